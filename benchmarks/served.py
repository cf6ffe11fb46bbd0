"""How many episodes go the same way through a server and in process, and why the others do not.

    msgrpo serve --adapter runs/x &
    msgrpo eval adapter:runs/x --scenario frozen-lake --temperature 0 --out runs/here
    msgrpo eval --endpoint http://127.0.0.1:8000/v1 --model x --scenario frozen-lake --temperature 0 --out runs/there
    python benchmarks/served.py runs/here/AGENT/frozen-lake.jsonl runs/there/AGENT/frozen-lake.jsonl \\
        --result benchmarks/results/served.json

Both records hold greedy episodes of the same starts. Episodes are compared answer by answer, to the first that
differs: after it the two play different games. Where the record holds what the chosen action's probability was, the
gap to the next one says how close the choice was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import facts

from msgrpo.episode import Episode, Turn, read_episodes

Start = tuple[int, int]


def by_start(file: Path) -> dict[Start, Episode]:
    return {(one.start_seed, one.chance_seed): one for one in read_episodes(file) if one.error is None}


def first_difference(here: Sequence[Turn], there: Sequence[Turn]) -> tuple[Turn, Turn] | None:
    """The first turns with other answers; None where all are alike."""
    for one, other in zip(here, there, strict=False):
        if one.state != other.state:
            raise SystemExit(f"the records hold different games: {one.state!r} and {other.state!r}")
        if one.answer != other.answer:
            return one, other
    return None


def compared(here: dict[Start, Episode], there: dict[Start, Episode]) -> dict[str, Any]:
    both = sorted(here.keys() & there.keys())
    parted = [pair for start in both if (pair := first_difference(here[start].turns, there[start].turns))]
    return {
        "episodes": len(both),
        "only in one record": len(here.keys() ^ there.keys()),
        "the same answers to the end": len(both) - len(parted),
        "the same actions to the end": sum(
            [t.action for t in here[start].turns] == [t.action for t in there[start].turns] for start in both
        ),
        "the same result": sum(here[start].returns == there[start].returns for start in both),
        "turns compared": sum(len(here[start].turns) for start in both),
        "where they part": [
            {"step": one.step, "here": one.answer, "there": other.answer, "chances here": one.action_probabilities}
            for one, other in parted
        ],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("here", type=Path)
    parser.add_argument("there", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    result = {"machine": facts()} | compared(by_start(given.here), by_start(given.there))
    given.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}, indent=1))
