"""One tree of exceptions. Each says what happened, with the value seen, and the command or change that helps."""

from __future__ import annotations

import difflib
import reprlib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgrpo.install import install_command
from msgrpo.text import printable

if TYPE_CHECKING:
    from pydantic import ValidationError

LONGEST_REASON = 500  # characters of what somebody's exception says
LONGEST_FAULT = 2000  # characters of what is said of a game's fault, which each record of its episodes holds
# How a RuntimeError says that memory is missing: the CPU's allocator, CUDA's, and libraries with one of their own.
NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class MsgrpoError(Exception):
    """An error that a person caused or can correct. The command line prints it without a traceback and exits with 2.

    Messages quote servers, files and arguments, so they are cleaned of control characters here.
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        self.message = printable(message)
        self.fix = None if fix is None else printable(fix)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  {self.fix}"


class UsageError(MsgrpoError):
    """A wrong name, option or value."""


class GameError(MsgrpoError):
    """A game was used against its contract (a step after the end, an unknown player)."""


class GameFaultError(GameError):
    """A game's own code failed or returned an invalid value. It costs the episode and nothing else.

    `rule` is the part of the contract (`contract.RULES`) that it breaks. A `fatal` fault ends what plays the
    episodes: to go on would take hours.
    """

    def __init__(self, message: str, *, rule: str = "runs", fatal: bool = False, fix: str | None = None) -> None:
        super().__init__(message if len(message) <= LONGEST_FAULT else f"{message[:LONGEST_FAULT]}…", fix=fix)
        self.rule = rule
        self.fatal = fatal


class ModelError(MsgrpoError):
    """A language model, tokenizer or adapter cannot be loaded or run."""


class MissingExtraError(MsgrpoError):
    """A part of msgrpo needs packages that are not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs packages that are not installed.", fix=install_command(extra))


class EndpointError(MsgrpoError):
    """An OpenAI-compatible endpoint gave no answer that counts; never turned into a move.

    `kind` is the column of the table that the failure belongs to; `fatal` means that asking again,
    or asking for another episode, is useless (wrong key, unknown model).
    """

    def __init__(self, message: str, *, kind: str, fatal: bool = False, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.kind = kind
        self.fatal = fatal


class RecordError(MsgrpoError):
    """An episode record cannot be read, or does not replay to what it says."""


class RunError(MsgrpoError):
    """A training run, its folder or its checkpoints are not what they should be."""


class ServeError(MsgrpoError):
    """vLLM cannot be started, or ended."""


class TookTooLongError(BaseException):
    """Code exceeded its time limit (`limits.within`). It is no Exception, so the stopped code cannot catch it."""


def check_given(what: str, given: object, kind: type, *, fix: str | None = None) -> None:
    """Raise UsageError for an argument of another type, as a caller from Python may give it."""
    if not isinstance(given, kind):
        raise UsageError(f"{what} is {reprlib.repr(given)}, no {kind.__name__}", fix=fix)


def no_memory(error: BaseException) -> str | None:
    """What an exception says of memory that is not there, on a GPU or on the CPU; None where it is another one."""
    message = str(error)
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's; it is not loaded
    if known or (isinstance(error, RuntimeError) and any(words in message for words in NO_MEMORY)):
        return f"there is not enough memory: {first_line(error)}"
    return None


def of_the_machine(error: BaseException) -> bool:
    """Whether what a reader of a file raises is the disk's trouble or the memory's, and says nothing of what the file
    holds; a file that is missing is damage to what it is a part of.
    """
    of_disk = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return of_disk or no_memory(error) is not None


@contextmanager
def users_code(failed: str, *, fix: str | None = None) -> Iterator[None]:
    """Turn whatever a user's code raises within the block, SystemExit too, into a UsageError with file and line."""
    try:
        yield
    except MsgrpoError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{failed}: {where_raised(error)}", fix=fix) from error
    except TookTooLongError as error:
        raise UsageError(f"{failed}: it took too long: {where_raised(error)}", fix=fix) from None


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:LONGEST_REASON]


def where_raised(error: BaseException) -> str:
    """An exception in one line: its type, what it says, the file and the line."""
    frames = traceback.extract_tb(error.__traceback__)
    while isinstance(error, TookTooLongError) and frames[1:] and frames[-1].name == "_stop_here":
        frames.pop()  # the signal's handler in `limits`; what it stopped is the frame before
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
    if isinstance(error, SyntaxError) and error.filename:
        at = f"{error.filename}:{error.lineno}"
    try:
        reason = " ".join(str(error)[: 2 * LONGEST_REASON].split())[:LONGEST_REASON]
    except Exception:  # an exception's own text may fail, too
        reason = ""
    return f"{type(error).__name__}{f': {reason}' if reason else ''} ({at})"


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?` for an unknown name, or the list of the known ones."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


def unknown_names(error: ValidationError) -> list[str]:
    """The names in a file that are not known here, each with its place, as a later version may have written them."""
    return [".".join(map(str, fault["loc"])) for fault in error.errors() if fault["type"] == "extra_forbidden"]


def first_fault(error: ValidationError, whole: str) -> str:
    """The first thing that is wrong, where it stands, and the value seen; `whole` names what has no place of its
    own.
    """
    fault = error.errors()[0]
    place = ".".join(map(str, fault["loc"])) or whole
    seen = f" (seen: {repr(fault['input'])[:200]})" if fault["loc"] and fault["type"] != "missing" else ""
    unknown = fault["type"] == "extra_forbidden"
    said = "this name is not known here" if unknown else fault["msg"].removeprefix("Value error, ")
    return f"{place}: {said}{seen}"
