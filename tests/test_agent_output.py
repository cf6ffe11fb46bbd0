"""What commands write: errors that can be read on a narrow terminal and searched in a log."""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from msgrpo import output
from msgrpo.agent import Sampling
from msgrpo.cli import main, make_app
from msgrpo.evals.cli import evaluate
from msgrpo.text import ANSWER_TOKENS
from msgrpo.train.curve import draw_curve
from msgrpo.tui.cli import play
from tests.command_line import run

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


def test_of_an_error_of_megabytes_the_beginning_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """`msgrpo verify` quoted a state of 50 MB, from a record's line, into the terminal."""
    written = io.StringIO()
    monkeypatch.setattr(output.err, "_file", written)
    output.say_error("player saw another state: " + "x" * 50_000)
    assert len(written.getvalue()) < 10_000
    assert written.getvalue().startswith("error: player saw another state: xxx")
    assert written.getvalue().endswith("x… (50,026 characters in all)\n")


def test_a_name_in_a_narrow_table_breaks_after_its_signs() -> None:
    """Of two models of one server `Qwen` stood there as `Q` and `wen`, at 80 columns."""
    table = Table("agent", box=None, pad_edge=False, width=17)
    table.add_row(output.Name("endpoint:http://127.0.0.1:8000/v1#Qwen/Qwen2.5-3B-Instruct"))
    table.add_row(output.Name("one that has no sign, and onewordthatistoolong"))
    written = io.StringIO()
    Console(file=written, width=80).print(table)
    assert [line.rstrip() for line in written.getvalue().splitlines()[1:]] == [
        *("endpoint:http://", "127.0.0.1:8000/", "v1#Qwen/Qwen2.5-", "3B-Instruct"),
        *("one that has no", "sign, and", "onewordthatistool", "ong"),
    ]


@pytest.mark.parametrize(
    ("terminal", "columns", "whole"), [(False, None, True), (False, "40", False), (True, None, False)]
)
def test_a_table_in_a_pipe_breaks_no_name(
    terminal: bool, columns: str | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`msgrpo leaderboard runs/eval | grep my-model` found nothing: tables in a pipe had 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    name = "endpoint:http://a-server.example.org:8000/v1#Qwen/Qwen2.5-3B-Instruct-of-a-long-name"
    table, written = Table("agent"), io.StringIO()
    table.add_row(output.Name(name))
    width = 80 if terminal else None
    output.print_table(table, Console(file=written, width=width, force_terminal=terminal, color_system=None))
    assert (name in written.getvalue()) == whole


def test_nothing_in_a_narrow_table_is_cut_off() -> None:
    """Of the command that installs an extra `msgrpo doctor` showed /home/some/where/.venv/bin/pyth…"""
    command = "/home/some/where/.venv/bin/python -m pip install -e '/home/some/where/msgrpo[train]'"
    table, written = Table("command that helps", box=None, pad_edge=False), io.StringIO()
    table.add_row(escape(command))
    output.print_table(table, Console(file=written, width=20, force_terminal=True, color_system=None))
    lines = [line.strip() for line in written.getvalue().splitlines()[1:]]
    assert "".join(lines).replace(" ", "") == command.replace(" ", "")


def test_no_part_of_a_name_is_a_sign_or_drives_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the command to copy for `gym:x:Evil-v0` was shown with a cross in it, and a folder's name could
    clear the screen or turn the direction of the line around.
    """
    written = io.StringIO()
    assert not output.out._emoji
    assert not output.err._emoji
    monkeypatch.setattr(output.err, "_file", written)
    output.say("msgrpo --allow gym:x:Evil-v0 eval runs/\x1b[2Ja\u200fb\u202e")
    assert written.getvalue() == "msgrpo --allow gym:x:Evil-v0 eval runs/\ufffd[2Ja\ufffdb\ufffd\n"


def test_a_folders_name_in_brackets_is_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: `view '[/b]'`, and eval of a game in such a folder, ended in a MarkupError of the table's title; and
    a name with `$` in the one of a curve, when the run had ended.
    """
    folder = tmp_path / "[/b]"
    monkeypatch.chdir(tmp_path)
    run("games", "new", "game.py")
    folder.mkdir(parents=True)
    (tmp_path / "game.py").rename(folder / "game.py")
    played = ["eval", "random", "--scenario", "[/b]/game.py:scenario", "--episodes", "2", "--out", "[/b]/out"]
    for command in (played, ["view", "[/b]", "--plain"]):
        assert "[/b]" in run(*command).output
    (folder / "metrics.jsonl").write_text("")
    assert draw_curve(folder, "nano on $x_{/game.py:scenario$", "return").is_file()


def test_a_second_ctrl_c_while_a_lock_is_given_back_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted while it takes a lock back, `threading` gives back a lock that it does not hold."""

    def app() -> None:
        lock = threading.Lock()
        with lock:
            lock.release()
            raise KeyboardInterrupt

    monkeypatch.setattr("msgrpo.cli.make_app", lambda: app)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


CTRL_C = """
import sys
class AtNumpy:
    def find_spec(self, name, *given):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, AtNumpy())
from msgrpo.cli import main
"""


def test_a_ctrl_c_while_the_command_line_is_loaded_is_no_traceback() -> None:
    """It takes a second where the machine is busy, and every command begins with it."""
    ended = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_longest_answer_is_the_same_for_every_command() -> None:
    """It stood in three places."""
    defaults = [
        Sampling().max_tokens,
        *(inspect.signature(c).parameters["max_tokens"].default for c in (evaluate, play)),
    ]
    assert defaults == [ANSWER_TOKENS] * 3


def test_the_paragraphs_of_a_commands_help_are_single_lines() -> None:
    """Of the first one typer joins the lines; the others kept theirs, and broke after "Exits with 2" at any width."""

    def helps(command: object, name: str) -> list[tuple[str, str]]:
        inner = getattr(command, "commands", {})
        below = [told for part in inner for told in helps(inner[part], f"{name} {part}")]
        return [(name, inspect.cleandoc(getattr(command, "help", None) or "")), *below]

    told = helps(typer.main.get_command(make_app()), "msgrpo")
    assert len(told) > 15
    assert [name for name, text in told if any("\n" in part for part in text.split("\n\n")[1:])] == []


def test_a_terminal_that_is_gone_takes_no_more_and_ends_nothing() -> None:
    """Of a disowned training whose terminal was closed the next evaluation, or the end, was an error."""
    ours, terminal = os.openpty()
    with open(terminal, "w") as stream:
        outlives = output.outliving(stream)
        print("before", file=outlives)
        assert os.read(ours, 100) == b"before\r\n"
        os.close(ours)
        print("after", file=outlives)
        with pytest.raises(OSError, match="Input/output error"):
            print("after", file=stream, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)  # what is left in the buffer goes there


def test_a_command_that_begins_on_a_terminal_that_is_gone_does_its_work(tmp_path: Path) -> None:
    """As the second training of a disowned loop: it ended at its first line."""
    ours, terminal = os.openpty()
    os.close(ours)
    command = [sys.executable, "-m", "msgrpo.cli", "games", "new", str(tmp_path / "mine.py")]
    assert subprocess.run(command, stdout=terminal, stderr=terminal, check=False).returncode == 0
    os.close(terminal)
    assert (tmp_path / "mine.py").is_file()


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", ">&-"])
def test_what_is_printed_without_standard_streams_gets_into_no_file(closed: str, tmp_path: Path) -> None:
    """The first file that was opened had the number of standard output; and `--json` was an AttributeError. Opened
    instead, the streams were closed again as soon as others took their places, and the first table was an error.
    """
    printing = (
        "import os, subprocess, sys; from msgrpo import cli; from msgrpo.output import print_json\n"
        "def command():\n"
        "    file = open(sys.argv[1], 'w'); print_json([]); sys.stdout.flush(); os.write(1, b'noise')\n"
        "    subprocess.run(['sh', '-c', 'cat; echo noise; echo noise >&2'], check=True)\n"
        "cli.make_app = lambda: command\n"
        "cli.main()"
    )
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", printing, str(tmp_path / "file")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr, (tmp_path / "file").read_text()) == (0, False, "")


def test_a_terminal_of_no_columns_is_one_of_unknown_width() -> None:
    """Nothing was written: no table, no help, and of an error only the exit code was left."""
    command = [sys.executable, "-m", "msgrpo.cli", "games", "no-such-game"]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "0"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:20]) == (2, "error: no scenario i")


def test_a_pipe_is_written_to_as_ever() -> None:
    """A command whose reader is gone (| head) ends."""
    reader, pipe = os.pipe()
    with open(pipe, "w") as stream:
        assert output.outliving(stream) is stream
    os.close(reader)


def test_a_reader_that_is_gone_is_an_error_at_which_a_run_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a SystemExit: `msgrpo train 2>&1 | head` ended without a checkpoint."""
    reader, pipe = os.pipe()
    os.close(reader)
    with open(pipe, "w") as stream:
        monkeypatch.setattr(output.err, "_file", stream)  # `file` would stay this test's stderr afterwards
        with pytest.raises(BrokenPipeError):
            output.say("update 10/60")
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe)  # what is left in the buffer goes there
