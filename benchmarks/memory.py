"""Memory and time of an evaluation, and of a table made from its record, for any number of episodes.

python benchmarks/memory.py --episodes 10000 --episodes 100000 --result benchmarks/results/memory-episodes.json

`random` plays frozen-lake, so nothing is waited for and no model is in memory: what is measured is our own. Each
command runs in a process of its own; its peak resident memory is what the kernel says when it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from machine import write


def measured(command: list[str]) -> dict[str, Any]:
    """Peak resident memory (MiB), wall and processor seconds of one command. Raises RuntimeError where it fails."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {said.decode()[-2000:]}")
    return {
        "peak_mib": round(used.ru_maxrss / 1024),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
    }


def main(
    result: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")],
    episodes: Annotated[list[int] | None, typer.Option(help="How many; repeat for several.")] = None,
) -> None:
    """Measure each number of episodes in turn, and write what is there after each."""
    msgrpo = str(Path(sys.executable).parent / "msgrpo")
    found: dict[str, Any] = {}
    for number in episodes or [10_000]:
        with tempfile.TemporaryDirectory() as folder:
            play = ["eval", "random", "--scenario", "frozen-lake", "--episodes", str(number), "--out", folder]
            evaluated = measured([msgrpo, *play])
            record = sum(file.stat().st_size for file in Path(folder).rglob("*.jsonl"))
            tabled = measured([msgrpo, "leaderboard", folder, "--out", f"{folder}/table"])
        found[str(number)] = {"record_mib": round(record / 2**20), "eval": evaluated, "leaderboard": tabled}
        write(result, {"episodes": found})
        print(number, json.dumps(found[str(number)]))


if __name__ == "__main__":
    typer.run(main)
