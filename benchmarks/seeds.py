"""Train several seeds and say what training changes, over all of them: never the best seed.

    python benchmarks/seeds.py --scenario frozen-lake --seeds 8 --result benchmarks/results/frozen-lake.json

Each seed is one `msgrpo train` on one core, `--workers` of them at a time. Runs that are finished are not run
again. The interval over seeds draws seeds and starts, the starts once for all seeds (`crossed_bootstrap`);
the file keeps every episode's value, so that anybody can compute it again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import facts

from evals.stats import crossed_bootstrap
from train.metrics import read


def run_seed(out: Path, scenario: str, seed: int, steps: int | None, settings: list[str]) -> dict[str, Any]:
    """One `msgrpo train`, resumed if it was interrupted; its summary and the two evaluations' values."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "msgrpo_agent.cli", "train", scenario, "--out", str(out), "--seed", str(seed)]
    command += ["--resume", *(["--steps", str(steps)] if steps else [])]
    command += [part for setting in settings for part in ("--set", setting)]
    with Path(f"{out}.log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    evaluations = {row["step"]: row["values"] for row in read(out) if row["kind"] == "eval"}
    return summary | {"values": [evaluations[0], evaluations[summary["steps"]]]}


def run_seeds(
    out: Path, scenario: str, seeds: int, workers: int, steps: int | None, settings: list[str]
) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        return list(
            pool.map(lambda seed: run_seed(out / f"seed-{seed}", scenario, seed, steps, settings), range(seeds))
        )


def together(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, with intervals that draw the starts once for all seeds."""
    before, after = ([run["values"][side] for run in runs] for side in (0, 1))
    change = [[b - a for a, b in zip(*run["values"], strict=True)] for run in runs]
    return {
        name: {
            "mean": sum(sum(one) / len(one) for one in values) / len(values),
            "interval": crossed_bootstrap(values, seed=0),
        }
        for name, values in (("before", before), ("after", after), ("change", change))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", type=Path, help="default: runs/seeds-SCENARIO")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    out = given.out or Path("runs") / f"seeds-{given.scenario}"
    runs = run_seeds(out, given.scenario, given.seeds, given.workers, given.steps, given.settings)
    result = {"machine": facts(), "together": together(runs)}
    result["seeds"] = runs
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=2) + "\n")
    for run in runs:
        score = run["score"]
        low, high = run["change"]["low"], run["change"]["high"]
        print(
            f"seed {run['seed']}: {score} {run['before'][score]:.3f} → {run['after'][score]:.3f}, "
            f"change [{low:+.3f}, {high:+.3f}], {run['training_seconds']:.0f} s"
        )
    for name, found in result["together"].items():
        print(f"{name}: {found['mean']:.3f} [{found['interval'][0]:.3f}, {found['interval'][1]:.3f}]")


if __name__ == "__main__":
    main()
