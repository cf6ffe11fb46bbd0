"""What training brought: adapters of several seeds against the model that they began from, on the same test starts.

    msgrpo eval nano --scenario frozen-lake-slippery --episodes 200 --max-tokens 48 --out runs/eval-slip200
    python benchmarks/gain_over_base.py runs/eval-slip200/nano/frozen-lake-slippery.jsonl \\
        --study benchmarks/results/lab-frozen-lake-slippery.json critic

The record is that of the untrained model. The adapters are a study's, by its report and an arm of it, or those of the
records after `--records`, one a training seed. Measured is the score: success where the game has a goal, else the
return. Prints the mean difference with its 95 % interval (over seeds and starts, `crossed_interval`) as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from compare_arms import arm_values
from machine import facts, options

from msgrpo.episode import read_episodes
from msgrpo.evals.stats import crossed_interval
from msgrpo.evals.suites import episode_seeds
from msgrpo.games import recorded_scenario


def scores_in_suite_order(record: Path) -> np.ndarray:
    """The scores of the record's episodes, in the order in which the suite plays their starts."""
    episodes = {(episode.start_seed, episode.chance_seed): episode for episode in read_episodes(record)}
    scenario = recorded_scenario(next(iter(episodes.values())).scenario)
    in_order = [episodes[seeds.start, seeds.chance] for seeds in episode_seeds(scenario, len(episodes))]
    return np.array([episode.score for episode in in_order], dtype=float)


def of_records(records: Sequence[Path]) -> np.ndarray:
    """One row a record and one column a start."""
    return np.array([scores_in_suite_order(record) for record in records])


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("record", type=Path)
    of = parser.add_mutually_exclusive_group(required=True)
    of.add_argument("--study", nargs=2, metavar=("REPORT", "ARM"))
    of.add_argument("--records", nargs="+", type=Path)
    given = parser.parse_args()
    scores = arm_values(Path(given.study[0]), given.study[1]) if given.study else of_records(given.records)
    gains = scores - scores_in_suite_order(given.record)
    result = {
        "machine": facts(),
        "score": scores.mean(),
        "score_interval": crossed_interval(scores.tolist(), seed=0),
        "by_seed": scores.mean(axis=1).tolist(),
        "mean": gains.mean(),
        "interval": crossed_interval(gains.tolist(), seed=0),
        "seeds": len(gains),
    }
    print(json.dumps(result, indent=2))
