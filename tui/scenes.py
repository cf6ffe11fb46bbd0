"""The film of a run: the same starts with the same luck, as they were played after more and more updates."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgrpo import run_log
from msgrpo.episode import Episode
from msgrpo.errors import MsgrpoError, RecordError
from msgrpo.tui.session import Session, points
from msgrpo.tui.shades import MUTED

Seeds = tuple[int, int]  # of a start and its luck
NOT_PLAYED = "this start was not played to its end"


def shows(run: Path) -> str:
    """The command that shows a run, after `msgrpo`."""
    return f"play --run {shlex.quote(str(run))}"


@dataclass
class Scenes:
    """The scenes that a run keeps, the one that is shown, and the start that is followed through all of them."""

    folder: Path
    steps: list[int] = field(default_factory=list)  # after how many updates each was played
    place: int = 0  # of the scene that is shown, in `steps`
    start: int = 0  # in `_starts`
    _starts: list[Seeds] = field(default_factory=list)  # in the order in which scenes showed them
    _read: dict[int, dict[Seeds, Episode] | str] = field(default_factory=dict)  # or why a scene cannot be read

    def look(self) -> bool:
        """See which scenes there are; whether there is a new one. At first the most telling start is followed."""
        steps = run_log.scenes(self.folder)
        new = steps != self.steps
        shown = self.step
        self.steps = steps
        self.place = max((i for i, step in enumerate(steps) if step <= shown), default=0)
        if new and len(steps) > 1 and not self._read:
            self.start = self._most_telling()
        return new

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def step(self) -> int:
        """Updates before the scene that is shown."""
        return self.steps[self.place] if self.steps else 0

    @property
    def last(self) -> bool:
        return self.place >= len(self.steps) - 1

    def move(self, by: int) -> None:
        self.place = max(0, min(self.place + by, len(self.steps) - 1))

    def move_start(self) -> None:
        """Follow the next start, from the scene that is shown."""
        self.start = (self.start + 1) % max(1, self.starts)

    @property
    def starts(self) -> int:
        """How many starts the scenes have that were read."""
        self._episodes(self.step)
        return len(self._starts)

    def episode(self, step: int) -> Episode | str:
        """How the start that is followed went after so many updates, or why that is not known."""
        episodes = self._episodes(step)
        if isinstance(episodes, str):
            return episodes
        seeds = self._starts[self.start] if self.start < len(self._starts) else None
        return episodes.get(seeds, NOT_PLAYED) if seeds is not None else NOT_PLAYED

    def session(self) -> Session | str:
        """The episode that is shown on its board, or why it cannot be shown."""
        return self.session_of(self.step)

    def session_of(self, step: int) -> Session | str:
        episode = self.episode(step)
        if isinstance(episode, str):
            return episode
        try:
            return Session.replay(episode, shows(self.folder))
        except MsgrpoError as error:
            return str(error)

    def results(self) -> list[tuple[int, Episode | str]]:
        """Of each scene its updates, and how the start went."""
        return [(step, self.episode(step)) for step in self.steps]

    def _episodes(self, step: int) -> dict[Seeds, Episode] | str:
        """A scene's episodes by their starts: one that a fault of the game ended is missing in its scene alone."""
        if step not in self._read:
            try:
                read = run_log.read_scene(self.folder, step).episodes
            except RecordError as error:
                self._read[step] = error.message
            else:
                self._read[step] = episodes = {(one.start_seed, one.chance_seed): one for one in read}
                self._starts += [seeds for seeds in episodes if seeds not in self._starts]
        return self._read[step]

    def _most_telling(self) -> int:
        """The first start with the largest difference between the first and the last scene."""
        first, last = self._episodes(self.steps[0]), self._episodes(self.steps[-1])
        if isinstance(first, str) or isinstance(last, str):
            return 0
        gains = {seeds: last[seeds].score - before.score for seeds, before in first.items() if seeds in last}
        return self._starts.index(max(gains, key=lambda seeds: gains[seeds])) if gains else 0


def learner_of(episode: Episode) -> str:
    """The player whose seat the policy had, the first of several."""
    return run_log.own_seats(episode)[0]


def has_goal(episode: Episode) -> bool:
    """Whether the policy alone could reach a goal."""
    return episode.success is not None and len(episode.agents) == 1


def result(episode: Episode) -> float:
    """What the policy reached: the goal, as 0 or 1, else its return."""
    if has_goal(episode):
        return float(bool(episode.success))
    return episode.returns.get(learner_of(episode), 0.0)


def scale_of(results: Sequence[Episode | str]) -> tuple[float, float]:
    """The lowest and the highest result of a film."""
    known = [result(one) for one in results if not isinstance(one, str)]
    return min(known, default=0.0), max(known, default=1.0)


def scene_sign(one: Episode | str, low: float, high: float) -> tuple[str, str]:
    """One letter for how a scene went, and its colour."""
    if isinstance(one, str):
        return "·", MUTED
    if has_goal(one):
        return ("★", "bold $text-success") if one.success else ("×", "$text-error")
    share = (result(one) - low) / (high - low) if high > low else 0.5
    return "▁▂▃▄▅▆▇█"[round(7 * share)], "$text-success"


def scene_legend(results: Sequence[Episode | str]) -> str:
    """What the signs of the scenes stand for."""
    if any(not isinstance(one, str) and has_goal(one) for one in results):
        return "★ goal, × missed"
    low, high = scale_of(results)
    return f"return, ▁ {points(round(low, 2))} to █ {points(round(high, 2))}"
