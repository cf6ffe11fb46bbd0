"""A time limit for code that is not ours: a game's step, a chat template.

    with within(60, "the game my_game.py:scenario"):
        game.step(...)

What takes longer is stopped by TookTooLongError where Python lets it be stopped, and named on the terminal, with file
and line, where it does not (a library's own loop). One thread watches all calls, so that a call costs a microsecond.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

LOOK_S = 0.25  # between two looks of the watcher


class TookTooLongError(BaseException):
    """Raised within a call that is over its limit. No Exception: code that is stopped must not catch it by chance."""


@dataclass
class _Call:
    what: str
    ends: float
    limit_s: float
    before: _Call | None  # that this one is within
    stopped: bool = False
    named: bool = False


_calls: dict[int, _Call] = {}  # thread -> its innermost call
_lock = threading.Lock()
_watcher: threading.Thread | None = None


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """Raise TookTooLongError within the block once it has taken `limit_s` seconds; `what` says whose code it is."""
    _start()
    me = threading.get_ident()
    call = _calls[me] = _Call(what, time.monotonic() + limit_s, limit_s, _calls.get(me))
    try:
        yield
    finally:
        with _lock:  # the watcher does nothing to a call that has ended
            if call.before is None:
                del _calls[me]
            else:
                _calls[me] = call.before
            if call.stopped:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), None)


def _start() -> None:
    """Start the watcher; in the main thread also take the signal that wakes what sleeps there."""
    global _watcher
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.signal(signal.SIGALRM, _stop_here)
    if _watcher is None or not _watcher.is_alive():  # a forked process has none
        _watcher = threading.Thread(target=_watch, name="msgrpo-limits", daemon=True)
        _watcher.start()


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        with _lock:
            for thread, call in list(_calls.items()):
                _look(thread, call, time.monotonic())


def _look(thread: int, call: _Call, now: float) -> None:
    if now < call.ends:
        return
    if not call.stopped:
        call.stopped = True
        main = threading.main_thread().ident
        if thread == main and signal.getsignal(signal.SIGALRM) is _stop_here:
            signal.pthread_kill(thread, signal.SIGALRM)
        else:
            error = ctypes.py_object(TookTooLongError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
    elif not call.named and now >= call.ends + max(call.limit_s, 4 * LOOK_S):
        call.named = True
        frame = sys._current_frames().get(thread)
        at = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        print(f"{call.what} does not come back{at}: end msgrpo with Ctrl-C or kill", file=sys.stderr, flush=True)


def _stop_here(number: int, frame: FrameType | None) -> None:
    call = _calls.get(threading.get_ident())
    if call is not None and call.stopped:
        raise TookTooLongError
