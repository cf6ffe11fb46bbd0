"""`msgrpo` in a process of its own, without the seconds in which Python loads torch and transformers.

The process is a fork of one that has imported them and done nothing else (multiprocessing's `forkserver`): it can be
killed and interrupted, and nothing was computed in it before. What a start from nothing does is asked elsewhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from msgrpo.cli import main
from tests.near import play_near_lakes

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["msgrpo.train.loop", "matplotlib.backends.backend_agg"])


def begin(arguments: Sequence[str], said: Path) -> BaseProcess:
    """The command line `msgrpo …`, which plays near lakes; what it says goes to the file `said`."""
    process = FORKS.Process(target=_run, args=(list(arguments), str(said)))
    process.start()
    return process


def run(arguments: Sequence[str], said: Path) -> str:
    """What it has said, once it has ended well."""
    process = begin(arguments, said)
    process.join()
    assert process.exitcode == 0, said.read_text()
    return said.read_text()


def _run(arguments: list[str], said: str) -> None:
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = ["msgrpo", *arguments]
    play_near_lakes()
    main()
