"""Which agents can be chosen here, and what those that cannot would need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic_core import from_json

from msgrpo.errors import MissingExtraError
from msgrpo.files import is_file, is_part, read_regular, replace_text, users_folder
from msgrpo.games import SCENARIOS
from msgrpo.games.outside import FIXED, offered
from msgrpo.install import install_command
from msgrpo.models.lora import ADAPTER_CONFIG
from msgrpo.models.paths import shipped_adapters
from msgrpo.run_log import CONFIG, METRICS, trained_on
from msgrpo.text import printable
from msgrpo.tui.session import short_name

RUNS = Path("runs")


# Games that come with optional packages, to begin with: what `msgrpo games` and the packages themselves list is more.
SPIEL = tuple(f"spiel:{name}" for name in ("tic_tac_toe", "connect_four", "chess", "breakthrough", "2048"))
RECENT, SEPARATOR = 5, "\n"  # games from outside that are remembered
LONGEST_GAME = 500  # characters of the name of one that is


@dataclass(frozen=True)
class Choice:
    """`missing` says what a person must do before this agent can play; None where it can play now."""

    spec: str
    title: str
    missing: str | None = None


def missing_extra(spec: str) -> str | None:
    """How to get what `spec` needs; None where everything is installed. Looks without importing anything."""
    kind = spec.partition(":")[0]
    needs = {"nano": ("train", ("torch", "transformers")), "adapter": ("train", ("torch", "transformers", "peft"))}
    needs["dqn"] = ("dqn", ("stable_baselines3",))
    extra, packages = needs.get(kind, ("", ()))
    if all(find_spec(package) is not None for package in packages):
        return None
    return str(MissingExtraError(f"the agent {spec!r}", extra).fix)


def game_choices(recent: Sequence[str], named: str) -> list[Choice]:
    """The games: our own, those of installed packages, the last ones from outside, and those that others bring."""
    own = [*SCENARIOS, *offered(), *recent, named]
    others = [(name, "minigrid", "minigrid") for name in FIXED] + [(name, "openspiel", "pyspiel") for name in SPIEL]
    missing = {name: None if find_spec(package) else install_command(extra) for name, extra, package in others}
    return [Choice(name, name, missing.get(name)) for name in dict.fromkeys([*own, *missing])]


def recent_games(memory: Mapping[str, str]) -> list[str]:
    """The remembered names of games, without those that nobody can have typed."""
    names = memory.get("recent", "").split(SEPARATOR)
    return [name for name in names if 1 < len(name) <= LONGEST_GAME and printable(name) == name][:RECENT]


def is_here(game: str) -> bool:
    """Whether a remembered game can be meant in this folder: the file of one that a file holds is there."""
    file, sign, _ = game.rpartition(":")
    return not (sign and file.endswith(".py")) or is_file(file)


def with_recent(memory: Mapping[str, str], game: str) -> str:
    """The remembered games after this one was played; games that are listed anyway are not kept."""
    known = {*SCENARIOS, *offered(), *FIXED, *SPIEL}
    games = dict.fromkeys([game, *recent_games(memory)])
    return SEPARATOR.join([name for name in games if name not in known][:RECENT])


# What makes a folder below runs/ a trained run: the kind of its agent, and the file that names its scenario.
RUN_FILES = {ADAPTER_CONFIG: ("adapter", CONFIG), "dqn.json": ("dqn", "dqn.json")}


def run_choices(runs: Path) -> list[Choice]:
    """The trained runs, newest first, without those whose name no record and no screen can show."""
    found = (path for name in RUN_FILES for path in runs.glob(f"*/{name}") if not is_part(path.parent))
    files = [path for path in found if printable(str(path)) == str(path)]
    paths = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    choices = []
    for path in paths:
        kind, facts = RUN_FILES[path.name]
        spec, about = f"{kind}:{path.parent}", trained_on(path.parent / facts)
        title = f"{short_name(spec)} ({'DQN, ' if kind == 'dqn' else ''}{about or 'trained'})"
        choices.append(Choice(spec, title, missing_extra(spec)))
    return choices


def memory_file() -> Path:
    """Where the choices of the last sitting are kept."""
    return users_folder("XDG_STATE_HOME", ".local/state") / "choices.json"


def remembered(file: Path | None) -> dict[str, str]:
    """What was chosen last, list -> entry; nothing where that cannot be read."""
    try:
        values = from_json(read_regular(file)) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in values.items()} if isinstance(values, dict) else {}


def remember(file: Path | None, chosen: dict[str, str]) -> None:
    """Keep what was chosen. Raises OSError where it cannot be written."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(chosen))


def training_runs(runs: Path) -> list[Path]:
    """The training runs, finished or going on; the one that wrote last is the first."""
    written = {file: file.stat().st_mtime for file in runs.glob(f"*/{METRICS}")}
    return [file.parent for file in sorted(written, key=lambda file: written[file], reverse=True)]


def introduced(spec: str) -> str:
    """What nano and the reference player are; nothing for other agents, which a person has named."""
    if spec == "optimal":
        return "optimal plays perfectly where that can be computed; elsewhere it searches, and can err.\n\n"
    model, _, game = spec.partition(":")
    if model != "nano":
        return ""
    how = f"trained on {game}" if game else "untrained: it knows the rules and plays badly"
    return f"nano is a language model of one million parameters, {how}.\n\n"


def agent_choices(runs: Path) -> list[Choice]:
    """nano before and after training, the trained runs, the references; those first that can play now."""
    missing = missing_extra("adapter")
    choices = [
        *(Choice(f"nano:{name}", f"nano:{name} (trained)", missing) for name in shipped_adapters()),
        Choice("nano", "nano (untrained, plays badly)", missing_extra("nano")),
        *run_choices(runs),
        Choice("optimal", "optimal (perfect play, or a search)"),
        Choice("random", "random"),
    ]
    return sorted(choices, key=lambda choice: choice.missing is not None)
