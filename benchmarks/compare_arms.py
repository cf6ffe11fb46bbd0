"""Compare two arms of a study that is in `results/`, over the same seeds and the same starts.

    python benchmarks/compare_arms.py benchmarks/results/lab-credit-snake.json critic to-go

Prints the mean difference of the test scores and its 95 % interval (bootstrap over seeds and starts). The second file
may be another one, if both studies have the same seeds and starts: `... FILE ARM OTHER --other-file FILE2`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from msgrpo.evals.stats import crossed_bootstrap


def values(file: Path, arm: str) -> np.ndarray:
    """The test scores of an arm, one row a training seed and one column a start."""
    return np.array(json.loads(file.read_text())["arms"][arm]["values"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("arm")
    parser.add_argument("other")
    parser.add_argument("--other-file", type=Path)
    given = parser.parse_args()
    differences = values(given.file, given.arm) - values(given.other_file or given.file, given.other)
    low, high = crossed_bootstrap(differences.tolist(), seed=0)
    print(f"{given.arm} - {given.other}: {differences.mean():+.3f} [{low:+.3f}, {high:+.3f}]")
