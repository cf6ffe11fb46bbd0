"""What a pulled cable and a slow node cost a run, between network namespaces that stand for machines.

    sudo .venv/bin/python benchmarks/cluster_cable.py runs/cable --result benchmarks/results/cluster-cable.json

Four namespaces with an address of their own are joined by a bridge; `ray start` runs in each, one CPU a node, the
head without one. nano trains with two ranks on two of the nodes, by the settings of `cluster_faults.py`. `cable`
pulls the cable of the second rank's node after the third saved update, `first-cable` that of the first rank's, and
`slow` gives the second rank a tenth of the time. `torchrun-cable` is `torchrun` in two namespaces without Ray. It
needs root and the command `ip`. The disk is one: what a network file system does without its network is not seen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from cluster_faults import HURT_AFTER, SETTINGS, figures, pace_of, saved, title, wait_for
from machine import options, write

NODES = 4
NET = "10.77.0.1"  # and the number of the node
PORT = 6399
SYSTEM = {  # as in examples/cluster/train.sbatch: a silent node is given up after some 17 s
    "health_check_period_ms": 2000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
}
BIN = Path(sys.executable).parent
RANK = "RayTrainWorker"
GONE = "nothing has been heard of process"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--faults", default="none,cable,first-cable,slow,torchrun-cable")
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: sudo")
    given.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is started is ended then, too
    rows: list[dict[str, Any]] = []
    for fault in given.faults.split(","):
        with machines(), ending() as started:
            row = by_torchrun(given.work / fault, started) if fault.startswith("torchrun") else by_ray(
                fault, given.work / fault, started
            )  # fmt: skip
        rows.append({"fault": fault} | row)
        print(json.dumps(rows[-1]), flush=True)
        if given.result is not None:
            whole = next((row["adapter"] for row in rows if row["fault"] == "none"), None)
            for row in rows:
                row["same bytes"] = row["adapter"] == whole if whole and row.get("adapter") else None
            write(given.result, {"settings": SETTINGS, "faults": rows})


@contextmanager
def machines() -> Iterator[None]:
    """Namespaces mr0 to mr3 on a bridge, which are gone afterwards."""
    _ip("link add mrbr type bridge", "addr add 10.77.0.1/24 dev mrbr", "link set mrbr up")
    try:
        for i in range(NODES):
            _ip(
                f"netns add mr{i}",
                f"link add mrv{i} type veth peer name eth0 netns mr{i}",
                f"link set mrv{i} master mrbr up",
                f"-n mr{i} addr add {NET}{i}/24 dev eth0",
                f"-n mr{i} link set eth0 up",
                f"-n mr{i} link set lo up",
            )
        yield
    finally:
        for i in range(NODES):
            _ip(f"link del mrv{i}", f"netns del mr{i}", check=False)
        _ip("link del mrbr", check=False)


def _ip(*commands: str, check: bool = True) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=check, stderr=None if check else subprocess.DEVNULL)


@contextmanager
def ending() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What is started and put into this list is ended, with all that it has started."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        below = [one for process in started for one in _below(process.pid)]
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            for one in below:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
            psutil.wait_procs(below, timeout=5 if number == signal.SIGTERM else 0.1)


def _below(pid: int) -> list[psutil.Process]:
    """A process and its session: what a raylet leaves behind is nobody's child."""
    return [one for one in psutil.process_iter() if _session(one.pid) == pid]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def run_in(node: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # whatever token Ray has written here
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }
    with log.open("ab") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", f"mr{node}", *command],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ray_node(node: int, work: Path) -> subprocess.Popen[bytes]:
    """A raylet; they begin one after the other, since those of one session race for its sockets."""
    log = work.with_name(f"{work.name}-node-{node}.log")
    log.unlink(missing_ok=True)
    head = [
        "--head",
        f"--port={PORT}",
        f"--system-config={json.dumps(SYSTEM)}",
        "--num-cpus=0",
        "--include-dashboard=false",
    ]
    command = ["ray", "start", f"--node-ip-address={NET}{node}", "--object-store-memory=80000000", "--block"]
    command += ["--disable-usage-stats", *(head if node == 0 else [f"--address={NET}0:{PORT}", "--num-cpus=1"])]
    started = run_in(node, command, log)
    wait_for(lambda: "Ray runtime started" in log.read_text(errors="replace") or started.poll() is not None)
    time.sleep(2)
    return started


def by_ray(fault: str, out: Path, started: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """One run on the cluster, with one fault; seconds are from the fault to the next saved update."""
    started += [ray_node(node, out) for node in range(NODES)]
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "msgrpo.cli", "train", "--ray", f"{NET}0:{PORT}", "--out", str(out), *sets]
    driver = run_in(0, command, out.with_suffix(".log"))
    started.append(driver)
    pace, at, hurt = pace_of(driver, out), saved(out), time.monotonic()
    over = threading.Event()
    if fault in ("cable", "first-cable"):
        rank = ranks(out)[0 if fault == "first-cable" else 1]
        _ip(f"link set mrv{node_of(rank.pid)} down")
    elif fault == "slow":
        threading.Thread(target=_slow, args=(ranks(out)[1], over), daemon=True).start()
    wait_for(lambda: saved(out) > at or driver.poll() is not None)
    seconds = time.monotonic() - hurt
    wait_for(lambda: driver.poll() is not None)
    over.set()
    return figures(out, seconds, pace, driver.returncode)


def ranks(out: Path) -> list[psutil.Process]:
    """The workers of Ray Train; the first rank is the one that holds files of the run."""
    found = [process for process in psutil.process_iter() if RANK in title(process)]
    return sorted(found, key=lambda one: not any(str(out) in file.path for file in one.open_files()))


def node_of(pid: int) -> int:
    """The namespace of a process."""
    its = os.stat(f"/proc/{pid}/ns/net").st_ino
    return next((i for i in range(NODES) if os.stat(f"/run/netns/mr{i}").st_ino == its), NODES)


def _slow(process: psutil.Process, over: threading.Event) -> None:
    """A tenth of the time: it runs for 0.1 s and stands for 0.9 s."""
    with suppress(psutil.NoSuchProcess):
        while not over.is_set():
            process.suspend()
            time.sleep(0.9)
            process.resume()
            time.sleep(0.1)


def by_torchrun(out: Path, started: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Two ranks without Ray: how long until both have said what has happened, which is when they end."""
    sets = [part for setting in SETTINGS if "trainers" not in setting for part in ("--set", setting)]
    logs = [out.with_name(f"{out.name}-{i}.log") for i in (1, 2)]
    for i, log in zip((1, 2), logs, strict=True):
        command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
        command += [f"{NET}1:29400", "--rdzv-conf", f"is_host={int(i == 1)}", "--local-addr", f"{NET}{i}"]
        command += ["-m", "msgrpo.cli", "train", "--out", str(out), *sets, "--steps", "60"]
        started.append(run_in(i, command, log))
    wait_for(lambda: saved(out) >= HURT_AFTER or any(one.poll() is not None for one in started))
    hurt = time.monotonic()
    _ip("link set mrv2 down")
    wait_for(lambda: all(GONE in log.read_text(errors="replace") for log in logs))
    return {
        "seconds until both ranks had said so": round(time.monotonic() - hurt, 1),
        "said": [line for log in logs for line in log.read_text(errors="replace").splitlines() if GONE in line],
        "updates": saved(out),
    }


if __name__ == "__main__":
    main()
