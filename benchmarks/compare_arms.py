"""Compare two arms of a study that is in `results/`, over the same seeds and the same starts.

    python benchmarks/compare_arms.py benchmarks/results/lab-credit-snake.json critic to-go
    python benchmarks/compare_arms.py benchmarks/results/lab-credit-snake.json critic lambda \\
        --other-file benchmarks/results/lab-credit-snake-rest.json

Prints the mean difference of the test scores with its 95 % interval (over seeds and starts, `crossed_interval`) as
JSON. The other arm may stand in another file if both studies have the same starts; compared are the seeds that both
have.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from machine import facts, options

from msgrpo.evals.stats import crossed_interval


def arm_values(file: Path, arm: str) -> np.ndarray:
    """The test scores of an arm, one row a training seed and one column a start."""
    return np.array(json.loads(file.read_text())["arms"][arm]["values"], dtype=float)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("arm")
    parser.add_argument("other")
    parser.add_argument("--other-file", type=Path)
    given = parser.parse_args()
    own, other = arm_values(given.file, given.arm), arm_values(given.other_file or given.file, given.other)
    seeds = min(len(own), len(other))
    differences = own[:seeds] - other[:seeds]
    result = {
        "machine": facts(),
        "difference": f"{given.arm} - {given.other}",
        "mean": differences.mean(),
        "interval": crossed_interval(differences.tolist(), seed=0),
        "seeds": seeds,
    }
    print(json.dumps(result, indent=2))
