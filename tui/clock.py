"""Time as the app sees it; a test puts a clock in its place that only moves when told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from textual.app import App

Cancel = Callable[[], None]


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, from any beginning."""
        ...

    def after(self, seconds: float, call: Callable[[], None]) -> Cancel:
        """Call once, later; the returned function calls it off."""
        ...


class RealClock:
    def __init__(self, app: App[None]) -> None:
        self._app = app

    def now(self) -> float:
        return time.monotonic()

    def after(self, seconds: float, call: Callable[[], None]) -> Cancel:
        return self._app.set_timer(seconds, call).stop
