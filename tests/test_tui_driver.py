"""A terminal that is closed while the app draws."""

from __future__ import annotations

import contextlib
import os
import pty
import threading

import pytest
from textual.drivers._writer_thread import WriterThread

from msgrpo.tui.app import PlayApp
from msgrpo.tui.driver import Lasting, TerminalDriver


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


def test_the_app_has_it() -> None:
    assert PlayApp(lambda spec: None).driver_class is TerminalDriver  # type: ignore[arg-type,return-value]
