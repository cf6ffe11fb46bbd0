"""How this package was installed, and the command that adds a part to it in the same way."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "msgrpo"


def install_command(extra: str, *options: str) -> str:
    """The command that installs an extra: from the clone, the address or the index that the package came from."""
    return " ".join([*_pip(), "install", *options, *_what(extra)])


def _pip() -> list[str]:
    """`pip` where that is the one of this Python, else this Python's own."""
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return ["pip"]
    python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
    return [shlex.quote(python), "-m", "pip"]


def _what(extra: str) -> list[str]:
    """What pip is asked for, from what it wrote down when it installed the package (PEP 610)."""
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        folder = Path(unquote(urlsplit(url).path))
        here = "." if folder == Path.cwd() else str(folder)
        return ["-e"] * bool(origin["dir_info"].get("editable")) + [f"'{here}[{extra}]'"]
    if "vcs_info" in origin:
        return [f"'{NAME}[{extra}] @ {origin['vcs_info'].get('vcs', 'git')}+{url}'"]
    return [f"'{NAME}[{extra}]'"]


def _origin() -> dict[str, Any]:
    """What pip wrote down; empty where it took the package from an index. A build leaves a record without it."""
    for record in Distribution.discover(name=NAME):
        text = record.read_text("direct_url.json")
        if text:
            return dict(json.loads(text))
    return {}
