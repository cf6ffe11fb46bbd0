"""Time as the app sees it; a test puts a clock in its place that only moves when told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from textual.screen import Screen

Cancel = Callable[[], None]


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, from any beginning."""
        ...

    def after(self, screen: Screen[Any], seconds: float, call: Callable[[], None]) -> Cancel:
        """Call once, later, unless the screen has ended by then; the returned function calls it off."""
        ...


class RealClock:
    """The timer belongs to the screen that it serves, and ends with it."""

    def now(self) -> float:
        return time.monotonic()

    def after(self, screen: Screen[Any], seconds: float, call: Callable[[], None]) -> Cancel:
        return screen.set_timer(seconds, call).stop
