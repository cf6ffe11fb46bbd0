"""How many turns does a credit leave without any advantage?

    PYTHONPATH=benchmarks python benchmarks/studies/silent.py runs/lab/credit-snake-rest \\
        --result benchmarks/results/silent-snake.json

Credits that compare equal states (`state-action`, `lambda`) have nothing to compare where a state was met by one
episode alone: its value is that episode's own return, and the advantage is 0 (for `state-action` also where all that
met it took the same action; for `lambda` where it was alone from then on). Such a turn teaches nothing. A run keeps
the credits of the best and the worst episode of its first groups in `updates/`; this gives the share of turns whose
advantage is 0, over all runs of a study, by the number of the turn.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import options, write

from msgrpo.run_log import UPDATES, read_update, steps

NONE = 1e-9  # below it an advantage is no advantage
SHOWN = 8  # turns that have a row of their own; the last stands for all after it as well


def credits_of(runs: list[Path]) -> Iterator[list[float]]:
    """The advantages of every episode that these runs kept, turn by turn."""
    for run in runs:
        for step in steps(run):
            for sample in read_update(run, step).samples:
                yield sample.credits


def silent(episodes: list[list[float]]) -> dict[str, Any]:
    """The share of turns without advantage, over all and by the number of the turn (from 0)."""
    by_turn: dict[int, list[bool]] = defaultdict(list)
    for episode in episodes:
        for turn, advantage in enumerate(episode):
            by_turn[min(turn, SHOWN - 1)].append(abs(advantage) < NONE)
    every = [one for turns in by_turn.values() for one in turns]
    shares = [float(np.mean(by_turn[turn])) for turn in sorted(by_turn)]
    return {"episodes": len(episodes), "turns": len(every), "silent": float(np.mean(every)), "by_turn": shares}


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("study", type=Path, help="the folder of a study")
    given = parser.parse_args()
    arms: dict[str, Any] = {}
    for arm in json.loads((given.study / "study.json").read_text())["arms"]:
        runs = sorted(folder.parent for folder in given.study.glob(f"{arm}/seed-*/{UPDATES}"))
        arms[arm] = {"runs": len(runs)} | silent(list(credits_of(runs)))
        print(arm, f"{arms[arm]['silent']:.2f}", [round(share, 2) for share in arms[arm]["by_turn"]])
    write(given.result, {"arms": arms})


if __name__ == "__main__":
    main()
