"""What commands write: errors that can be read on a narrow terminal and searched in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from msgrpo import output

MESSAGE = "steps is 'many', which is no whole number of [bold red]updates"


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_breaks_between_words_on_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(output, "err", Console(file=written, width=20, force_terminal=terminal, color_system=None))
    output.say_error(MESSAGE)
    lines = [line.strip() for line in written.getvalue().splitlines()]
    assert " ".join(lines) == f"error: {MESSAGE}"
    assert (len(lines) > 1) == terminal
    assert all(len(line) <= 20 for line in lines) == terminal
