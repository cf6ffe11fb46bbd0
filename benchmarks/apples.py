"""Semantic override: does training where apples are worth +1 make an agent eat them where the rules say −1?

    python benchmarks/apples.py --records runs/leaderboard --against nano --result benchmarks/results/apples.json

Apples eaten in an episode, from the records of `msgrpo eval`: its rewards without the −1 of a death, and without
their sign where apples cost a point. Differences are paired over the same episodes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from machine import facts

from evals.plays import load
from evals.record import seeds_of
from evals.rows import return_of
from evals.stats import bootstrap_mean, paired_difference
from msgrpo_agent.episode import Episode
from msgrpo_agent.game import Outcome

WORTH = {"snake": 1, "snake-poison-apple": -1}


def eaten(episode: Episode) -> float:
    """How many apples; a death is the only way that these games end before their step limit."""
    died = episode.outcome is Outcome.TERMINATED
    return WORTH[episode.scenario] * (return_of(episode) + died)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--against", default="nano")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    plays, _ = load([given.records], scenarios=list(WORTH))
    apples = {(play.scenario, play.agent): {seeds_of(e): eaten(e) for e in play.finished.values()} for play in plays}
    rows: list[dict[str, Any]] = []
    for (scenario, agent), found in apples.items():
        low, high = bootstrap_mean(list(found.values()), seed=0)
        row = {"scenario": scenario, "agent": agent, "episodes": len(found)}
        row |= {"eaten": sum(found.values()) / len(found), "low": low, "high": high}
        base = apples[scenario, given.against]
        if agent != given.against and set(found) == set(base):
            change = paired_difference(list(found.values()), [base[seeds] for seeds in found], seed=0)
            row["against"] = {"mean": change.mean, "low": change.low, "high": change.high}
        rows.append(row)
        print(json.dumps(row))
    given.result.write_text(json.dumps({"machine": facts(), "against": given.against, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
