"""The episodes of a record: which there are, which of them a filter lets through, and the one that is shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from msgrpo.episode import Episode, read_episodes
from msgrpo.errors import RecordError, UsageError
from msgrpo.evals.record import records_in
from msgrpo.game import MISTAKE, Outcome
from msgrpo.run_log import TRANSCRIPTS
from msgrpo.text import counted, printable
from msgrpo.tui.agents import HUMAN
from msgrpo.tui.session import names_of, points

FILTERS: dict[str, Callable[[Episode], bool]] = {
    "all": lambda episode: True,
    "lost": lambda episode: episode.error is None and episode.score <= 0,
    "won": lambda episode: episode.error is None and episode.score > 0,
    "invalid answers": lambda episode: any(turn.failure is not None for turn in episode.turns),
    "mistakes": lambda episode: any((turn.regret or 0) >= MISTAKE for turn in episode.turns),
    "broken off": lambda episode: episode.error is not None,
}
COLUMNS = ("#", "scenario", "who", "return", "end", "steps", "lost a move", "invalid", "seed")
NAMES = ("scenario", "who")  # columns that hold names
SOME = ("lost a move", "invalid")  # columns that many records have nothing to say in
EVERYBODY = ""


@dataclass
class Records:
    """`place` counts from 0 through all episodes, whatever the filter."""

    name: str
    episodes: list[Episode]
    only: str = "all"
    agent: str = EVERYBODY  # whose episodes are listed
    words: str = ""  # that an answer has to hold
    best_first: bool = False  # in place of the order in which they were played
    place: int = 0
    chosen: bool = False  # by its number
    command: str = ""  # after `msgrpo`, that shows them

    @classmethod
    def read(cls, path: Path) -> Records:
        """The episodes of a file, or of all files below a folder. Raises RecordError where there is none."""
        try:
            path = path.expanduser()
        except RuntimeError as error:  # ~nobody
            raise RecordError(f"{path} cannot be read: {error}") from error
        files = [path]
        if path.is_dir():
            try:
                files = records_in([path])
            except RecordError:
                files = [path / TRANSCRIPTS]  # a training run's: its last episodes
                if not files[0].is_file():
                    raise
        episodes, damaged = list[Episode](), 0
        for file in files:
            try:
                episodes += read_episodes(file)
            except RecordError:
                if not path.is_dir():
                    raise
                damaged += 1
        if not episodes:
            unread = damaged or any(file.stat().st_size for file in files)
            what = ": what stands there is none, or was cut off as it was written" if unread else ""
            raise RecordError(f"{path} holds no episode{what}", fix="play or evaluate again to record one")
        left_out = f" · {counted(damaged, 'file')} left out: no record" if damaged else ""
        return cls(printable(f"{path}{left_out}"), episodes, command=f"play --replay {shlex.quote(str(path))}")

    @classmethod
    def high_scores(cls, file: Path) -> Records:
        """What people have reached, the best first. Raises RecordError where nobody has played by hand."""
        if not file.is_file():
            raise RecordError(
                "nobody has played a game to its end by hand yet", fix="play one: msgrpo play snake --agent human"
            )
        return replace(cls.read(file), agent=HUMAN, best_first=True)

    def choose(self, number: int) -> None:
        """By its number, from 1. Raises UsageError where there are not so many."""
        if not 1 <= number <= len(self.episodes):
            raise UsageError(f"{self.name} has no episode {number}", fix=f"--episode 1 … {len(self.episodes)}")
        self.place, self.chosen = number - 1, True

    @property
    def episode(self) -> Episode:
        return self.episodes[self.place]

    @cached_property
    def _specs(self) -> list[str]:
        """Every agent, in the order in which they come."""
        return list(dict.fromkeys(spec for episode in self.episodes for spec in episode.agents.values()))

    @cached_property
    def who(self) -> dict[str, str]:
        """What the list calls each agent."""
        return names_of(self._specs)

    def names(self) -> dict[str, str]:
        """What an agent may be called: by its whole name, or as the list shows it; name -> whole name."""
        return {name: spec for spec, name in self.who.items()} | {spec: spec for spec in self._specs}

    def listed(self) -> list[int]:
        """The places of the episodes that the filters let through."""
        return sorted((i for i, episode in enumerate(self.episodes) if self._shown(episode)), key=self._key)

    def _key(self, place: int) -> tuple[str, bool, float, int, int]:
        """Sorts the list: as it was played, or by scenario, return and fewer steps, with unfinished games last."""
        if not self.best_first:
            return "", False, 0.0, 0, place
        episode = self.episodes[place]
        return episode.scenario, *rank(episode, self.agent), place

    def _shown(self, episode: Episode) -> bool:
        sought = self.words.casefold()
        return (
            FILTERS[self.only](episode)
            and self.agent in (EVERYBODY, *episode.agents.values())
            and (
                not sought or any(sought in f"{t.answer or ''} {t.reasoning or ''}".casefold() for t in episode.turns)
            )
        )

    @property
    def told(self) -> str:
        """Which episodes are listed."""
        words, order = self.words and f"“{self.words}”", "best first" if self.best_first else ""
        parts = [self.only, self.agent and self.who[self.agent], words, order]
        return " · ".join(filter(None, parts))

    def next_agent(self) -> None:
        """List the next agent's episodes, after the last one everybody's."""
        names = [EVERYBODY, *self._specs]
        self.agent = names[(names.index(self.agent) + 1) % len(names)]

    def beside(self, place: int) -> list[Episode]:
        """Other agents' episodes with the same start and luck, in a game of one."""
        here = self.episodes[place]
        same = (here.scenario, here.start_seed, here.chance_seed)
        return [
            other
            for other in self.episodes
            if len(here.agents) == 1
            and (other.scenario, other.start_seed, other.chance_seed) == same
            and other.agents != here.agents
            and other.error is None
        ]

    def next_filter(self) -> None:
        """The next filter that lets something through."""
        names = list(FILTERS)
        for _ in names:
            self.only = names[(names.index(self.only) + 1) % len(names)]
            if self.listed():
                break

    def further(self, by: int) -> int | None:
        """The place of the next or previous listed episode; None at the end of the list."""
        here = self._key(self.place)
        others = [i for i in self.listed() if (self._key(i) > here if by > 0 else self._key(i) < here)]
        return (others[0] if by > 0 else others[-1]) if others else None

    def move(self, by: int) -> bool:
        """To the next or previous listed episode; False at the end of the list."""
        place = self.further(by)
        if place is not None:
            self.place = place
        return place is not None

    def table(self) -> tuple[list[str], dict[int, list[str]]]:
        """The names of the columns, and of each listed episode, by its place, what they say; empty columns are left
        out, so that the others have room.
        """
        lines = {place: self.line(place) for place in self.listed()}
        used = [i for i, name in enumerate(COLUMNS) if name not in SOME or any(line[i] for line in lines.values())]
        return [COLUMNS[i] for i in used], {place: [line[i] for i in used] for place, line in lines.items()}

    def line(self, place: int) -> tuple[str, ...]:
        """What the list says of one episode, by COLUMNS."""
        episode = self.episodes[place]
        turns = episode.turns
        result = episode.error or how_it_ended(episode)
        regrets = [turn.regret for turn in turns if turn.regret is not None]
        return (
            str(place + 1),
            episode.scenario,
            " vs ".join(self.who[spec] for spec in episode.agents.values()),
            " : ".join(points(round(total, 3)) for total in episode.returns.values()),
            result,
            str(turns[-1].step + 1 if turns else 0),
            f"{fmean(regrets):.3f}" if regrets else "",
            str(sum(turn.failure is not None for turn in turns) or ""),
            str(episode.start_seed),
        )


def how_it_ended(episode: Episode) -> str:
    """In words that hold for every game: the goal, out of steps, lost, over, or not finished."""
    if episode.success:
        return "goal"
    if episode.outcome is Outcome.TERMINATED:
        return "over" if episode.success is None else "lost"
    return "out of steps" if episode.outcome is Outcome.TRUNCATED else "not finished"


def reached(episode: Episode, agent: str = EVERYBODY) -> float:
    """The highest return of a seat that the agent had."""
    seats = [player for player, spec in episode.agents.items() if agent in (EVERYBODY, spec)]
    return max((episode.returns.get(player, 0.0) for player in seats), default=0.0)


def rank(episode: Episode, agent: str = EVERYBODY) -> tuple[bool, float, int]:
    """Sorts a scenario's episodes, the best first: by the return, then by fewer steps, and unfinished games last."""
    return episode.outcome is Outcome.PLAYING, -reached(episode, agent), len(episode.turns)


def standing_by_hand(file: Path, episode: Episode) -> str:
    """The place of a person's finished game among the high scores of its scenario; empty where there is no other."""
    try:
        scores = Records.high_scores(file)
    except RecordError:  # damaged or not there: the game that has just ended matters more
        return ""
    games = [
        scores.episodes[place] for place in scores.listed() if scores.episodes[place].scenario == episode.scenario
    ]
    if len(games) < 2 or HUMAN not in episode.agents.values():
        return ""
    place = 1 + sum(rank(game, HUMAN) < rank(episode, HUMAN) for game in games)
    return f"place {place} of {len(games)} by hand, the best {points(reached(games[0], HUMAN))}"
