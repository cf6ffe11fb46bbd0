"""`msgrpo games new FILE`: the small game in `higher.py`, as a beginning for one's own."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from msgrpo.errors import UsageError
from msgrpo.files import replace_text


def write(file: Path) -> str:
    """Write the game to `file` and return the name by which it can be played. Raises UsageError if it is taken."""
    if file.suffix != ".py" or not re.fullmatch(r"[A-Za-z_]\w*", file.stem):
        raise UsageError(f"{file} cannot be imported", fix="a name like my_game.py")
    if file.exists():
        raise UsageError(f"{file} is there already", fix="choose another name")
    text = files("msgrpo.games").joinpath("higher.py").read_text()
    for field in ("id", "family"):
        text = text.replace(f'{field}="higher"', f'{field}="{file.stem}"')
    try:
        replace_text(file, text)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    return f"{file}:scenario"
