"""Are the words in the records of episodes true?

    PYTHONPATH=benchmarks python benchmarks/studies/recorded_words.py runs/eval/AGENT/frozen-lake.jsonl \\
        --result benchmarks/results/words-of-records.json

Of every record how many of its turns are right about all four cells beside the player, and about the goal's direction
(`words.truths`); the episodes are played again to know.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from machine import write
from words import truths

from msgrpo.episode import read_episodes
from msgrpo.games import get_scenario


def main() -> None:
    parser = argparse.ArgumentParser(description="How many of the words in records are true.")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    agents = {}
    for file in given.records:
        episodes = list(read_episodes(file))
        agents[file.parent.name] = truths(get_scenario(episodes[0].scenario), episodes)
    write(given.result, {"agents": agents})
    print(json.dumps(agents, indent=1))


if __name__ == "__main__":
    main()
