"""The keys: their names, and the file in which a person changes them."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from textual.binding import Binding, BindingType

from msgrpo_agent.errors import UsageError, nearest
from tui.app import PlayApp
from tui.screens.play import PlayScreen
from tui.screens.start import StartScreen


def keys_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "msgrpo" / "keys.toml"


def bindings() -> dict[str, Binding]:
    """Every key that can be changed, by its name."""
    listed: list[BindingType] = [*StartScreen.BINDINGS, *PlayScreen.BINDINGS, *PlayApp.BINDINGS]
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
    return found
