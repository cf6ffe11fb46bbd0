"""The files by which others watch a training run: rows of metrics, and each update's groups with a few episodes.

Only training writes them. Each file is replaced in one move, so it can be read at any moment.
"""

from __future__ import annotations

import fcntl
import math
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import from_json

from msgrpo.episode import Episode
from msgrpo.errors import RecordError, RunError, UsageError, first_fault
from msgrpo.files import open_lock, read_regular, replace_text
from msgrpo.text import Clean, printable

CONFIG, METRICS, UPDATES, FILM, LOCK = "config.json", "metrics.jsonl", "updates", "film", ".lock"
SUMMARY = "summary.json"  # what a run has come to, once it has ended
TRANSCRIPTS = "transcripts.jsonl"  # a few episodes of the last update, to read
# The metrics of an update that a person is shown, and what they are called there.
CALLED = {
    "rollout/return": "return",
    "rollout/success": "success",
    "rollout/invalid": "invalid",
    "rollout/entropy": "entropy",
    "update/kl": "KL",
    "update/clip_share": "clipped",
    "rollout/flat_groups": "flat groups",
}
POLICY = "policy"  # what the agent that is trained is called in the episodes of its run
LOCK_TRIES, LOCK_RETRY_S = 20, 0.05  # a watcher holds the lock briefly, so retry before giving up
LARGEST = 2**53  # of the whole numbers in a run's files: each up to there is a float too
LATEST, EVERY = 100, 10  # updates that are kept: the latest hundred, and every tenth before them
Kept = TypeVar("Kept", bound=BaseModel)
MOST_SCENES = 200  # of a film: where there would be more, every second one goes


def own_seats(episode: Episode) -> list[str]:
    """The seats that the policy had; all where no opponent was named."""
    return [player for player, spec in episode.agents.items() if spec == POLICY] or list(episode.agents)


class Member(BaseModel):
    """One episode of a group: its return, its advantage, and whether the update kept it."""

    total: float  # the return with shaping
    advantage: float  # within its group
    kept: bool
    sample: int | None = None  # where the whole episode is in `Update.samples`


class GroupRow(BaseModel):
    """The episodes of one start, of one player."""

    scenario: Clean
    start_seed: int
    player: Clean
    members: list[Member]

    @property
    def flat(self) -> bool:
        """Whether all returns are equal, so that the group teaches nothing."""
        return all(member.advantage == 0 for member in self.members)


class WatchedEpisode(BaseModel):
    """A whole episode, and the credit that each turn of `player` had in the update."""

    episode: Episode
    player: Clean
    credits: list[float]


class Update(BaseModel):
    """The groups that one update saw, and some of their episodes."""

    step: int = Field(ge=1)
    groups: list[GroupRow]
    samples: list[WatchedEpisode]

    @model_validator(mode="after")
    def _samples_fit(self) -> Self:
        for member in (member for row in self.groups for member in row.members):
            if member.sample is not None and not 0 <= member.sample < len(self.samples):
                raise ValueError(f"there is no sample {member.sample}")
        for sample in self.samples:
            if len(sample.credits) != len(sample.episode.turns_of(sample.player)):
                raise ValueError("a sample has not one credit a turn")
        return self


class Scene(BaseModel):
    """The film's starts as they were played after so many updates, always with the same luck and sampling seeds."""

    step: int = Field(ge=0)
    episodes: list[Episode]


@contextmanager
def alone(run: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Lock the run's folder, so that no other process trains there and watchers see that the run goes on.

    The kernel frees the lock when the process ends, however it ends. A disk without locks is used without one.
    Raises RunError if another process keeps the lock for longer than a watcher does, and longer than `wait_s`.
    """
    run.mkdir(parents=True, exist_ok=True)
    with open_lock(run / LOCK) as lock:
        for tries in reversed(range(max(LOCK_TRIES, math.ceil(wait_s / LOCK_RETRY_S)))):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not tries:
                    fix = "wait for it, or give another --out"
                    raise RunError(f"another process trains in {run}", fix=fix) from error
                time.sleep(LOCK_RETRY_S)
            except OSError:  # the disk has no locks, so `goes_on` returns None
                break
        lock.seek(0)
        if lock.read() != gethostname():
            lock.truncate(0)
            lock.write(gethostname())
            lock.flush()
        yield


def goes_on(run: Path) -> bool | None:
    """Whether a process trains in the folder; None if unknown: on a copy, or on a disk without locks."""
    if not (run / LOCK).is_file():  # a pipe would be waited for
        return None
    try:
        with (run / LOCK).open(errors="replace") as lock:
            if lock.read() != gethostname():
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def read_rows(run: Path) -> list[dict[str, Any]]:
    """All complete rows of `metrics.jsonl`; a torn last line is passed over."""
    file = run / METRICS
    lines = file.read_bytes().splitlines() if file.is_file() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_row(from_json(line)))
        except (ValueError, TypeError) as error:
            if number != len(lines):
                raise RunError(f"{file}:{number} is damaged", fix="start again in another --out") from error
    return rows


def _row(value: Any) -> dict[str, Any]:
    """Read a row. Raises ValueError if it is none."""
    row = dict(value)
    if row.get("kind") not in ("train", "eval") or not isinstance(row.get("step"), int):
        raise ValueError("a row has a kind and a step")
    _check_numbers(row)
    return row


def _check_numbers(data: Any) -> None:
    """Raise ValueError for a whole number that is no quantity of a run's: one that no float holds fails wherever it
    is computed with.
    """
    entries = data.values() if isinstance(data, dict) else ()
    numbers = (one for entry in entries for one in (entry if isinstance(entry, list) else [entry]))
    if any(isinstance(one, int) and abs(one) > LARGEST for one in numbers):
        raise ValueError(f"it holds a number beyond {LARGEST:g}")


def settings(run: Path) -> dict[str, Any]:
    """The run's own settings. Raises UsageError where there is no run."""
    if run.is_file():
        raise UsageError(f"{run} is a file and no run's folder", fix=f"msgrpo play --replay {shlex.quote(str(run))}")
    try:
        read = from_json(read_regular(run / CONFIG))
        _check_numbers(read)
    except OSError as error:
        raise UsageError(
            f"{run} holds no training run: {CONFIG} cannot be read ({error.strerror})",
            fix="msgrpo train frozen-lake --out runs/fl, then msgrpo play --run runs/fl",
        ) from error
    except ValueError as error:
        raise UsageError(f"{run / CONFIG} is damaged: {error}") from error
    steps = read.get("steps") if isinstance(read, dict) else None
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise UsageError(f"{run / CONFIG} holds no settings of a training run")
    return {key: printable(value) if isinstance(value, str) else value for key, value in read.items()}


def trained_on(file: Path) -> str | None:
    """The scenario that a file of settings or facts names; None where it cannot be read, or names none."""
    try:
        facts = from_json(read_regular(file))
    except (OSError, ValueError):
        return None
    value = facts.get("scenario") if isinstance(facts, dict) else None
    return value if isinstance(value, str) else None


def write_update(run: Path, update: Update) -> None:
    """Write the update's file, in one move, and thin out the old ones."""
    folder = run / UPDATES
    folder.mkdir(exist_ok=True)
    replace_text(folder / f"{update.step:06d}.json", update.model_dump_json())
    old = update.step - LATEST
    if old > 0 and old % EVERY:
        (folder / f"{old:06d}.json").unlink(missing_ok=True)


def write_scene(run: Path, scene: Scene) -> None:
    """Write the scene's file, in one move; a film that grows too long loses every second scene but its ends."""
    folder = run / FILM
    folder.mkdir(exist_ok=True)
    replace_text(folder / f"{scene.step:06d}.json", scene.model_dump_json())
    kept = scenes(run)
    if len(kept) > MOST_SCENES:
        for step in kept[1:-1:2]:
            (folder / f"{step:06d}.json").unlink(missing_ok=True)


def forget_after(run: Path, step: int) -> None:
    """Remove the updates and scenes that a resumed run makes again."""
    for folder in (UPDATES, FILM):
        for number in _numbered(run / folder):
            if number > step:
                (run / folder / f"{number:06d}.json").unlink(missing_ok=True)


def steps(run: Path) -> list[int]:
    """The numbers of the updates that are kept."""
    return _numbered(run / UPDATES)


def scenes(run: Path) -> list[int]:
    """After how many updates there is a scene of the film."""
    return _numbered(run / FILM)


def _numbered(folder: Path) -> list[int]:
    return sorted(int(file.stem) for file in folder.glob("*.json") if re.fullmatch("[0-9]+", file.stem))


def read_update(run: Path, step: int) -> Update:
    """Read an update. Raises RecordError if it is missing or damaged."""
    return _read(run / UPDATES / f"{step:06d}.json", Update)


def read_scene(run: Path, step: int) -> Scene:
    """Read a scene of the film. Raises RecordError if it is missing or damaged."""
    return _read(run / FILM / f"{step:06d}.json", Scene)


def _read(file: Path, kind: type[Kept]) -> Kept:
    try:
        return kind.model_validate_json(read_regular(file))
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        what = f"no {kind.__name__.lower()}"
        raise RecordError(f"{file} is {what}: {first_fault(error, 'the file')}") from error
