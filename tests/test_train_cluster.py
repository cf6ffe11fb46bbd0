"""A run on a Ray cluster: what the ranks tell the command, and what is missing. `test_train_ranks.py` starts one."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msgrpo.errors import RunError, ServeError, UsageError
from msgrpo.models.http import Client
from msgrpo.run_log import CONFIG
from msgrpo.serve.host import About
from msgrpo.train.config import make_config
from msgrpo.train.engines.pool import Pool, Remote, RemoteError
from tests.test_train_ranks import ROOT

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")

from ray.train.v2.api.exceptions import ControllerError  # noqa: E402

from msgrpo.train import cluster, loop  # noqa: E402
from msgrpo.train.cluster import missing, request, train_on_ray  # noqa: E402
from msgrpo.train.desk import STARTS, Desk, RunEnd  # noqa: E402
from msgrpo.train.engines import on_ray  # noqa: E402
from msgrpo.train.ranks import LostPeerError  # noqa: E402
from msgrpo.train.run_folder import check_folder, config_of, how_to_go_on, resume_command, writing  # noqa: E402
from msgrpo.train.stopping import StopRequested  # noqa: E402


def test_the_desk_passes_on_what_ranks_report_once_and_in_order() -> None:
    desk = Desk()
    desk.start()
    assert not desk.begin()
    desk.report("note", "a")
    desk.report("update", 1, {"loss": 0.5})
    desk.end(RunEnd({"steps": 1}))
    desk.end(RunEnd(error="too late"))
    assert desk.fetch() == ([("note", ("a",)), ("update", (1, {"loss": 0.5}))], RunEnd({"steps": 1}), True)
    assert desk.fetch()[0] == []
    desk.start()
    assert desk.begin()  # again: the rank goes on from the checkpoint


def test_starts_that_get_nowhere_end_the_run_and_an_update_between_them_does_not() -> None:
    desk = Desk()
    for _ in range(STARTS):
        desk.start()
    desk.report("update", 1, {})
    for _ in range(STARTS):
        desk.start()
        assert not desk.is_over()
    desk.fault("RuntimeError: out of memory")
    desk.start()
    outcome = desk.fetch()[1]
    assert outcome is not None
    assert f"{STARTS} starts in a row" in outcome.error
    assert "out of memory" in outcome.error


def test_ranks_that_are_killed_before_their_first_word_end_the_run() -> None:
    """The first rank counted the starts: one that was killed while it loaded its libraries began again for ever, and
    of one that was killed later nothing was said.
    """
    desk = Desk()
    desk.start()
    desk.fault("RuntimeError: an earlier fault")
    desk.start()
    desk.begin()
    desk.start()
    reports, outcome, running = desk.fetch()
    assert reports[1:] == [
        ("note", ("the processes of the run begin again: one has ended without a word, or their number changes",))
    ]
    assert (outcome, running) == (None, False)
    for _ in range(STARTS - 2):
        desk.start()
    again, outcome, _ = desk.fetch()
    assert again == reports[1:] * (STARTS - 2)
    assert outcome is not None
    assert "the last with: no message, as of a process that was killed" in outcome.error


def test_ray_train_tells_the_desk_of_each_start_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[str]()
    desk = SimpleNamespace(start=SimpleNamespace(remote=lambda: happened.append("told")))
    config = cluster.OnNetwork("gloo", desk=desk)
    monkeypatch.setattr(cluster.ray, "get", lambda answer: answer)
    monkeypatch.setattr(cluster.TorchConfig().backend_cls, "on_start", lambda *given: happened.append("met"))
    group = SimpleNamespace(execute=lambda function: happened.append("asked the ranks"))
    config.backend_cls().on_start(group, config)
    assert happened == ["told", "asked the ranks", "met"]


@pytest.mark.parametrize(("trainers", "waits"), [("2", str(cluster.PLACES_S)), ("1-2", None)])
def test_places_for_all_trainers_are_waited_for(
    trainers: str, waits: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Train asks for a minute. The sixth time ended a run that had lost a node, or found a full cluster."""
    name = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr(cluster, "TorchTrainer", lambda *given, **more: SimpleNamespace(fit=lambda: None))
    config = make_config(settings=[f"trainers={trainers}"])
    work = cluster.Work(config, tmp_path, False, (), tmp_path, tmp_path, None, [], "auto")
    cluster.Fit(work, gpus=False).thread.join()
    assert os.environ.get(name) == waits


def test_a_desk_that_does_not_answer_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts the desk's process again where it does not begin in time: this waited with it, and said nothing."""

    def get(answer: object, timeout: float = math.inf) -> object:
        if timeout < math.inf:
            raise ray.exceptions.GetTimeoutError("not ready")
        pytest.fail("this waits for ever")

    @contextmanager
    def connected(address: str) -> Iterator[bool]:
        yield True

    remote = SimpleNamespace(remote=lambda: SimpleNamespace(fetch=SimpleNamespace(remote=lambda: None)))
    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(cluster, "missing", lambda config, gpus: "")
    monkeypatch.setattr(cluster, "check_key", lambda config: None)
    monkeypatch.setattr(cluster, "Fit", lambda work, gpus: SimpleNamespace(thread=threading.current_thread()))
    monkeypatch.setattr(cluster.ray, "get", get)
    monkeypatch.setattr(cluster.ray, "cluster_resources", dict)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(cluster.ray, "remote", lambda kind: SimpleNamespace(options=lambda **how: remote))
    with pytest.raises(RunError, match="the Ray cluster is lost: no answer within 300 s"):
        train_on_ray(make_config(), tmp_path / "run", "local", resume=False, report=Notes())  # type: ignore[arg-type]


def test_what_ray_train_could_not_do_is_told_without_its_wrapping() -> None:
    """Its first line was all that was told: `Training failed due to controller error:`."""
    fault = ModuleNotFoundError("No module named 'msgrpo'")
    task = ray.exceptions.RayTaskError("execute", "Traceback …", fault)
    assert cluster._reason(ControllerError(task)) == "No module named 'msgrpo'"
    assert cluster._reason(ControllerError(RuntimeError("no port"))) == "no port"
    assert cluster._reason(ValueError("another")) == "another"


def test_starts_that_do_the_same_updates_again_get_nowhere() -> None:
    """What fails in update 3, with a checkpoint every five, was begun again without end."""
    desk = Desk()
    for start in range(1 + STARTS):
        assert not desk.is_over(), start
        desk.start()
        for step in (1, 2):
            desk.report("update", step, {})
    desk.start()
    assert desk.is_over()


def test_a_rank_that_begins_again_after_a_stop_loads_nothing() -> None:
    """Killed just before Ctrl-C, a rank loaded the model and the checkpoint to be told that it shall stop."""
    desk = Desk()
    desk.begin()
    desk.stop()
    assert not desk.is_over()  # it saves the update in progress
    desk.begin()
    assert desk.fetch()[1] == RunEnd()


def test_what_a_cluster_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(settings=["rollouts=vllm(servers=2, tensor_parallel=4)", "trainers=3-8"])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 10.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 2.0}}])
    assert missing(config, gpus=True) == (
        "the run needs 11 GPU, the cluster has 10; a server needs 4 GPU of one node, the largest has 2"
    )
    assert missing(config, gpus=False) == ""


def test_servers_are_asked_for_as_the_run_needs_them() -> None:
    config = make_config(settings=["rollouts=vllm(servers=2, tensor_parallel=2)", "base=nano", "lora_rank=32"])
    wanted = request(config, gpus=True)
    assert (wanted.tensor_parallel_size, wanted.runtime_rank, wanted.dtype, wanted.gpu_share) == (
        2,
        32,
        "float32",
        None,
    )
    assert wanted.extra == ("--distributed-executor-backend", "mp")
    assert request(make_config(settings=["rollouts=vllm(servers=1, gpu_share=0.5)"]), gpus=True).gpu_share == 0.5


@pytest.mark.parametrize("trainers", ["0", "4-2", "two", "2-"])
def test_a_number_of_trainers_that_is_none_is_refused(trainers: str) -> None:
    with pytest.raises(UsageError, match="trainers is"):
        make_config(settings=[f"trainers={trainers}"])


def test_the_pool_follows_servers_that_come_and_go() -> None:
    pool = Pool([Remote("http://a", out=None), Remote("http://b", out=None)], None, print)
    stays = pool.at("http://b")
    pool.follow(["http://b", "http://c"])
    assert [remote.url for remote in pool.remotes] == ["http://b", "http://c"]
    assert pool.at("http://b") is stays
    assert [remote.url for remote in pool.playing] == ["http://b"]  # the new one is not proved yet
    pool.failed(stays, RemoteError("it is gone", final=True))
    assert pool.playing == []
    assert isinstance(pool.client(1.0), Client)


class Handle:
    """An actor as `OnRay` sees it, without Ray: its methods answer at once."""

    def __init__(self, **answers: Any) -> None:
        for name, answer in answers.items():
            setattr(self, name, type("Method", (), {"remote": staticmethod(lambda *given, answer=answer: answer)})())


def test_a_node_whose_disk_is_full_gets_no_version_and_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def about(url: str | None, **more: Any) -> About:
        return About("10.0.0.1", 1, 2, url, **more)

    def got(one: Any) -> Any:
        if isinstance(one, Exception):
            raise one
        return one

    # values stand for references, so that all must differ
    monkeypatch.setattr(on_ray.ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(on_ray.ray, "get", got)
    monkeypatch.setattr(on_ray.ray, "put", lambda value: value)
    good = Handle(about=about("http://a"), receive=None)
    full = Handle(about=about("http://b"), receive="its node cannot write the version v1: No space left on device")
    begins = Handle(about=about(None, stage="loading the weights"))
    gone = Handle(about=ray.exceptions.RayActorError())
    said = type("Report", (), {"doing": lambda self, text: None})()
    fleet = on_ray.OnRay([good, full, begins, gone], said, lambda: False)
    assert fleet.urls() == ["http://a", "http://b"]
    assert fleet.publish("v1", {"adapter_model.safetensors": b"x"}) == {
        "http://b": "its node cannot write the version v1: No space left on device"
    }


class Notes:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    doing = note


def test_waiting_for_servers_tells_each_fault_once_and_ends_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server that cannot start beside one that has no place yet: this waited for ever, and said nothing of the
    first; a stop was not looked for.
    """
    monkeypatch.setattr(on_ray.ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(on_ray.ray, "get", lambda value: value)
    monkeypatch.setattr(on_ray.time, "sleep", lambda seconds: None)
    broken = Handle(about=About("10.0.0.1", 1, None, error="[Errno 28] No space left on device"))
    begins = Handle(about=About("10.0.0.2", 1, 2, stage="loading the weights"))
    asked, report = iter([False, False, True]), Notes()
    with pytest.raises(StopRequested):
        on_ray.OnRay([broken, begins], report, lambda: next(asked)).urls()  # type: ignore[arg-type]
    assert sum("a server on 10.0.0.1 cannot start" in note for note in report.notes) == 1


def test_servers_that_ray_could_not_make_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes such an actor no second time, whatever `max_restarts` says: they were waited for without end."""

    def get(one: Any) -> Any:
        raise one

    died = type("Died", (ray.exceptions.ActorDiedError,), {"actor_init_failed": True})
    why = "The actor died because of an error raised in its creation task\nOSError: No space left on device"
    faults = [died(), died()]
    for fault in faults:
        fault.error_msg = why
    monkeypatch.setattr(on_ray.ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(on_ray.ray, "get", get)
    monkeypatch.setattr(on_ray.time, "sleep", lambda seconds: pytest.fail("it waits"))
    fleet = on_ray.OnRay([Handle(about=fault) for fault in faults], Notes(), lambda: False)  # type: ignore[arg-type]
    with pytest.raises(ServeError, match="OSError: No space left on device"):
        fleet.urls()


def test_a_server_that_ray_does_not_place_is_refused(tmp_path: Path) -> None:
    """Its supervisor would be killed with the rank, and vLLM left behind."""
    config = make_config(settings=["rollouts=vllm", "trainers=2"])
    with pytest.raises(UsageError, match="starts a server beside the first trainer") as error:
        train_on_ray(config, tmp_path / "run", "auto", resume=False, report=Notes())  # type: ignore[arg-type]
    assert "vllm(servers=1)" in str(error.value.fix)


def test_what_goes_on_with_a_run_names_its_cluster(tmp_path: Path) -> None:
    assert resume_command(tmp_path, "10.0.0.1:6379").endswith(f"--out {tmp_path} --ray 10.0.0.1:6379")
    assert "--resume" not in how_to_go_on(tmp_path, "10.0.0.1:6379")  # it has not begun
    (tmp_path / CONFIG).write_text("{}")
    assert how_to_go_on(tmp_path, "10.0.0.1:6379").endswith(f"--out {tmp_path} --ray 10.0.0.1:6379")


def test_what_a_folder_or_a_disk_refuses_names_the_cluster_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pasted, the command went on here with one process; Ray sets RANK and WORLD_SIZE as torchrun does."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    ending = f"msgrpo train --resume --out {tmp_path} --ray 10.0.0.1:6379"
    (tmp_path / CONFIG).write_text(make_config().model_dump_json())
    with pytest.raises(RunError) as full, writing(tmp_path, "10.0.0.1:6379"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UsageError, match="other settings") as other:
        check_folder(tmp_path, make_config(settings=["groups=2"]), True, "10.0.0.1:6379")
    assert str(full.value.fix).endswith(ending)
    assert f"{ending};" in str(other.value.fix)
    (tmp_path / CONFIG).write_text(make_config().model_dump_json().replace('"frozen-lake"', '"a.py:b"'))
    with pytest.raises(UsageError) as unnamed:
        config_of(tmp_path, {"steps": 9}, "10.0.0.1:6379")
    assert str(unnamed.value.fix).endswith(f"--out {tmp_path} --ray 10.0.0.1:6379 --set steps=9")


def test_without_a_cluster_what_needs_one_is_refused(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "msgrpo.cli",
        "train",
        "--out",
        str(tmp_path / "run"),
        "--rollouts",
        "vllm(servers=2)",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--ray auto" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_that_is_cut_off_from_the_command_ends_itself(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node's cable was pulled: it waited for the others, and kept the lock that they needed to begin again."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'msgrpo[ray]'")
    from msgrpo.train import cluster

    ended, asked = threading.Event(), threading.Event()

    def get(question: None, timeout: float) -> bool:
        asked.set()
        if answers:
            return False
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(cluster.peers, "SILENT_S", 0.4)
    monkeypatch.setattr(cluster.ray, "get", get)
    monkeypatch.setattr(cluster.os, "_exit", lambda code: ended.set())
    desk = SimpleNamespace(is_over=SimpleNamespace(remote=lambda: None))
    with cluster.cut_off_ends(desk):
        assert asked.wait(60)
        assert ended.wait(1 if answers else 60) is not answers


@pytest.mark.parametrize("saved", [True, False])
def test_an_error_of_a_rank_ends_the_run_once_the_first_has_saved(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all ranks have it, as of a loss that is not finite, the first still saves when another has told of it: it
    was ended meanwhile. And nothing was said of how the run goes on.
    """
    ended = RunEnd(error="the loss is not finite", fix="another rate", saved=saved)
    desk, joined, told = Handle(fetch=([], ended, True)), [], Notes()
    thread = SimpleNamespace(is_alive=lambda: True, join=joined.append)
    (tmp_path / CONFIG).write_text("{}")
    monkeypatch.setattr(cluster.ray, "get", lambda answer, timeout: answer)
    work = cluster.Work(make_config(), tmp_path, False, (), tmp_path, tmp_path, desk, [], "auto")
    with pytest.raises(RunError, match="not finite"):
        cluster._followed(SimpleNamespace(thread=thread), work, told, gpus=False)  # type: ignore[arg-type]
    assert joined == ([] if saved else [cluster.END_S])
    assert told.notes == [f"go on with: msgrpo train --resume --out {tmp_path} --ray auto"]


def test_a_terminal_that_is_gone_leaves_the_ranks_the_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank said after the terminal's end could not be shown, and that ended the command, and a cluster of its
    own with it, before the rank had saved. So did what the command said by itself: what it waits for.
    """

    def gone(text: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    fetched = iter([([], None, False), ([("note", ("update 3: …",))], RunEnd(saved=True), True)])
    desk = SimpleNamespace(fetch=SimpleNamespace(remote=lambda: next(fetched)))
    monkeypatch.setattr(cluster.ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(cluster, "missing", lambda config, gpus: "no trainer")
    work = cluster.Work(make_config(), tmp_path, False, (), tmp_path, tmp_path, desk, [], "auto")
    fit: Any = SimpleNamespace(thread=SimpleNamespace(is_alive=lambda: True))
    with pytest.raises(KeyboardInterrupt):
        cluster._followed(fit, work, SimpleNamespace(note=gone), gpus=False)  # type: ignore[arg-type]


def test_what_is_missing_is_noted_once_for_as_long_as_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that waited for an hour had said it 360 times."""
    told, lacks = list[tuple[str, str]](), iter(["1 CPU", "1 CPU", "2 CPU", ""])
    fetched = iter([*[([], None, True)] * 4, ([], RunEnd(saved=True), True)])
    desk = SimpleNamespace(fetch=SimpleNamespace(remote=lambda: next(fetched)))
    monkeypatch.setattr(cluster.ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(cluster, "missing", lambda config, gpus: next(lacks))
    monkeypatch.setattr(cluster, "MISSING_S", 0.0)
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    work = cluster.Work(make_config(), tmp_path, False, (), tmp_path, tmp_path, desk, [], "auto")
    fit: Any = SimpleNamespace(thread=SimpleNamespace(is_alive=lambda: True))
    report: Any = SimpleNamespace(
        note=lambda text: told.append(("note", text)), doing=lambda text: told.append(("doing", text))
    )
    with pytest.raises(KeyboardInterrupt):
        cluster._followed(fit, work, report, gpus=False)
    assert told == [("note", "waiting: 1 CPU"), ("doing", "waiting: 1 CPU"), ("note", "waiting: 2 CPU")]


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_a_later_rank_lets_the_first_save(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lived on, the first waited for it, and all since the last checkpoint was lost. Of a sharded base it waits in
    a group that was made later than the ranks' own.
    """
    desk, happened = Desk(), list[str]()
    ours, later = ("this", "Ray's"), ("this", "a later group's")

    def train(*given: Any, **more: Any) -> None:
        if place:
            raise RunError("there is not enough memory", fix="less at once")
        desk.end(RunEnd(error="there is not enough memory"))  # by the other rank
        raise LostPeerError("another process of this run has ended")

    def close(chosen: object) -> None:
        assert chosen == {later}
        happened.append("closed after it was told" if desk.is_over() else "closed before")

    monkeypatch.chdir(tmp_path)  # to which a rank goes; after the test all is as it was
    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(cluster, "_before", {ours})
    monkeypatch.setattr(cluster.peers, "connections", lambda: {ours: 3, later: 4})
    monkeypatch.setattr(cluster.peers, "close", close)
    monkeypatch.setattr(cluster.ray, "get", lambda answer, timeout=0.0: answer)
    monkeypatch.setattr(
        cluster.ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: place), raising=False
    )
    names = ("report", "begin", "fault", "end", "is_over", "stopping")
    handle = SimpleNamespace(**{name: SimpleNamespace(remote=getattr(desk, name)) for name in names})
    cluster.rank({"work": cluster.Work(make_config(), tmp_path, False, (), tmp_path, tmp_path, handle, [], "auto")})
    assert happened == (["closed after it was told"] if place else [])
    reports, outcome, _ = desk.fetch()
    assert outcome is not None
    assert outcome.error == "there is not enough memory"
    assert reports == []  # nothing begins again
