"""`msgrpo train --ray`: the same run, its processes placed, watched and started again by Ray.

The ranks are the workers of Ray Train's TorchTrainer: when one is lost, Ray starts all of them again, and they go on
from the last checkpoint as `--resume` does. Servers are actors (`engines/on_ray.py`). The command that a person has
started stays outside; between it and the ranks stands the desk, an actor beside the command: what ranks report is
fetched there, and there they ask whether to stop.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from msgrpo.errors import MsgrpoError, RunError, UsageError, first_line
from msgrpo.extras import needs
from msgrpo.models.paths import NANO
from msgrpo.ray_cluster import connected
from msgrpo.serve.vllm_command import KEY_VARIABLE, Request
from msgrpo.train import peers
from msgrpo.train.config import TrainConfig
from msgrpo.train.desk import STARTS, Desk, RunEnd
from msgrpo.train.display import Quiet
from msgrpo.train.engines.on_ray import OnRay, start_hosts, stop_hosts
from msgrpo.train.engines.pool import NoServerError
from msgrpo.train.ranks import LostPeerError
from msgrpo.train.run_folder import check_folder, how_to_go_on
from msgrpo.train.sinks import Measured, Reporter
from msgrpo.train.stopping import stop_requests

POLL_S = 0.3  # between two looks at the desk
DOING_S = 0.5  # between two reports of what goes on
PLACES_S = 7 * 24 * 3600  # for places of all trainers: what is missing is shown meanwhile, and Ctrl-C is heard
MISSING_S = 10.0  # between two looks at what the cluster has
END_S = 30.0  # for Ray Train's own end
DESK_S = 300.0  # for an answer of the desk, whose process Ray starts again where it does not begin within a minute


class AtDesk:
    """A rank's reporter: everything goes to the desk; what goes on now, every so often."""

    def __init__(self, desk: Any) -> None:
        self._desk, self._shown = desk, 0.0

    def note(self, text: str) -> None:
        self._desk.report.remote("note", text)

    def doing(self, text: str) -> None:
        if time.monotonic() - self._shown >= DOING_S:
            self._shown = time.monotonic()
            self._desk.report.remote("doing", text)

    def stopping(self) -> None:
        """Nothing to say here: the command has told the person."""

    def update(self, step: int, values: Measured) -> None:
        self._desk.report.remote("update", step, values)

    def evaluation(self, step: int, values: Measured) -> None:
        self._desk.report.remote("evaluation", step, values)

    def close(self) -> None:
        """The command closes the console."""


@dataclass(frozen=True)
class Work:
    """What every rank is given."""

    config: TrainConfig
    out: Path
    resume: bool
    logs: Sequence[str]
    folder: Path  # in which the command was started: names of files may be relative to it
    scratch: Path  # Ray Train's own files; ours are the checkpoints in the run's folder
    desk: Any
    hosts: Sequence[Any]
    address: str  # of the cluster, as a person named it


def rank(work: Mapping[str, Work]) -> None:
    """One process of the run: a worker of Ray Train, which has opened the process group."""
    given = work["work"]
    desk, first = given.desk, ray.train.get_context().get_world_rank() == 0
    if given.folder.is_dir():
        os.chdir(given.folder)
    report: Reporter = AtDesk(desk) if first else Quiet()  # the first speaks for all
    again = first and ray.get(desk.begin.remote())
    if ray.get(desk.is_over.remote()):
        return

    def stopping() -> bool:
        return bool(ray.get(desk.stopping.remote()))

    try:
        with needs("msgrpo train", "train"):  # here, since the run's other processes need no model library
            from msgrpo.train.loop import Cluster, train

        fleet = OnRay(given.hosts, report, stopping) if given.hosts else None
        cluster = Cluster(fleet, stopping, again, given.address)
        with cut_off_ends(desk):
            summary = train(
                given.config, given.out, resume=given.resume or again, report=report, logs=given.logs, cluster=cluster
            )
    except KeyboardInterrupt:
        outcome = RunEnd()
    except (LostPeerError, NoServerError) as error:
        if ray.get(desk.is_over.remote()):  # another rank has told why
            return
        desk.fault.remote(error.message)
        raise
    except MsgrpoError as error:
        outcome = RunEnd(error=error.message, fix=error.fix, saved=first)
    except BaseException as error:
        desk.fault.remote(f"{type(error).__name__}: {error}"[:500])
        raise
    else:
        outcome = RunEnd(summary)
    if first or outcome.error:
        ray.get(desk.end.remote(outcome))
    if outcome.error and not first:  # this process lives on, and the first would wait for it instead of saving
        peers.close(peers.connections().keys() - _before)  # of later groups, too


@contextmanager
def cut_off_ends(desk: Any) -> Iterator[None]:
    """End this process where nothing is heard of the command for SILENT_S: its node is cut off from the cluster.

    Nobody else can end it then. It would wait for the other ranks and keep the lock of the run's folder, which those
    who begin again need.
    """
    over = threading.Event()

    def watch() -> None:
        heard = time.monotonic()
        while not over.wait(peers.SILENT_S / 8):
            with suppress(ray.exceptions.RayError):
                ray.get(desk.is_over.remote(), timeout=peers.SILENT_S)
                heard = time.monotonic()
            if time.monotonic() - heard > peers.SILENT_S and not over.is_set():
                os._exit(1)

    threading.Thread(target=watch, name="msgrpo-cut-off", daemon=True).start()
    try:
        yield
    finally:
        over.set()


@dataclass
class OnNetwork(TorchConfig):  # type: ignore[misc]
    """Ray Train's process group, over the network by which the nodes know each other; the desk counts its starts."""

    desk: Any = None

    @property
    def backend_cls(self) -> type:
        usual = super().backend_cls

        class Backend(usual):  # type: ignore[valid-type, misc]
            def on_start(self, worker_group: Any, backend_config: Any) -> None:
                ray.get(backend_config.desk.start.remote())
                worker_group.execute(_before_meeting)
                super().on_start(worker_group, backend_config)

        return Backend


_before: set[peers.Connection] = set()  # this process's connections before the ranks have met


def _before_meeting() -> None:
    peers.use_network_of(ray.util.get_node_ip_address())
    _before.update(peers.connections())


def train_on_ray(
    config: TrainConfig, out: Path, address: str, *, resume: bool, report: Reporter, logs: Sequence[str] = ()
) -> dict[str, Any]:
    """Run on the cluster at `address` (`auto`: the one of this machine, else a new one) and return the summary.

    Raises what `train` raises; KeyboardInterrupt once all is saved and ended. Nothing of the run is left on the
    cluster, however it ends.
    """
    if config.vllm is not None and not config.servers:
        raise UsageError(
            "rollouts=vllm starts a server beside the first trainer, whose end Ray would not let it notice",
            fix="--rollouts 'vllm(servers=1)': servers that Ray places; or --rollouts hf",
        )
    check_folder(out, config, resume, address, logs)
    report.doing("waiting for Ray")
    with connected(address) as is_ours:
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        if not gpus:
            report.note("the cluster has no GPU now: the run computes on processors")
        lack = missing(config, gpus=gpus)
        if lack and is_ours:
            raise UsageError(
                f"this machine has too little for the run: {lack}",
                fix="fewer --set trainers=…, or of 'vllm(servers=…)', or --ray ADDRESS of a larger cluster",
            )
        check_key(config)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        desk = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote()
        hosts = start_hosts(config.servers, request(config, gpus=gpus), gpus=gpus) if config.servers else []
        scratch = Path(tempfile.mkdtemp(prefix="msgrpo-ray-"))
        work = Work(config, out.resolve(), resume, logs, Path.cwd(), scratch, desk, hosts, address)
        try:
            return _followed(Fit(work, gpus=gpus), work, report, gpus=gpus)
        except ray.exceptions.RayError as error:  # the desk's or the head's process is gone, or stands still
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            raise RunError(
                f"the Ray cluster is lost: {f'no answer within {DESK_S:.0f} s' if late else first_line(error)}",
                fix=f"what was saved is kept; {how_to_go_on(out, address, logs)}",
            ) from error
        finally:
            if hosts:
                stop_hosts(hosts)
            shutil.rmtree(work.scratch, ignore_errors=True)


class Fit:
    """Ray Train at work, in a thread of its own."""

    def __init__(self, work: Work, *, gpus: bool) -> None:
        few, many = work.config.trainers_range
        if few == many:  # else Ray Train tries with another number of them after a minute
            os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(PLACES_S))
        self._trainer = TorchTrainer(
            rank,
            train_loop_config={"work": work},
            torch_config=OnNetwork("cpu:gloo,cuda:nccl" if gpus else "gloo", desk=work.desk),
            scaling_config=ScalingConfig(num_workers=many if few == many else (few, many), use_gpu=gpus),
            run_config=RunConfig(
                name="train",
                storage_path=str(work.scratch),
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=STARTS),  # the desk counts
            ),
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:  # told by `_followed`
            self.error = error


def _followed(fit: Fit, work: Work, report: Reporter, *, gpus: bool) -> dict[str, Any]:
    """Show what the ranks report until the run has ended."""
    passed_on, looked, lacked = False, 0.0, ""

    def tell(method: str, *given: Any) -> None:
        with suppress(OSError):  # nobody may read any more, and the ranks still have to save
            getattr(report, method)(*given)

    told = "stopping: this update is done and saved; Ctrl-C once more stops without saving"
    with stop_requests(lambda: report.note(told)) as stop:
        while True:
            running = fit.thread.is_alive()
            reports, outcome, begun = ray.get(work.desk.fetch.remote(), timeout=DESK_S)
            for method, given in reports:
                tell(method, *given)
            if outcome is not None:
                break
            if not running:
                raise RunError(
                    f"Ray Train has ended the run: {_reason(fit.error) if fit.error else 'no reason'}",
                    fix=how_to_go_on(work.out, work.address, work.logs),
                )
            if not begun and stop.asked is not None:
                raise KeyboardInterrupt  # nobody is there who could save anything
            if time.monotonic() - looked > MISSING_S:
                looked = time.monotonic()
                before, lacked = lacked, missing(work.config, gpus=gpus)
                if lacked:
                    tell("doing" if lacked == before else "note", f"waiting: {lacked}")
                elif not begun:
                    free = ray.available_resources()
                    has = f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU"
                    tell("doing", f"waiting for the trainers; free now: {has}")
            if stop.asked is not None and not passed_on:
                work.desk.stop.remote()
                passed_on = True
            time.sleep(POLL_S)
    if not outcome.saved:  # then the others may wait for it without end
        fit.thread.join(END_S)
    if outcome.error:
        tell("note", how_to_go_on(work.out, work.address, work.logs))
        raise RunError(outcome.error, fix=outcome.fix)
    if outcome.summary is None:
        raise KeyboardInterrupt
    summary: dict[str, Any] = outcome.summary
    return summary


def _reason(error: BaseException) -> str:
    """What Ray Train says, without what it wraps it in."""
    error = getattr(error, "controller_failure", error)
    return first_line(getattr(error, "cause", error))


def missing(config: TrainConfig, *, gpus: bool) -> str:
    """What the cluster lacks for this run; empty where it has all of it."""
    few, _ = config.trainers_range
    parallel = 1 if config.vllm is None else config.vllm.tensor_parallel
    wanted = {"CPU": few + config.servers, "GPU": few + config.servers * parallel if gpus else 0}
    there = ray.cluster_resources()
    lacks = [
        f"the run needs {number} {name}, the cluster has {there.get(name, 0):g}"
        for name, number in wanted.items()
        if there.get(name, 0) < number
    ]
    largest = max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if gpus and config.servers and largest < parallel:
        lacks.append(f"a server needs {parallel} GPU of one node, the largest has {largest:g}")
    return "; ".join(lacks)


def check_key(config: TrainConfig) -> None:
    """Raise UsageError where servers would be reached from other nodes without a key."""
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if config.servers and len(addresses) > 1 and not os.environ.get(KEY_VARIABLE):
        raise UsageError(
            f"the cluster has {len(addresses)} machines: servers that others reach need a key",
            fix=f"set {KEY_VARIABLE} here, and on every node before its `ray start`",
        )


def request(config: TrainConfig, *, gpus: bool) -> Request:
    """What each server serves."""
    vllm = config.vllm
    assert vllm is not None
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if gpus and config.base != NANO else "float32"
    return Request(
        base=config.base,
        runtime_rank=config.lora_rank,
        max_model_len=vllm.max_model_len,
        gpu_share=vllm.gpu_share if "gpu_share" in vllm.model_fields_set else None,  # it shares with nobody
        tensor_parallel_size=vllm.tensor_parallel,
        dtype=dtype,
        extra=("--distributed-executor-backend", "mp") if vllm.tensor_parallel > 1 else (),
    )
