"""A run's folder that somebody changed, that a kill left in the middle, or that lost a part: named, and never
overwritten.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from msgrpo import files
from msgrpo.errors import RunError, UsageError
from msgrpo.evals.suites import SUITE_VERSION
from msgrpo.files import digest, replace_bytes, replace_text
from msgrpo.models.lora import ADAPTER_WEIGHTS
from msgrpo.run_log import CONFIG, METRICS
from msgrpo.train import checkpoint
from msgrpo.train.checkpoint import Progress, State, load_latest
from msgrpo.train.config import make_config
from msgrpo.train.evaluate import Evaluations
from msgrpo.train.loop import enough_memory, train
from msgrpo.train.rollouts import Players
from msgrpo.train.run_folder import check_folder, config_of, how_to_go_on, resume_command, writing
from tests.near import use_near_lakes
from tests.train_helpers import Told

TINY = [
    "groups=1",
    "group_size=4",
    "select=aaw(keep=2)",
    "minibatches=1",
    "evaluation=2(film=0)",
    "steps=2",
    "checkpoint_every=1",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damaged") / "run"
    with pytest.MonkeyPatch.context() as patch:
        use_near_lakes(patch)
        train(make_config(settings=TINY), out, report=Told())
    return out


def state(step: int = 3) -> State:
    return State(Progress(step=step), {"w": torch.ones(1)}, {"state": {}, "param_groups": []})


def test_the_newest_checkpoint_is_the_one_with_the_largest_number(tmp_path: Path) -> None:
    """By their names as text, update 1,000,000 came before 999,998, and saving it deleted it."""
    for step in (999_998, 999_999, 1_000_000):
        checkpoint.save(tmp_path, state(step))
    found, damaged = load_latest(tmp_path)
    assert found is not None
    assert (found.progress.step, damaged) == (1_000_000, [])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1000000", "step-999999"]


def test_what_a_killed_writer_left_goes_and_a_folder_of_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1))
    for name in (".step-000002.0a1b2c3d.part", "step-best"):
        (tmp_path / "checkpoints" / name).mkdir()
    checkpoint.save(tmp_path, state(2))
    found, damaged = load_latest(tmp_path)
    assert found is not None
    assert (found.progress.step, damaged) == (2, [])
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000002", "step-best"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_just_now_is_not_passed_over(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one in its place would have an update done again, and the newer one removed."""
    checkpoint.save(tmp_path, state(1))
    checkpoint.save(tmp_path, state(2))

    def load(*given: Any, **named: Any) -> Any:
        raise error

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(type(error)):
        load_latest(tmp_path)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch it-ran",)


HELD: dict[str, Callable[[], Any]] = {
    "a list": lambda: [1, 2],
    "a text": lambda: "state",
    "no adapter": lambda: {"progress": {}, "optimizer": {}},
    "an unknown field": lambda: {"progress": {"bogus": 1}, "adapter": {}, "optimizer": {}},
    "a step that is a text": lambda: {"progress": {"step": "x"}, "adapter": {}, "optimizer": {}},
    "a step below 0": lambda: {"progress": {"step": -1}, "adapter": {}, "optimizer": {}},
    "a start below 0": lambda: {"progress": {"next_start": -1}, "adapter": {}, "optimizer": {}},
    "seconds without a number": lambda: {"progress": {"seconds": math.nan}, "adapter": {}, "optimizer": {}},
    "a temperature of 0": lambda: {"progress": {"temperature": 0.0}, "adapter": {}, "optimizer": {}},
    "weights that are numbers": lambda: {"progress": {}, "adapter": {"w": 1}, "optimizer": {}},
    "a memory of numbers": lambda: {"progress": {}, "adapter": {}, "optimizer": {}, "memory": {"critic": 1}},
    "a memory that is a list": lambda: {"progress": {}, "adapter": {}, "optimizer": {}, "memory": []},
}


@pytest.mark.parametrize("what", [*HELD, "a pickle", "nothing", "half of it"])
def test_a_checkpoint_with_a_right_digest_and_wrong_content_is_passed_over(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path, state(1))
    folder = checkpoint.save(tmp_path, state(2))
    whole = (folder / "state.pt").read_bytes()
    buffer = io.BytesIO()
    if what in HELD:
        torch.save(HELD[what](), buffer)
    data = {"a pickle": pickle.dumps(Evil()), "nothing": b"", "half of it": whole[: len(whole) // 2]}
    (folder / "state.pt").write_bytes(data.get(what, buffer.getvalue()))
    (folder / "sha256").write_text(digest(folder / "state.pt"))
    assert_passed_over(tmp_path, folder, 1)
    assert not (tmp_path / "it-ran").exists()


def assert_passed_over(run: Path, folder: Path, step: int) -> None:
    """The newest checkpoint is damaged, and the one before it is found."""
    found, damaged = load_latest(run)
    assert found is not None
    assert (found.progress.step, damaged) == (step, [folder])


@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_going_on_without_a_checkpoint_never_overwrites_what_was_trained(
    damage: str, trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    if damage == "gone":
        shutil.rmtree(out / "checkpoints")
    else:
        for file in out.glob("checkpoints/*/state.pt"):
            file.write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(RunError, match="would begin at 0"):
        train(make_config(settings=TINY), out, resume=True, report=Told())
    assert {path: path.read_bytes() for path in before} == before


def _first(state: State) -> dict[str, Any]:
    kept: dict[str, Any] = next(iter(state.optimizer["state"].values()))
    return kept


SPOILT: dict[str, Callable[[State], Any]] = {
    "a mean of another shape": lambda state: _first(state).update(exp_avg=torch.zeros(3)),
    "a mean that is missing": lambda state: _first(state).pop("exp_avg_sq"),
    "a mean that is a text": lambda state: _first(state).update(exp_avg="x"),
    "a group without its rates": lambda state: state.optimizer["param_groups"][0].pop("betas"),
    "a list in place of all means": lambda state: state.optimizer.update(state=[1]),
    "groups that are none": lambda state: state.optimizer.update(param_groups=[1]),
    "a step that is a text": lambda state: _first(state).update(step="x"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_an_optimizer_that_cannot_go_on_is_refused(what: str, trained: Path, tmp_path: Path) -> None:
    """torch takes such a state and fails in its next step, in a traceback, with the adapter overwritten before."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    found, _ = load_latest(out)
    assert found is not None
    SPOILT[what](found)
    checkpoint.save(out, found)
    with pytest.raises(RunError, match="holds the optimizer of another run"):
        train(make_config(settings=[*TINY, "steps=3"]), out, resume=True, report=Told())


def test_what_adamw_needs_for_its_next_step_is_asked_for_of_every_weight() -> None:
    weights = [torch.nn.Parameter(torch.zeros(length)) for length in (2, 3)]
    own = torch.optim.AdamW(weights)
    torch.cat(weights).sum().backward()  # type: ignore[no-untyped-call]
    own.step()
    whole = own.state_dict()
    for sound in (whole, whole | {"state": {}}):  # the second has taken no step yet
        checkpoint.check_optimizer(sound, own)
    for name in ("betas", "eps", "weight_decay"):
        groups = [{key: value for key, value in whole["param_groups"][0].items() if key != name}]
        with pytest.raises(ValueError, match=f"it has no {name}"):
            checkpoint.check_optimizer(whole | {"param_groups": groups}, own)
    for mean in ("exp_avg", "exp_avg_sq"):
        for spoilt in (torch.zeros(2), torch.zeros(3, dtype=torch.long)):
            state = whole["state"] | {1: whole["state"][1] | {mean: spoilt}}
            with pytest.raises(ValueError, match="means of weight 1"):
                checkpoint.check_optimizer(whole | {"state": state}, own)


@pytest.mark.parametrize("to", ["sparse", "whole numbers", "nothing at all"])
def test_weights_that_are_no_plain_numbers_are_passed_over(to: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(1))
    weight = torch.ones(2, 2)
    made = {"sparse": weight.to_sparse(), "whole numbers": weight.long(), "nothing at all": weight.to("meta")}[to]
    assert_passed_over(tmp_path, checkpoint.save(tmp_path, replace(state(2), adapter={"w": made})), 1)


@pytest.mark.parametrize("name", ["state.pt", "sha256"])
def test_a_checkpoint_with_a_pipe_in_it_is_passed_over(name: str, tmp_path: Path) -> None:
    """It would be read for ever. The same in the place of a run's settings: no command is advised from them."""
    checkpoint.save(tmp_path, state(3))
    checkpoint.save(tmp_path, state(4))
    newest = tmp_path / "checkpoints" / "step-000004"
    (newest / name).unlink()
    os.mkfifo(newest / name)
    assert_passed_over(tmp_path, newest, 3)
    os.mkfifo(tmp_path / CONFIG)
    assert resume_command(tmp_path) == f"msgrpo train --resume --out {tmp_path}"


def test_weights_under_other_names_are_refused(trained: Path, tmp_path: Path) -> None:
    """Another version of PEFT names layers in another way: nothing was loaded, and nothing was said."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    found, _ = load_latest(out)
    assert found is not None
    renamed = {f"renamed.{name}": tensor for name, tensor in found.adapter.items()}
    checkpoint.save(out, State(found.progress, renamed, found.optimizer))
    with pytest.raises(RunError, match="these are not the adapter's weights"):
        train(make_config(settings=[*TINY, "steps=3"]), out, resume=True, report=Told())


def test_a_refused_resume_changes_nothing(trained: Path, tmp_path: Path) -> None:
    """The metrics were cut before the run was refused."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    (out / METRICS).write_text("".join(json.dumps(row | {"suite_version": 1}) + "\n" for row in rows))
    before = (out / METRICS).read_bytes()
    with pytest.raises(RunError, match="suite version"):
        train(make_config(settings=[*TINY, "steps=3"]), out, resume=True, report=Told())
    assert (out / METRICS).read_bytes() == before


@pytest.mark.usefixtures("near")
def test_a_run_that_was_killed_while_its_settings_were_put_in_place_begins(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / f".{CONFIG}.x1.part").write_text("{")
    check_folder(out, make_config(settings=TINY), resume=False)
    train(make_config(settings=[*TINY, "steps=1"]), out, report=Told())
    assert not list(out.glob(".*.part"))


@pytest.mark.usefixtures("near")
def test_what_a_killed_export_left_in_a_runs_folder_does_not_stop_the_run(trained: Path, tmp_path: Path) -> None:
    """A folder was to be removed as a file, so the run could not go on; it may also be an export that goes on."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    (out / ".merged.0a1b2c3d.part").mkdir()
    train(make_config(settings=[*TINY, "steps=3"]), out, resume=True, report=Told())
    assert (out / ".merged.0a1b2c3d.part").is_dir()


def test_two_writers_of_one_file_do_not_collide(tmp_path: Path) -> None:
    """On one temporary name, 97 of 6,000 writes of two writers failed."""
    file, failed = tmp_path / "f", []

    def write(text: str) -> None:
        for _ in range(300):
            try:
                replace_text(file, text * 1000)
                assert len(set(file.read_text())) == 1
            except Exception as error:
                failed.append(error)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "ab"]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_what_is_put_in_place_was_synced_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole after a power cut, too: the data is on the disk before the name is, and then the name."""
    done: list[str] = []
    fsync, move = os.fsync, Path.replace
    monkeypatch.setattr(files.os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append("moved"), move(self, to))[1])
    replace_bytes(tmp_path / "f", b"x")
    assert done[1:] == ["moved", str(tmp_path)]
    assert done[0].startswith(str(tmp_path / ".f."))
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o666 & ~files._umask()
    done.clear()
    with files.replacing_folder(tmp_path / "folder") as part:
        (part / "f").write_bytes(b"x")
    assert done == [str(part / "f"), str(part), "moved", str(tmp_path)]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EACCES, "Permission denied", "f"), "cannot be read or written"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "the system has refused something"),
        (TimeoutError(), "the system has refused something"),
    ],
)
def test_only_a_full_disk_is_called_one(error: OSError, says: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(RunError) as caught, writing(tmp_path):
        raise error
    assert says in caught.value.message
    assert ("room" in str(caught.value.fix)) == (error.errno == errno.ENOSPC)


def test_a_run_that_could_not_begin_is_not_to_be_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught, writing(tmp_path / "there" / "is none"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "there")
    assert "--resume" not in str(caught.value.fix)
    assert "another --out" in str(caught.value.fix)


@pytest.mark.parametrize("said", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_memory_that_a_library_lacks_is_one_clear_error(said: str) -> None:
    with pytest.raises(RunError, match="not enough memory"), enough_memory():
        raise RuntimeError(said)


def test_settings_that_are_damaged_are_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("[" * 100_000)
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"")
    with pytest.raises(UsageError, match="is damaged"):
        check_folder(tmp_path, make_config(), resume=True)


@pytest.mark.parametrize("damage", [{"values": ["x", 1.0]}, {"score": None}, {"success": "high"}, {"eval_s": None}])
def test_a_damaged_evaluation_is_refused_before_anything_is_trained(damage: dict[str, Any], tmp_path: Path) -> None:
    """The run trained to its end and then had a KeyError for a summary. Looked for: all rows that a resumed run reads
    (`doctor` and the app pass over what is no number).
    """
    row = {
        "kind": "eval",
        "step": 0,
        "suite_version": SUITE_VERSION,
        "score": "success",
        "success": 0.5,
        "eval_s": 1.0,
    }
    row |= {"success_low": 0.1, "success_high": 0.9, "invalid": 0.0, "values": [1.0, None]}
    (tmp_path / METRICS).write_text(json.dumps(row) + "\n")
    players = Players(make_config(given={"scenario": "frozen-lake", "base": "nano"}))
    assert Evaluations(tmp_path, players, 1).done[0]["success"] == 0.5
    (tmp_path / METRICS).write_text(json.dumps(row | damage) + "\n")
    with pytest.raises(RunError, match="damaged evaluation"):
        Evaluations(tmp_path, players, 1)


def test_a_forecast_counts_in_words_that_fit_the_number(tmp_path: Path) -> None:
    """Of a run of one update it said: the other 0, with 1 evaluations."""
    settings = {"scenario": "frozen-lake", "base": "nano"}
    alone = Players(make_config(given={**settings, "steps": 1}))
    assert "; 1 evaluation will take about" in Evaluations(tmp_path, alone, 0).forecast(1, 9.0)
    three = Players(make_config(given={**settings, "steps": 3}, settings=["evaluation=9(every=2)"]))
    assert "; 2 more updates and 2 evaluations will take" in Evaluations(tmp_path, three, 0).forecast(1, 9.0)


def test_the_command_that_goes_on_has_the_logs_that_no_setting_holds(tmp_path: Path) -> None:
    """Pasted, it went on without W&B, and nothing said so."""
    logs = ["wandb", "trackio"]
    (tmp_path / CONFIG).write_text("{}")
    whole = f"msgrpo train --resume --out {tmp_path} --log wandb --log trackio"
    assert how_to_go_on(tmp_path, logs=logs) == f"go on with: {whole}"
    with pytest.raises(RunError) as full, writing(tmp_path, None, logs):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(full.value.fix).endswith(whole)


def test_so_has_the_command_told_to_who_named_another_setting_or_has_to_allow_one(tmp_path: Path) -> None:
    """Both lacked the logs."""
    (tmp_path / CONFIG).write_text(make_config(given={"seed": 1}).model_dump_json())
    with pytest.raises(UsageError) as differing:
        check_folder(tmp_path, make_config(), resume=True, logs=["wandb"])
    going_on = f"train --resume --out {tmp_path} --log wandb"
    assert f"msgrpo {going_on};" in str(differing.value.fix)
    (tmp_path / CONFIG).write_text('{"scenario": "a.py:b"}')
    with pytest.raises(UsageError) as unnamed:
        config_of(tmp_path, {}, logs=["wandb"])
    assert unnamed.value.fix == f"if you trust it: msgrpo --allow a.py:b {going_on}"
