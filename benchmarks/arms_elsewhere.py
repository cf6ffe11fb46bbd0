"""What the arms of a study reach on scenarios that they were not tested on, over all their seeds.

    msgrpo eval runs' adapters --scenario A --scenario B --episodes 100 --out runs/elsewhere
    python benchmarks/arms_elsewhere.py runs/elsewhere --first one --result FILE.json

The records' agents are named adapter:…/ARM/seed-N. For each scenario: the mean score of each arm with its 95 %
interval over seeds and starts (Student's quantiles, as for a study), and the difference from the first arm.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import options, write

from msgrpo.episode import read_episodes
from msgrpo.evals.stats import few_seeds_interval


def scores(records: Sequence[Path]) -> dict[str, dict[str, np.ndarray]]:
    """[scenario][arm]: a row for each training seed, a column for each start."""
    rows: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for file in sorted(file for folder in records for file in folder.glob("*/*.jsonl")):
        episodes = sorted(read_episodes(file), key=lambda episode: (episode.start_seed, episode.chance_seed))
        (spec,) = {spec for episode in episodes for spec in episode.agents.values()}
        if (form := re.search(r"([^/]+)/seed-(\d+)$", spec)) is not None:
            rows[episodes[0].scenario][form[1]][int(form[2])] = [episode.score for episode in episodes]
    return {
        scenario: {arm: np.array([of_arm[seed] for seed in sorted(of_arm)]) for arm, of_arm in arms.items()}
        for scenario, arms in rows.items()
    }


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("records", nargs="+", type=Path, help="the --out of msgrpo eval")
    parser.add_argument("--first", required=True, help="the arm from which the others differ")
    given = parser.parse_args()
    result: dict[str, Any] = {"scenarios": {}}
    for scenario, arms in scores(given.records).items():
        of_arms: dict[str, Any] = {}
        for arm, values_SN in arms.items():
            of_arms[arm] = {
                "mean": values_SN.mean(),
                "interval": few_seeds_interval(values_SN),
                "by_seed": values_SN.mean(axis=1).tolist(),
            }
            if arm != given.first:
                differences = values_SN - arms[given.first]
                of_arms[arm] |= {
                    "difference": differences.mean(),
                    "difference_interval": few_seeds_interval(differences),
                }
        result["scenarios"][scenario] = of_arms
        print(scenario, json.dumps(of_arms))
    write(given.result, result)


if __name__ == "__main__":
    main()
