"""A terminal that is closed while the app draws."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from textual.drivers._writer_thread import WriterThread

from msgrpo.tui.app import PlayApp
from msgrpo.tui.driver import Lasting, TerminalDriver
from tests.command_line import PROGRAM


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lasting", [True, False])
def test_a_closed_terminal_ends_no_thread_that_somebody_waits_for(lasting: bool) -> None:
    """Without it Textual's thread ends with the first error, and its full queue is waited for at the end."""
    master, slave = pty.openpty()
    terminal = os.fdopen(slave, "w")
    try:
        writer = WriterThread(Lasting(terminal) if lasting else terminal)  # type: ignore[arg-type]
        writer.start()
        writer.write("shown")
        os.close(master)
        for _ in range(20):  # fewer than its queue holds
            writer.write("x" * 5000)
        ending = threading.Thread(target=writer.stop, daemon=True)
        ending.start()
        ending.join(timeout=60)
        assert not ending.is_alive()
        assert writer._queue.empty() is lasting
    finally:
        with contextlib.suppress(OSError):  # what the closed terminal did not take before
            terminal.close()


def test_a_terminal_that_goes_without_a_signal_ends_the_app(tmp_path: Path) -> None:
    """In a session that is not the terminal's own nothing says so: the app went on, and read the end for ever."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(tmp_path)}
    arguments = [*PROGRAM, "play", "frozen-lake", "--agent", "human"]
    app = subprocess.Popen(
        arguments, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, env=environment, start_new_session=True
    )
    try:
        os.close(slave)
        shown = b""
        while b"leave" not in shown:
            shown += os.read(master, 65536)
        os.close(master)
        assert app.wait(timeout=100) == 128 + signal.SIGHUP
    finally:
        app.kill()


def test_the_app_has_it() -> None:
    assert PlayApp(lambda spec: None).driver_class is TerminalDriver  # type: ignore[arg-type,return-value]
