"""Treat signals that ask a program to end as Ctrl-C, so that clean-up code runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP act as SIGINT within the block; one that is ignored (nohup) stays ignored.

    The signal is passed on as SIGINT, so that asyncio's own handler cancels its main task in good order. A shell
    starts what it puts into the background with SIGINT ignored: then there is nobody to pass it on to before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
