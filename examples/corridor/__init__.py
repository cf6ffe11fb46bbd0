"""A Gymnasium environment as a game, in a module: `msgrpo play examples.corridor:scenario --agent random`.

The environment is an ordinary one, registered with Gymnasium; the scenario adds the words.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from msgrpo.game import Scenario
from msgrpo.games.gymnasium_game import gym_scenario

LENGTH = 9
RULES = (
    f"A corridor of {LENGTH} cells, numbered from 0. Somewhere in it is a door. left and right go one cell; "
    "a draught sometimes pushes you back by one. Standing at the door ends the game with 1 point."
)


class Corridor(gymnasium.Env[int, int]):
    """Find the door."""

    observation_space = spaces.Discrete(LENGTH)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.door = (int(x) for x in self.np_random.choice(LENGTH, size=2, replace=False))
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        move = 1 if action == 1 else -1
        if self.np_random.random() < 0.1:
            move = -move
        self.place = int(np.clip(self.place + move, 0, LENGTH - 1))
        found = self.place == self.door
        return self.place, float(found), found, False, {}


if "Corridor-v0" not in gymnasium.registry:
    gymnasium.register("Corridor-v0", entry_point=Corridor)


def seen(env: Corridor, observation: int) -> str:
    return f"You are in cell {observation}. The door is in cell {env.door}."


def scenario() -> Scenario:
    return gym_scenario("corridor", "Corridor-v0", ("left", "right"), seen, rules=RULES, step_limit=16, goal=True)
