"""The append-only record of one agent in one scenario, from which an interrupted evaluation resumes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msgrpo.episode import GAME_FAULT, MAKES_RECORDS, Episode, read_episodes
from msgrpo.errors import RecordError, first_fault
from msgrpo.evals.suites import MOST, MOST_COUNTED, SUITE_VERSION, EpisodeSeeds, HeldOut
from msgrpo.files import open_lock, replace_text
from msgrpo.games import may_load
from msgrpo.run_log import METRICS, TRANSCRIPTS
from msgrpo.specs import is_anothers
from msgrpo.text import Clean, printable_data
from msgrpo.trust import check_named

RUN_FILE = "run.json"
OF_TRAINING = (METRICS, TRANSCRIPTS)
MATCHES = "match"  # the folder of their records
# Failures that come again: the episode's own prompt, or the game's own code, is their cause.
LASTING = ("context_length", "bad_request", "content_filter", GAME_FAULT)
LOCKED_S = 60.0  # longer than any process changes run.json
MANY = MOST_COUNTED * MOST["repeats"]  # upper bound of every count in run.json
LONGEST_NAME = 80  # characters of a folder's name; file systems take 255 bytes


def records_in(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths` and all records in the folders among them, without what training writes there."""
    odd = [path for path in paths if not path.is_dir() and not path.is_file()]
    if odd:
        raise RecordError(f"{odd[0]} is neither a file nor a folder that can be read", fix=MAKES_RECORDS)
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])
        if file == path or (file.name not in OF_TRAINING and file.is_file())
    ]
    if not files:
        listed = ", ".join(map(str, paths))
        read = next((path for path in paths if (path / TRANSCRIPTS).is_file()), None)
        fix = MAKES_RECORDS
        if read is not None:
            shown = shlex.quote(str(read))
            fix += f"; the run's last training episodes are no evaluation, but can be read: msgrpo view {shown}"
        raise RecordError(f"no records (.jsonl) in {listed}", fix=fix)
    return files


def check_games(paths: Sequence[Path], command: str) -> None:
    """Raise UsageError for the games from outside that nobody has allowed, all of them at once. The first line of
    each record says its game; `command` is what was given to msgrpo, to be copied with what allows them.
    """
    first = [next(read_episodes(file), None) for file in records_in(paths)]
    games = dict.fromkeys(episode.scenario for episode in first if episode is not None)
    check_named([("the game", name) for name in games if not may_load(name)], "a record", command)


def holds_episodes(out: Path) -> bool:
    """Whether a folder has records of an evaluation, AGENT/SCENARIO.jsonl, that are not empty."""
    return any(
        file.parent.name != MATCHES and file.name not in OF_TRAINING and file.stat().st_size > 0
        for file in out.glob("*/*.jsonl")
    )


def seeds_of(episode: Episode) -> EpisodeSeeds:
    """An episode's identity within its scenario."""
    return EpisodeSeeds(episode.start_seed, episode.chance_seed, episode.sampling_seed)


def failure_of(episode: Episode) -> str:
    """How an episode failed, in words; where its game's own code did, with the command that looks for faults."""
    said = f"{episode.error}: {episode.error_message}" if episode.error_message else str(episode.error)
    look = f" (msgrpo games check {shlex.quote(episode.scenario)} looks for faults)"
    return f"{said}{look if episode.error == GAME_FAULT else ''}"


def as_recorded(settings: dict[str, Any]) -> dict[str, Any]:
    """An agent's settings as a record gives them back: JSON has no tuples, and what is written is cleaned."""
    recorded: dict[str, Any] = printable_data(json.loads(json.dumps(settings)))
    return recorded


def folder_name(spec: str) -> str:
    """A folder's name for an agent: readable, and different for different specs."""
    clean = re.sub(r"[^A-Za-z0-9.-]+", "_", spec).strip("_.")[:LONGEST_NAME]
    return clean if clean == spec else f"{clean}-{hashlib.sha256(spec.encode()).hexdigest()[:6]}"


class RecordFile:
    """Opens `path` for appending, one process at a time. A line torn by a killed writer is cut off first.

    The lock is the kernel's (flock): it ends with the process, however that ends. Raises RecordError for a file that
    another process writes to, or that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RecordError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self._lock()
            self._cut_torn_line()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def append(self, episode: Episode) -> None:
        """Append one line completely or not at all: a line that a full disk cuts off is removed."""
        line = episode.model_dump_json().encode() + b"\n"
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                written += os.write(self._file, line[written:])  # this one raises the reason why the first stopped
            if written < len(line):
                raise OSError(None, "the line was cut off")
        except OSError as error:
            os.ftruncate(self._file, before)
            raise RecordError(
                f"{self.path} cannot be written: {error.strerror}",
                fix="make it writable and start the same command again; finished episodes stay",
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordError(
                f"another process writes to {self.path}", fix="wait for it, or give another --out"
            ) from error
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be locked: {error.strerror}", fix="give an --out on a disk that knows locks"
            ) from error

    def _cut_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.ftruncate(self._file, self.path.read_bytes().rfind(b"\n") + 1)


class Record(RecordFile):
    """The record of one agent on one scenario, and what it says of the episodes that are still to be played.

    `finished` are the episodes that have a result, `failures` how often the others failed by their own fault: an
    outage uses none of an episode's attempts up, nor does a run that stopped because nearly everything failed (its
    lines are the first `forgiven`). Raises RecordError also for a file that other settings made.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, forgiven: int = 0) -> None:
        super().__init__(path)
        self.lines = 0
        self.tokens: list[tuple[int, int]] = []  # (prompt tokens, answer tokens) of every line
        self.largest = (0, 0)  # the largest (prompt tokens, answer tokens) of an answer
        self.finished: set[EpisodeSeeds] = set()
        self.recorded: set[EpisodeSeeds] = set()  # episodes that have a line, with a result or without
        self.failures: Counter[EpisodeSeeds] = Counter()
        self._forgiven = forgiven
        settings = as_recorded(settings)
        try:
            for episode in read_episodes(path):
                self._check(episode, settings)
                self._count(episode)
        except BaseException:
            self.close()
            raise

    def append(self, episode: Episode) -> None:
        super().append(episode)
        self._count(episode)

    def _count(self, episode: Episode) -> None:
        self.lines += 1
        self.recorded.add(seeds_of(episode))
        read, written = ([getattr(t, f"{kind}_tokens") for t in episode.turns] for kind in ("prompt", "completion"))
        self.tokens.append((sum(read), sum(written)))
        self.largest = max([self.largest, *zip(read, written, strict=True)], key=sum)
        if episode.error is None:
            self.finished.add(seeds_of(episode))
        elif episode.error in LASTING and self.lines > self._forgiven:
            self.failures[seeds_of(episode)] += 1

    def _check(self, episode: Episode, settings: dict[str, Any]) -> None:
        recorded = next(iter(episode.settings.values()), {})
        if recorded != settings:
            changed = {k for k in {*recorded, *settings} if recorded.get(k) != settings.get(k)}
            was, now = ({k: s.get(k) for k in sorted(changed)} for s in (recorded, settings))
            raise RecordError(
                f"{self.path} was made with other settings: {was}, now {now}",
                fix="use the same options, or give another --out",
            )


class Price(BaseModel):
    """US$ per million tokens."""

    model_config = ConfigDict(extra="forbid")

    prompt: float = Field(ge=0, le=1e9, allow_inf_nan=False)
    completion: float = Field(ge=0, le=1e9, allow_inf_nan=False)

    def of(self, read: int, written: int) -> float:
        """What these tokens cost, in US$."""
        return (self.prompt * read + self.completion * written) / 1e6


Count = Annotated[int, Field(ge=0, le=MANY)]
Repeats = Annotated[int, Field(ge=1, le=MOST["repeats"])]
FREE = Price(prompt=0, completion=0)


class Command(BaseModel):
    """A start of an evaluation: when (UTC), and the command line."""

    model_config = ConfigDict(extra="forbid")

    at: Clean
    line: Clean


class Run(BaseModel):
    """`run.json`: what the records beside it belong to, and what was asked for. Keys are agents, or files.

    A field that is not known is refused: as the split does, it may say what the records are, and rewriting the file
    would lose it.
    """

    model_config = ConfigDict(extra="forbid")

    suite_version: int
    split: HeldOut = "test"  # whose starts all its episodes have
    prices: dict[Clean, Price] = {}
    asked: dict[Clean, dict[Clean, Count]] = {}  # agent -> scenario -> episodes
    at_once: dict[Clean, Count] = {}  # agent -> the most episodes that were played at once
    forgiven: dict[Clean, int] = {}  # record -> leading lines whose failures use up no attempts
    lines: dict[Clean, Count] = {}  # record -> lines that it had when the evaluation last began or stopped
    removed: dict[Clean, Count] = {}  # record -> lines that were gone when it began again
    started: dict[Clean, int] = {}  # agent -> starts of the evaluation
    ended: dict[Clean, int] = {}  # agent -> those of them that came to their end
    repeats: dict[Clean, dict[Clean, Repeats]] = {}  # agent -> scenario -> episodes from each start
    names: dict[Clean, Clean] = {}  # agent -> its name in tables
    commands: list[Command] = []  # what was started, in order

    def interrupted(self, agent: str) -> int:
        """How many starts were killed or stopped. Their unfinished answers are in no record."""
        return self.started.get(agent, 0) - self.ended.get(agent, 0)

    def note_lines(self, record: str, lines: int) -> None:
        """Keep how many lines a record has now, and how many have been taken out of it since the last time."""
        if (gone := self.lines.get(record, 0) - lines) > 0:
            self.removed[record] = self.removed.get(record, 0) + gone
        self.lines[record] = lines


def check_names(run: Run) -> None:
    """Raise RecordError for a table's name that makes one agent another: a reader takes `nano` for nano."""
    for spec, name in run.names.items():
        if is_anothers(name, spec, run.asked):
            raise RecordError(
                f"{RUN_FILE} calls the agent {spec} {name!r}, which whoever reads a table takes for another agent",
                fix="give it another name: msgrpo eval --name",
            )


@contextmanager
def changing_run(out: Path) -> Iterator[Run]:
    """Change `run.json` as one step, also when several evaluations share the folder. Refuses another version."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open_lock(out / f".{RUN_FILE}.lock") as lock:
            _lock_in_time(lock)
            run = read_run(out) or Run(suite_version=SUITE_VERSION)
            if run.suite_version != SUITE_VERSION:
                raise RecordError(
                    f"{out} holds results of suite version {run.suite_version}, this is {SUITE_VERSION}",
                    fix="give another --out",
                )
            yield run
            replace_text(out / RUN_FILE, run.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise RecordError(
            f"{error.filename or out} cannot be written: {error.strerror}", fix="give another --out"
        ) from error


def _lock_in_time(lock: TextIO) -> None:
    """Lock `run.json`, which others do for a moment. Raises RecordError where one does not let go."""
    deadline = time.monotonic() + LOCKED_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise RecordError(
                    f"another process has held {lock.name} for {LOCKED_S:g} s: it may be stopped (Ctrl-Z)",
                    fix=f"fuser {shlex.quote(lock.name)} names it: let it go on (fg) or end it; or another --out",
                ) from error
            time.sleep(0.01)


def run_of(file: Path) -> Run | None:
    """The `run.json` of a record: in its folder or the one above; None for records of other origin."""
    return next((run for folder in list(file.resolve().parents)[:2] if (run := read_run(folder))), None)


def taken_out(file: Path) -> int:
    """How many lines of a record somebody has removed, as far as its `run.json` tells: lost episodes that are played
    again until they are won leave no other trace.
    """
    file = file.resolve()
    for folder in list(file.parents)[:2]:
        if run := read_run(folder):
            name, there = file.relative_to(folder).as_posix(), 0
            with suppress(OSError), file.open("rb") as lines:  # whoever reads it says why it cannot be read
                there = sum(bool(line.strip()) for line in lines)
            return run.removed.get(name, 0) + max(run.lines.get(name, 0) - there, 0)
    return 0


def read_run(out: Path) -> Run | None:
    """The `run.json` of a folder; None without one. Raises RecordError for a damaged one."""
    path = out / RUN_FILE
    if not path.is_file():
        if os.path.lexists(path):
            raise RecordError(f"{path} is no file that can be read", fix="remove it, or give another folder")
        return None
    try:
        return Run.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RecordError(
            f"{path} is damaged, or of a later version: {first_fault(error, 'the file')}",
            fix="read it with the msgrpo that wrote it; or remove it, or give another folder",
        ) from error
