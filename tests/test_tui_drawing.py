"""What is drawn when: a step that nobody waits for is one picture, and of a board the cells that have changed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from textual.app import App
from textual.geometry import Region
from textual.strip import Strip

from msgrpo.game import Judgement
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.tui.app import PlayApp
from msgrpo.tui.session import Setup
from msgrpo.tui.widgets.board import AXIS, BoardView
from msgrpo.tui.widgets.keyline import Hint, KeyLine
from msgrpo.tui.widgets.timeline import Timeline
from tests.tui_helpers import ManualClock, play_screen, press, resolver, settle, text_of, ticks, until


def app_of(setup: Setup, clock: ManualClock, folder: Path) -> PlayApp:
    return PlayApp(resolver(), setup, clock=clock, runs=folder, plays=folder)


async def test_a_move_that_nobody_waits_for_is_drawn_with_what_it_was_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an agent that answers at once is never said to be waited for, nor the keys of waiting shown."""
    monkeypatch.setattr("msgrpo.tui.drawing.TOGETHER_S", 60.0)
    drawn, hints = [], []
    display, show = App._display, KeyLine.show

    def displayed(self: App[None], screen: object, renderable: object) -> None:
        drawn.append(text_of(self, ".worth"))
        display(self, screen, renderable)  # type: ignore[arg-type]

    def shown(self: KeyLine, keys: Sequence[Hint]) -> None:
        hints.append([hint.words for hint in keys])
        show(self, keys)

    clock = ManualClock()
    app = app_of(Setup("frozen-lake", "optimal", seed=3, speed=0.001), clock, tmp_path)
    app.animation_level = "none"
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1, seconds=1000.0)  # after which the panel has its lines
        monkeypatch.setattr(App, "_display", displayed)
        monkeypatch.setattr(KeyLine, "show", shown)
        await ticks(pilot, clock, 2, seconds=1000.0)
        assert play_screen(app).match.last == 3
        assert len(drawn) == 2
        assert all("is best" in worth and "now: worth +1.00" in worth for worth in drawn)
        assert hints
        assert not any("stop waiting" in words for words in hints)


async def test_a_move_does_not_wait_for_a_slow_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, judges = get_scenario("frozen-lake"), threading.Event()
    judge = lake.judge
    assert judge is not None

    def slow(game: object, player: str) -> Judgement:
        judges.wait()
        return judge(game, player)

    monkeypatch.setitem(SCENARIOS, "frozen-lake", replace(lake, judge=slow))
    clock = ManualClock()
    app = app_of(Setup("frozen-lake", "optimal", seed=3), clock, tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: clock.calls)
        clock.tick(0.25)
        await until(lambda: "step 1/" in text_of(app, ".stats") and not play_screen(app).drawing.going)  # it is drawn
        assert text_of(app, ".worth") == "last: … now: …"
        judges.set()
        await settle(pilot)
        assert "now: worth +1.00" in text_of(app, ".worth")


@pytest.mark.parametrize("scenario", ["snake", "frozen-lake-slippery", "snake-duel"])
async def test_every_cell_that_looks_otherwise_after_a_step_is_drawn_and_few_others(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    app = app_of(Setup(scenario, "optimal", "random" if scenario == "snake-duel" else None, seed=3), clock, tmp_path)
    app.animation_level = "none"
    regions: list[Region] = []
    refresh = BoardView.refresh

    def refreshed(self: BoardView, *asked: Region, **how: bool) -> BoardView:
        regions.extend(asked or [self.size.region])
        return refresh(self, *asked, **how)

    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        board, screen = app.screen.query_one(BoardView), play_screen(app)
        monkeypatch.setattr(BoardView, "refresh", refreshed)
        for _ in range(15):
            before = pictures(board)
            regions.clear()
            await ticks(pilot, clock, 1)
            drawn = {place for place in before if any(cell(board, place) in region for region in regions)}
            changed = {place for place, lines in pictures(board).items() if lines != before[place]}
            assert changed <= drawn
            if not screen.match.over:
                assert len(drawn) <= len(changed) + 1
        assert screen.match.last > 5


def cell(board: BoardView, place: tuple[int, int]) -> Region:
    (left, top), scale = board._margins(), board.scale
    return Region(left + AXIS + 2 * scale * place[1], top + scale * place[0], 2 * scale, scale)


def pictures(board: BoardView) -> dict[tuple[int, int], list[Strip]]:
    """Of every cell, by its row and column, the lines as they would be drawn now."""
    assert board.board is not None
    lines = [board.render_line(y) for y in range(board.size.height)]
    found = {}
    for row, cells in enumerate(board.board.cells):
        for column in range(len(cells)):
            here = cell(board, (row, column))
            found[row, column] = [lines[y].crop(here.x, here.right) for y in here.line_range]
    return found


async def test_another_theme_comes_to_what_keeps_its_colours(tmp_path: Path) -> None:
    """The board and the history are the same after a change of the theme as in an app that begins with it."""

    async def lines_of(first: str, then: str) -> list[list[Strip]]:
        clock = ManualClock()
        app = app_of(Setup("frozen-lake", "optimal", seed=3), clock, tmp_path)
        async with app.run_test(size=(120, 40)) as pilot:
            app.theme = first
            await settle(pilot)
            await ticks(pilot, clock, 3)
            app.theme = then
            await settle(pilot)
            await press(pilot, "left")
            widgets = [app.screen.query_one(kind) for kind in (BoardView, Timeline)]
            return [widget.render_lines(widget.size.region) for widget in widgets]

    night, changed = await lines_of("msgrpo-night", "msgrpo-night"), await lines_of("msgrpo-night", "msgrpo-day")
    assert changed == await lines_of("msgrpo-day", "msgrpo-day")
    assert night != changed
