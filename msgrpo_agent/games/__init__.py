"""SCENARIOS, the registry of ours, and `get_scenario`, which also finds those from outside (`outside.py`).

Sources: [V] Verlog, [F] FastSnake, [G] Gymnasium, [ours].
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from gymnasium.envs.toy_text.frozen_lake import MAPS

from msgrpo.errors import UsageError, check_given, nearest
from msgrpo.files import is_file
from msgrpo.game import Scenario
from msgrpo.games import frozen_lake, outside, snake
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.games.retold import SIGN, retold
from msgrpo.games.search import best_snake_actions, judge_lake, optimal_lake_actions
from msgrpo.games.snake import Item, Snake, SnakeSetting
from msgrpo.judge import playouts
from msgrpo.trust import is_allowed, names_code

SCENARIOS: dict[str, Scenario] = {}
MOST_TELLINGS = 4  # of one game; a name with thousands is no name


def register(scenario: Scenario) -> None:
    if scenario.id in SCENARIOS:
        raise UsageError(f"a scenario named {scenario.id!r} is registered already")
    SCENARIOS[scenario.id] = scenario


def get_scenario(name: str) -> Scenario:
    """The scenario of this name: one of ours, `module:scenario`, `file.py:scenario`, or an installed package's.

    `NAME~TELLING` is the same game in other words (`retold.py`). Raises UsageError where there is none.
    """
    check_given("the name of a scenario", name, str)
    if name in SCENARIOS:
        return SCENARIOS[name]
    plain, sign, telling = name.rpartition(SIGN)
    if name.count(SIGN) > MOST_TELLINGS:
        raise UsageError(f"{name[:60]!r}… is retold {name.count(SIGN)} times; {MOST_TELLINGS} are the most")
    if sign and "/" not in telling:
        return retold(get_scenario(plain), telling)
    scenario = outside.find(name)
    if scenario is None:
        if name.endswith(".py") and is_file(Path(name)):
            raise UsageError(f"{name} is a file; a game is named with its scenario", fix=outside.named_in(Path(name)))
        known = (*SCENARIOS, *outside.FIXED, *outside.offered())
        raise UsageError(f"no scenario is named {name!r}", fix=nearest(name, known))
    return scenario


def may_load(name: str) -> bool:
    """Whether to load this game runs no code from outside, or a person has named it, or the game that it retells."""
    return not names_code(name) or is_allowed(name) or is_allowed(name.rpartition(SIGN)[0])


def recorded_scenario(name: str) -> Scenario:
    """The scenario that a record names: ours, an installed package's, or one that a person has named themselves.

    A record may come from anywhere, and to load a game from outside is to run its code. Raises UsageError.
    """
    if not may_load(name):
        raise UsageError(
            f"a record is of the game {name!r}, which is not msgrpo's own; it is not loaded because a record says so",
            fix=f"if you trust that file: msgrpo --allow {shlex.quote(name)} …",
        )
    return get_scenario(name)


def _best_on_ice(game: FrozenLake, player: str) -> list[str]:
    return optimal_lake_actions(game)


def _lake(id: str, size: int, p_frozen: float, slippery: bool, step_limit: int, source: str) -> Scenario:
    make = partial(frozen_lake.random_lake, size, p_frozen, slippery, step_limit)
    text = frozen_lake.rules(slippery, step_limit)
    return Scenario(
        id, "frozen-lake", text, step_limit, source, make, goal=True, reference=_best_on_ice, judge=judge_lake
    )


def _gymnasium_lake(name: str, step_limit: int) -> Scenario:
    desc = tuple(MAPS[name])  # always an explicit desc: without one Gymnasium draws an unseeded map
    make = partial(frozen_lake.lake_on_map, desc, True, step_limit)
    text = frozen_lake.rules(True, step_limit)
    source = f"[G] map {name}, limit {step_limit}"
    return Scenario(
        f"frozen-lake-{name}",
        "frozen-lake",
        text,
        step_limit,
        source,
        make,
        one_start=True,
        goal=True,
        reference=_best_on_ice,
        judge=judge_lake,
    )


def _snake(id: str, setting: SnakeSetting, source: str) -> Scenario:
    players = snake.player_names(setting)
    text = snake.rules(setting)
    return Scenario(
        id,
        "snake",
        text,
        setting.step_limit,
        source,
        partial(Snake, setting),
        players,
        reference=best_snake_actions,
        judge=playouts(best_snake_actions),
    )


APPLES = Item("apple", "apples", "A", 5, 1)
for _scenario in (  # a new game of ours: one entry here
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
