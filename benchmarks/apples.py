"""Semantic override: does training where apples are worth +1 make an agent eat them where the rules say −1?

    msgrpo lab benchmarks/studies/override.toml --out runs/override
    msgrpo eval base:runs/nano-snake adapter:runs/override/nothing/seed-0 … --scenario snake \\
        --scenario snake-poison-apple --episodes 100 --out runs/override-eval
    python benchmarks/apples.py --records runs/override-eval --against base:runs/nano-snake --against nothing \\
        --result benchmarks/results/apples-override.json

Apples eaten in an episode, from the records of `msgrpo eval`: its rewards without the −1 of a death, and without
their sign where apples cost a point. Adapters of a study's arm (`…/ARM/seed-K`) are one row. Differences are paired
over the same episodes; intervals are bootstrapped over seeds and episodes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts

from evals.plays import load
from evals.record import seeds_of
from evals.rows import return_of
from evals.stats import crossed_bootstrap
from msgrpo_agent.episode import Episode
from msgrpo_agent.game import Outcome

WORTH = {"snake": 1, "snake-poison-apple": -1}


def eaten(episode: Episode) -> float:
    """How many apples; a death is the only way that these games end before their step limit."""
    died = episode.outcome is Outcome.TERMINATED
    return WORTH[episode.scenario] * (return_of(episode) + died)


def arm_of(agent: str) -> str:
    """The arm of a study whose adapter it is, else the agent itself."""
    found = re.fullmatch(r"adapter:(?:.*/)?([^/]+)/seed-\d+", agent)
    return found[1] if found else agent


def measured(values: np.ndarray) -> dict[str, Any]:
    """The mean of (seeds, episodes) and its interval."""
    return {"mean": float(values.mean()), "interval": crossed_bootstrap(values.tolist(), seed=0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--against", action="append", required=True, help="an agent or an arm; may repeat")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    plays, _ = load([given.records], scenarios=list(WORTH))
    apples: dict[str, dict[str, list[list[float]]]] = {scenario: defaultdict(list) for scenario in WORTH}
    starts: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for play in sorted(plays, key=lambda play: play.agent):
        found = {seeds_of(episode): eaten(episode) for episode in play.finished.values()}
        apples[play.scenario][arm_of(play.agent)].append([found[seeds] for seeds in sorted(found)])
        starts[play.scenario].add(tuple(sorted(found)))
    if any(len(several) > 1 for several in starts.values()):
        parser.error("the agents did not play the same episodes")
    rows: list[dict[str, Any]] = []
    for scenario, arms in apples.items():
        for arm, values in arms.items():
            row: dict[str, Any] = {
                "scenario": scenario,
                "agent": arm,
                "seeds": len(values),
                "episodes": len(values[0]),
            }
            row["eaten"] = measured(np.array(values))
            row["by_seed"] = [float(np.mean(one)) for one in values]
            row["against"] = {
                other: measured(np.array(values) - np.array(arms[other]))
                for other in given.against
                if other != arm and len(arms[other]) in (1, len(values))
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    given.result.write_text(json.dumps({"machine": facts(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
