"""The command line, in this process and in another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from msgrpo.cli import main, make_app

PROGRAM = [sys.executable, "-m", "msgrpo.cli"]


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the program in this process."""
    monkeypatch.setattr(sys, "argv", ["msgrpo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """A process that has ended after the block: where the block fails, it and what it has started are killed.

    `with process:` alone waits for it then, however long it goes on, and the test cannot say why it failed.
    """
    with process:
        try:
            yield process
        except BaseException:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for child in below:
                with suppress(psutil.Error):  # it has ended since
                    child.kill()
            process.kill()
            raise


def invoked(*arguments: str, **more: Any) -> Any:
    """What a command comes to in this process, an error included."""
    return CliRunner().invoke(make_app(), list(arguments), **more)


def run(*arguments: str, **more: Any) -> Any:
    """A command that ends well in this process; an error is raised."""
    result = invoked(*arguments, **more)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result
