"""One update of nano alone and beside a busy loop on each core, with threads that sleep while they wait and as usual.

python benchmarks/beside.py --result benchmarks/results/beside-busy.json

msgrpo sets OMP_WAIT_POLICY=PASSIVE before torch is loaded, so that OpenMP's threads sleep while they wait for each
other; by default they spin, and hold the core that one of them needs. The update is that of `train/mini.py` with few
episodes, in a process of its own; the time is without imports, and the ways are measured in turn. An update that
takes longer than the limit is ended and counts as the limit. Whatever else runs on the machine makes `alone` slower:
the load average before each run is in the result.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import write

WAYS = {"passive": {"OMP_WAIT_POLICY": "PASSIVE"}, "default": {}}
SETTINGS = {"steps": 1, "groups": 2, "group_size": 4, "keep": 2, "minibatches": 1}
UPDATE = f"""
import time
import torch  # before msgrpo, which would say for the default way, too, how threads wait
from msgrpo.train.mini import Settings, learn

print("imported", flush=True)
began = time.perf_counter()
learn(Settings(**{SETTINGS}))
print(time.perf_counter() - began)
"""


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """For as long, so many processes compute without a pause."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measured(way: str, limit_s: float) -> tuple[float, bool]:
    """Seconds of the update, and whether it came to its end. Raises CalledProcessError where it fails."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, "-c", UPDATE]
    with subprocess.Popen(command, env=given | WAYS[way], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return limit_s, False
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return float(said.split()[-1]), True


def main(
    result: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")],
    runs: Annotated[int, typer.Option(min=1, help="Of each way, alone and beside.")] = 3,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds after which an update is ended.")] = 120.0,
) -> None:
    """Measure the four combinations in turn, and write what is there after each run."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, dict[str, Any]] = {}
    for _, place, way in product(range(runs), ("alone", "beside"), WAYS):
        load = os.getloadavg()[0]
        with busy(cores if place == "beside" else 0):
            seconds, ended = measured(way, limit_s)
        one = found.setdefault(f"{place}, {way}", {"median_s": 0.0, "seconds": [], "ended": [], "load_average": []})
        one["seconds"].append(round(seconds, 2))
        one["ended"].append(ended)
        one["load_average"].append(round(load, 1))
        one["median_s"] = statistics.median(one["seconds"])
        write(result, {"limit_s": limit_s, "settings": SETTINGS, "found": found})
        print(f"{place}, {way}: {seconds:.1f} s{'' if ended else ', not at its end'}, load {load:.1f} before")


if __name__ == "__main__":
    typer.run(main)
