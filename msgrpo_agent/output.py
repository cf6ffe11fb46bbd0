"""Where every command prints: text for people, JSON for machines. And the options that several commands have."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from msgrpo.text import as_json, printable

T = TypeVar("T")
PIPED = 160  # columns of a table that goes into a pipe or a file
LONGEST_SHOWN = 8000  # characters of an error or a note: it may quote a file in which one line has megabytes


class _Console(Console):
    """A console whose reader may go (| head): an error of output, at which a run saves what it has. By itself rich
    raises SystemExit, at which nobody saves.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


if os.environ.get("COLUMNS", "").isdigit() and not int(os.environ["COLUMNS"]):
    del os.environ["COLUMNS"]  # rich would write nothing, errors neither
# a name may hold :x:, which is no sign of rich here
out, err = _Console(emoji=False), _Console(stderr=True, emoji=False)
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of text.")]
HowAsked = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        help="How models are asked: brief (as usual), none, free, a file, or its fields as JSON. "
        "Default: as they were trained or taught, others as usual.",
    ),
]
Chat = Annotated[
    str | None,
    typer.Option(
        "--chat",
        help='JSON for the chat template, like {"enable_thinking": false}. Default: as they were trained or taught.',
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]


class _Terminal(io.FileIO):
    """A terminal, which may go before the command does."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outliving(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, to which nothing is written once its terminal is gone: who has closed it, and has told the
    shell (disown) that the command is to go on, does not want it to end at the next line that it says.
    """
    try:
        device = stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)  # one that is gone already is no tty any more
    except io.UnsupportedOperation:  # it is in memory
        return stream
    if not device:
        return stream
    terminal = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(terminal, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


def open_what_is_closed() -> None:
    """Give a command that was started without a standard stream (`>&-`) one that leads nowhere. Else the first file
    that it opens gets the stream's number, and what a library prints is written into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)  # by a server that the command starts
            setattr(sys, name, os.fdopen(number, mode, closefd=False))  # `outliving` lets this stream go


class Name:
    """A name in a table: where it is wider than its column, it goes on after one of its signs, not within a word."""

    def __init__(self, name: str) -> None:
        self._name, self._pieces = name, re.findall(r"[^/#:\s-]*[/#:\s-]+|[^/#:\s-]+", name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max((cell_len(piece.rstrip()) for piece in self._pieces), default=0), cell_len(self._name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for piece in self._pieces:
            if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(lines), overflow="fold")


def print_json(value: Any) -> None:
    """Write `value` as JSON to standard output, never wrapped or coloured."""
    sys.stdout.write(as_json(value, indent=2) + "\n")


def print_table(table: RenderableType, console: Console = out) -> None:
    """Write a table, of which nothing is cut off: commands are copied from it. In a pipe or a file it is wider than
    on a terminal: who searches it finds names in one piece.
    """
    for column in table.columns if isinstance(table, Table) else ():
        column.overflow = "fold"
    own_width = console.is_terminal or "COLUMNS" in os.environ
    (console if own_width else _Console(file=console.file, width=PIPED, emoji=False)).print(table)


def print_line(text: str) -> None:
    """Write one line to standard output: not wrapped, and no part of it read as markup or by the terminal."""
    out.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def beginning(text: str) -> str:
    """The text, or its beginning where it is longer than anybody reads."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}… ({len(text):,} characters in all)"


def say(text: str) -> None:
    """Write one line to standard error: not wrapped, and no part of it read as markup or by the terminal."""
    err.print(beginning(printable(text)), markup=False, highlight=False, soft_wrap=True)


def say_error(message: str) -> None:
    """Write an error; on a terminal its lines end between words. What is to be copied is `say`'s."""
    line = Text.assemble(("error: ", "bold red"), beginning(message))
    err.print(line, highlight=False, soft_wrap=not err.is_terminal)


def takes(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Makes of `command(given)` a command with an option for every field of the dataclass `kind`."""
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        Parameter(
            option.name,
            Parameter.KEYWORD_ONLY,
            default=option.default if option.default_factory is MISSING else option.default_factory(),
            annotation=hints[option.name],
        )
        for option in fields(kind)  # type: ignore[arg-type]
    ]

    def decorated(command: Callable[[T], None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            command(kind(**values))

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        return run

    return decorated
