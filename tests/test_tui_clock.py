"""What the app puts off does not meet a screen that is being taken away."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("textual")

from textual.app import App, ComposeResult
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import Static

from msgrpo.tui.clock import after, once_drawn, stands

TUI = Path(__file__).parent.parent / "tui"
PUTS_OFF = {"call_after_refresh", "call_later", "call_next", "set_timer", "set_interval"}


class Part(Vertical):
    """Something put off comes to it at the worst moment: its own parts are gone, and it is still there."""

    def __init__(self, *, careful: bool) -> None:
        super().__init__()
        self.careful = careful
        self.met = False

    def compose(self) -> ComposeResult:
        yield Static("words", id="words")

    def draw(self) -> None:
        self.query_one("#words", Static).update("more words")

    def on_unmount(self) -> None:
        self.met = True
        if not self.careful or stands(self):
            self.draw()


class Holder(Screen[None]):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def compose(self) -> ComposeResult:
        yield self.part


async def leave(part: Part) -> None:
    app: App[None] = App()
    async with app.run_test() as pilot:
        await app.push_screen(Holder(part))
        assert stands(part)
        part.draw()
        await app.pop_screen()
        await pilot.pause()
        assert part.met
        assert not stands(part)


async def test_nothing_is_drawn_on_a_screen_that_is_left() -> None:
    await leave(Part(careful=True))
    with pytest.raises(NoMatches):  # what Textual by itself does
        await leave(Part(careful=False))


async def test_what_is_put_off_meets_the_screen_or_nothing() -> None:
    app: App[None] = App()
    async with app.run_test() as pilot:
        for seconds in (0.0, 0.001, 0.002, 0.005):
            part = Part(careful=True)
            await app.push_screen(Holder(part))
            once_drawn(part, lambda part=part: once_drawn(part, part.draw))
            after(part, seconds + 0.001, part.draw)
            await pilot.pause(seconds)
            app.pop_screen()
            await pilot.pause(0.01)


def test_only_the_clock_puts_calls_off() -> None:
    for file in sorted(TUI.rglob("*.py")):
        if file.name not in ("clock.py", "driver.py"):  # the driver looks after a real terminal, and shows nothing
            names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
            assert not names & PUTS_OFF, f"{file}: use tui.clock"
