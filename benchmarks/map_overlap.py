"""How many evaluation starts of one lake have a map that another lake trains on: the split holds within a scenario.

    python benchmarks/map_overlap.py --result benchmarks/results/map-overlap.json

Looked at are the first training starts of the other lake: those that nano's text begins with (`train/nano.py`), and
those that one seed of `msgrpo train` comes through in 60 updates of 16 groups.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from machine import facts

from msgrpo_agent.game import Split
from msgrpo_agent.games import get_scenario

NANO_SEED = 10_000_019  # the first start seed of nano's text
PAIRS = (
    ("frozen-lake", "frozen-lake-slippery", NANO_SEED, 1200),
    ("frozen-lake-slippery", "frozen-lake", 0, 960),
)


def maps(scenario_id: str, split: Split, first_seed: int, count: int) -> list[object]:
    scenario = get_scenario(scenario_id)
    starts = scenario.starts(split, first_seed=first_seed)
    return [scenario.new(start, 0).board().cells for start in islice(starts, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    found = []
    for evaluated, trained, first_seed, count in PAIRS:
        held_out, seen = maps(evaluated, "eval", 0, given.episodes), maps(trained, "train", first_seed, count)
        overlap = sum(one in seen for one in held_out)
        found.append(
            {"evaluated": evaluated, "episodes": given.episodes, "different_maps": len(set(held_out))}
            | {"trained": trained, "training_starts": count, "episodes_with_a_training_map": overlap}
        )
        print(found[-1])
    given.result.write_text(json.dumps({"machine": facts(), "pairs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
