"""What training brought: a study's adapters against the model that they began from, on the same test starts.

    python benchmarks/gain_over_base.py runs/eval-slip200/nano runs/lab/frozen-lake-slippery/critic

The first folder holds the records of the untrained model, the second one arm of a study of `msgrpo lab`. Prints the mean
difference of success and its 95 % interval (bootstrap over seeds and starts).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from msgrpo.evals.stats import crossed_bootstrap


def success_by_start(folder: Path) -> np.ndarray:
    """Success of each episode of the only record below this folder, in the order of the start seeds."""
    (record,) = folder.rglob("*.jsonl")
    episodes = [json.loads(line) for line in record.read_text().splitlines()]
    return np.array([episode["success"] for episode in sorted(episodes, key=lambda e: e["start_seed"])], dtype=float)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("arm", type=Path)
    given = parser.parse_args()
    base = success_by_start(given.base)
    gains = [success_by_start(folder / "test") - base for folder in sorted(given.arm.glob("seed-*"))]
    low, high = crossed_bootstrap([gain.tolist() for gain in gains], seed=0)
    print(f"{np.mean(gains):+.3f} [{low:+.3f}, {high:+.3f}] over {len(gains)} seeds")
