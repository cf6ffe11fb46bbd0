"""Where measurements go: every sink gets the same names, and none of them ends a run."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from msgrpo.cli import make_app
from msgrpo.errors import MissingExtraError, UsageError
from msgrpo.run_log import read_rows
from msgrpo.train import sinks
from msgrpo.train.config import make_config
from msgrpo.train.display import Lines, LiveDisplay
from msgrpo.train.loop import train
from msgrpo.train.run_folder import quiet_boards
from tests.command_line import invoked
from tests.train_helpers import Told

CONFIG = make_config()
ROW = {"score": "success", "success": 0.5, "success_low": 0.4, "success_high": 0.6, "values": [1.0, 0.0]}


def write(opened: sinks.Sinks) -> None:
    opened.update(1, {"rollout/return": 0.25, "update/kl": 0.5})
    opened.evaluation(1, ROW)
    opened.close()


def test_the_record_and_tensorboard_hold_the_same_paths(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(sinks.open_sinks(tmp_path, CONFIG, 0, Told(), []))
    assert read_rows(tmp_path) == [
        {"kind": "train", "step": 1, "rollout/return": 0.25, "update/kl": 0.5},
        {"kind": "eval", "step": 1, **ROW},
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = {"rollout/return", "update/kl", "eval/success", "eval/success_low", "eval/success_high"}
    assert set(board.Tags()["scalars"]) == tags
    assert board.Scalars("update/kl")[0].value == 0.5


def test_wandb_offline_gets_every_number_under_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file holds names beside values; a resumed run goes on under the same name. No network is asked."""
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = []
    for step in (0, 1):
        told = Told()
        write(sinks.open_sinks(tmp_path, CONFIG, step, told, ["wandb"]))
        assert told.said == []
        names.append((tmp_path / "wandb-id").read_text())
    assert names[0] == names[1]
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert all(names[0] in file.name for file in files)
    data = files[0].read_bytes()
    for name, value in (("rollout/return", 0.25), ("update/kl", 0.5), ("eval/success", 0.5)):
        assert re.search(rf"{name}.{{1,4}}{value}".encode(), data, re.DOTALL), name


def test_trackio_gets_every_number_under_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: it chooses its folder when it is imported."""
    import os
    import subprocess
    import sys

    pytest.importorskip("trackio", reason="the trackio extra is not installed")
    program = (
        "from pathlib import Path\n"
        "from tests.test_train_sinks import CONFIG, Told, sinks, write\n"
        f"told = Told(); write(sinks.open_sinks(Path({str(tmp_path)!r}), CONFIG, 0, told, ['trackio']))\n"
        "assert not told.said, told.said\n"
    )
    environment = os.environ | {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    import sqlite3

    (file,) = (tmp_path / "trackio").rglob("msgrpo*.db")
    with sqlite3.connect(file) as base:
        rows = [json.loads(text) for (text,) in base.execute("SELECT metrics FROM metrics")]
    together: dict[str, Any] = {name: value for row in rows for name, value in row.items()}
    assert (together["rollout/return"], together["eval/success"]) == (0.25, 0.5)


def test_a_sink_that_fails_is_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_: object) -> None:
            self.calls = 0

        def update(self, step: int, values: Any) -> None:
            self.calls += 1
            raise ConnectionError("no network\nat http://a")

        evaluation = update

        def close(self) -> None:
            raise AssertionError("it was left out")

    class Unopened:
        def __init__(self, *_: object) -> None:
            raise TimeoutError  # many say nothing

    monkeypatch.setattr(sinks, "LOGS", {"wandb": Failing, "trackio": Unopened})
    told = Told()
    write(sinks.open_sinks(tmp_path, CONFIG, 0, told, ["wandb", "trackio"]))
    assert told.said == [
        "Unopened cannot be used and is left out: TimeoutError",
        "Failing failed and is left out from now on: no network",
    ]
    assert len(read_rows(tmp_path)) == 2


def test_the_record_that_cannot_be_written_does_end_the_run(tmp_path: Path) -> None:
    opened = sinks.open_sinks(tmp_path, CONFIG, 0, Told(), [])
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        opened.update(1, {})
    opened.close()


def test_an_unknown_logger_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such logger"):
        sinks.check_logs(["wandbb"])
    found = invoked("train", "--log", "mlflow", "--out", str(tmp_path / "run"))
    assert isinstance(found.exception, UsageError)
    with pytest.raises(UsageError, match="no such logger"):  # from Python the folder was written, then a KeyError
        train(CONFIG, tmp_path / "run", report=Told(), logs=["wandbb"])
    assert not (tmp_path / "run").exists()


def test_a_logger_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went on without it, after a note."""
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingExtraError, match="--log trackio needs packages that are not installed"):
        train(CONFIG, tmp_path / "run", report=Told(), logs=["trackio"])
    assert not (tmp_path / "run").exists()


def test_a_missing_interval_is_not_taken_for_markup(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`[no interval]` was taken for a style of the terminal and left out of a run's last line. Looked for: every
    print of a text that holds names or intervals (the app's plain result had the same).
    """
    settings = [
        "groups=1",
        "group_size=2",
        "select=all",
        "minibatches=1",
        "evaluation=1(film=0)",
        "max_tokens=4",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        make_app()(["train", "frozen-lake", "--steps", "1", *options, "--out", str(tmp_path / "run")])
    assert ended.value.code == 0
    assert "95 % interval [no interval]" in capsys.readouterr().out


def test_the_bar_says_how_long_a_run_of_slow_updates_will_take() -> None:
    """An update of a real model takes minutes, and rich forgets after half of one."""
    display, clock = LiveDisplay(Console(file=io.StringIO()), make_config(given={"steps": 10})), 0.0
    display.progress.get_time = lambda: clock
    for step in range(1, 5):
        clock += 100.0
        display.update(step, {"rollout/turns": 50.0})
    assert display.progress.tasks[0].time_remaining == 600.0


@pytest.mark.parametrize("doing", ["update 4 of 40: no episode has ended yet", "update 4 of 40: 2 of 6 steps"])
def test_of_a_stop_it_is_said_what_is_given_up(doing: str) -> None:
    """It was a sentence in a sentence: update 4 of 40: no episode has ended yet is given up."""
    said = io.StringIO()
    shown = Lines(Console(file=said), CONFIG)
    shown.doing(doing)
    shown.stopping()
    assert "stopping: update 4 of 40 is given up and will be done again" in said.getvalue()


class BoardsThread(threading.Thread):
    """As TensorBoard's, which keeps what it met for whoever writes there next."""

    __module__ = "tensorboard.summary.writer.event_file_writer"

    def run(self) -> None:
        raise OSError(errno.EFBIG, "File too large")


class OthersThread(BoardsThread):
    """Of somebody else."""


def test_what_a_disk_refuses_of_tensorboard_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread printed a traceback, and then came the error that says it."""
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with quiet_boards():
        for thread in (BoardsThread(), OthersThread()):
            thread.start()
            thread.join()
    assert [type(raised.thread) for raised in told] == [OthersThread]
