"""What a player can reach on Frozen Lake that sees no further than nano's thought: the four neighbours.

    python benchmarks/reactive.py --result benchmarks/results/reactive.json

Three players that never step onto a hole they see and head right and down: right before down, down before right,
and either at random. None looks ahead, so each walks into dead ends; every start could be won.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import facts

from evals.stats import wilson
from evals.suites import episode_seeds
from msgrpo_agent.game import Outcome, stream
from msgrpo_agent.games import get_scenario
from msgrpo_agent.games.frozen_lake import FrozenLake
from train.nano import look

Order = Callable[[np.random.Generator], list[str]]
PLAYERS: dict[str, Order] = {
    "right first": lambda generator: ["right", "down", "up", "left"],
    "down first": lambda generator: ["down", "right", "left", "up"],
    "either": lambda generator: [*generator.permutation(["right", "down"]), *generator.permutation(["up", "left"])],
}


def move(game: FrozenLake, order: list[str]) -> str:
    """The first direction in which nano's own words name no hole and no edge."""
    words = look(game, game.players[0]).partition(".")[0].split()
    seen = dict(zip(words[::2], words[1::2], strict=True))
    return next((action for action in order if seen[action] in ("free", "goal")), order[0])


def wins(order: Order, episodes: int) -> int:
    scenario, generator, won = get_scenario("frozen-lake"), stream(0, "reactive"), 0
    for start, chance, _ in episode_seeds(scenario, episodes):
        game = scenario.new(start, chance)
        assert isinstance(game, FrozenLake)
        while game.outcome is Outcome.PLAYING:
            game.step({game.players[0]: move(game, order(generator))})
        won += bool(game.success)
    return won


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    found = {}
    for name, order in PLAYERS.items():
        won = wins(order, given.episodes)
        found[name] = {"success": won / given.episodes, "interval": wilson(won, given.episodes)}
        print(name, f"{won / given.episodes:.3f}")
    result = {"machine": facts(), "episodes": given.episodes, "players": found}
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
