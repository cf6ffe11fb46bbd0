"""What every export contains: the counted episodes as they were played, and the prompt of each turn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from msgrpo.episode import Episode, Turn
from msgrpo.evals.plays import Play
from msgrpo.evals.record import seeds_of
from msgrpo.evals.suites import HeldOut, places_in_suite
from msgrpo.games import recorded_scenario
from msgrpo.prompt import Past, Prompt, recorded_template

Files = dict[str, Callable[[Path], None]]  # a path below --out -> what writes that file
CARD = "README.md"
# What splits are called: the suite's two, as others call them, and what is of neither.
IN_SUITE: dict[HeldOut, str] = {"test": "test", "val": "validation"}
OF_NO_SUITE = "other"
MADE_BY = "made by `msgrpo export`"  # a card without this text was written by somebody else and is not replaced


@dataclass(frozen=True)
class Played:
    """An episode that the leaderboard knows of: its result, or the attempt that failed last, and other failures."""

    place: int | None  # in the suite, from 1; None for seeds of no suite
    episode: Episode
    failed: list[Episode]  # the other attempts, which an endpoint failed

    @property
    def id(self) -> int | str:
        """The place in the suite; without one the seeds."""
        return self.place or "-".join(map(str, seeds_of(self.episode)))


def played(play: Play) -> list[Played]:
    """The counted episodes of the suite, in its order, and then those of no suite."""
    failed = defaultdict(list)
    for episode in play.failed:
        failed[seeds_of(episode)].append(episode)
    wanted = {*play.finished, *play.unfinished}
    places, _ = places_in_suite(play.scenario, wanted, play.repeats, play.split)
    in_order = []
    for seeds in sorted(wanted, key=lambda seeds: (places.get(seeds, math.inf), seeds)):
        tries = [*failed[seeds], *([play.finished[seeds]] if seeds in play.finished else [])]
        place = places[seeds] + 1 if seeds in places else None
        in_order.append(Played(place, tries[-1], tries[:-1]))
    return in_order


def prompt_of(episode: Episode, turn: Turn) -> Prompt:
    """The prompt of a turn: rendered by the recorded template, or prefix and state where the template is unknown."""
    template = recorded_template(episode.settings.get(turn.player, {}))
    if template is None:
        return Prompt(episode.prefix.get(turn.player, ""), turn.state)
    past = [Past(t.state, t.action) for t in episode.turns_of(turn.player) if t.step < turn.step]
    return template.render(recorded_scenario(episode.scenario), turn.state, past)


def left_out(play: Play) -> int:
    """How many episodes have ended, with or without a result, and do not count."""
    ended = {*play.left_out, *map(seeds_of, play.failed)}
    return len(ended - {*play.finished, *play.unfinished})


def distinct(versions: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Each set of versions once, in the order in which they come."""
    return [dict(pairs) for pairs in dict.fromkeys(tuple(packages.items()) for packages in versions)]
