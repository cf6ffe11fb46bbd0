"""AAW sampling (G′ = G/4) against all episodes and against a uniform quarter: what is reached, and how fast.

    python benchmarks/selection.py --seeds 5 --result benchmarks/results/selection.json

All three have the same rollouts (8 groups of 24 an update) and number of updates; the update of `all` sees four
times the turns. The runs of a seed come one after the other, so that whatever else the machine does meets all three.
Reported: success on the evaluation starts after the same updates, seconds of training, and success at the
same wall time (that of the fastest), interpolated between evaluations.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts
from seeds import run_seed

from evals.stats import bootstrap_mean
from train.metrics import read

VARIANTS = ("aaw", "uniform", "all")
SETTINGS = ("groups=8", "keep=6", "eval_every=5")


def curve(run: Path, score: str) -> tuple[list[float], list[float]]:
    """Seconds of training and the score, at each evaluation."""
    rows = read(run)
    seconds = {0: 0.0} | {row["step"]: row["seconds"] for row in rows if row["kind"] == "train"}
    found = [(seconds[row["step"]], row[score]) for row in rows if row["kind"] == "eval"]
    return [x for x, _ in found], [y for _, y in found]


def spread(values: list[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "interval": bootstrap_mean(values, seed=0), "values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/selection"))
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    jobs = [(variant, seed) for seed in range(given.seeds) for variant in VARIANTS]

    def run_one(job: tuple[str, int]) -> tuple[list[float], list[float]]:
        variant, seed = job
        out, settings = given.out / variant / f"seed-{seed}", [f"selection={variant}", *SETTINGS]
        return curve(out, run_seed(out, given.scenario, seed, given.steps, settings)["score"])

    with ThreadPoolExecutor(given.workers) as pool:
        found_of = dict(zip(jobs, pool.map(run_one, jobs), strict=True))
    curves = {variant: [found_of[variant, seed] for seed in range(given.seeds)] for variant in VARIANTS}
    same_time = min(xs[-1] for found in curves.values() for xs, _ in found)
    result: dict[str, Any] = {"machine": facts(), "seconds_compared": same_time}
    for variant, found in curves.items():
        result[variant] = {
            "after_same_updates": spread([ys[-1] for _, ys in found]),
            "at_same_seconds": spread([float(np.interp(same_time, xs, ys)) for xs, ys in found]),
            "seconds": spread([xs[-1] for xs, _ in found]),
            "gain_per_second": spread([(ys[-1] - ys[0]) / xs[-1] for xs, ys in found]),
        }
        print(variant, *(f"{k} {v['mean']:.4f}" for k, v in result[variant].items()), sep="  ")
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
