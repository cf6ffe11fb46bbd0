"""Stopping a run: what is being computed may be given up, what is being written may not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgrpo.signals import ENDING
from msgrpo.train.ranks import Ranks

StopAsked = Callable[[], bool]


class StopRequested(KeyboardInterrupt):
    """The run was asked to stop while it did something that may be given up.

    It is raised by a signal handler, and asyncio lets nothing but KeyboardInterrupt and SystemExit out of its tasks
    and callbacks: anything else would be logged there and forgotten.
    """


class Stop:
    """Whether the run was asked to stop. Within `abandonable` a request ends the work at once; elsewhere it waits
    until somebody asks `agreed`.
    """

    def __init__(self, tell: Callable[[], None], elsewhere: StopAsked | None = None) -> None:
        self._tell, self._elsewhere = tell, elsewhere
        self._may_abandon = False
        self.asked: int | None = None  # the signal

    def ask(self, number: int, frame: Any) -> None:
        """A signal handler: the first asks; a second Ctrl-C ends the process without saving.

        A second SIGTERM does not: schedulers send it to every process of a job, and launchers pass theirs on as well.
        """
        if self.asked is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.asked = number
        with suppress(OSError):  # the terminal may be gone
            self._tell()
        if self._may_abandon:
            raise StopRequested

    def agreed(self, ranks: Ranks) -> bool:
        """Whether the run stops here. A signal reaches every process; elsewhere the first asks, for all."""
        if self._elsewhere is not None and ranks.broadcast(ranks.first and self._elsewhere()):
            self.asked = signal.SIGTERM
        return self.asked is not None

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Play or compute: given up at once when asked to stop, since it can be done again from the last state."""
        if self.asked is not None:
            raise StopRequested
        self._may_abandon = True
        try:
            yield
        finally:
            self._may_abandon = False
        if self.asked is not None:  # somebody's library has swallowed what the handler raised
            raise StopRequested


@contextmanager
def stop_requests(tell: Callable[[], None], elsewhere: StopAsked | None = None) -> Iterator[Stop]:
    """While this is open, Ctrl-C, SIGTERM and the terminal's end ask the run to stop, which `tell` says to a person.
    In a thread, where no signals arrive, only `elsewhere` can ask.
    """
    stop = Stop(tell, elsewhere)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
