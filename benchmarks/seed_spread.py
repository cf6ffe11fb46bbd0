"""How far training seeds lie apart, in every study that is in `results/`.

    python benchmarks/seed_spread.py

For each arm: the mean test score, the standard deviation over its seeds, and the permutation test's p that seeds of
equal quality would lie as far apart (`msgrpo.evals.stats.seeds_alike`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from machine import options

RESULTS = Path(__file__).parent / "results"

if __name__ == "__main__":
    options(__doc__).parse_args()
    for file in sorted(RESULTS.glob("lab-*.json")):
        for arm, scores in json.loads(file.read_text())["arms"].items():
            seeds = scores["by_seed"]
            spread = np.std(seeds, ddof=1) if len(seeds) > 1 else np.nan
            print(f"{file.stem} {arm}: mean {np.mean(seeds):.3f}, sd {spread:.3f}, p {scores['seeds_alike']:.4f}")
