"""Semantic override in Snake: does a policy trained where only apples pay prefer the fruit that pays twice as much?

    export PYTHONPATH=benchmarks
    GAME=benchmarks/studies/bananas.py:scenario
    msgrpo eval nano nano:snake optimal random --scenario $GAME --scenario snake-poison-apple-and-banana \\
        --episodes 200 --max-tokens 48 --out runs/bananas
    python benchmarks/studies/bananas.py --records runs/bananas --against nano \\
        --result benchmarks/results/bananas.json

Both games have three apples and three bananas on the board. In the one of this file an apple pays +1 and a banana
+2, in `snake-poison-apple-and-banana` an apple costs 1 and a banana pays +1. The apples and bananas of an episode
are counted from its rewards; intervals are over episodes, differences between agents paired over the same episodes.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import options, write

from msgrpo.episode import Episode
from msgrpo.errors import UsageError
from msgrpo.evals.plays import load
from msgrpo.evals.stats import bootstrap_mean
from msgrpo.game import Outcome, Scenario
from msgrpo.games import snake
from msgrpo.games.search import best_snake_actions
from msgrpo.trust import allow

GAME = "benchmarks/studies/bananas.py:scenario"
WORTH = {GAME: (1, 2), "snake-poison-apple-and-banana": (-1, 1)}  # an apple, a banana
SETTING = snake.SnakeSetting((snake.Item("apple", "apples", "A", 3, 1), snake.Item("banana", "bananas", "B", 3, 2)))

scenario = Scenario(
    "snake-bananas",
    "snake",
    snake.rules(SETTING),
    SETTING.step_limit,
    "[ours]",
    partial(snake.Snake, SETTING),
    players=snake.player_names(SETTING),
    reference=best_snake_actions,
)


def eaten(episode: Episode, worth: int) -> int:
    """How many pieces of fruit of this worth; a death costs a point, and who dies eats nothing in that step."""
    died = episode.outcome is Outcome.TERMINATED
    return sum(turn.reward == worth for turn in episode.turns) - (died and worth == -1)


def measured(values: np.ndarray) -> dict[str, Any]:
    low, high = bootstrap_mean(values, seed=0)
    return {"mean": float(values.mean()), "interval": [low, high]}


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--records", type=Path, required=True, help="folder of the evaluation")
    parser.add_argument("--against", required=True, help="the agent before training")
    given = parser.parse_args()
    allow([GAME])
    try:
        plays, _ = load([given.records])
    except UsageError as error:
        parser.error(str(error))
    rows = []
    for game, worth in WORTH.items():
        counts = {
            play.agent: np.array([[eaten(play.finished[seeds], w) for w in worth] for seeds in sorted(play.finished)])
            for play in plays
            if play.scenario == game
        }
        if given.against not in counts:
            parser.error(f"--against {given.against} is none of {', '.join(sorted(counts))}")
        for agent, fruit in counts.items():
            row: dict[str, Any] = {"game": game, "agent": agent, "episodes": len(fruit)}
            for i, name in enumerate(("apples", "bananas")):
                row[name] = measured(fruit[:, i])
                row[f"{name} more than before"] = measured(fruit[:, i] - counts[given.against][:, i])
            rows.append(row)
            print(json.dumps(row), flush=True)
    write(given.result, {"against": given.against, "rows": rows})


if __name__ == "__main__":
    main()
