"""What training brought: a study's adapters against the model that they began from, on the same test starts.

    msgrpo eval nano --scenario frozen-lake-slippery --episodes 200 --max-tokens 48 --out runs/eval-slip200
    python benchmarks/gain_over_base.py benchmarks/results/lab-frozen-lake-slippery.json critic \\
        runs/eval-slip200/nano/frozen-lake-slippery.jsonl

The file is the report of a study that measures success, the arm one of it, the record that of the untrained model.
Prints the mean difference of success with its 95 % interval (over seeds and starts, `crossed_interval`) as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from compare_arms import arm_values
from machine import facts

from msgrpo.episode import read_episodes
from msgrpo.evals.stats import crossed_interval
from msgrpo.evals.suites import episode_seeds
from msgrpo.games import recorded_scenario


def success_in_suite_order(record: Path) -> np.ndarray:
    """Success of the record's episodes, in the order in which the suite plays their starts."""
    episodes = {(episode.start_seed, episode.chance_seed): episode for episode in read_episodes(record)}
    scenario = recorded_scenario(next(iter(episodes.values())).scenario)
    in_order = [episodes[seeds.start, seeds.chance] for seeds in episode_seeds(scenario, len(episodes))]
    return np.array([episode.success for episode in in_order], dtype=float)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("arm")
    parser.add_argument("record", type=Path)
    given = parser.parse_args()
    gains = arm_values(given.file, given.arm) - success_in_suite_order(given.record)
    result = {
        "machine": facts(),
        "mean": gains.mean(),
        "interval": crossed_interval(gains.tolist(), seed=0),
        "seeds": len(gains),
    }
    print(json.dumps(result, indent=2))
