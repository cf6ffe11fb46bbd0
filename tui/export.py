"""What a sitting leaves behind: the record of an episode, and a name for its files."""

from __future__ import annotations

import os
import re
from itertools import chain, count
from pathlib import Path
from time import sleep

from msgrpo.episode import Episode
from msgrpo.errors import RecordError
from msgrpo.evals.record import RecordFile
from msgrpo.tui.session import Session

PLAYS = Path("plays")  # where episodes and pictures go
BY_HAND = PLAYS / "human.jsonl"  # the record of what people have played
TRIES, BETWEEN_TRIES_S = 100, 0.02  # of a record that another app writes to, which takes it milliseconds
LONGEST_STEM = 100  # file systems take names of 255 bytes


def file_stem(session: Session) -> str:
    """`snake-nano-seed7`: scenario, who played, start seed."""
    names = "-vs-".join(session.name(player) for player in session.players)
    return f"{safe_stem(f'{session.scenario.id}-{names}')}-seed{session.seed}"


def safe_stem(name: str) -> str:
    """The name without what a file's name may not hold."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)[:LONGEST_STEM]


def unused(folder: Path, name: str) -> str:
    """The name, or where a file has it, the first of name-2, name-3, … that none has: nothing is written over."""
    stem, suffix = Path(name).stem, Path(name).suffix
    names = chain([name], (f"{stem}-{number}{suffix}" for number in count(2)))
    return next(free for free in names if not os.path.lexists(folder / free))


def episode_line(episode: Episode) -> str:
    return episode.model_dump_json() + "\n"


def append_episode(path: Path, episode: Episode) -> None:
    """Add one line to a record, once no other app writes to it. Raises RecordError where it cannot be written."""
    for _ in range(TRIES):
        if append_unless_locked(path, episode):
            return
        sleep(BETWEEN_TRIES_S)
    with RecordFile(path) as record:
        record.append(episode)


def append_unless_locked(path: Path, episode: Episode) -> bool:
    """Add one line to a record; False where another app is writing to it. Raises RecordError as above."""
    try:
        with RecordFile(path) as record:
            record.append(episode)
    except RecordError as error:
        if isinstance(error.__cause__, BlockingIOError):
            return False
        raise
    return True
