"""Do intervals hold what they promise? Simulated experiments whose truth is known.

    python benchmarks/coverage.py --result benchmarks/results/coverage.json

Of intervals that say 95 %, about 95 % should hold the truth. *Over seeds*: S training seeds, all evaluated on the
same n starts. An episode succeeds with a logit of 0.5 + start (standard deviation 1.5) + seed (0, 0.4 or 1.0); the
truth is the mean over all starts and seeds. *A mean*: n values of a skewed distribution, of five returns as Snake's,
and of paired differences of success. Beside each stands the percentile bootstrap, crossed where there are seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import options, write
from numpy.typing import NDArray

from msgrpo.evals.stats import bootstrap_mean, crossed_bootstrap, crossed_interval, resampled_means

Values = NDArray[np.float64]
RESAMPLES = 1000
RETURNS, CHANCES = np.array([-1.0, 0.0, 1.0, 2.0, 3.0]), np.array([0.45, 0.25, 0.15, 0.1, 0.05])


def over_seeds(seeds: int, starts: int, spread: float, experiments: int) -> dict[str, Any]:
    generator = np.random.default_rng([seeds, starts, int(10 * spread)])
    far = generator.normal(0, math.hypot(1.5, spread), 2_000_000)
    truth = float((1 / (1 + np.exp(-(0.5 + far)))).mean())
    hits, widths = [0, 0], [0.0, 0.0]
    for number in range(experiments):
        logits = 0.5 + generator.normal(0, 1.5, starts) + generator.normal(0, spread, (seeds, 1))
        values = list((generator.random((seeds, starts)) < 1 / (1 + np.exp(-logits))).astype(float))
        for i, interval in enumerate((crossed_interval, crossed_bootstrap)):
            low, high = interval(values, seed=number, resamples=RESAMPLES)
            hits[i] += low <= truth <= high
            widths[i] += high - low
    return {
        "seeds": seeds,
        "starts": starts,
        "sd of a seed's logit": spread,
        "now": hits[0] / experiments,
        "before": hits[1] / experiments,
        "width now": widths[0] / experiments,
        "width before": widths[1] / experiments,
    }


def of_a_mean(name: str, draw: Callable[[int], Values], truth: float, n: int, experiments: int) -> dict[str, Any]:
    hits = [0, 0]
    for number in range(experiments):
        values = draw(n)
        old = np.quantile(resampled_means(values[None], seed=number, resamples=RESAMPLES), [0.025, 0.975])
        for i, (low, high) in enumerate((bootstrap_mean(values, seed=number, resamples=RESAMPLES), tuple(old))):
            hits[i] += bool(low <= truth <= high)
    return {"values": name, "n": n, "now": hits[0] / experiments, "before": hits[1] / experiments}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--result", type=Path)
    chosen = parser.parse_args()
    generator = np.random.default_rng(0)
    draws: dict[str, tuple[Callable[[int], Values], float]] = {
        "exponential": (lambda n: generator.exponential(1, n), 1.0),
        "returns as Snake's": (lambda n: generator.choice(RETURNS, n, p=CHANCES), float(RETURNS @ CHANCES)),
        "differences of success": (lambda n: generator.choice([-1.0, 0.0, 1.0], n, p=[0.1, 0.7, 0.2]), 0.1),
    }
    found = {
        "command": "python benchmarks/coverage.py --result benchmarks/results/coverage.json",
        "experiments": chosen.experiments,
        "over seeds": [
            over_seeds(seeds, 200, spread, chosen.experiments)
            for seeds in (2, 3, 4, 5, 8)
            for spread in (0.0, 0.4, 1.0)
        ],
        "a mean": [
            of_a_mean(name, draw, truth, n, chosen.experiments)
            for name, (draw, truth) in draws.items()
            for n in (20, 50, 200)
        ],
    }
    for row in [*found["over seeds"], *found["a mean"]]:  # type: ignore[misc]
        print(
            "  ".join(
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if chosen.result:
        write(chosen.result, found)


if __name__ == "__main__":
    main()
