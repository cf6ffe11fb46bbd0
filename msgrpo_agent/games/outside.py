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

import ast
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from msgrpo.errors import UsageError
from msgrpo.extras import needs
from msgrpo.files import read_regular
from msgrpo.game import Scenario
from msgrpo.outside_code import loading, module_at
from msgrpo.text import printable
from msgrpo.trust import allow, names_code

GROUP = "msgrpo.scenarios"
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

    Raises UsageError with the file and line where what it leads to cannot be imported or is no scenario, and for a
    name that cannot be printed: a record would hold another one.
    """
    if name in _loaded:
        return _loaded[name]
    if printable(name) != name:
        raise UsageError(
            f"the name {name!r} holds what cannot be printed: no record could name that game", fix="rename it"
        )
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
        return _scenario(module_at(where, name, HOW), attribute, name)
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            with loading(name, HOW):
                return _checked(entry.load(), name, entry.value)
    return None


def named_in(file: Path) -> str:
    """How to name what a file seems to offer, by what it defines. It is read and not run: nobody has allowed that."""
    try:
        body = ast.parse(read_regular(file)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        body = []
    found = [name for part in body for name in _scenarios_of(part)]
    return " or ".join(f"{file}:{name}" for name in found) or f"{file}:NAME, where NAME is a Scenario of that file"


def _scenarios_of(part: ast.stmt) -> list[str]:
    """The names that a statement gives to a `Scenario(...)`, or to a function that is declared to return one."""
    if isinstance(part, ast.FunctionDef):
        return [part.name] if part.returns is not None and _is_scenario(part.returns) else []
    if not isinstance(part, ast.Assign | ast.AnnAssign) or not isinstance(part.value, ast.Call):
        return []
    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
    return [to.id for to in targets if isinstance(to, ast.Name)] if _is_scenario(part.value.func) else []


def _is_scenario(named: ast.expr) -> bool:
    return ast.unparse(named).strip("\"'").rpartition(".")[2] == "Scenario"


@cache
def offered() -> list[str]:
    """The names that installed packages offer."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def _scenario(module: ModuleType, attribute: str, name: str) -> Scenario:
    file = getattr(module, "__file__", module.__name__)
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if isinstance(value, Scenario)]
        there = f"it has {', '.join(known)}" if known else "it holds no msgrpo.game.Scenario"
        raise UsageError(f"{name!r}: {file} has no {attribute!r}", fix=there)
    return _checked(getattr(module, attribute), name, f"{file}:{attribute}")


def _checked(value: Any, name: str, where: str) -> Scenario:
    if callable(value) and not isinstance(value, Scenario):
        with loading(name, HOW):
            value = value()
    if not isinstance(value, Scenario):
        raise UsageError(
            f"{name!r}: {where} is a {type(value).__name__}",
            fix="it must be a msgrpo.game.Scenario, or a function without arguments that returns one",
        )
    return replace(value, id=name, rules=printable(value.rules), source=printable(value.source))
