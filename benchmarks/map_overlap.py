"""How many evaluation starts of one lake have a map that another lake trains on: the split holds within a scenario.

    python benchmarks/map_overlap.py --records runs/leaderboard --result benchmarks/results/map-overlap.json

Looked at are the first training starts of the other lake: those that nano's text begins with (`train/nano.py`), and
those that one seed of `msgrpo train` comes through in 60 updates of 16 groups. With `--records`, a folder of
`msgrpo eval`, each agent's success on the starts whose map the other lake trains on, and on the others.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

from machine import facts

from evals.stats import wilson
from msgrpo_agent.episode import read_episodes
from msgrpo_agent.game import Split
from msgrpo_agent.games import get_scenario

NANO_SEED = 10_000_019  # the first start seed of nano's text
PAIRS = (
    ("frozen-lake", "frozen-lake-slippery", NANO_SEED, 1200),
    ("frozen-lake-slippery", "frozen-lake", 0, 960),
)
GROUPS = {True: "map_is_trained_on", False: "map_is_new"}


def maps(scenario_id: str, split: Split, first_seed: int, count: int) -> list[object]:
    scenario = get_scenario(scenario_id)
    starts = scenario.starts(split, first_seed=first_seed)
    return [scenario.new(start, 0).board().cells for start in islice(starts, count)]


def success_by_overlap(folder: Path, scenario_id: str, seen: set[object]) -> list[dict[str, Any]]:
    """Each agent's successes and episodes, on starts with a map among `seen` and on the others."""
    scenario = get_scenario(scenario_id)
    rows = []
    for record in sorted(folder.glob(f"*/{scenario_id}.jsonl")):
        groups: dict[bool, list[bool]] = {True: [], False: []}
        for episode in read_episodes(record):
            if episode.success is not None:
                groups[scenario.new(episode.start_seed, 0).board().cells in seen].append(episode.success)
        rows.append({"agent": record.parent.name} | {name: share(groups[key]) for key, name in GROUPS.items()})
    return rows


def share(successes: list[bool]) -> dict[str, Any]:
    low, high = wilson(sum(successes), len(successes))
    return {"episodes": len(successes), "success": sum(successes) / len(successes), "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for evaluated, trained, first_seed, count in PAIRS:
        held_out, seen = maps(evaluated, "eval", 0, given.episodes), maps(trained, "train", first_seed, count)
        overlap = sum(one in seen for one in held_out)
        found.append(
            {"evaluated": evaluated, "episodes": given.episodes, "different_maps": len(set(held_out))}
            | {"trained": trained, "training_starts": count, "episodes_with_a_training_map": overlap}
        )
        if given.records is not None:
            found[-1]["agents"] = success_by_overlap(given.records, evaluated, set(seen))
        print(json.dumps(found[-1], indent=2))
    given.result.write_text(json.dumps({"machine": facts(), "pairs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
