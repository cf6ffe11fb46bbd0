"""Which scenarios belong together, and which episodes an agent plays in each: fixed for a suite version."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from msgrpo_agent.errors import UsageError, nearest
from msgrpo_agent.game import Scenario
from msgrpo_agent.games import SCENARIOS, get_scenario
from msgrpo_agent.rollout import derive_seed

SUITE_VERSION = 1  # changes whenever the seeds below, or a scenario's rules, change: results do not mix
QUICK, DEFAULT = 20, 200  # episodes: they resolve about 31 and 10 points (stats.py)

PAPER = ("frozen-lake", "frozen-lake-slippery", "snake", "snake-poison-apple")
SUITES = ("paper", "all", "transfer")


class EpisodeSeeds(NamedTuple):
    """What makes an episode the same for every agent: start, luck, and the agent's own dice."""

    start: int
    chance: int
    sampling: int


def suite(name: str) -> list[Scenario]:
    """The scenarios of a suite, single-player ones: a leaderboard row is one agent alone.

    `paper` are the four of the paper; `all` and `transfer` every scenario, `transfer` to be read as what
    training on one did to the others.
    """
    if name not in SUITES:
        raise UsageError(f"no suite is named {name!r}", fix=nearest(name, SUITES))
    ids = PAPER if name == "paper" else tuple(SCENARIOS)
    return [scenario for scenario in map(get_scenario, ids) if len(scenario.players) == 1]


def episode_seeds(scenario: Scenario, n: int) -> list[EpisodeSeeds]:
    """The first `n` evaluation episodes: the i-th start of the eval split, with luck and dice derived from i.

    A longer list begins with the shorter one, so 20 episodes can be extended to 200.
    """
    return list(islice(suite_seeds(scenario), n))


def suite_seeds(scenario: Scenario) -> Iterator[EpisodeSeeds]:
    """All evaluation episodes of a scenario, without end."""
    for i, start in enumerate(scenario.starts("eval")):
        yield EpisodeSeeds(
            start,
            derive_seed(SUITE_VERSION, scenario.id, i, "chance"),
            derive_seed(SUITE_VERSION, scenario.id, i, "sampling"),
        )
