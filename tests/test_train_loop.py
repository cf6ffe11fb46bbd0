"""Whole runs on nano: a run learns, can be killed anywhere and resumed, and has its folder to itself."""

import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from msgrpo import run_log
from msgrpo.errors import RunError, UsageError
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.models import loading
from msgrpo.run_log import CONFIG, read_rows
from msgrpo.text import counted
from msgrpo.train import checkpoint, loop
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.film import Film
from msgrpo.train.nano.teach import teach
from msgrpo.train.rollouts import Players
from tests import forked
from tests.command_line import run_here
from tests.train_helpers import NO_FILM, TINY, WEIGHTS, Told, tiny

ROOT = Path(__file__).parents[1]
LAKE = get_scenario("frozen-lake")
pytestmark = pytest.mark.usefixtures("near")  # what a run learns is asked of one test alone


def arguments(out: Path, *more: str) -> list[str]:
    settings = [part for setting in TINY for part in ("--set", setting)]
    return ["train", "--steps", "4", "--out", str(out), *settings, *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted, in a process of its own: what ran before in this one may change rounding.

    It starts from nothing, and those that are compared with it are forks: that they begin alike is seen as well.
    """
    out = tmp_path_factory.mktemp("runs") / "whole"
    command = [sys.executable, "-m", "tests.near", *arguments(out)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return out


def test_a_run_folder_holds_all_it_should(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    assert {"adapter_config.json", WEIGHTS, "config.json", "metrics.jsonl", "curve.png", "transcripts.jsonl"} <= names
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["before"].keys() >= {"success", "success_low", "success_high", "invalid"}
    assert summary["change"]["low"] <= summary["change"]["mean"] <= summary["change"]["high"]
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in updates] == [1, 2, 3, 4]
    assert all(row["update/kept_turns"] for row in updates)
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 2, 4]
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_adapter_loads_with_peft_and_changes_the_model(finished: Path) -> None:
    from peft import PeftModel

    base, _ = loading.load_base("nano")
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, str(finished))
    assert not torch.allclose(plain, adapted(ids).logits)
    merged, _ = loading.load_adapted(finished)
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("after", "film"), [(1, True), (3, False)])
def test_killed_and_resumed_it_ends_with_the_same_bytes(
    finished: Path, tmp_path: Path, after: int, film: bool
) -> None:
    """kill -9 as soon as the metrics show `after` updates, wherever that finds it; then the same command. A film
    changes no byte of the adapter.
    """
    out, more = tmp_path / "killed", () if film else ("--set", NO_FILM)
    running = forked.begin(arguments(out, *more), tmp_path / "said")
    metrics = out / "metrics.jsonl"
    while running.is_alive() and not (metrics.is_file() and metrics.read_text().count('"train"') >= after):
        time.sleep(0.01)
    running.kill()
    running.join()
    assert running.exitcode == -signal.SIGKILL
    assert "validation starts" in forked.run(arguments(out, "--resume", *more), tmp_path / "said again")
    assert run_log.scenes(finished)[0] == 0
    assert run_log.scenes(out)[:1] == ([0] if film else [])  # which others there are is a matter of time
    assert (out / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    whole, resumed = (json.loads((run / "summary.json").read_text()) for run in (finished, out))
    assert {**whole, "training_seconds": 0} == {**resumed, "training_seconds": 0} | {
        side: {**resumed[side], "eval_s": whole[side]["eval_s"]} for side in ("before", "after")
    }


def test_a_run_that_goes_on_films_no_scene_that_its_share_of_the_time_does_not_hold(
    finished: Path, tmp_path: Path
) -> None:
    """A scene was played at once, as if it took no time."""
    scene = run_log.read_scene(finished, 0)
    config = make_config(settings=TINY, given={"steps": 4})
    assert Film(tmp_path, Players(config))._wanted(1)  # how long a scene takes is not known yet
    for episode in scene.episodes:
        episode.turns[0].latency_s = 1000.0
    run_log.write_scene(tmp_path, scene)
    assert not Film(tmp_path, Players(config))._wanted(1)
    (tmp_path / "film" / "000000.json").write_text("damaged")
    assert Film(tmp_path, Players(config))._wanted(1)


@pytest.mark.parametrize("whole", [0, 1])  # updates before the one in which it fails
def test_a_credit_of_ones_own_that_fails_loses_no_update(whole: int, tmp_path: Path) -> None:
    """All updates since the last checkpoint were lost with the one in which it failed; in the first one nothing was
    said of how the run goes on, which names what a person has to allow.
    """
    out, mine = tmp_path / "run", tmp_path / "mine.py"
    mine.write_text(
        "asked = []\n"
        "def credit(group):\n"
        "    asked.append(group)\n"
        f"    assert len(asked) <= {2 * whole}, 'no more'\n"
        "    return [[1.0] * len(turns) for turns in group.turns]\n"
    )
    config = make_config(
        settings=[*TINY, NO_FILM, "checkpoint_every=100", f"credit={mine}:credit"], given={"steps": 3}
    )
    told = Told()
    with pytest.raises(UsageError, match=r"no more \(.*mine.py:4\)"):
        loop.train(config, out, report=told)
    assert [folder.name for folder in (out / "checkpoints").glob("*")] == ["step-000001"][:whole]
    goes_on = f"go on with: msgrpo --allow {mine}:credit train --resume --out {out}"
    assert told.said[-1] == f"kept: {counted(whole, 'update')}; {goes_on}"


class KilledError(BaseException):
    """In the place of kill -9 at one line."""


@pytest.mark.parametrize("line", ["msgrpo.train.checkpoint.save", "msgrpo.train.evaluate.draw_curve"])
def test_what_stands_beside_the_last_checkpoint_is_whole_whenever_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Killed after its last checkpoint, a run had no transcripts, or those of an update before, for ever; killed
    before its curve was drawn, it had a summary, by which a study takes it for complete.
    """
    out, original = tmp_path / "run", pkgutil.resolve_name(line)

    def killed(*given: Any) -> None:
        original(*given)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(line, killed)
        with pytest.raises(KilledError):
            loop.train(tiny(steps=1), out, report=Quiet())
    assert not (out / "summary.json").exists()
    loop.train(tiny(steps=1), out, resume=True, report=Quiet())
    assert {"transcripts.jsonl", "summary.json", "curve.png"} <= {file.name for file in out.iterdir()}


def test_an_adapter_that_a_full_disk_kept_back_is_written_by_resuming(finished: Path, tmp_path: Path) -> None:
    """The last checkpoint was whole, and what stands after it was not, or is an earlier update's."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / WEIGHTS).unlink()
    (out / "summary.json").unlink()
    loop.train(tiny(), out, resume=True, report=Quiet())
    assert (out / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()
    assert (out / "summary.json").is_file()


def test_a_run_that_goes_on_has_no_summary_of_fewer_updates(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed later, it left one that a model card told of the weights that had come since."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "learn", killed)
        with pytest.raises(KeyboardInterrupt):
            loop.train(tiny(steps=6), out, resume=True, report=Quiet())
    assert not (out / "summary.json").exists()
    loop.train(tiny(steps=4), out, resume=True, report=Quiet())
    assert json.loads((out / "summary.json").read_text())["steps"] == 4


def test_a_run_that_is_stopped_before_it_has_begun_is_not_told_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the model was being loaded: the command that was printed was refused, for want of a run."""

    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "open_weights", stopped)
    assert run_here(monkeypatch, *arguments(tmp_path / "run")) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert "it had not begun: the same command begins it" in said
    assert "--resume" not in said


def said_in(folder: Path) -> str:
    return (folder / "said").read_text() if (folder / "said").is_file() else ""


def test_ctrl_c_stops_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "stopped"
    running = forked.begin(arguments(out, "--steps", "5", "--set", NO_FILM), tmp_path / "said")  # time for the signal
    while running.is_alive() and "the first update took" not in said_in(tmp_path):
        time.sleep(0.01)
    assert running.pid is not None
    os.kill(running.pid, signal.SIGINT)
    running.join()
    assert running.exitcode == 130
    said = said_in(tmp_path)
    assert "is given up and will be done again" in said
    hint = re.search(r"go on with: msgrpo (train --resume --out \S+)", said)
    assert hint is not None
    assert run_here(monkeypatch, *hint[1].split()) == 0  # what it prints can be pasted
    shown = capsys.readouterr()
    assert "going on after update 1" in shown.err
    assert "6 validation starts" in shown.out


def test_a_damaged_checkpoint_falls_back_to_the_one_before(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(finished, out)
    newest = sorted((out / "checkpoints").iterdir())[-1]
    with (newest / "state.pt").open("r+b") as handle:
        handle.seek(1000)
        handle.write(b"\0" * 64)
    state, damaged = checkpoint.load_latest(out)
    assert state is not None
    assert (state.progress.step, damaged) == (3, [newest])
    said = " ".join(forked.run(arguments(out, "--resume"), tmp_path / "said").split())
    assert "step-000004 is damaged, or of another version, and was passed over" in said
    assert (out / WEIGHTS).read_bytes() == (finished / WEIGHTS).read_bytes()


def test_an_out_with_another_run_is_refused_and_untouched(finished: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    with pytest.raises(UsageError, match="holds a run already"):
        loop.train(tiny(), finished, report=Quiet())
    with pytest.raises(UsageError, match="seed 9 there, 5 asked"):
        loop.train(tiny(seed=5), finished, resume=True, report=Quiet())
    with pytest.raises(UsageError, match="4 updates already, more than the 3 asked for"):
        loop.train(tiny(steps=3), finished, resume=True, report=Quiet())
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        loop.train(tiny(), tmp_path / "file", report=Quiet())
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json is damaged"):
        loop.train(tiny(), tmp_path / "damaged", resume=True, report=Quiet())
    with pytest.raises(UsageError, match="holds no run"):
        loop.train(tiny(), tmp_path, report=Quiet())
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


def test_resume_needs_no_option_but_the_folder(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads the run's own settings; what is said beside it must agree."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    resume = ["train", "--resume", "--out", str(out)]
    assert run_here(monkeypatch, *resume, "--steps", "5") == 0
    assert "6 validation starts" in capsys.readouterr().out
    assert read_rows(out)[-1]["step"] == 5
    assert run_here(monkeypatch, *resume, "--set", "select=aaw(keep=3)") == 2
    assert "aaw(keep=2)' there, 'aaw(keep=3)' asked" in capsys.readouterr().err


def test_a_runs_folder_in_the_place_of_the_scenario_is_named_with_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All scenarios were listed."""
    (tmp_path / CONFIG).write_text("{}")
    assert run_here(monkeypatch, "train", "--resume", str(tmp_path)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"go on with: msgrpo train --resume --out {tmp_path}" in said


def test_resume_begins_nothing_where_nothing_says_what_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mistyped"
    assert run_here(monkeypatch, "train", "--resume", "--out", str(out)) == 2
    assert "holds no run to go on with" in capsys.readouterr().err
    assert not out.exists()


@contextmanager
def another_process_trains_in(out: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """It holds the run's lock until it has waited for so long, or is ended."""
    held = "import sys, time; from pathlib import Path; from msgrpo import run_log\n"
    held += "with run_log.alone(Path(sys.argv[1])): print(flush=True); time.sleep(float(sys.argv[2]))"
    command = [sys.executable, "-c", held, str(out), str(seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            yield other
        finally:
            other.kill()


def test_one_process_trains_in_a_folder(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before = (out / "metrics.jsonl").read_bytes()
    with another_process_trains_in(out, 600), pytest.raises(RunError, match="another process trains in"):
        loop.train(tiny(steps=5), out, resume=True, report=Quiet())
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_run_that_begins_again_waits_for_who_was_cut_off(finished: Path, tmp_path: Path) -> None:
    """With the cable of the first rank's node pulled, the new first rank met the lock of the old one, which had not
    noticed yet that it was alone: the run ended.
    """
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    steps = len([row for row in read_rows(out) if row["kind"] == "train"])
    config = TrainConfig.model_validate_json((out / "config.json").read_text()).model_copy(
        update={"steps": steps + 1}
    )
    with another_process_trains_in(out, 3) as old:
        loop.train(config, out, resume=True, report=Told(), cluster=loop.Cluster(again=True))
        assert old.wait(60) == 0
    assert len([row for row in read_rows(out) if row["kind"] == "train"]) == steps + 1


def test_a_run_that_lost_its_first_evaluation_says_so_before_training(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="lacks the evaluation before training"):
        loop.train(tiny(steps=5), out, resume=True, report=Quiet())


@pytest.mark.slow
def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few small updates on the lake raise the success by more than luck would."""
    monkeypatch.setitem(SCENARIOS, "frozen-lake", LAKE)
    settings = [
        "groups=6",
        "group_size=8",
        "select=aaw(keep=4)",
        "learning_rate=2e-3",
        "evaluation=50(every=50, film=0)",
        "checkpoint_every=50",
    ]
    summary = loop.train(make_config(settings=settings, given={"steps": 6}), tmp_path / "run", report=Quiet())
    assert summary["change"]["low"] > 0, summary
    assert os.path.getsize(tmp_path / "run" / WEIGHTS) > 100_000


def test_what_is_no_run_and_no_scenario_is_named(tmp_path: Path) -> None:
    """Both were errors of Python about a line of ours."""
    with pytest.raises(UsageError, match=r"config is {'steps': 3}, no TrainConfig"):
        loop.train({"steps": 3}, tmp_path / "run", report=Quiet())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'frozen-lake' is no scenario"):
        teach("frozen-lake", tmp_path / "taught")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_began_and_ended_while_another_loaded_its_base_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one went on from its checkpoint, with settings of its own."""
    out, opened = tmp_path / "run", loop.open_weights

    def meanwhile(*given: Any) -> Any:
        out.mkdir()
        (out / CONFIG).write_text(tiny().model_dump_json())
        return opened(*given)

    monkeypatch.setattr(loop, "open_weights", meanwhile)
    with pytest.raises(UsageError, match="holds a run already"):
        loop.train(tiny(learning_rate=0.5), out, report=Quiet())
    assert json.loads((out / CONFIG).read_text()) == tiny().model_dump(mode="json")
