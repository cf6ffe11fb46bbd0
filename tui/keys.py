"""The keys: their names, and the file in which a person changes them."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from textual.binding import Binding, BindingType
from textual.keys import Keys
from textual.keys import _character_to_key as character_to_key
from textual.screen import Screen

from msgrpo.errors import UsageError, nearest
from msgrpo.tui.app import PlayApp
from msgrpo.tui.screens.learn import LearnScreen
from msgrpo.tui.screens.play import PlayScreen
from msgrpo.tui.screens.records import RecordsScreen
from msgrpo.tui.screens.start import StartScreen

SCREENS: tuple[type[Screen[None]], ...] = (StartScreen, PlayScreen, LearnScreen, RecordsScreen)
SIGNS = (
    *("space", "full_stop", "comma", "plus", "minus", "equals_sign", "question_mark", "exclamation_mark", "slash"),
    *("left_square_bracket", "right_square_bracket", "semicolon", "colon", "underscore", "asterisk", "number_sign"),
)
KEYS = frozenset((*(key.value for key in Keys), *SIGNS))


def keys_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "msgrpo" / "keys.toml"


def bindings() -> dict[str, Binding]:
    """Every key that can be changed, by its name."""
    listed: list[BindingType] = [binding for screen in SCREENS for binding in screen.BINDINGS]
    listed += PlayApp.BINDINGS
    return {b.id: b for b in listed if isinstance(b, Binding) and b.id is not None}


def read_keys(path: Path | None = None) -> dict[str, str]:
    """The changed keys, name -> keys; empty without a file. Raises UsageError for a wrong file or name."""
    path = path or keys_file()
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", fix='write lines like  "play.pause" = "space,p"'
        ) from error
    known = bindings()
    for name, keys in found.items():
        if name not in known:
            raise UsageError(f"{path}: no key is named {name!r}", fix=nearest(name, known))
        if not isinstance(keys, str) or not keys:
            raise UsageError(f"{path}: {name} must be a text of keys, not {keys!r}", fix=f'"{name}" = "space,p"')
        for key in keys.split(","):
            if not is_key(key):
                raise UsageError(f"{path}: {name} names the key {key!r}, which there is not", fix=nearest(key, KEYS))
    _check_conflicts(path, found)
    return found


def is_key(name: str) -> bool:
    """Whether a key can have this name: a character, a named key, or one of these after ctrl+, shift+, alt+."""
    plain = re.sub(r"^((ctrl|shift|alt|meta|super)\+)+", "", name)
    return len(plain) == 1 or name in KEYS or plain in KEYS


def _check_conflicts(path: Path, changed: dict[str, str]) -> None:
    """Raise UsageError where one screen would do two things with one key."""
    for screen in SCREENS:
        owner: dict[str, str] = {}
        listed: list[BindingType] = [*screen.BINDINGS, *PlayApp.BINDINGS]
        for binding in listed:
            if not isinstance(binding, Binding) or binding.id is None:
                continue
            for name in changed.get(binding.id, binding.key).split(","):
                key = character_to_key(name) if len(name) == 1 else name  # "." and full_stop are one key
                other = owner.setdefault(key, binding.id)
                if other != binding.id and {other, binding.id} & set(changed):
                    raise UsageError(
                        f"{path}: the key {key!r} would mean both {other} and {binding.id}",
                        fix="give one of them another key; msgrpo play --keys lists all",
                    )
