"""Semantic override: does training where apples are worth +1 make an agent eat them where the rules say −1?

    msgrpo lab benchmarks/studies/override.toml --out runs/override
    msgrpo eval base:runs/nano-snake adapter:runs/override/nothing/seed-0 … --scenario snake \\
        --scenario snake-poison-apple --episodes 100 --out runs/override-eval
    PYTHONPATH=benchmarks python benchmarks/studies/apples.py --records runs/override-eval \\
        --against base:runs/nano-snake --against nothing \\
        --result benchmarks/results/apples-override.json

Apples eaten in an episode, from the records of `msgrpo eval`: its rewards without the −1 of a death, and without
their sign where apples cost a point. Adapters of a study's arm (`…/ARM/seed-K`) are one row. Differences are paired
over the same episodes and seeds; intervals are over both (`crossed_interval`). `more_where_they_pay` is eaten where
apples pay minus eaten where they cost, from the same starts: what somebody has who tells the games apart.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from machine import options, write

from msgrpo.episode import Episode
from msgrpo.errors import UsageError
from msgrpo.evals.plays import load
from msgrpo.evals.rows import return_of
from msgrpo.evals.stats import crossed_interval
from msgrpo.evals.suites import EpisodeSeeds
from msgrpo.game import Outcome

WORTH = {"snake": 1, "snake-poison-apple": -1}  # an apple; where it pays, then where it costs


def eaten(episode: Episode) -> float:
    """How many apples; a death is the only way that these games end before their step limit."""
    died = episode.outcome is Outcome.TERMINATED
    return WORTH[episode.scenario] * (return_of(episode) + died)


def arm_of(agent: str) -> tuple[str, int]:
    """The arm of a study whose adapter it is, and the training seed; else the agent itself, and seed 0."""
    found = re.fullmatch(r"adapter:(?:.*/)?([^/]+)/seed-(\d+)", agent)
    return (found[1], int(found[2])) if found else (agent, 0)


def measured(values: np.ndarray) -> dict[str, Any]:
    """The mean of (seeds, episodes) and its interval."""
    return {"mean": float(values.mean()), "interval": crossed_interval(values.tolist(), seed=0)}


def read(records: Path) -> dict[str, dict[str, np.ndarray]]:
    """scenario → arm → apples of (seeds, episodes). Raises UsageError where seeds or episodes do not fit together."""
    plays, _ = load([records], scenarios=list(WORTH))
    found: dict[str, dict[str, dict[int, dict[EpisodeSeeds, float]]]] = {scenario: {} for scenario in WORTH}
    for play in plays:
        arm, seed = arm_of(play.agent)
        of_arm = found[play.scenario].setdefault(arm, {})
        if seed in of_arm:
            raise UsageError(f"two studies have an arm {arm} with seed {seed} here: their seeds would be mixed")
        of_arm[seed] = {seeds: eaten(episode) for seeds, episode in play.finished.items()}
    for scenario, arms in found.items():
        if len({tuple(sorted(one)) for of_arm in arms.values() for one in of_arm.values()}) > 1:
            raise UsageError(f"the agents did not play the same episodes of {scenario}")
    played = (one for arms in found.values() for of_arm in arms.values() for one in of_arm.values())
    if len({tuple(seeds.start for seeds in sorted(one)) for one in played}) > 1:
        raise UsageError("the two games were not played from the same starts")
    trained = {tuple(sorted(of_arm)) for arms in found.values() for of_arm in arms.values() if len(of_arm) > 1}
    if len(trained) > 1:
        raise UsageError(f"the arms have different seeds: {', '.join(map(str, sorted(trained)))}")
    return {
        scenario: {
            arm: np.array([[one[seeds] for seeds in sorted(one)] for _, one in sorted(of_arm.items())])
            for arm, of_arm in arms.items()
        }
        for scenario, arms in found.items()
    }


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--against", action="append", required=True, help="an agent or an arm; may repeat")
    given = parser.parse_args()
    try:
        apples = read(given.records)
    except UsageError as error:
        parser.error(str(error))
    pays, costs = (apples[scenario] for scenario in WORTH)
    for other in given.against:
        if other not in pays or other not in costs:
            parser.error(f"--against {other} is none of {', '.join(sorted(pays))}")
    rows = []
    for arm in pays:
        row: dict[str, Any] = {"agent": arm, "seeds": len(pays[arm]), "episodes": pays[arm].shape[1]}
        row |= {"where": {scenario: measured(apples[scenario][arm]) for scenario in WORTH}}
        row["by_seed"] = {scenario: apples[scenario][arm].mean(axis=1).tolist() for scenario in WORTH}
        row["more_where_they_pay"] = measured(pays[arm] - costs[arm])
        row["against"] = {
            other: {scenario: measured(apples[scenario][arm] - apples[scenario][other]) for scenario in WORTH}
            | {"more_where_they_pay": measured(pays[arm] - pays[other] - costs[arm] + costs[other])}
            for other in given.against
            if other != arm and len(pays[other]) in (1, len(pays[arm]))
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    write(given.result, {"rows": rows})


if __name__ == "__main__":
    main()
