"""Draws at once what changes together on the screen of a match; a move waits a moment for what it was worth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from textual.screen import Screen

from msgrpo.tui.asking import Asking
from msgrpo.tui.clock import once_drawn, soon, stands
from msgrpo.tui.judging import Judging
from msgrpo.tui.pace import Pace

TOGETHER_S = 0.03  # that a move waits for what it is worth, and an agent's first frame for its answer
ROUNDS = 4  # of the event loop, in which each widget in turn says that it has to be drawn


class Drawing:
    """The pictures of a screen, one after the other. `waits` shows who is waited for, as soon as somebody is."""

    def __init__(
        self, screen: Screen[None], judging: Judging, asking: Asking, pace: Pace, waits: Callable[[], None]
    ) -> None:
        self._screen = screen
        self._judging = judging
        self._asking = asking
        self._pace = pace
        self._waits = waits
        self.asked = False  # somebody is asked, which no picture says yet
        self.moved = False  # a move is shown by which no person waits
        self._frame: ExitStack | None = None  # while the next picture is put together
        self._draws: asyncio.Task[None] | None = None
        self._opened = 0.0  # when it was begun, by the event loop

    @property
    def going(self) -> bool:
        """Whether a picture has begun that is not drawn yet."""
        return self._frame is not None

    def begin(self) -> None:
        """Let nothing be drawn until every widget has said what it shows anew, so that all of it comes at once."""
        if self._draws is not None:
            self._draws.cancel()
        if self._frame is None:
            self._frame = ExitStack()
            self._opened = asyncio.get_running_loop().time()
            self._frame.enter_context(self._screen.app.batch_update())
        self._draws = asyncio.get_running_loop().create_task(self._draw())

    async def _draw(self) -> None:
        """Once all widgets have said what they show; with what the move was worth, if that is soon known."""
        await _widgets()
        if self.asked:  # who answers at once is not drawn as one that thinks: the move is, by a call of begin
            self.asked = False
            if self._asking.searching():
                await self._asking.soon(TOGETHER_S)
                await _widgets()
            if self._asking.going:
                soon(self._screen, self._waits)
            await _widgets()
        if self.moved:
            self.moved = False
            left = self._opened + 2 * TOGETHER_S - asyncio.get_running_loop().time()  # of a frame that goes on and on
            await self._judging.soon(min(TOGETHER_S, 0.5 / self._pace.speed, left))
            await _widgets()
        self.now()

    def now(self) -> None:
        """Draw what there is."""
        if self._frame is not None:
            self._frame.close()
            self._frame = None
            if stands(self._screen):
                once_drawn(self._screen, self._judging.look)  # which takes the processor from the picture


async def _widgets() -> None:
    """Let every widget say that it has to be drawn."""
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
