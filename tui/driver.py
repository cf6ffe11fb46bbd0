"""The terminal as the app writes to it. One that was closed takes nothing more, and that is no error."""

from __future__ import annotations

import os
import signal
from typing import Any, TextIO, cast

from textual.drivers.linux_driver import LinuxDriver

LOOK_S = 1.0  # between two looks at whether the terminal is still there


class Lasting:
    """A file that drops what it cannot write. Textual's thread would end there, and the app wait for it for ever."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            return

    def fileno(self) -> int:
        return self._file.fileno()


class TerminalDriver(LinuxDriver):
    """Textual's own, which outlives its terminal, so that the app ends in good order when a window is closed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file = cast(Any, Lasting(cast("TextIO", self._file)))
        self._look()

    def _look(self) -> None:
        """End the app as a hangup does, once its terminal is gone: in a session that is not the terminal's own no
        signal says so, and Textual reads the end of the file for ever.
        """
        if self.input_tty and not os.isatty(self.fileno):
            signal.raise_signal(signal.SIGHUP)
        else:
            self._loop.call_later(LOOK_S, self._look)

    def _get_terminal_size(self) -> tuple[int, int]:
        """The terminal's own columns and rows: Textual believes exported COLUMNS and LINES, which never change."""
        try:
            columns, rows = os.get_terminal_size(cast(Any, self._file).fileno())
        except OSError:
            columns = rows = 0
        return (columns, rows) if columns and rows else super()._get_terminal_size()

    def _sigcont_application(self, *signals: Any) -> None:
        """Take the terminal up again, if the app had given it up.

        The end of a terminal sends SIGCONT too, to an app that never stopped. Textual would start its threads a
        second time there, and wait at the end for one of two.
        """
        if self._must_signal_resume:
            super()._sigcont_application(*signals)
