"""Recordings: what the screen showed, as a GIF and as an asciicast, with and without a terminal."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from msgrpo.errors import EndpointError, MsgrpoError, UsageError
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui import launch
from msgrpo.tui.app import PlayApp
from msgrpo.tui.recording import LAST_S, LONGEST_S, Recording, _Draw
from msgrpo.tui.records import Records
from msgrpo.tui.session import Setup
from tests.command_line import PROGRAM
from tests.tui_helpers import answer, scripted

COMMAND = [*PROGRAM, "play"]


def frames(file: Path) -> list[Image.Image]:
    with Image.open(file) as gif:
        found = []
        for i in range(gif.n_frames):
            gif.seek(i)
            found.append(gif.convert("RGB"))
        return found


def record(file: Path, setup: Setup | None = None, *, records: Path | None = None, said: object = "left") -> str:
    """Record without a terminal, as a pipe would; returns what was printed."""
    agents = {
        "optimal": OptimalAgent(),
        "random": RandomAgent(),
        "nano": scripted("nano", said if isinstance(said, Exception) else answer(str(said))),
    }
    console = Console(file=io.StringIO(), width=200)
    launch.start(
        agents.__getitem__, setup, replay=records, episode=None, run=None, games=1, plain=False,
        record=file, console=console,
    )  # fmt: skip
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_gif_shows_every_step_and_the_end(tmp_path: Path) -> None:
    file = tmp_path / "game.gif"
    command = [*COMMAND, "frozen-lake", "--agent", "optimal", "--seed", "3", "--speed", "60", "--record", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    shown = frames(file)
    assert f"{len(shown)} pictures: {file}" in done.stdout
    assert len(shown) >= 7  # the start and six steps
    assert all(one.tobytes() != other.tobytes() for one, other in pairwise(shown))
    assert (tmp_path / "plays").exists() is False


def test_a_cast_is_what_the_screen_showed(tmp_path: Path) -> None:
    file = tmp_path / "game.cast"
    record(file, Setup("frozen-lake", "nano", seed=3, speed=60))
    header, *events = [json.loads(line) for line in file.read_text().splitlines()]
    assert (header["version"], header["width"], header["height"]) == (2, 120, 40)
    assert [kind for _, kind, _ in events] == ["o"] * len(events)
    times = [at for at, _, _ in events]
    assert times == sorted(times)
    assert max(after - before for before, after in pairwise(times)) <= LONGEST_S
    drawn = re.sub(r"\x1b\[(\?25l|H|2J)", "", events[-1][2]).replace("\r", "")
    last = Text.from_ansi(drawn).plain
    assert "nano · frozen-lake · seed 3" in last
    assert "the apple is near." in last  # the words, too


def test_a_record_plays_by_itself(tmp_path: Path) -> None:
    from msgrpo.cli import main  # the real command makes the record

    out = tmp_path / "eval"
    sys_argv, sys.argv = (
        sys.argv,
        ["msgrpo", "eval", "optimal", "--scenario", "frozen-lake", "--episodes", "1", "--out", str(out)],
    )
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = sys_argv
    assert ended.value.code in (0, None)
    file = tmp_path / "replay.gif"
    record(file, records=out / "optimal" / "frozen-lake.jsonl")
    steps = len(Records.read(out).episode.turns)
    assert len(frames(file)) > steps


def test_an_agent_without_an_answer_ends_the_recording_and_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "game.gif"
    silent = EndpointError("connection refused", kind="connection")
    with pytest.raises(MsgrpoError, match=r"gave no answer: .*connection refused"):
        record(file, Setup("frozen-lake", "nano", seed=3, speed=60), said=silent)
    assert frames(file)  # what was shown is there


@pytest.mark.parametrize(
    ("name", "setup", "told"),
    [
        ("game.mp4", Setup("snake", "optimal"), "ends in neither"),
        ("nowhere/game.gif", Setup("snake", "optimal"), "there is no folder"),
        ("game.gif", None, "needs a game"),
        ("game.gif", Setup("snake", "human"), "a person needs a terminal"),
    ],
)
def test_what_cannot_be_recorded_is_said_before_anything_is_played(
    tmp_path: Path, name: str, setup: Setup | None, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        record(tmp_path / name, setup)
    assert list(tmp_path.iterdir()) == []


def test_what_is_to_be_typed_for_a_recording_can_be_pasted(tmp_path: Path) -> None:
    for file in (tmp_path / "my films" / "a.gif", tmp_path / "my films.gif"):
        if file.parent == tmp_path:
            file.mkdir()
        with pytest.raises(UsageError) as refused:
            record(file, Setup("snake", "optimal"))
        assert len(shlex.split(str(refused.value.fix).removeprefix("mkdir -p").removeprefix("--record"))) == 1


def test_a_pause_is_cut_and_a_picture_that_did_not_change_is_none() -> None:
    class Screen:
        lines: list[Strip]

        @property
        def _compositor(self) -> Screen:
            return self

        def render_strips(self) -> list[Strip]:
            return self.lines

    screen, recording = Screen(), Recording()
    for now, text in ((0.0, "a"), (1.0, "a"), (1.5, "b"), (100.0, "c")):
        screen.lines = [Strip([Segment(text)])]
        recording.take(screen, now)  # type: ignore[arg-type]
    assert [at for at, _ in recording.pictures] == [0.0, 1.5, 1.5 + LONGEST_S]
    assert LAST_S > 0


def test_the_gif_draws_half_blocks_in_the_colours_of_the_cell() -> None:
    draw = _Draw(2, 1)
    image = draw.picture([Strip([Segment("▀ ", Style(color="#ff0000", bgcolor="#0000ff"))])]).convert("RGB")
    across, down = draw.across, draw.down
    assert image.size == (2 * across, down)
    assert image.getpixel((across // 2, 1)) == (255, 0, 0)
    assert image.getpixel((across // 2, down - 2)) == (0, 0, 255)
    assert image.getpixel((across + 2, 1)) == (0, 0, 255)


async def test_a_recording_that_runs_by_itself_shows_every_move_judged_and_who_has_won(tmp_path: Path) -> None:
    """The fault: its last picture was taken before the result was laid out, and while the bars were still moving."""
    agents = {"up": scripted("up", answer("up")), "optimal": OptimalAgent()}
    setup = Setup("frozen-lake", "up", "optimal", seed=3, speed=64.0)
    app = PlayApp(agents.__getitem__, setup, runs=tmp_path, plays=tmp_path / "plays", record=True)
    async with app.run_test(size=(120, 40)) as pilot:
        while app.is_running:
            await pilot.pause(0.05)
    shown = ["\n".join(strip.text for strip in lines) for _, lines in app.recording.pictures]
    assert not any("now: …" in picture or "last: …" in picture for picture in shown)
    assert "optimal wins" in shown[-1]
    assert "mistake" in shown[-1]
