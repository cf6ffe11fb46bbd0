"""Compare two arms of a study that is in `results/`, over the same seeds and the same starts.

    python benchmarks/compare_arms.py benchmarks/results/lab-credit-snake.json critic to-go
    python benchmarks/compare_arms.py benchmarks/results/lab-credit-snake.json critic lambda \\
        --other-file benchmarks/results/lab-credit-snake-rest.json

Prints the mean difference of the test scores with its 95 % interval (over seeds and starts, `crossed_interval`) as
JSON, and for each evaluation during training that of the validation scores (Student's interval over the seeds; the
starts are the same). The other arm may stand in another file if both studies have the same starts; compared are the
seeds that both have.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from machine import facts, options
from scipy import stats

from msgrpo.evals.stats import crossed_interval


def arm_values(file: Path, arm: str) -> np.ndarray:
    """The test scores of an arm, one row a training seed and one column a start."""
    return np.array(json.loads(file.read_text())["arms"][arm]["values"], dtype=float)


def validation_curves(file: Path, arm: str) -> list[dict[int, float]]:
    """The validation scores of an arm by update, one curve a training seed."""
    curves = json.loads(file.read_text())["arms"][arm]["curves"]
    return [dict(zip(map(int, curve["updates"]), curve["score"], strict=True)) for curve in curves]


def on_validation(own: list[dict[int, float]], other: list[dict[int, float]]) -> dict[int, dict[str, object]]:
    """The mean difference over seeds, and its interval, after each update at which both were evaluated."""
    found = {}
    for update in sorted((own[0].keys() & other[0].keys()) - {0}):
        differences = np.array([mine[update] - theirs[update] for mine, theirs in zip(own, other, strict=False)])
        half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
        mean = differences.mean()
        found[update] = {"mean": mean, "interval": (mean - half, mean + half)}
    return found


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("arm")
    parser.add_argument("other")
    parser.add_argument("--other-file", type=Path)
    given = parser.parse_args()
    other_file = given.other_file or given.file
    own, other = arm_values(given.file, given.arm), arm_values(other_file, given.other)
    seeds = min(len(own), len(other))
    differences = own[:seeds] - other[:seeds]
    result = {
        "machine": facts(),
        "difference": f"{given.arm} - {given.other}",
        "mean": differences.mean(),
        "interval": crossed_interval(differences.tolist(), seed=0),
        "seeds": seeds,
        "on validation starts, by update": on_validation(
            validation_curves(given.file, given.arm), validation_curves(other_file, given.other)
        ),
    }
    print(json.dumps(result, indent=2))
