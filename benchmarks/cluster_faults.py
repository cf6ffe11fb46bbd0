"""What a lost process or node costs a run on a Ray cluster, and whether it ends with the same bytes.

    python benchmarks/cluster_faults.py runs/cluster-faults --result benchmarks/results/cluster-faults.json

One machine stands for several: each raylet is a node with one CPU. nano trains with two ranks; after the third saved
update something is killed. Seconds are from the fault to the next update that is saved, so they depend on how busy
the machine is: the undisturbed run's seconds an update stand beside them. For the faults of servers vLLM plays the
rollouts, one server on a node of its own; its sampling depends on which turns meet in a batch, so there are no bytes
to compare.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from machine import options, write

SETTINGS = [
    "minibatches=2", "groups=4", "group_size=6", "select=aaw(keep=3)", "evaluation=5(every=100)",
    "checkpoint_every=1", "steps=8", "trainers=2",
]  # fmt: skip
HURT_AFTER = 3  # saved updates
PATIENCE_S = 900.0


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    from ray.cluster_utils import Cluster

    be_patient()
    small = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    nodes: list[Any] = []
    rows: list[dict[str, Any]] = []
    try:
        for fault in given.faults.split(","):
            while sum(node.any_processes_alive() for node in nodes) < 3:
                nodes.append(cluster.add_node(num_cpus=1, object_store_memory=small["object_store_memory"]))
            rows.append(measured(fault, given.work / fault, cluster.address))
            print(json.dumps(rows[-1]), flush=True)
            if given.result is not None:
                undisturbed = next((row["adapter"] for row in rows if row["fault"] == "none"), None)
                for row in rows:
                    row["same bytes"] = None if row["fault"] in SERVED else row["adapter"] == undisturbed
                write(given.result, {"settings": SETTINGS, "faults": rows})
    finally:
        cluster.shutdown()


def be_patient() -> None:
    """Let a raylet take minutes to begin: Ray gives it 30 s, too few on a machine with much other work."""
    from ray._private import services

    usual = services.get_node

    def get_node(*given: Any) -> Any:
        deadline = time.monotonic() + 300
        while True:
            try:
                return usual(*given)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    services.get_node = get_node


def measured(fault: str, out: Path, address: str) -> dict[str, Any]:
    """One run with one fault."""
    driver = start(out, address, *(("--rollouts", "vllm(servers=1)") if fault in SERVED else ()))
    pace, at, hurt = pace_of(driver, out), saved(out), time.monotonic()
    again = FAULTS[fault](driver, out, address)
    wait_for(lambda: saved(out) > at or again.poll() is not None)
    seconds = time.monotonic() - hurt
    status = again.wait(PATIENCE_S)
    left = len([*workers(), *workers("ray::_Host"), *workers("EngineCore")])
    return {"fault": fault, **figures(out, seconds, pace, status), "processes left": left}


def pace_of(driver: subprocess.Popen[bytes], out: Path) -> float:
    """Seconds an update, of those that are saved before the run is hurt."""
    wait_for(lambda: saved(out) >= 1 or driver.poll() is not None)
    first, began = saved(out), time.monotonic()
    wait_for(lambda: saved(out) >= HURT_AFTER or driver.poll() is not None)
    return (time.monotonic() - began) / max(saved(out) - first, 1)


def figures(out: Path, seconds: float, pace: float, status: int) -> dict[str, Any]:
    """What a run that was hurt came to."""
    return {
        "seconds to the next update": round(seconds, 1),
        "seconds an update": round(pace, 1),
        "exit status": status,
        "updates": saved(out),
        "adapter": hashlib.sha256((out / "adapter_model.safetensors").read_bytes()).hexdigest()[:16],
    }


def start(out: Path, address: str, *more: str) -> subprocess.Popen[bytes]:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "msgrpo.cli", "train", "--ray", address, "--out", str(out), *settings, *more]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def saved(out: Path) -> int:
    """The newest update that is in a checkpoint."""
    steps = [path.name.removeprefix("step-") for path in (out / "checkpoints").glob("step-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("nothing has happened for a quarter of an hour")
        time.sleep(0.1)


def workers(name: str = "RayTrainWorker") -> list[psutil.Process]:
    """The processes below the raylets that call themselves so: Ray Train's ranks, without a name."""
    return [process for process in psutil.Process().children(recursive=True) if name in title(process)]


def title(process: psutil.Process) -> str:
    """How it calls itself; nothing once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def nothing(driver: subprocess.Popen[bytes], out: Path, address: str) -> subprocess.Popen[bytes]:
    return driver


def rank(driver: subprocess.Popen[bytes], out: Path, address: str) -> subprocess.Popen[bytes]:
    workers()[-1].kill()
    return driver


def node(driver: subprocess.Popen[bytes], out: Path, address: str) -> subprocess.Popen[bytes]:
    """A raylet, and so its worker with it: a node that is switched off."""
    worker = workers()[-1]
    raylet = worker.parent()
    assert raylet is not None
    raylet.kill()
    worker.kill()
    return driver


def driver_killed(driver: subprocess.Popen[bytes], out: Path, address: str) -> subprocess.Popen[bytes]:
    """The command is killed, and started again with --resume once nothing of it runs."""
    driver.kill()
    driver.wait()
    wait_for(lambda: not workers())
    return start(out, address, "--resume")


def stopped(driver: subprocess.Popen[bytes], out: Path, address: str) -> subprocess.Popen[bytes]:
    """Ctrl-C: all is saved, nothing is left, and --resume goes on."""
    driver.send_signal(signal.SIGINT)
    driver.wait(PATIENCE_S)
    wait_for(lambda: not workers())
    return start(out, address, "--resume")


def host(driver: subprocess.Popen[bytes], out: Path, address: str) -> subprocess.Popen[bytes]:
    """The actor of the only server."""
    workers("ray::_Host")[-1].kill()
    return driver


def vllm(driver: subprocess.Popen[bytes], out: Path, address: str) -> subprocess.Popen[bytes]:
    """The engine of the only server."""
    workers("EngineCore")[-1].kill()
    return driver


FAULTS = {
    "none": nothing,
    "rank": rank,
    "node": node,
    "driver": driver_killed,
    "ctrl-c": stopped,
    "vllm": vllm,
    "host": host,
}
SERVED = ("vllm", "host")


if __name__ == "__main__":
    main()
