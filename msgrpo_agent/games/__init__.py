"""SCENARIOS, the registry. To add a game: one file here, one entry below, and the contract test runs over it.

Sources: [V] Verlog, [F] FastSnake, [G] Gymnasium, [ours].
"""

from __future__ import annotations

from gymnasium.envs.toy_text.frozen_lake import MAPS

from msgrpo_agent.errors import UsageError, nearest
from msgrpo_agent.game import Scenario
from msgrpo_agent.games import frozen_lake, snake
from msgrpo_agent.games.frozen_lake import FrozenLake
from msgrpo_agent.games.snake import Item, Snake, SnakeSetting

SCENARIOS: dict[str, Scenario] = {}


def register(scenario: Scenario) -> None:
    if scenario.id in SCENARIOS:
        raise UsageError(f"a scenario named {scenario.id!r} is registered already")
    SCENARIOS[scenario.id] = scenario


def get_scenario(scenario_id: str) -> Scenario:
    if scenario_id not in SCENARIOS:
        raise UsageError(f"no scenario is named {scenario_id!r}", fix=nearest(scenario_id, SCENARIOS))
    return SCENARIOS[scenario_id]


def _lake(id: str, size: int, p_frozen: float, slippery: bool, step_limit: int, source: str) -> Scenario:
    def make(start_seed: int, chance_seed: int) -> FrozenLake:
        desc = frozen_lake.random_map(size, p_frozen, start_seed)
        return FrozenLake(desc, slippery, step_limit, chance_seed)

    text = frozen_lake.rules(slippery, step_limit)
    return Scenario(id, "frozen-lake", text, step_limit, source, make, goal=True)


def _gymnasium_lake(name: str, step_limit: int) -> Scenario:
    desc = tuple(MAPS[name])  # always an explicit desc: without one Gymnasium draws an unseeded map

    def make(start_seed: int, chance_seed: int) -> FrozenLake:
        return FrozenLake(desc, True, step_limit, chance_seed)

    text = frozen_lake.rules(True, step_limit)
    source = f"[G] map {name}, limit {step_limit}"
    return Scenario(f"frozen-lake-{name}", "frozen-lake", text, step_limit, source, make, one_start=True, goal=True)


def _snake(id: str, setting: SnakeSetting, source: str) -> Scenario:
    def make(start_seed: int, chance_seed: int) -> Snake:
        return Snake(setting, start_seed, chance_seed)

    players = snake.player_names(setting)
    return Scenario(id, "snake", snake.rules(setting), setting.step_limit, source, make, players)


APPLES = Item("apple", "apples", "A", 5, 1)
for _scenario in (
    _lake("frozen-lake", 4, 0.8, False, 8, "[V]"),
    _lake("frozen-lake-slippery", 4, 0.9, True, 15, "[V]"),
    _lake("frozen-lake-big-slippery", 6, 0.9, True, 20, "[V]"),
    _gymnasium_lake("4x4", 100),
    _gymnasium_lake("8x8", 200),
    _snake("snake", SnakeSetting((APPLES,)), "[F][V]"),
    _snake("snake-poison-apple", SnakeSetting((Item("apple", "apples", "A", 5, -1),)), "[V]"),
    _snake(
        "snake-poison-apple-and-banana",
        SnakeSetting((Item("apple", "apples", "A", 3, -1), Item("banana", "bananas", "B", 3, 1))),
        "[V]",
    ),
    _snake("snake-solo", SnakeSetting((APPLES,), enemies=0, step_limit=100), "[ours]"),
    _snake("snake-duel", SnakeSetting((APPLES,), players=2, enemies=0), "[ours]"),
):
    register(_scenario)
