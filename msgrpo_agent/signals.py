"""How a program ends: signals that ask for it are treated as Ctrl-C, so that clean-up code runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

ENDING = (signal.SIGTERM, signal.SIGHUP)
ASIDE = "msgrpo-aside"  # the name of threads that nobody waits for
T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """The result of a call in a thread that nobody waits for at the end: who quits does not wait for a model."""
    import asyncio  # here, since every command loads this file

    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(set_result: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_result(value)

    def work() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = result.set_result, call()
        except StopIteration as error:  # which no future holds
            outcome = result.set_exception, RuntimeError(repr(error))
        except BaseException as error:  # raised where the result is awaited
            outcome = result.set_exception, error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=work, daemon=True, name=ASIDE).start()
    return await result


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
