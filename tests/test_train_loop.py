"""The training loop on nano: it learns, it can be killed anywhere, and it refuses what would end badly."""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from msgrpo import cli, run_log
from msgrpo.agent import Completion, ParseFailure, Sampling
from msgrpo.episode import Episode, Turn
from msgrpo.errors import ModelError, RunError, UsageError
from msgrpo.game import Outcome
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.models import generation, loading, local, shared_prefix
from msgrpo.models.paths import NANO_DIR
from msgrpo.prompt import ChatFormat, PromptTemplate
from msgrpo.run_log import read_rows
from msgrpo.train import checkpoint, loop, update
from msgrpo.train.checkpoint import Progress
from msgrpo.train.config import MicroBatching, TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.doctor import examine
from msgrpo.train.engines import contract
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.groups import Group
from msgrpo.train.memory import enough_memory
from msgrpo.train.metrics import describe
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals import paper
from msgrpo.train.rollouts import Players, Rollouts, RolloutSource
from msgrpo.train.update import minibatches
from tests import forked
from tests.train_helpers import Told, taught

ROOT = Path(__file__).parents[1]
TINY = [
    "minibatches=2",
    "groups=2",
    "group_size=4",
    "select=aaw(keep=2)",
    "evaluation=6(every=2)",
    "checkpoint_every=1",
    "seed=9",  # with which each of the four updates has turns to learn from
]
NO_FILM = "evaluation=6(every=2, film=0)"
WEIGHTS = "adapter_model.safetensors"
LAKE = get_scenario("frozen-lake")
pytestmark = pytest.mark.usefixtures("near")  # what a run learns is asked of one test alone


def tiny(**given: Any) -> TrainConfig:
    return make_config(settings=[*TINY, NO_FILM], given={"steps": 4, **given})


def arguments(out: Path, *more: str) -> list[str]:
    settings = [part for setting in TINY for part in ("--set", setting)]
    return ["train", "--steps", "4", "--out", str(out), *settings, *more]


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["msgrpo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


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
    forked.run(arguments(out, "--resume"), tmp_path / "said")
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


@pytest.mark.parametrize("base", ["./no/such/folder", "no-such-model", "{vision}"])
def test_a_base_that_cannot_be_loaded_leaves_nothing_behind(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if base == "{vision}":
        folder = tmp_path / "vision"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "vit"}')
        base = str(folder)
    with pytest.raises(ModelError):
        loop.train(tiny(base=base), tmp_path / "run", report=Quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("lean")
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = paper.policy_loss, []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        loss, stats = whole(*args, **kwargs)
        return (loss * float("nan") if len(calls) > 3 else loss), stats

    monkeypatch.setattr(paper, "policy_loss", poisoned)
    with pytest.raises(RunError, match="not finite in update"):
        loop.train(tiny(), tmp_path / "run", report=Quiet())
    state, _ = checkpoint.load_latest(tmp_path / "run")
    assert state is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.adapter.values())


def test_a_full_disk_is_one_clear_error_and_loses_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, checkpoint.State(Progress(step=1), {"a": torch.ones(2)}, {}))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match="No space left"):
        checkpoint.save(tmp_path, checkpoint.State(Progress(step=2), {"a": torch.zeros(2)}, {}))
    state, damaged = checkpoint.load_latest(tmp_path)
    assert state is not None
    assert (state.progress.step, damaged) == (1, [])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    "refused",
    ["metrics.jsonl", "config.json", "adapter_model.safetensors", "adapter_config.json", "summary.json", "curve.png"],
)
def test_a_disk_that_refuses_any_file_of_a_run_is_one_clear_error(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when this file, and no other, is put in its place."""
    replace_file, asked = os.replace, []

    def full(source: Any, target: Any) -> None:
        asked.append(Path(target).name)
        if asked[-1] == refused:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunError, match=rf"disk is full .*No space left on device.*{refused}") as caught:
        loop.train(tiny(steps=1), tmp_path / "run", report=Quiet())
    assert asked[-1] == refused
    goes_on = "another --out" if refused == "config.json" else f"msgrpo train --resume --out {tmp_path / 'run'}"
    assert goes_on in str(caught.value.fix)


class Heard(Told):
    """Keeps what goes on as well."""

    def doing(self, text: str) -> None:
        self.said.append(text)

    def stopping(self) -> None:
        self.said.append("stopping")


@pytest.mark.usefixtures("lean")
def test_a_run_says_what_it_does_from_its_first_moment_on(tmp_path: Path) -> None:
    told = Heard()
    loop.train(tiny(steps=1, group_size=8), tmp_path / "run", report=told)
    assert told.said[0] == "loading nano"
    said = "\n".join(told.said)
    assert "evaluation after 0 updates: 6 of 6 episodes played" in said
    assert re.search(r"update 1 of 1: 16 of 16 episodes played, [\d,]+ tokens/s", said)
    assert re.search(r"update 1 of 1: learning from \d+ turns, 2 of 2 steps", said)


class StoppedAt(Heard):
    """Asks the run to stop when it says something."""

    def __init__(self, moment: str, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self._moment, self._number = moment, number

    def doing(self, text: str) -> None:
        super().doing(text)
        if text.startswith(self._moment) and "stopping" not in self.said:
            signal.raise_signal(self._number)


@pytest.mark.parametrize(
    ("moment", "kept", "number"),
    [
        ("update 1 of 4: 1 of 8 episodes played", None, signal.SIGINT),
        ("update 2 of 4: 1 of 8 episodes played", 1, signal.SIGTERM),
        ("update 3 of 4: learning from", 2, signal.SIGINT),
        ("evaluation after 2 updates: 1 of 6", 2, signal.SIGTERM),
    ],
)
@pytest.mark.usefixtures("lean")
def test_a_stop_gives_up_what_goes_on_and_keeps_every_finished_update(
    moment: str, kept: int | None, number: signal.Signals, tmp_path: Path
) -> None:
    """At once, not when the update has ended; and all that has ended is saved, though no checkpoint was due."""
    told = StoppedAt(moment, number)
    with pytest.raises(KeyboardInterrupt):
        loop.train(tiny(checkpoint_every=4), tmp_path / "run", report=told)
    assert told.said[next(i for i, text in enumerate(told.said) if text.startswith(moment)) + 1] == "stopping"
    state, _ = checkpoint.load_latest(tmp_path / "run")
    assert (None if state is None else state.progress.step) == kept


class At(Heard):
    """Notices when the run says something."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self._moment, self.come = moment, False

    def doing(self, text: str) -> None:
        super().doing(text)
        self.come = self.come or text.startswith(self._moment)


@pytest.mark.parametrize("moment", ["update 3 of 4: 1 of 8 episodes played", "evaluation after 2 updates"])
@pytest.mark.usefixtures("lean")
def test_games_that_fail_for_good_end_a_run_and_keep_every_finished_update(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, play = At(moment), FrozenLake._advance

    def advance(game: FrozenLake, actions: Mapping[str, str | None]) -> dict[str, float]:
        if told.come:
            raise ConnectionError("the server is gone")
        return play(game, actions)

    monkeypatch.setattr(FrozenLake, "_advance", advance)
    with pytest.raises(RunError, match=r"have no result, the last: game_fault: .*the server is gone"):
        loop.train(tiny(checkpoint_every=4), tmp_path / "run", report=told)
    state, _ = checkpoint.load_latest(tmp_path / "run")
    assert state is not None
    assert state.progress.step == 2
    assert told.said[-1] == "all 2 updates are kept; --resume goes on"


@pytest.mark.usefixtures("lean")
def test_an_update_that_was_given_up_between_its_steps_leaves_no_trace(tmp_path: Path) -> None:
    """Stopped after the first of two optimizer steps and resumed, the run ends as the one that was never stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    loop.train(tiny(steps=2), whole, report=Quiet())
    told = StoppedAt("update 2 of 2: learning from")
    with pytest.raises(KeyboardInterrupt):
        loop.train(tiny(steps=2), stopped, report=_AfterOneStep(told))
    loop.train(tiny(steps=2), stopped, resume=True, report=Quiet())
    assert (whole / WEIGHTS).read_bytes() == (stopped / WEIGHTS).read_bytes()


class _AfterOneStep(Quiet):
    """Tells the other only what is said after a step of the optimizer."""

    def __init__(self, other: Quiet) -> None:
        self.doing = lambda text: other.doing(text) if ", 1 of 2 steps" in text else None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        MemoryError(),
    ],
)
def test_memory_that_is_not_there_is_one_clear_error(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(paper, "policy_loss", full)
    with pytest.raises(RunError, match="not enough memory") as caught:
        loop.train(tiny(format_penalty=0.5), tmp_path / "run", report=Quiet())
    advised = re.findall(r"--set '(.*?)'", str(caught.value.fix))
    assert make_config(settings=advised).micro_batch == MicroBatching(tokens=2048, checkpointing=True)


@pytest.mark.parametrize("where", ["play", "load"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory\nmore lines"),
        MemoryError(),
    ],
)
def test_memory_that_other_commands_lack_is_one_clear_error(
    error: Exception, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only training said so: `msgrpo eval` of a model that a GPU cannot hold ended in a traceback."""

    def full(*_: object, **__: object) -> None:
        raise error

    if where == "play":
        monkeypatch.setattr(torch.nn.Embedding, "forward", full)
    else:
        monkeypatch.setattr("msgrpo.models.loading.AutoModelForCausalLM.from_pretrained", full)
    arguments = ["eval", "nano", "--scenario", "frozen-lake", "--episodes", "1", "--out", str(tmp_path / "out")]
    assert run_here(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert "smaller" in told
    assert "memory" in told
    assert "network" not in told
    assert "Traceback" not in told


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, RecursionError])
def test_other_runtime_errors_stay_what_they_are(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="shapes cannot"), enough_memory():
        raise kind("shapes cannot be multiplied")


def engine_of(policy: Policy, config: TrainConfig | None = None) -> HfEngine:
    return HfEngine(policy, get_scenario("frozen-lake"), config or tiny())


def canary(engine: HfEngine, policy: Policy, **given: Any) -> float:
    """The canary without the merge before it."""
    prompts = contract.canary_prompts(get_scenario("frozen-lake"))
    answers = engine.model.generate(prompts, contract.canary_sampling(1.0), contract.SEEDS)
    return contract.check(policy, "the rollout engine", answers, **given)


def moved(policy: Policy, by: float) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters):
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))


def test_the_canary_sees_what_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny())
    monkeypatch.setattr(contract, "_plain", lambda policy, answers: torch.tensor([float("nan")]))
    with pytest.raises(RunError, match="disagree by nan"):
        engine_of(policy).load(0)


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


@pytest.mark.parametrize("fault", ["padding", "rows"])
def test_the_canary_sees_faults_that_one_row_cannot_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is attended to, and rows that answer for one another: with one row there is neither."""
    policy = Policy(tiny())
    engine = engine_of(policy)
    assert canary(engine, policy) < 1e-3
    if fault == "padding":
        run = shared_prefix.run
        monkeypatch.setattr(
            shared_prefix, "run", lambda trunk, ids, mask, *more: run(trunk, ids, torch.ones_like(mask), *more)
        )
    else:
        monkeypatch.setattr(generation, "distinct_rows", lambda rows: (rows[::-1], list(range(len(rows)))))
    with pytest.raises(RunError, match="disagree"):
        canary(engine, policy)


def test_the_models_own_forward_is_a_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny())
    engine = engine_of(policy)
    forward = policy.model.forward

    def scaled(*arguments: Any, **named: Any) -> Any:
        found = forward(*arguments, **named)
        found.logits = found.logits / 8
        return found

    monkeypatch.setattr(policy.model, "forward", scaled)
    with pytest.raises(RunError, match="the model's own forward and the trainer disagree"):
        canary(engine, policy)


@pytest.mark.parametrize("by", [0.002, 0.02])
def test_the_canary_names_whose_weights_an_engine_plays_with(by: float) -> None:
    """The base's, or the version before; also where the difference is smaller than what rounding may be."""
    policy = Policy(tiny())
    base = engine_of(policy)
    base.load(0)
    moved(policy, by)
    with pytest.raises(RunError, match=r"plays with the weights of the base"):
        canary(base, policy)
    before = policy.adapter_state()
    stale = engine_of(policy)
    stale.load(1)
    assert canary(stale, policy) < 1e-3
    moved(policy, by)
    with pytest.raises(RunError, match=r"plays with the weights of the version before"):
        canary(stale, policy, previous=[before])
    assert all(torch.equal(policy.adapter_state()[name], value) for name, value in policy.adapter_state().items())
    stale.load(2)
    assert canary(stale, policy, previous=[before]) < 1e-3


def test_small_differences_are_told_apart_by_whose_they_are() -> None:
    """Far below the tolerance, and ten times what rounding in float32 is: the old rule let it pass."""
    policy = Policy(tiny())
    stale = engine_of(policy)
    stale.load(0)
    moved(policy, 1e-4)
    before = policy.adapter_state()
    stale.load(1)
    moved(policy, 1e-4)
    with pytest.raises(RunError, match=r"plays with the weights of the version before"):
        canary(stale, policy, previous=[before])


def test_rounding_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 an engine may be nearer to the base by chance, after an update that moved less than rounding."""
    policy = Policy(tiny())
    stale = engine_of(policy)
    stale.load(0)
    moved(policy, 1e-4)
    moved(policy, 1e-4)
    with pytest.raises(RunError, match="plays with the weights of the base"):
        canary(stale, policy)
    exact = contract._plain
    monkeypatch.setattr(contract, "_plain", lambda policy, answers: exact(policy, answers) + 4e-4)
    assert canary(stale, policy) < 1e-3


def test_the_rounding_of_one_bfloat16_logit_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logit of one token of sixty falls on the next number of bfloat16, 1/16 higher, and not in the base."""
    policy = Policy(tiny(dtype="bfloat16"))
    engine = engine_of(policy)
    engine.load(0)
    prompts = contract.canary_prompts(get_scenario("frozen-lake"))
    said = engine.model.generate(prompts, contract.canary_sampling(1.0), contract.SEEDS)
    exact = contract._trainer_logprobs

    def rounded(policy: Policy, answers: Any) -> Tensor:
        found = exact(policy, answers)
        found[found.argmin()] += (1 - float(found.min().exp())) / 16
        return found

    with monkeypatch.context() as patch:
        patch.setattr(contract, "_trainer_logprobs", rounded)
        patch.setattr(contract, "_plain", rounded)
        patch.setattr(contract, "_under", lambda policy, answers, weights: exact(policy, answers))
        contract.check(policy, "the rollout engine", said)
    moved(policy, 0.07)
    with pytest.raises(RunError, match="plays with the weights of the base"):
        contract.check(policy, "the rollout engine", said)


def test_one_uncertain_token_in_bfloat16_stops_no_run_and_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM and the trainer of a 0.5B were 0.29 nats apart about one token, and as near as usual about the others."""
    policy = Policy(tiny(dtype="bfloat16"))
    engine = engine_of(policy)
    exact = contract._plain

    def off(tokens: int) -> Callable[[Policy, Any], Tensor]:
        def apart(policy: Policy, answers: Any) -> Tensor:
            logprobs = exact(policy, answers)
            logprobs[:tokens] -= 0.4
            return logprobs

        return apart

    monkeypatch.setattr(contract, "_plain", off(2))
    assert canary(engine, policy) > 0.25
    monkeypatch.setattr(contract, "_plain", off(999))
    with pytest.raises(RunError, match=r"disagree by 0\.4"):
        canary(engine, policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_reports_another_temperature_is_seen(dtype: str) -> None:
    config = tiny(temperature=0.7, dtype=dtype)
    policy = Policy(config)
    engine = engine_of(policy, config)
    engine.load(0)
    prompts = contract.canary_prompts(get_scenario("frozen-lake"))
    raw = engine.model.generate(prompts, Sampling(max_tokens=contract.TOKENS), contract.SEEDS)  # at temperature 1
    with pytest.raises(RunError, match="disagree"):
        contract.check(policy, "the rollout engine", raw)


def test_a_mismatch_on_fresh_rollouts_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The canary has passed, and then the engine reports other numbers: the first minibatch shows it."""
    complete = local.LocalModel.complete

    async def off(self: Any, *arguments: Any, **named: Any) -> Completion:
        found = await complete(self, *arguments, **named)
        return Completion(**vars(found) | {"logprobs": tuple(value - 0.01 for value in found.logprobs)})

    monkeypatch.setattr(local.LocalModel, "complete", off)
    with pytest.raises(RunError, match=r"engine and trainer differ by 0\.01 nats a token"):
        loop.train(tiny(), tmp_path / "run", report=Quiet())
    (finding, *_) = examine(tmp_path / "run").findings  # its row was written before
    assert finding.cause == "engine mismatch"
    assert "0.01 nats a token on fresh rollouts; a run stops at 0.001" in finding.evidence


def test_rollouts_that_are_one_version_old_may_differ() -> None:
    fresh = {"engine/mismatch_bound": 1e-3, "engine/mismatch_max": 2.0, "rollout/staleness": 0.0}
    update.check_mismatch(fresh | {"engine/mismatch_mean": 1.0, "rollout/staleness": 1.0})
    update.check_mismatch(fresh)  # no turn was kept
    for mean in (1.0, math.nan):
        with pytest.raises(RunError):
            update.check_mismatch(fresh | {"engine/mismatch_mean": mean})


def test_a_run_that_lost_its_first_evaluation_says_so_before_training(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="lacks the evaluation before training"):
        loop.train(tiny(steps=5), out, resume=True, report=Quiet())


def test_the_reference_is_the_base_however_far_the_adapter_went() -> None:
    policy, scenario = Policy(tiny()), get_scenario("frozen-lake")
    prompt = PromptTemplate().render(scenario, scenario.new(1, 1).observe("player"))
    answer = engine_of(policy).model.generate([prompt], Sampling(max_tokens=24), [3])[0]
    pair = (list(answer.prompt_ids), list(answer.token_ids))
    before = policy.reference_logprobs([], [pair])
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(0.05)
    torch.testing.assert_close(policy.reference_logprobs([], [pair]), before)
    assert not torch.allclose(policy.logprobs([], [pair])[0], before, atol=1e-2)


def test_checkpointed_layers_give_the_same_gradient() -> None:
    """Gradient checkpointing saves memory and changes nothing else."""
    gradients = []
    for checkpointing in (False, True):
        policy, scenario = (
            Policy(tiny().model_copy(update={"micro_batch": MicroBatching(checkpointing=checkpointing)})),
            get_scenario("snake"),
        )
        with torch.no_grad():
            for i, parameter in enumerate(policy.parameters):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.05)
        prompt = PromptTemplate().render(scenario, scenario.new(1, 1).observe("snake1"))
        ids = ChatFormat(policy.tokenizer).ids([prompt])[0]
        logprobs, _ = policy.logprobs(ids[:100], [(ids[100:], [7, 8, 9]), (ids[100:], [9, 8])])
        logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")  # PEFT, of the experts
@pytest.mark.parametrize("kind", ["qwen2", "starcoder2", "mixtral"])
def test_checkpointed_layers_do_nothing_at_random(kind: str, tmp_path: Path) -> None:
    """They are in training mode, where a base with dropout, or with a shaken router, answers otherwise each time."""
    base = shutil.copytree(NANO_DIR, tmp_path / "base", ignore=shutil.ignore_patterns("adapters"))
    settings = json.loads((base / "config.json").read_text()) | {"attention_dropout": 0.5}
    if kind == "starcoder2":  # whose layers call dropout with numbers of their own
        dropout = {"residual_dropout": 0.5, "embedding_dropout": 0.5, "hidden_act": "gelu"}
        config = Starcoder2Config(**{k: v for k, v in settings.items() if k not in ("model_type", "dtype")} | dropout)
        Starcoder2ForCausalLM(config).save_pretrained(base)
    elif kind == "mixtral":
        experts = {"num_local_experts": 4, "router_jitter_noise": 0.5}
        kept = {k: v for k, v in settings.items() if k not in ("model_type", "dtype", "attention_dropout")}
        MixtralForCausalLM(MixtralConfig(**kept | experts)).save_pretrained(base)
    else:
        (base / "config.json").write_text(json.dumps(settings))
    policy = Policy(tiny(base=str(base), micro_batch="16384(checkpointing=true)"))
    plain = Policy(tiny(base=str(base)))
    asked: tuple[list[int], list[tuple[list[int], list[int]]]] = [], [([1, 2, 3, 4, 5, 6], [7, 8, 9])]
    assert policy.model.training
    torch.testing.assert_close(policy.logprobs(*asked), plain.logprobs(*asked))


def test_a_run_as_on_a_gpu_bfloat16_with_checkpointed_layers(tmp_path: Path) -> None:
    """There the adapted model itself plays rollouts, and its layers keep no cache in training mode."""
    config = tiny(steps=1, dtype="bfloat16", micro_batch="16384(checkpointing=true)", evaluation="6(every=1, film=0)")
    summary = loop.train(config, tmp_path / "run", report=Quiet())
    assert summary["before"]["invalid"] < 0.2  # a model without its cache would not find the format
    policy = Policy(config)
    engine = engine_of(policy, config)
    assert engine.load(0).model is policy.model
    assert canary(engine, policy) < 0.1
    assert policy.model.training


def test_the_learning_rate_rises_stays_and_falls() -> None:
    config = make_config(settings=["learning_rate=1.0"], given={"steps": 40})
    rates = [update.learning_rate(config, step) for step in (0, 4, 20, 30, 39)]
    assert rates == pytest.approx([0.2, 1.0, 1.0, 0.5, 0.05])


def test_minibatches_are_equal_parts_that_keep_a_prompt_together() -> None:
    samples = [taught((i % 5,), (i,), (0.0,), 1.0) for i in range(23)]
    parts = list(minibatches(samples, 4, torch.Generator().manual_seed(0)))
    assert sorted(sample.answer_ids for part in parts for sample in part) == [(i,) for i in range(23)]
    assert {len(part) for part in parts} == {5, 6}
    prompts = [sample.prompt_ids for part in parts for sample in part]
    assert sum(a != b for a, b in pairwise(prompts)) == 4
    assert len(list(minibatches(samples[:2], 4, torch.Generator()))) == 2


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


# ── found by mutation ──


def test_starts_go_on_where_they_ended_and_differ_from_seed_to_seed() -> None:
    """The first 3 and the next 3 of the training starts from 0 on, and from 1,000,003 on for seed 1."""
    scenario = get_scenario("frozen-lake")
    for seed in (0, 1, 2):
        config = make_config(settings=["groups=3"], given={"seed": seed})
        first, after = RolloutSource(Players(config)).next_starts(0)
        second, end = RolloutSource(Players(config)).next_starts(after)
        seeds = [start for _, start in first + second]
        assert seeds == list(islice(scenario.starts("train", first_seed=seed * 1_000_003), 6))
        assert end == seeds[-1] + 1 - seed * 1_000_003


def test_training_starts_are_no_evaluation_starts() -> None:
    scenario, config = get_scenario("frozen-lake"), make_config(settings=["groups=30"])
    starts = [start for _, start in RolloutSource(Players(config)).next_starts(0)[0]]
    for split in ("val", "test"):
        assert set(starts).isdisjoint(islice(scenario.starts(split), 30))
    assert len(set(starts)) == 30


@pytest.mark.parametrize(
    ("steps", "step", "rate"),
    [
        (40, 0, 0.2), (40, 3, 0.8), (40, 4, 1.0), (40, 5, 1.0),  # up in five
        (40, 20, 1.0), (40, 21, 0.95), (40, 30, 0.5),  # down from the middle
        (40, 38, 0.1), (40, 39, 0.05), (100, 98, 0.05), (100, 99, 0.05),  # no lower than a twentieth
        (1, 0, 0.2), (2, 1, 0.4),
    ],
)  # fmt: skip
def test_the_learning_rate_by_hand(steps: int, step: int, rate: float) -> None:
    config = make_config(settings=["learning_rate=0.01"], given={"steps": steps})
    assert update.learning_rate(config, step) == pytest.approx(0.01 * rate)


def episode(success: bool | None, returns: dict[str, float], *turns: Turn) -> Episode:
    return Episode(
        scenario="frozen-lake", start_seed=0, chance_seed=0, sampling_seed=0, agents=dict.fromkeys(returns, "p"),
        settings={}, turns=list(turns), outcome=Outcome.TERMINATED, success=success, returns=returns,
    )  # fmt: skip


def test_describe_counts_turns_episodes_and_players_each_by_their_own_number() -> None:
    """Three episodes of 3, 1 and 1 turns and two players each; the third has no success, as games without a goal."""
    good = Turn(step=0, player="a", state="s", prompt_tokens=1000, completion_tokens=10, finish_reason="stop")
    cut = good.model_copy(update={"finish_reason": "length", "failure": ParseFailure.NO_TAG})
    bad = good.model_copy(update={"failure": ParseFailure.ILLEGAL})
    zeros = torch.zeros(2)
    start = get_scenario("frozen-lake").new(0, 0)
    groups = [
        Group(lambda j: start, [], zeros, advantages) for advantages in (zeros, zeros, torch.tensor([1.0, -1.0]))
    ]
    episodes = [
        episode(True, {"a": 1.0, "b": 0.0}, good, cut, bad),
        episode(False, {"a": 2.0, "b": 0.5}, good),
        episode(None, {"a": 0.0, "b": -0.5}, good),
    ]
    assert describe(Rollouts(groups, episodes, [], [], 0, 0, 0.0, 0.0)) == pytest.approx(
        {
            "rollout/return": 3.0 / 6, "rollout/invalid": 2 / 5, "rollout/truncated": 1 / 5, "rollout/turns": 5.0,
            "rollout/tokens": 50.0, "rollout/flat_groups": 2 / 3, "rollout/success": 1 / 2, "rollout/entropy": 0.0,
            "rollout/lost": 0.0,
        }
    )  # fmt: skip
    assert "rollout/success" not in describe(Rollouts(groups, episodes[2:], [], [], 0, 0, 0.0, 0.0))


def test_later_updates_are_not_expected_to_play_several_updates_ahead_as_the_first_does() -> None:
    first = Rollouts([], [], [], [], 0, 0, played_s=10.0, waited_s=40.0)  # its own rollouts, then those of three more
    assert first.pace(45.0, update_s=5.0, ahead=3, here=True) == 15.0
    assert first.pace(15.0, update_s=5.0, ahead=3, here=False) == 10.0
    assert first.pace(15.0, update_s=12.0, ahead=3, here=False) == 12.0
    assert first.pace(17.0, update_s=5.0, ahead=0, here=True) == 17.0


class Stub:
    """A policy whose log-probabilities are its one parameter, wherever; the reference's are higher by log 2."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.tensor(-1.0))
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.longest_sharing = 100
        self.asked_reference = 0

    def logprobs(self, prefix: list[int], pairs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        longest = max(len(answer) for _, answer in pairs)
        mask = torch.tensor([[i >= longest - len(answer) for i in range(longest)] for _, answer in pairs]).long()
        return self.parameter.expand(len(pairs), longest), mask

    is_sharded = False

    def together(self, what: str) -> None:
        """One rank."""

    def reference_logprobs(self, prefix: list[int], pairs: list[tuple[list[int], list[int]]]) -> Tensor:
        self.asked_reference += 1
        longest = max(len(answer) for _, answer in pairs)
        return torch.full((len(pairs), longest), -1.0 + math.log(2))


@pytest.mark.parametrize("micro", [1, 1000])
@pytest.mark.parametrize("over", ["token", "turn"])
def test_a_minibatch_by_hand(over: str, micro: int) -> None:
    """Answers of 1 and 3 tokens, A = 1 and 2; w is 1 for the one and 2, which is clipped at 1.28, for the other.

    The losses without KL are −1 and three times −2.56, and k3 is 1 − log 2 for every token: statistics are means
    over the 4 tokens, however the loss is weighed and the minibatch is divided.
    """
    stub: Any = Stub()
    part = [
        taught((1, 2), (5,), (-1.0,), 1.0),
        taught((1, 3), (5, 6, 7), (-1.0 - math.log(2),) * 3, 2.0),
    ]
    settings = [f"loss=clip(kl=0.5, over={over})", f"micro_batch={micro}"]
    totals, furthest = update._accumulate(stub, part, ALONE, make_config(settings=settings))
    mean, share = (-(1 + 3 * 2.56) / 4, 1 / 4) if over == "token" else (-(1 + 2.56) / 2, 1 / 2)
    assert totals == pytest.approx(
        {
            "loss": mean + 0.5 * (1 - math.log(2)), "kl": 1 - math.log(2), "clip_share": 3 / 4,
            "ratio": (1 + 3 * 2) / 4, "mismatch": 3 * math.log(2) / 4, "echo": 0.0,
        }
    )  # fmt: skip
    assert furthest == pytest.approx(math.log(2))
    assert stub.asked_reference == (2 if micro == 1 else 1)
    # clipped tokens have no gradient but the penalty's, ½ (1 − pref/pθ) = −½, as have all; the other's is −A w
    assert stub.parameter.grad.item() == pytest.approx(-share - 0.5)


def test_without_a_penalty_no_reference_is_computed() -> None:
    stub: Any = Stub()
    config = make_config(settings=["loss=clip(kl=0)"])
    part = [taught((1, 2), (5,), (-1.0,), 1.0)]
    totals, _ = update._accumulate(stub, part, ALONE, config)
    assert (stub.asked_reference, totals["kl"], totals["loss"]) == (0, 0.0, -1.0)
