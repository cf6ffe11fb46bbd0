"""`msgrpo teach`: rows of bad play, the same result after a kill, LoRA on larger bases; presets by size."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from msgrpo.agent import parse_action
from msgrpo.errors import RunError, UsageError
from msgrpo.games import get_scenario
from msgrpo.models.loading import load_base
from msgrpo.prompt import make_template
from msgrpo.run_log import alone
from msgrpo.train import config as settings
from msgrpo.train.config import PRESETS, make_config, preset_for
from msgrpo.train.nano import teach as teaching
from msgrpo.train.nano.build import build
from msgrpo.train.nano.teach import ANSWERS, BEGUN, rows_of, teach
from msgrpo.train.nano.words import Words

LAKE = get_scenario("frozen-lake")


class CutOffError(Exception):
    """As good as a kill: nothing is put down."""


def test_rows_of_the_lake_say_true_words_and_act_badly() -> None:
    turns = list(itertools.islice(rows_of(LAKE, 0), 300))
    assert all(len(turn) == 1 and Words.read(turn[0].answer) is not None for turn in turns)
    best = sum(bool(turn[0].best) for turn in turns) / len(turns)
    assert 0.7 < best < 0.9  # most moves of a short walk lose nothing yet; a good player's share would be 1
    assert [turn[0].answer for turn in itertools.islice(rows_of(LAKE, 0), 5)] == [t[0].answer for t in turns[:5]]


def test_without_words_a_prompt_has_several_answers_of_one_action() -> None:
    template = make_template("none")
    for turn in itertools.islice(rows_of(LAKE, 0, template, words=False), 20):
        assert len(turn) == ANSWERS
        assert len({row.prompt for row in turn}) == 1
        assert turn[0].prompt.prefix.startswith(
            "You are playing a text game. Look at the state and choose one action."
        )
        for row in turn:
            found = parse_action(row.answer, LAKE.actions).action
            assert row.answer == f"<action>{found}</action>"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model, _ = load_base(str(folder))
    return dict(model.state_dict())


@pytest.mark.parametrize("small", [teaching.SMALL, 0])
def test_a_teaching_that_is_cut_off_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """All weights of a small model, a LoRA of any other: both end as a base that differs from the one before."""
    monkeypatch.setattr(teaching, "SMALL", small)
    monkeypatch.setattr(teaching, "SAVE_S", -1.0)
    monkeypatch.setattr(teaching, "BLOCK", 2)
    whole = teach(LAKE, tmp_path / "whole", steps=4)
    seen = []

    def cut_off(pace: Any) -> None:
        seen.append(pace.step)
        if pace.step == 4 and len(seen) == 4:
            raise CutOffError

    with pytest.raises(CutOffError):
        teach(LAKE, tmp_path / "cut", steps=4, progress=cut_off)
    assert (tmp_path / "cut" / BEGUN).exists()
    with pytest.raises(UsageError, match="begun with"):
        teach(LAKE, tmp_path / "cut", steps=4, seed=1)
    with pytest.raises(UsageError, match="3 steps already"):
        teach(LAKE, tmp_path / "cut", steps=2)
    resumed = teach(LAKE, tmp_path / "cut", steps=4, progress=cut_off)
    assert seen == [1, 2, 3, 4, 4]
    assert resumed["losses"] == whole["losses"]
    assert resumed["rows"] == whole["rows"]
    one, other, untaught = weights(tmp_path / "whole"), weights(tmp_path / "cut"), load_base("nano")[0].state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one.keys() == untaught.keys()
    moved = [name for name in one if not torch.equal(one[name], untaught[name])]
    assert any("q_proj" in name for name in moved)
    assert ("model.norm.weight" in moved) == bool(small)
    assert 0 < whole["best_actions"] < 1
    assert json.loads((tmp_path / "whole" / "taught.json").read_text()) == whole
    assert not (tmp_path / "cut" / BEGUN).exists()


def test_a_damaged_beginning_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / BEGUN).write_bytes(b"torn")
    with pytest.raises(RunError, match=r"teach\.pt is damaged"):
        teach(LAKE, tmp_path, steps=2)
    assert (tmp_path / BEGUN).read_bytes() == b"torn"


def test_a_base_of_another_size_never_gets_nanos_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"small": 135_000_000, "large": 3_000_000_000, "org/unknown": None, "taught": 900_000}
    monkeypatch.setattr(settings, "parameters_of", lambda base: sizes[base])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [preset_for(base) for base in sizes] == ["small", "paper", "paper", "nano"]
    for base in ("small", "large", "org/unknown"):
        chosen = make_config(given={"base": base, "scenario": "snake"})
        assert chosen.base == base
        assert chosen.learning_rate < 1e-3
        assert chosen.groups * chosen.group_size < 384
        preset = PRESETS[preset_for(base)]
        for name in ("learning_rate", "groups", "group_size", "steps"):
            assert getattr(chosen, name) == preset[name]
    assert make_config(given={"base": "small"}, settings=["learning_rate=0.5"]).learning_rate == 0.5
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [preset_for(base) for base in sizes] == ["small-gpu", "paper", "paper", "nano"]


def test_one_process_teaches_in_a_folder(tmp_path: Path) -> None:
    """Two at once overwrote each other's steps: the one that was further lost a quarter of an hour.

    The same fault was in `nano build` and `train-dqn`; `train`, `lab` and `eval` had their locks.
    """
    with alone(tmp_path / "out"):
        with pytest.raises(RunError, match="another process trains in"):
            teach(LAKE, tmp_path / "out", steps=1)
        with pytest.raises(RunError, match="another process trains in"):
            build(tmp_path / "out", steps=1, scenarios=["frozen-lake"])
