"""How a program ends: signals that ask for it are treated as Ctrl-C, so that clean-up code runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
ASIDE = "msgrpo-aside"  # the name of threads that nobody waits for


def end_with_threads(code: int) -> None:
    """End the program with this code, if somebody computes on in a thread that nobody waits for.

    Such a thread would end in the middle of a library's own code, when Python itself ends, and crash the program.
    """
    if any(thread.name == ASIDE for thread in threading.enumerate()):
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP act as SIGINT within the block; one that is ignored (nohup) stays ignored.

    The signal is passed on as SIGINT, so that asyncio's own handler cancels its main task in good order. A shell
    starts what it puts into the background with SIGINT ignored, and asyncio handles no ignored signal: within the
    block SIGINT is held back instead of ignored, and let through when it is passed on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if ignored:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in ENDING}
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was held back is forgotten
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
