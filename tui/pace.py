"""How fast a game goes by itself, and the one timer that waits for the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgrpo.tui.clock import Cancel

SPEEDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # steps a second


def neighbour(values: Sequence[float], value: float, by: int) -> float:
    """The entry `by` places after the one that is nearest to `value`; at the ends the last one."""
    nearest = min(range(len(values)), key=lambda i: abs(values[i] - value))
    return values[max(0, min(nearest + by, len(values) - 1))]


class Pace:
    """Calls `step` 1/`speed` seconds after each call of `later`, as long as it is `playing`.

    `after(seconds, call)` starts a timer and returns what calls it off; whoever owns the pace stops it at the end.
    """

    def __init__(
        self,
        after: Callable[[float, Callable[[], None]], Cancel],
        step: Callable[[], None],
        *,
        speed: float,
        playing: bool,
    ) -> None:
        self._after, self._step = after, step
        self.speed = speed
        self.playing = playing
        self._cancel: Cancel | None = None

    def later(self) -> None:
        """Start the wait for the next step anew."""
        self.stop()
        self._cancel = self._after(1 / self.speed, self._due)

    def _due(self) -> None:
        self._cancel = None
        if self.playing:
            self._step()

    def stop(self) -> None:
        """Call off the step that is waited for."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def change_speed(self, by: int) -> None:
        """To the next of SPEEDS, upwards or downwards; a step that is waited for comes at the new speed."""
        self.speed = neighbour(SPEEDS, self.speed, by)
        if self._cancel is not None:
            self.later()
