"""Time as the app sees it; a test puts a clock in its place that only moves when told to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from textual.screen import Screen
from textual.widget import Widget

Cancel = Callable[[], None]


def stands(widget: Widget) -> bool:
    """Whether its screen stays: what Textual has queued comes even to a widget whose parts are gone."""
    return widget.is_attached and widget.screen.display  # display is False from the moment of removal on


def _while_standing(widget: Widget, call: Callable[[], object]) -> Callable[[], None]:
    def called() -> None:
        if stands(widget):
            call()

    return called


def once_drawn(widget: Widget, call: Callable[[], object]) -> None:
    """Call once what has changed is laid out and drawn, unless the screen is being taken away by then."""
    widget.call_after_refresh(_while_standing(widget, call))


def once_laid_out(widget: Widget, call: Callable[[], object]) -> None:
    """Call once what has changed has its final layout, which takes a second refresh."""
    once_drawn(widget, lambda: once_drawn(widget, call))


def soon(widget: Widget, call: Callable[[], object]) -> None:
    """Call once what is queued before it is done, unless the screen is being taken away by then."""
    widget.call_later(_while_standing(widget, call))


def after(widget: Widget, seconds: float, call: Callable[[], object]) -> Cancel:
    """Call once, later, unless the screen is being taken away by then; the returned function calls it off."""
    return widget.set_timer(seconds, _while_standing(widget, call)).stop


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
        return after(screen, seconds, call)
