"""Which scenarios belong together, and which episodes an agent plays in each: fixed for a suite version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count, islice
from numbers import Integral
from typing import Literal, NamedTuple

from msgrpo.episode import derive_seed
from msgrpo.errors import GameFaultError, UsageError, nearest
from msgrpo.game import Scenario, check_kind
from msgrpo.games import SCENARIOS, get_scenario, recorded_scenario
from msgrpo.games.retold import SIGN, TELLINGS

SUITE_VERSION = 2  # changes whenever the seeds below, or a scenario's rules, change: results do not mix
HeldOut = Literal["val", "test"]  # settings are chosen on the one, and final figures are of the other
FAR = 1000  # episodes of the suite that a record may lack before the last one that it holds
QUICK, DEFAULT = 20, 200  # episodes: they resolve about 31 and 10 points (stats.py)

PAPER = ("frozen-lake", "frozen-lake-slippery", "snake", "snake-poison-apple")
RETOLD = ("frozen-lake", "snake", "snake-poison-apple")  # the suite `semantic` has these in all wordings
SUITES = ("paper", "all", "transfer", "semantic")

MOST = {"repeats": 1000}  # of each start; of everything else that is counted:
MOST_COUNTED = 1_000_000
CONCURRENCY = 64  # episodes at once: enough to fill a server's or a model's batch


class EpisodeSeeds(NamedTuple):
    """What makes an episode the same for every agent: start, luck, and the agent's own dice."""

    start: int
    chance: int
    sampling: int


def check_counts(**counts: int) -> None:
    """Raise UsageError for a count by which nothing can be played, or that no run.json holds."""
    for what, number in counts.items():
        most = MOST.get(what, MOST_COUNTED)
        if not isinstance(number, Integral) or number < 1:
            raise UsageError(
                f"{what} is {number!r}: nothing can be played", fix=f"give {what} a whole number from 1 on"
            )
        if number > most:
            raise UsageError(f"{what} is {number}: {most} is the most")


def check_scenario(scenario: Scenario) -> None:
    """Raise UsageError for no scenario, or one that its name does not lead to: nothing could read its records."""
    check_kind(scenario)
    try:
        same = get_scenario(scenario.id).rules_hash == scenario.rules_hash
    except UsageError:
        same = False
    if not same:
        raise UsageError(
            f"the name {scenario.id!r} does not lead to this scenario, so nothing could read its records",
            fix='put it into a file of its own: msgrpo.get_scenario("my_game.py:scenario") gives it such a name',
        )


def suite(name: str) -> list[Scenario]:
    """The scenarios of a suite, single-player ones: a leaderboard row is one agent alone.

    `paper` are the four of the paper; `all` and `transfer` every scenario, `transfer` to be read as what
    training on one did to the others; `semantic` some of them, plain and in other words.
    """
    if name not in SUITES:
        raise UsageError(f"no suite is named {name!r}", fix=nearest(name, SUITES))
    ids = PAPER if name == "paper" else tuple(SCENARIOS)
    if name == "semantic":
        retellings = ["", *(f"{SIGN}{telling}" for telling in TELLINGS)]
        ids = tuple(f"{plain}{retelling}" for plain in RETOLD for retelling in retellings)
    return [scenario for scenario in map(get_scenario, ids) if len(scenario.players) == 1]


def episode_seeds(scenario: Scenario, n: int, split: HeldOut = "test", repeats: int = 1) -> list[EpisodeSeeds]:
    """The episodes on the first `n` held-out starts: the i-th start of the split, with luck and dice derived from i.

    `repeats` episodes from each start stand one after the other; the first of them is the only one of `repeats` 1.
    `test` is for leaderboards and final figures; `val` is for a training run to look at and to choose settings on.
    A longer list begins with the shorter one, so 20 episodes can be extended to 200.
    """
    return list(islice(suite_seeds(scenario, split, repeats), n * repeats))


def suite_seeds(scenario: Scenario, split: HeldOut, repeats: int) -> Iterator[EpisodeSeeds]:
    """All episodes of a split, without end; each is drawn once, when it is first asked for."""
    drawn = _drawn(scenario, split)
    return (drawn.at(i, repeat) for i in count() for repeat in range(repeats))


def places_in_suite(
    scenario_id: str, wanted: Iterable[EpisodeSeeds], repeats: int, split: HeldOut = "test"
) -> tuple[dict[EpisodeSeeds, int], set[EpisodeSeeds]]:
    """Where in the suite each of these episodes stands, from 0; and those that stand nowhere near its beginning."""
    scenario, drawn = recorded_scenario(scenario_id), -1
    foreign, places = set(wanted), {}
    try:
        for drawn, seeds in enumerate(islice(suite_seeds(scenario, split, repeats), len(foreign) + FAR * repeats)):
            if seeds in foreign:
                foreign.discard(seeds)
                places[seeds] = drawn
            if not foreign:
                break
    except GameFaultError:  # from a start that cannot be looked at on, nothing has been played
        if drawn < 0:
            raise
        for seeds in foreign:  # unless it could be then
            scenario.start_key(seeds.start)
    return places, foreign


class _Drawn:
    """The episodes of a scenario that were asked for so far, and where the next ones come from."""

    def __init__(self, scenario: Scenario, split: HeldOut) -> None:
        self._scenario, self._split = scenario, split
        self._seeds: list[int] = []
        self.at = cache(self._at)

    def _at(self, i: int, repeat: int) -> EpisodeSeeds:
        while len(self._seeds) <= i:  # no iterator is kept: a game's fault would end it for good
            beyond = self._seeds[-1] + 1 if self._seeds else 0
            self._seeds.append(next(self._scenario.starts(self._split, beyond)))
        named = self._scenario.plain or self._scenario.id  # a retelling has the episodes of the plain game
        place, again = (SUITE_VERSION, self._split, named, i), [repeat] if repeat else []
        return EpisodeSeeds(
            self._seeds[i], derive_seed(*place, "chance", *again), derive_seed(*place, "sampling", *again)
        )


@cache
def _drawn(scenario: Scenario, split: HeldOut) -> _Drawn:
    return _Drawn(scenario, split)
