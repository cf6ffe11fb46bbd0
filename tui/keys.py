"""The keys of a game that have a name, and the file in which a person changes them."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from pathlib import Path

from textual.binding import Binding
from textual.keys import Keys
from textual.keys import _character_to_key as character_to_key

from msgrpo.errors import UsageError, nearest
from msgrpo.files import read_regular, users_folder
from msgrpo.tui.app import PlayApp
from msgrpo.tui.screens.play import PlayScreen

SIGNS = (
    *("space", "full_stop", "comma", "plus", "minus", "equals_sign", "question_mark", "exclamation_mark", "slash"),
    *("left_square_bracket", "right_square_bracket", "semicolon", "colon", "underscore", "asterisk", "number_sign"),
)
KEYS = frozenset((*(key.value for key in Keys), *SIGNS))


def keys_file() -> Path:
    return users_folder("XDG_CONFIG_HOME", ".config") / "keys.toml"


def bindings() -> dict[str, Binding]:
    """Every key that can be changed, by its name."""
    return {b.id: b for b in PlayScreen.BINDINGS if isinstance(b, Binding) and b.id is not None}


def read_keys(path: Path | None = None) -> dict[str, str]:
    """The changed keys, name -> keys; empty without a file. Raises UsageError for a wrong file or name."""
    path = path or keys_file()
    try:
        named = tomllib.loads(read_regular(path).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", fix='write lines like  "play.pause" = "space,f2"'
        ) from error
    known = bindings()
    for name, keys in named.items():
        if name not in known:
            raise UsageError(f"{path}: no key is named {name!r}", fix=nearest(name, known))
        if not isinstance(keys, str) or not keys:
            raise UsageError(f"{path}: {name} must be a text of keys, not {keys!r}", fix=f'"{name}" = "space,f2"')
        for key in keys.split(","):
            if not is_key(key):
                raise UsageError(f"{path}: {name} names the key {key!r}, which there is not", fix=like(key))
    _check_conflicts(path, named)
    return named


def is_key(name: str) -> bool:
    """Whether a key can have this name: a character, a named key, or one of these after ctrl+, shift+, alt+."""
    plain = re.sub(r"^((ctrl|shift|alt|meta|super)\+)+", "", name)
    return len(plain) == 1 or name in KEYS or plain in KEYS


def like(key: str) -> str:
    """The key that may be meant: names are written small."""
    if is_key(key.lower()):
        return f"did you mean {key.lower()}?"
    close = get_close_matches(key.lower(), KEYS, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else "a character, or a name such as space, f2 or ctrl+k"


def _check_conflicts(path: Path, changed: dict[str, str]) -> None:
    """Raise UsageError where the game would do two things with one key."""
    owner: dict[str, str] = {}
    for binding in [*PlayScreen.BINDINGS, *PlayApp.BINDINGS]:
        if not isinstance(binding, Binding):
            continue
        called = binding.id or binding.description
        for name in changed.get(binding.id or "", binding.key).split(","):
            key = character_to_key(name) if len(name) == 1 else name  # "." and full_stop are one key
            other = owner.setdefault(key, called)
            if other != called and {other, called} & set(changed):
                raise UsageError(
                    f"{path}: the key {key!r} would mean both {other!r} and {called!r}",
                    fix="give it another key; msgrpo play --keys lists those that have names",
                )
