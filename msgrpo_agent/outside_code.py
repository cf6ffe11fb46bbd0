"""Code of a user's own, by name: a file that ends in `.py`, or a module that can be imported.

It may hang or fail: its import has a time limit, what it raises is named with its file and line, and the working
directory and Ctrl-C are afterwards as they were.
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
from pathlib import Path
from types import ModuleType

from msgrpo.errors import MsgrpoError, UsageError, users_code, where_raised
from msgrpo.files import expanded, is_file
from msgrpo.limits import is_interrupt, unmoved, within

IMPORT_S = 60.0  # seconds that a file may take to be imported, libraries included


def module_at(place: str, name: str, fix: str) -> ModuleType:
    """The module at `place`: a file, or what can be imported, from the current folder too; `name` is what was asked
    for. Raises UsageError with the file and line where it cannot be imported, and `fix`.
    """
    if place.endswith(".py"):
        return _from_file(Path(place), name, fix)
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", place):
        raise UsageError(f"{name!r} names no module: {place!r}", fix=fix)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # behind all that is installed: a user's train.py does not stand in for ours
    with loading(name, fix):
        return importlib.import_module(place)


def _from_file(file: Path, name: str, fix: str) -> ModuleType:
    if not is_file(file):
        raise UsageError(f"{name[:200]!r}: there is no file {str(file)[:200]}", fix=fix)
    file = expanded(file)
    known = "msgrpo_outside_" + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, file.resolve())
    assert spec is not None  # a file that ends in .py has both
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # dataclasses look their module up
    try:
        with loading(name, fix):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[known]
        raise
    return module


@contextmanager
def loading(name: str, fix: str) -> Iterator[None]:
    """Somebody's code runs within the block so that `name` can be used."""
    failed = f"{name!r} cannot be loaded"
    with users_code(failed, fix=fix), within(IMPORT_S, f"the import of {name}"), unmoved():
        try:
            yield
        except MsgrpoError as error:  # it says what is wrong, and not in whose code
            raise UsageError(f"{failed}: {error.message}", fix=error.fix) from error
        except KeyboardInterrupt as error:
            if is_interrupt(error):
                raise
            raise UsageError(f"{failed}: {where_raised(error)}", fix=fix) from error
