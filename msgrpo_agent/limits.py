"""Limits for code that is not ours: the time of a game's step or of a chat template, and what a game may raise.

    with within(60, "the game my_game.py:scenario"):
        game.step(...)

What takes longer is stopped by TookTooLongError where Python lets it be stopped, and named on the terminal, with file
and line, where it does not (a library's own loop). One thread watches all calls, so that a call costs a microsecond.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import shlex
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from msgrpo.errors import GameError, GameFaultError, TookTooLongError, where_raised

GAME_S = 60.0  # seconds that one call of a game may take
HANGS = 3  # such calls end what plays the game
HANDLERS = ("_on_sigint", "ask")  # of signals, which raise KeyboardInterrupt: asyncio's and training's
LOOK_S = 0.25  # between two looks of the watcher
LATER_S = 4 * LOOK_S  # after a call's end, by when the watcher has looked, if it can
IDLE = 0.05  # of the time between two looks, less than which the processor worked for a process that stood still
INT, TERM, ALRM = (int(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
# `signal`'s own take 4 µs to give what they return a name
_handler_of: Callable[[int], Any] = import_module("_signal").getsignal
_mask: Callable[[int, Any], set[int]] = import_module("_signal").pthread_sigmask


@dataclass
class _Call:
    what: str
    ends: float
    limit_s: float
    before: _Call | None  # that this one is within
    given: bool = False  # whether it was given time back
    stopped: bool = False
    named: bool = False


_calls: dict[int, _Call] = {}  # thread -> its innermost call
_lock = threading.Lock()
_one_at_a_time = threading.RLock()  # what limits the memory of the whole process
_watcher: threading.Thread | None = None
_wakes = False  # whether the main thread has been asked to take the signal
_hangs: dict[str, list[str]] = defaultdict(list)  # game -> what is said of each call that took too long


def within(limit_s: float, what: str) -> _Within:
    """Raise TookTooLongError within the block once it has taken `limit_s` seconds; `what` says whose code it is."""
    return _Within(limit_s, what)


class _Within:
    """A class and no generator: each turn of a game passes through five of these blocks."""

    __slots__ = ("_call", "_limit_s", "_thread", "_what")

    def __init__(self, limit_s: float, what: str) -> None:
        self._limit_s, self._what = limit_s, what

    def __enter__(self) -> None:
        _start()
        self._thread = me = threading.get_ident()
        now = time.monotonic()
        ends = now + self._limit_s
        self._call = _calls[me] = _Call(self._what, ends, self._limit_s, _calls.get(me))
        if not 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= self._limit_s + LATER_S:  # no alarm comes in time
            _set_alarm(self._call)

    def __exit__(self, *given: object) -> None:
        try:
            self._end()
        except TookTooLongError:  # it is sent once, and may arrive here
            self._end()
            raise

    def _end(self) -> None:
        call = self._call
        with _lock:  # the watcher does nothing to a call that has ended
            if call.before is not None:
                _calls[self._thread] = call.before
            else:
                _calls.pop(self._thread, None)
            if call.stopped:
                _take_back(self._thread)


def _take_back(thread: int) -> None:
    """Let no exception that was sent to this thread arrive later.

    To clear it would leave CPython's mark that one is pending, and with that mark the first call under a profiler or
    a debugger never returns (3.11). So one exception is sent again, which takes the place of the other, and caught.
    """
    try:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLongError))
        while True:  # it arrives at the end of a round
            pass
    except TookTooLongError:
        return


def _start() -> None:
    """Start the watcher; in the main thread also take the signal that wakes what sleeps there."""
    global _watcher, _wakes
    if not _wakes and threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.signal(signal.SIGALRM, _stop_here)
            atexit.register(_no_alarm)
        _wakes = True
    if _watcher is None or not _watcher.is_alive():  # a forked process has none
        _watcher = threading.Thread(target=_watch, name="msgrpo-limits", daemon=True)
        _watcher.start()


def _set_alarm(call: _Call) -> None:
    """Have the system wake the main thread after a call's end, and again until it has ended.

    Code in C that holds Python's lock (a regular expression that tries for hours) keeps the watcher from looking. But
    it lets signals in, and with their handler the watcher. An alarm is not taken back, which would cost each call
    more than all else; one that comes within a later call is set anew. The system is asked whether one is to come,
    since a game can take it back and a forked process has none.
    """
    if threading.current_thread() is threading.main_thread() and _handler_of(ALRM) is _stop_here:
        signal.setitimer(signal.ITIMER_REAL, max(call.ends - time.monotonic(), 0) + LATER_S)


def _no_alarm() -> None:
    """Take the alarm back: a process that ends has no handler any more, and the alarm would kill it."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _watch() -> None:
    before, worked = time.monotonic(), time.process_time()
    while True:
        time.sleep(LOOK_S)
        now, work = time.monotonic(), time.process_time()
        with _lock:
            _give_back(now - before, work - worked)
            for thread, call in list(_calls.items()):
                _look(thread, call, time.monotonic())
        before, worked = now, work


def _give_back(passed: float, worked: float) -> None:
    """Give every call the time in which the process stood still, as after a Ctrl-Z: so long was no look, and the
    processor hardly worked for it. Code in C that keeps the watcher from looking works all the while, or waits, again
    and again, perhaps without end: so a call is given time once.
    """
    if passed > LATER_S and worked < IDLE * passed:
        for innermost in list(_calls.values()):
            call: _Call | None = innermost
            while call is not None:
                if not call.given:
                    call.ends, call.given = call.ends + passed, True
                call = call.before


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
    elif not call.named and now >= call.ends + max(call.limit_s, LATER_S):
        call.named = True
        frame = sys._current_frames().get(thread)
        at = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        print(f"{call.what} does not come back{at}: end msgrpo with Ctrl-C or kill", file=sys.stderr, flush=True)


def _stop_here(number: int, frame: FrameType | None) -> None:
    call = _calls.get(threading.get_ident())
    if call is not None:
        _set_alarm(call)
        if call.stopped:
            raise TookTooLongError


def games_code(name: str) -> _GamesCode:
    """A game's own code: whatever it raises within, and taking longer than GAME_S, becomes one GameFaultError that
    names the game, and the file and the line where that is known. Only GameError, the answer to a wrong move, passes.
    The third call that took too long is fatal: two hundred episodes would hang for hours. A game that changes the
    working directory would have everybody else's files written elsewhere, so that is a fault too. What it changes of
    Ctrl-C and other signals is put back.
    """
    return _GamesCode(name)


class _GamesCode:
    __slots__ = ("_folder", "_handlers", "_limit", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._folder = _folder()
        self._limit = within(GAME_S, f"the game {self._name}")
        self._limit.__enter__()
        self._handlers = _handlers()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        try:
            try:
                moved = _folder()
                if moved != self._folder and self._folder:
                    os.chdir(self._folder)
                    error = error or GameFaultError(f"it changed the working directory to {moved[:200]!r}")
                if self._handlers != _handlers():
                    _put_back(self._handlers)  # last: a signal that was held back arrives here, the limit's own too
            finally:
                self._limit.__exit__()
        except TookTooLongError as late:
            error = late
        if error is not None and (fault := self._fault(error)) is not error:
            raise fault from (None if isinstance(error, TookTooLongError) else error)

    def _fault(self, error: BaseException) -> BaseException:
        """What an error of the game is for everybody else; itself where it is to pass."""
        game = f"the game {self._name}"
        if isinstance(error, GameFaultError):
            if error.message.startswith(game):
                return error
            return GameFaultError(f"{game}: {error.message}", rule=error.rule, fatal=error.fatal, fix=error.fix)
        if isinstance(error, GameError):
            return error
        if isinstance(error, TookTooLongError):
            _hangs[self._name].append(f"{game} took longer than {GAME_S:g} s: {where_raised(error)}")
            return _hung(self._name)
        if is_interrupt(error):  # nothing of ours is awaited within: a cancellation, too, is the game's own
            return error
        return GameFaultError(f"{game} failed: {where_raised(error)}")


def _hung(name: str) -> GameFaultError:
    fatal = hangs(name) >= HANGS
    fix = f"it did so {HANGS} times, and what was played before is kept: msgrpo games check {shlex.quote(name)}"
    return GameFaultError(_hangs[name][-1], fatal=fatal, fix=fix if fatal else None)


def hangs(name: str) -> int:
    """How many calls of a game have taken too long in this process."""
    return len(_hangs.get(name, ()))


def check_hangs(name: str, before: int) -> None:
    """Raise the fatal fault of a game that took too long too often, and since there were `before` such calls: none of
    its episodes that go on waits for it once more.
    """
    if hangs(name) >= max(HANGS, before + 1):
        raise _hung(name)


@contextmanager
def passing_faults() -> Iterator[None]:
    """A game's own fault ends what is within, and no more; a fatal one is raised."""
    try:
        yield
    except GameFaultError as fault:
        if fault.fatal:
            raise


@contextmanager
def asked_of(what: str) -> Iterator[None]:
    """A scenario's own function, `what`, is asked of a state: where it plays on in a way that the game refuses, that
    is its fault, and nobody's wrong move.
    """
    try:
        yield
    except GameFaultError:
        raise
    except GameError as error:
        raise GameFaultError(f"{what}() failed: {error.message}", rule=what, fix=error.fix) from error


@contextmanager
def unmoved() -> Iterator[None]:
    """Put back the working directory, and what Ctrl-C and other signals do, where somebody's code within changes
    them: files would be written elsewhere, and nobody could end the program.
    """
    here, handlers = _folder(), _handlers()
    try:
        yield
    finally:
        if here and _folder() != here:
            os.chdir(here)
        _put_back(handlers)


def _handlers() -> tuple[Any, Any, Any, set[int]]:
    """What Ctrl-C, SIGTERM and our own alarm do, and which signals this thread holds back."""
    return _handler_of(INT), _handler_of(TERM), _handler_of(ALRM), _mask(signal.SIG_BLOCK, ())


def _put_back(before: tuple[Any, Any, Any, set[int]]) -> None:
    """The handlers first: what was held back arrives as soon as it is let in."""
    *handlers, held = before
    if threading.current_thread() is threading.main_thread():  # no other can have changed them
        for number, handler in zip((INT, TERM, ALRM), handlers, strict=True):
            if handler is not None and _handler_of(number) is not handler:
                signal.signal(number, handler)
    if more := _mask(signal.SIG_BLOCK, ()) - held:  # a signal that is held back ends nothing
        _mask(signal.SIG_UNBLOCK, more)


def _folder() -> str:
    """The working directory; nothing where it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


@contextmanager
def memory_within(more: int) -> Iterator[None]:
    """Raise MemoryError within the block once this process has grown by `more` bytes; only where Linux counts them.

    The limit is that of the whole process, so one thread at a time is in such a block, the block must be short, and
    `more` larger than what other threads ask for in the meantime.
    """
    with _one_at_a_time:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
        except OSError:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = (pages * resource.getpagesize() + more, soft, hard)
        limit = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def is_interrupt(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt is a person's Ctrl-C, and not one that a game raised itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised_there = "KeyboardInterrupt" in (last.line or "") and last.name not in HANDLERS
    return isinstance(error, KeyboardInterrupt) and (type(error) is not KeyboardInterrupt or not raised_there)
