"""What ends a run early (a stop, a full disk, too little memory, failing games): one clear error, and all is kept."""

import errno
import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msgrpo.errors import GameFaultError, ModelError, RunError
from msgrpo.game import Game
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.serve.adapters import write_version
from msgrpo.train import checkpoint, dqn, loop
from msgrpo.train import msgrpo as equations
from msgrpo.train.checkpoint import Progress
from msgrpo.train.config import MicroBatching, TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.lab import load_study, run
from msgrpo.train.memory import enough_memory
from msgrpo.train.nano import begun
from msgrpo.train.nano.teach import rows_of, teach
from msgrpo.train.rivals.skip import Skip
from msgrpo.train.run_folder import refused
from msgrpo.train.state import RunState
from msgrpo.train.stopping import stop_requests
from tests.command_line import run_here
from tests.train_helpers import WEIGHTS, Told, tiny

pytestmark = pytest.mark.usefixtures("near")


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


def test_a_game_that_cannot_begin_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told after the model was loaded, and the run's folder stayed."""

    def observe(game: FrozenLake, player: str) -> str:
        raise ValueError("no view")

    monkeypatch.setattr(FrozenLake, "observe", observe)
    told = Heard()
    with pytest.raises(GameFaultError, match="no view"):
        loop.train(tiny(), tmp_path / "run", report=told)
    assert told.said == []
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("lean")
def test_a_loss_that_is_not_finite_stops_and_loses_no_whole_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = equations.policy_loss, []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        loss, stats = whole(*args, **kwargs)
        return (loss * float("nan") if len(calls) > 3 else loss), stats

    monkeypatch.setattr(equations, "policy_loss", poisoned)
    told = Told()
    with pytest.raises(RunError, match="not finite in update 2") as ended:
        loop.train(tiny(checkpoint_every=100), tmp_path / "run", report=told)
    assert "in another --out" in str(ended.value)  # on --resume the learning rate may not change
    assert told.said[-1] == f"kept: 1 update; go on with: msgrpo train --resume --out {tmp_path / 'run'}"
    state, _ = checkpoint.load_latest(tmp_path / "run")
    assert state is not None
    assert state.progress.step == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.adapter.values())


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, checkpoint.State(Progress(step=1), {"a": torch.ones(2)}, {}))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, checkpoint.State(Progress(step=2), {"a": torch.zeros(2)}, {}))
    state, damaged = checkpoint.load_latest(tmp_path)
    assert state is not None
    assert (state.progress.step, damaged) == (1, [])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_what_the_disk_refuses_of_a_checkpoint_is_told_in_its_words(tmp_path: Path) -> None:
    """torch says [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*step-000001"):
            checkpoint.save(tmp_path, checkpoint.State(Progress(step=1), {"a": torch.ones(100_000)}, {}))
        with pytest.raises(OSError, match=r"File too large: .*build\.pt"):
            begun.save(tmp_path / "build.pt", {"a": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_disk_that_is_full_only_when_a_folder_is_synced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a network may be: of versions that lie elsewhere the run's own disk was called full."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "versions").mkdir()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"No space left on device: '.*versions.x-v000001'"), refused("the run x"):
        write_version(tmp_path / "versions", "x-v000001", {"adapter_config.json": b"{}"})


def test_only_a_full_disk_is_called_one_of_a_study_a_baseline_and_a_teaching(tmp_path: Path) -> None:
    """The first two asked whether the disk is full, and the third advised to free some space, whatever it was."""
    (tmp_path / "file").touch()
    (tmp_path / "s.toml").write_text('question = "q"\nscenario = "frozen-lake"\nseeds = 1\n[arms.a]\n')
    taken, study = tmp_path / "file" / "x", load_study(tmp_path / "s.toml")
    begin: list[Callable[[], object]] = [
        lambda: run(study, taken, 1, print),
        lambda: dqn.train("frozen-lake", taken),
        lambda: teach(get_scenario("frozen-lake"), taken),
    ]
    for one in begin:
        with pytest.raises(RunError, match=r"^a file cannot be read or written in .*file") as caught:
            one()
        assert caught.value.fix == "remove the cause; the same command goes on"
    with pytest.raises(RunError, match=r"^the disk is full in the run") as full, refused("the run x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.fix == "make room; the same command goes on"


def test_a_disk_that_cannot_be_read_is_no_damaged_teaching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was advised to begin anew in another folder."""
    (tmp_path / "teach.pt").touch()

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(tmp_path / "teach.pt"))

    monkeypatch.setattr(torch, "load", stale)
    with (
        pytest.raises(RunError, match="Stale file handle") as caught,
        begun.alone_in(tmp_path, "teach.pt"),
        begun.taking_over(tmp_path / "teach.pt", ""),
    ):
        pass
    assert caught.value.fix == "remove the cause; the same command goes on"


NO_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"


def test_memory_that_reading_lacks_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint was passed over as damaged, and training went on from an older one."""
    for step in (1, 2):
        checkpoint.save(tmp_path, checkpoint.State(Progress(step=step), {}, {}))

    def lacking(*_: object, **__: object) -> None:
        raise RuntimeError(NO_MEMORY)

    monkeypatch.setattr(torch, "load", lacking)
    with pytest.raises(RunError, match="not enough memory"), enough_memory():
        checkpoint.load_latest(tmp_path)


def test_memory_that_saving_lacks_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint and a teaching that lacked memory advised to free some disk space."""

    def full(*_: object) -> None:
        raise RuntimeError(NO_MEMORY)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match="not enough memory"), enough_memory():
        checkpoint.save(tmp_path, checkpoint.State(Progress(step=1), {}, {}))
    with pytest.raises(RunError, match="not enough memory"), enough_memory():
        begun.save(tmp_path / "build.pt", {})


def test_a_run_counts_on_from_its_checkpoint_and_keeps_each_update_once(tmp_path: Path) -> None:
    """Of three groups two are flat. What an update goes back to is a copy, and nothing is kept of what cannot be."""
    written: list[int] = []
    kept = [None, True]
    weights: Any = SimpleNamespace(
        temperature=0.7,
        memory={"critic": torch.ones(2)},
        copy=lambda progress: checkpoint.State(progress, {"a": torch.ones(2)}, {}),
        kept=lambda state: state if kept.pop(0) else None,
        write=lambda out, state: written.append(state.progress.step),
    )
    run = RunState(tmp_path, weights, Progress(step=3, next_start=10, seconds=5.0, flat_groups=2))
    groups = [SimpleNamespace(is_flat=is_flat) for is_flat in (True, False, True)]
    rollouts: Any = SimpleNamespace(next_start=14, groups=groups)
    run.save()  # the checkpoint has it
    run.advance(rollouts, 2.5)
    assert run.progress == Progress(step=4, next_start=14, seconds=7.5, flat_groups=4, temperature=0.7)
    weights.memory["critic"] += 1  # the next update has begun
    run.save()
    assert (run.saved, written) == (3, [])
    for _ in range(2):
        run.save()
    assert (run.saved, written) == (4, [4])
    state, _ = checkpoint.load_latest(tmp_path)
    assert state is not None
    assert state.progress == run.progress
    assert state.memory["critic"].tolist() == [1, 1]


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
    assert (
        told.said.index("evaluation after 0 updates: no episode has ended yet") == told.said.index("loading nano") + 1
    )
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
            os.kill(os.getpid(), self._number)


@pytest.mark.parametrize(
    ("moment", "kept", "number"),
    [
        ("update 1 of 4: 1 of 8 episodes played", None, signal.SIGINT),
        ("update 2 of 4: 1 of 8 episodes played", 1, signal.SIGTERM),
        ("update 3 of 4: learning from", 2, signal.SIGINT),
        ("evaluation after 2 updates: 1 of 6", 2, signal.SIGTERM),
        ("update 2 of 4: learning from", 1, signal.SIGHUP),
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


@pytest.mark.usefixtures("lean")
async def test_a_run_is_trained_stopped_and_resumed_in_a_cell_of_a_notebook(tmp_path: Path) -> None:
    """Where a loop runs, the first evaluation was an error of asyncio, and half a run's folder was left. In a thread,
    as the page on training had it, the run went on when the kernel was interrupted.
    """
    config, out = tiny(checkpoint_every=4), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        loop.train(config, out, report=StoppedAt("update 2 of 4: 1 of 8 episodes played"))
    state, _ = checkpoint.load_latest(out)
    assert state is not None
    assert state.progress.step == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "msgrpo-loop"]
    assert loop.train(config, out, report=Quiet(), resume=True)["steps"] == 4


@pytest.mark.parametrize("ignored", [True, False])
def test_the_terminals_end_asks_a_run_to_stop_unless_it_is_to_outlive_it(ignored: bool) -> None:
    """It ended the run at once, without what it had learned since the checkpoint; and nobody can be told any more."""

    def gone() -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with stop_requests(gone) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.asked == (None if ignored else signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


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
    assert told.said[-1] == f"kept: 2 updates; go on with: msgrpo train --resume --out {tmp_path / 'run'}"


@pytest.mark.parametrize("seed", [0, 1])  # the first starts are looked at in any case: are there few?
def test_a_start_that_cannot_be_looked_at_ends_no_training(seed: int) -> None:
    """It ended train and teach there, and again at each --resume. Its games are lost, as those of any other fault."""
    lake, begin = get_scenario("frozen-lake"), seed * 10_007

    def make(start: int, chance: int) -> Game:
        if start == begin + 2:
            raise IndexError("no such map")
        return lake.make(start, chance)

    frail = replace(lake, id="frail", family="frail", make=make)
    first = list(islice(frail.starts("train", begin), 9))
    assert begin + 2 in first
    assert list(islice(Skip().worthwhile(frail, iter(first), {}), 9)) == first
    assert len(list(islice(rows_of(frail, seed), 60))) == 60
    with pytest.raises(GameFaultError, match="no such map"):  # a suite has the same starts for everybody
        list(islice(frail.starts("test", begin), 9))


def test_validation_starts_that_cannot_be_drawn_are_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's folder was there, its settings too, and every --resume ended in the same way."""
    config, lake = tiny(), get_scenario("frozen-lake")

    def make(start: int, chance: int) -> Game:
        if start == 5:
            raise IndexError("no such map")
        return lake.make(start, chance)

    monkeypatch.setattr(TrainConfig, "scenarios", (replace(lake, id="frail", family="frail", make=make),))
    with pytest.raises(
        GameFaultError, match=r"validation starts cannot be drawn, .*: the game frail failed: .*no such"
    ):
        loop.train(config, tmp_path / "run", report=Quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("lean")
def test_a_command_that_is_lost_between_two_updates_loses_none(tmp_path: Path) -> None:
    """On a cluster every update begins with the question whether to stop; where nobody answered it, those since the
    last checkpoint were lost.
    """
    asked = []

    def stopping() -> bool:
        asked.append(1)
        if len(asked) > 2:
            raise ConnectionError("the desk is gone")
        return False

    with pytest.raises(RunError, match="the desk is gone"):
        loop.train(
            tiny(checkpoint_every=4), tmp_path / "run", report=Quiet(), cluster=loop.Cluster(stopping=stopping)
        )
    state, _ = checkpoint.load_latest(tmp_path / "run")
    assert state is not None
    assert state.progress.step == 2


@pytest.mark.parametrize(("refused", "kept"), [("000003.json", 3), ("transcripts.jsonl", 4)])
@pytest.mark.usefixtures("lean")
def test_a_file_to_look_at_that_cannot_be_written_costs_no_update(
    refused: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What people watch of an update is written when it has ended: that stood outside of what saves it."""
    replace_file = os.replace

    def refusing(source: Any, target: Any) -> None:
        if Path(target).name == refused:
            raise OSError(errno.EACCES, "Permission denied", str(target))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    told = Told()
    with pytest.raises(RunError, match=rf"Permission denied.*{refused}"):
        loop.train(tiny(checkpoint_every=4), tmp_path / "run", report=told)
    state, _ = checkpoint.load_latest(tmp_path / "run")
    assert state is not None
    assert state.progress.step == kept
    assert told.said[-1].startswith(f"kept: {kept} updates; go on with: ")


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

    monkeypatch.setattr(equations, "policy_loss", full)
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
