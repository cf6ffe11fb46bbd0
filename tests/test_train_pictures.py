"""The pictures that runs and studies leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from msgrpo.models.card import card
from msgrpo.train.curve import draw_curve
from msgrpo.train.lab_report import draw
from tests.command_line import run

LONG = (
    "runs/smol-words on frozen-lake@0.5,benchmarks/studies/eight_steps.py:scenario@0.5, seed 1: what it reaches " * 2
)


@pytest.mark.parametrize("study", [False, True])
def test_a_long_title_lies_inside_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, study: bool
) -> None:
    """The fault: of a run on a mixture the title was cut off at the picture's edge."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def kept(figure: Figure, *args: Any, **settings: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", kept)
    if study:
        curve = {"answers": [0, 10], "seconds": [0, 5], "score": [0.1, 0.3]}
        draw({"study": {"question": LONG}, "arms": {"one": {"curves": [curve]}}}, tmp_path / "study.png")
    else:
        (tmp_path / "metrics.jsonl").write_text("")
        draw_curve(tmp_path, LONG, "success")
    (figure,) = drawn
    figure.draw_without_rendering()
    (title,) = figure.findobj(lambda artist: isinstance(artist, Text) and LONG[:15] in artist.get_text())
    box = title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1


def test_of_a_mixture_it_is_said_which_game_was_evaluated(tmp_path: Path) -> None:
    """The fault: the last line and the curve gave the first game's score as that of the whole mixture."""
    out = tmp_path / "run"
    settings = [
        "--steps",
        "1",
        "--set",
        "groups=1",
        "--set",
        "group_size=2",
        "--set",
        "select=all",
        "--set",
        "evaluation=2(film=0)",
    ]
    said = run("train", "snake@0.5,frozen-lake@0.5", "--out", str(out), *settings).output
    assert "nano on snake@0.5,frozen-lake@0.5, 2 validation starts of snake: return" in " ".join(said.split())
    assert "On 2 validation starts of `snake`" in card(out, "mine", merged=False)
    assert json.loads((out / "summary.json").read_text())["evaluated_on"] == "snake"
