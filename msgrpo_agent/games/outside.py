"""Scenarios from outside the package, by name.

    my_pkg.my_game:scenario         an attribute of a module that can be imported, from the current folder too
    path/to/my_game.py:scenario     an attribute of a file
    NAME                            what an installed package offers: an entry point of the group `msgrpo.scenarios`
    gym:BabyAI-GoToObj-v0           any level of MiniGrid and BabyAI
    spiel:tic_tac_toe               any game of OpenSpiel
    ta:TicTacToe-v0                 a game of TextArena
    openenv:http://host:8000        the environment of an OpenEnv server

The attribute is a `Scenario`, or a function without arguments that returns one. Whatever name a scenario was asked
for by becomes its id, so that a record's `scenario` finds it again.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from msgrpo.errors import UsageError, users_code, where_raised
from msgrpo.extras import needs
from msgrpo.files import is_file
from msgrpo.game import Scenario
from msgrpo.limits import is_interrupt, unmoved, within
from msgrpo.text import printable
from msgrpo.trust import allow, names_code

GROUP = "msgrpo.scenarios"
IMPORT_S = 60.0  # seconds that a game's file may take to be imported, libraries included
HOW = "module:scenario, path/to/file.py:scenario, or the name of an entry point of the group " + GROUP


# Levels under a name of their own, with a step limit that stays: id and steps.
FIXED = {
    "babyai-goto": ("BabyAI-GoToObj-v0", 20),
    "babyai-open-door": ("BabyAI-OpenDoor-v0", 20),
    "babyai-pickup": ("BabyAI-PickupLoc-v0", 24),
    "minigrid-empty": ("MiniGrid-Empty-Random-6x6-v0", 20),
}
_loaded: dict[str, Scenario] = {}


def _minigrid(name: str, env_id: str, limit: int | None) -> Scenario:
    with needs(f"the game {name!r}", "minigrid"):
        from msgrpo.games.minigrid_game import minigrid_scenario
    return minigrid_scenario(env_id, step_limit=limit)


def find(name: str) -> Scenario | None:
    """The scenario that `name` leads to, with that name as its id; None where it leads nowhere.

    Raises UsageError with the file and line where what it leads to cannot be imported or is no scenario.
    """
    if name in _loaded:
        return _loaded[name]
    scenario = _found(name)
    if scenario is not None:
        _loaded[name] = scenario
        allow([name])  # a person asked for it: records may name it too
    return scenario


def on_server(name: str) -> bool:
    """Whether the games of this name are played on a server."""
    return name.startswith("openenv:")


def runs_code(name: str) -> bool:
    """Whether looking at this game would run, or read, what its name names, which has not been loaded before."""
    return names_code(name) and name not in _loaded


def _found(name: str) -> Scenario | None:
    kind, _, rest = name.partition(":")
    if name in FIXED:
        env_id, limit = FIXED[name]
        return replace(_minigrid(name, env_id, limit), id=name)
    if kind == "gym":
        return _minigrid(name, rest, None)
    if kind == "spiel":
        with needs(f"the game {name!r}", "openspiel"):
            from msgrpo.games.spiel_game import spiel_scenario
        return spiel_scenario(rest)
    if on_server(name):
        from msgrpo.games.openenv_game import openenv_scenario

        return openenv_scenario(rest)
    if kind == "ta":
        with needs(f"the game {name!r}", "textarena"):
            from msgrpo.games.textarena_game import arena_scenario
        return arena_scenario(rest)
    if ":" in name:
        where, _, attribute = name.rpartition(":")
        module = _from_file(Path(where), name) if where.endswith(".py") else _imported(where, name)
        return _scenario(module, attribute, name)
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            with _users(name):
                return _checked(entry.load(), name, entry.value)
    return None


@cache
def offered() -> list[str]:
    """The names that installed packages offer."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def _imported(module: str, name: str) -> ModuleType:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
        raise UsageError(f"{name!r} names no module: {module!r}", fix=HOW)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # behind all that is installed: a user's train.py does not stand in for ours
    with _users(name):
        return importlib.import_module(module)


def _from_file(file: Path, name: str) -> ModuleType:
    if not is_file(file):
        raise UsageError(f"{name[:200]!r}: there is no file {str(file)[:200]}", fix=HOW)
    known = "msgrpo_game_" + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, file)
    assert spec is not None  # a file that ends in .py has both
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # dataclasses look their module up
    try:
        with _users(name):
            spec.loader.exec_module(module)
    except UsageError:
        del sys.modules[known]
        raise
    return module


def _scenario(module: ModuleType, attribute: str, name: str) -> Scenario:
    file = getattr(module, "__file__", module.__name__)
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if isinstance(value, Scenario)]
        there = f"it has {', '.join(known)}" if known else "it holds no msgrpo.game.Scenario"
        raise UsageError(f"{name!r}: {file} has no {attribute!r}", fix=there)
    return _checked(getattr(module, attribute), name, f"{file}:{attribute}")


def _checked(value: Any, name: str, where: str) -> Scenario:
    if callable(value) and not isinstance(value, Scenario):
        with _users(name):
            value = value()
    if not isinstance(value, Scenario):
        raise UsageError(
            f"{name!r}: {where} is a {type(value).__name__}",
            fix="it must be a msgrpo.game.Scenario, or a function without arguments that returns one",
        )
    names = [*value.players, *value.actions]
    odd = [label for label in names if not isinstance(label, str) or printable(label) != label]
    if odd:
        raise UsageError(f"{name!r}: {odd[0]!r} is no name of a player or an action that can be printed")
    return replace(value, id=name, rules=printable(str(value.rules)), source=printable(str(value.source)))


@contextmanager
def _users(name: str) -> Iterator[None]:
    failed = f"{name!r} cannot be loaded"
    with users_code(failed, fix=HOW), within(IMPORT_S, f"the import of {name}"), unmoved():
        try:
            yield
        except KeyboardInterrupt as error:
            if is_interrupt(error):
                raise
            raise UsageError(f"{failed}: {where_raised(error)}", fix=HOW) from error
