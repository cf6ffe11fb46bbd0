"""Pictures of the main screens in two sizes. They hold for the Textual version that the dev extra pins.

After a change that is meant: `pytest tests/test_tui_snapshots.py --snapshot-update`, then look at the pictures.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from msgrpo.errors import EndpointError
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui.app import PlayApp
from msgrpo.tui.session import Setup
from tests.tui_helpers import ManualClock, answer, press, scripted, settle, ticks

PINNED = "8.2.8"
SIZES = {"80x24": (80, 24), "120x40": (120, 40)}
pytestmark = pytest.mark.skipif(version("textual") != PINNED, reason=f"the pictures are those of Textual {PINNED}")


@pytest.fixture(params=SIZES, ids=list(SIZES))
def picture(request: pytest.FixtureRequest, snap_compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compare the screen after some seconds of play and some keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("msgrpo.tui.choices.missing_extra", lambda spec: None)
    monkeypatch.setattr("msgrpo.tui.app.missing_extra", lambda spec: None)

    def compare(setup: Setup | None, *keys: str, steps: int = 0, light: bool = False, script: tuple = ()) -> bool:
        clock = ManualClock()
        agents = {
            "random": RandomAgent(),
            "optimal": OptimalAgent(),
            "nano": scripted("nano", *(script or (answer("up", "up apple down free."), answer("left"), "no tag"))),
        }
        app = PlayApp(agents.__getitem__, setup, clock=clock, runs=tmp_path)

        app.animation_level = "none"

        async def before(pilot: Pilot[Any]) -> None:
            if light:
                app.action_toggle_light()
            await settle(pilot)
            await ticks(pilot, clock, steps)
            await press(pilot, *keys)

        return bool(snap_compare(app, terminal_size=SIZES[request.param], run_before=before))

    return compare


def test_start(picture: Any) -> None:
    assert picture(None, *["down"] * 5)


def test_watch(picture: Any) -> None:
    assert picture(Setup("snake", "nano", seed=3), steps=3)


def test_watch_by_day(picture: Any) -> None:
    assert picture(Setup("snake-poison-apple-and-banana", "nano", seed=3), steps=2, light=True)


def test_step_mode(picture: Any) -> None:
    assert picture(Setup("frozen-lake", "nano", seed=3, step=True), "n")


def test_race(picture: Any) -> None:
    assert picture(Setup("snake", "human", "nano", seed=3), "up", "left")


def test_race_result(picture: Any) -> None:
    assert picture(Setup("frozen-lake", "human", "optimal", seed=3), *["left"] * 8)


def test_duel(picture: Any) -> None:
    assert picture(Setup("snake-duel", "human", "nano", seed=3), "up", "up")


def test_failure(picture: Any) -> None:
    fault = EndpointError("connection refused (7 tries)", kind="connection", fix="is the server running?")
    assert picture(Setup("snake", "nano", seed=3), steps=1, script=(fault,))


def test_help(picture: Any) -> None:
    assert picture(Setup("snake", "human", seed=3), "question_mark")
