"""A training run as somebody watches it: where it stands, its curve, an update's groups, one of their episodes.

Everything is read from the run's folder, again and again while it goes on; nothing here imports Textual.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgrpo import run_log
from msgrpo.errors import MsgrpoError, RecordError, RunError
from msgrpo.mixture import names_of
from msgrpo.run_log import CALLED, GroupRow, Member, Update, WatchedEpisode
from msgrpo.text import duration, printable
from msgrpo.tui.scenes import Scenes, shows
from msgrpo.tui.session import Session, short_name

PARTS = {"time/rollout": "playing", "time/update": "learning"}


@dataclass
class Learning:
    """A run, the update that is looked at, one of its groups, and one of the episodes that were kept whole."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    update: Update | None = None
    following: bool = True  # the newest update is shown as it comes
    group: int = 0
    sample: int = 0
    trouble: str = ""  # why the update that should be shown is not
    filming: bool = False  # the film is shown in place of an update's groups

    def __post_init__(self) -> None:
        self.film = Scenes(self.folder)

    @classmethod
    def of(cls, folder: Path) -> Learning:
        """Raises UsageError where the folder holds no run."""
        run = cls(folder, run_log.settings(folder))
        run.look()
        return run

    def look(self) -> bool:
        """Read what is new; whether there was anything. Of a folder that is gone, what was read last stays."""
        if self.gone:
            return False
        try:
            rows = run_log.read_rows(self.folder)
        except RunError as error:  # who trains has to begin anew, who only looks has not
            raise RunError(error.message, fix="without it there is no curve; the adapter is another file") from error
        steps = run_log.steps(self.folder)
        new = self.film.look() or (len(rows), steps) != (len(self.rows), self.steps)
        self.rows, self.steps = rows, steps
        if self.steps and (self.update is None or self.following) and self.steps[-1] != self.step:
            try:
                self.show(self.steps[-1])
                self.trouble = ""
            except RecordError as error:  # the curve is there all the same
                new, self.trouble = new or not self.trouble, error.message
        return new

    @property
    def step(self) -> int:
        """The update that is shown; 0 before the first."""
        return self.update.step if self.update else 0

    def show(self, step: int) -> None:
        self.update = run_log.read_update(self.folder, step)
        self.group = max(0, min(self.group, len(self.update.groups) - 1))
        self.sample = min(self.sample, max(0, len(self.samples()) - 1))

    def move(self, by: int) -> None:
        """To an earlier or later update; at the newest one it follows the run again."""
        if self.steps:
            place = self.steps.index(self.step) if self.step in self.steps else len(self.steps) - 1
            place = max(0, min(place + by, len(self.steps) - 1))
            self.following = place == len(self.steps) - 1
            self.show(self.steps[place])

    def move_group(self, by: int) -> None:
        if self.update and self.update.groups:
            self.group, self.sample = (self.group + by) % len(self.update.groups), 0

    def move_sample(self) -> None:
        if self.samples():
            self.sample = (self.sample + 1) % len(self.samples())

    @property
    def row(self) -> GroupRow | None:
        return self.update.groups[self.group] if self.update and self.update.groups else None

    def samples(self) -> list[Member]:
        """The members of the group that is shown whose episodes were kept whole, the best first."""
        return sorted(
            (member for member in (self.row.members if self.row else []) if member.sample is not None),
            key=lambda member: -member.advantage,
        )

    @property
    def member(self) -> Member | None:
        members = self.samples()
        return members[min(self.sample, len(members) - 1)] if members else None

    @property
    def shown(self) -> WatchedEpisode | None:
        """The episode that is shown."""
        member = self.member
        return self.update.samples[member.sample] if self.update and member and member.sample is not None else None

    @property
    def updates_shown(self) -> int:
        """Up to which update the curve is drawn."""
        return self.film.step if self.filming else self.settings["steps"]

    def session(self) -> Session | str:
        """The episode on its board, or why it cannot be shown."""
        if self.filming:
            return self.film.session()
        sample = self.shown
        if sample is None:
            if self.update:
                return "no episode of this group was kept whole"
            return self.nothing
        try:
            return Session.replay(sample.episode, shows(self.folder))
        except MsgrpoError as error:  # one that went on from the middle of another (branch), or a foreign game
            return str(error)

    @property
    def nothing(self) -> str:
        """Why no update is shown."""
        if self.trouble or not self.done:
            return self.trouble or "the first update is not over yet"
        return f"{self.folder / run_log.UPDATES} holds no update: the curve is all that is left"

    # ── in words and numbers ─────────────────────────────────────────────────────────────────────────────────

    @property
    def train_rows(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "train"]

    @property
    def evaluations(self) -> list[tuple[int, float, float | None, float | None]]:
        """(update, mean, low, high) of every evaluation; the ends are None where it has no interval."""
        rows = [row for row in self.rows if row["kind"] == "eval"]
        ends = [[measured(row, f"{self.score}{end}") for end in ("", "_low", "_high")] for row in rows]
        return [
            (row["step"], mean, low, high)
            for row, (mean, low, high) in zip(rows, ends, strict=True)
            if mean is not None
        ]

    @property
    def score(self) -> str:
        return next((printable(str(row.get("score"))) for row in self.rows if row["kind"] == "eval"), "return")

    @property
    def evaluated(self) -> str:
        """The game of a mixture that the evaluations are of, its first; empty where there is one game."""
        games = names_of(str(self.settings.get("scenario")))
        return printable(games[0]) if len(games) > 1 else ""

    @property
    def done(self) -> int:
        return max((row["step"] for row in self.train_rows), default=0)

    @property
    def gone(self) -> bool:
        """Whether the run's files were removed, or moved away, while it was watched."""
        files = [run_log.CONFIG, *([run_log.METRICS] if self.rows else [])]
        return not all((self.folder / file).is_file() for file in files)

    @property
    def over(self) -> bool:
        return (self.folder / run_log.SUMMARY).is_file() and self.done >= self.settings["steps"]

    def state(self) -> str:
        """Where the run stands: the time left by its own pace, or that it is over, gone, stopped or silent."""
        if self.gone:
            return "its folder is gone"
        if self.over:
            return "over"
        goes_on = run_log.goes_on(self.folder)
        if goes_on is False:
            return "stopped: --resume goes on"
        if not self.train_rows:
            return "the first update is being played"
        took = (measured(self.train_rows[-1], "time/total") or 0.0) / max(self.done, 1)
        left = took * max(0, self.settings["steps"] - self.done)
        silent = time.time() - (self.folder / run_log.METRICS).stat().st_mtime
        if goes_on is None and silent > 60 + 5 * took:
            return f"stopped? wrote nothing for {duration(silent)}"
        if not left:
            return "the last evaluation is being played"
        return f"{duration(left)} left"

    def title(self, width: int | None = None) -> str:
        """What is trained, how far it is and where; in so many columns, the parts that have room."""
        base = short_name(str(self.settings.get("base", "")))
        done = f"{self.done} of {self.settings['steps']} updates · {self.state()}"
        what, where = f"{base} on {self.settings.get('scenario')}", printable(str(self.folder))
        whole = f"{done} · {what} · {where}"
        if width is None or len(whole) <= width:
            return whole
        name = printable(self.folder.name)
        short = f"{done} · {what} · {name}"
        return short if len(short) <= width else f"{done} · {name}"

    def facts(self) -> list[tuple[str, str]]:
        """What the update that is shown measured."""
        step = self.film.step if self.filming else self.step
        row: dict[str, Any] = next((row for row in self.train_rows if row["step"] == step), {})
        figures = [
            (name, f"{value:.3g}") for key, name in CALLED.items() if (value := measured(row, key)) is not None
        ]
        parts = [f"{name} {value:.1f} s" for key, name in PARTS.items() if (value := measured(row, key))]
        return [*figures, ("time", ", ".join(parts))] if parts else figures


def measured(row: dict[str, Any], key: str) -> float | None:
    """A row's finite number; None where there is none."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


SIGNS = (
    "Each line is a group: the number of its start, then a sign for every episode, the best first. ▲ △ better than "
    "the group's mean, ▼ ▽ worse, • · all were equal. Filled signs: the update learnt from the episode; hollow or "
    "small ones: it did not see it."
)


def sign(member: Member) -> str:
    """▲ better than its group, ▼ worse, · the same; hollow where the update did not see it."""
    if member.advantage == 0:
        return "·" if not member.kept else "•"
    return ("▲" if member.kept else "△") if member.advantage > 0 else ("▼" if member.kept else "▽")
