"""What a person has named, and may therefore be run, imported or asked.

Records, run folders and studies come from anywhere. What they name (a game's file, a rival's file, a server, a
folder) is data: it runs, and is asked, only where a person has said the same name, on the command line or by
`msgrpo --allow`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgrpo.errors import UsageError
from msgrpo.mixture import names_of
from msgrpo.prompt import PRESETS, is_json

_allowed: set[str] = set()
# Settings of a run, or of a study, that can name code or a server.
CHOICES = ("credit", "select", "gate")  # of `msgrpo.train.rivals`, which a function outside may make
SETTINGS = ("scenario", *CHOICES, "teacher", "backend", "rollouts", "opponent", "test_opponent", "prompt")


def allow(names: Iterable[str]) -> None:
    """Note names that a person has given: what they name may be run, imported or asked."""
    _allowed.update(names)


def is_allowed(name: str) -> bool:
    """Whether a person has named this in this process."""
    return name in _allowed


def names_code(name: str) -> bool:
    """Whether to load the scenario of this name is to run code that is neither ours nor a library's."""
    # of a library's game a retelling may follow; its parameters may not, since they can name files
    return ":" in name and re.fullmatch(r"(gym|spiel|ta):[\w.-]+(~[\w-]+)*", name) is None


def foreign(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(setting, name) of all in a run's settings that would run somebody's code or ask somebody's server."""
    for key in SETTINGS:
        value = settings.get(key)
        if not isinstance(value, str):
            continue
        if key == "scenario":
            names = [name for name in names_of(value) if names_code(name)]
        elif key == "rollouts":
            # hf and vllm name nothing; all else has a server in it, or a folder
            names = [] if re.fullmatch(r"\s*(hf|vllm)\s*(\(.*\))?\s*", value, re.DOTALL) else [value]
        elif key == "prompt":
            names = [] if value in PRESETS or is_json(value) else [value]  # a file that every prompt would hold
        elif key == "backend":
            names = [value] if value != "local" else []  # it sends the run to a service, with a person's key
        else:
            names = [value] if ":" in value else []
        yield from ((key, name) for name in names)


def check_named(named: Iterable[tuple[str, str]], whose: str, command: str, program: str = "msgrpo") -> None:
    """Raise UsageError where what `whose` file names (`foreign`) is not all named by a person too.

    `command` is what follows `program`, for the message, which allows what was allowed already, too.
    """
    named = list(dict.fromkeys(named))
    if missing := [f"{key} {name!r}" for key, name in named if not is_allowed(name)]:
        allowed = " ".join(f"--allow {shlex.quote(name)}" for name in dict.fromkeys(name for _, name in named))
        raise UsageError(
            f"{whose} names {', '.join(missing)}; nothing is run or asked because a file says so",
            fix=f"if you trust it: {program} {allowed} {command}",
        )
