"""Frozen lakes of three steps that begin two from the goal: the same text and words, and a third of the turns.

For runs of which something else is asked than what they learn: in this process by the fixture `near`, in another by

    python -m tests.near train …    the command line, which then plays near lakes

or, where other processes play, by the name `tests.near:lake`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from msgrpo.game import Scenario
from msgrpo.games import SCENARIOS
from msgrpo.games.frozen_lake import FrozenLake

if TYPE_CHECKING:
    import pytest


def make(scenario: Scenario, start_seed: int, chance_seed: int) -> FrozenLake:
    whole = scenario.make(start_seed, chance_seed)
    assert isinstance(whole, FrozenLake)
    rows = [list(row.replace("S", "F")) for row in whole.desc]
    rows[2][2] = "S"
    return FrozenLake(tuple(map("".join, rows)), whole.slippery, 3, chance_seed)


NEAR = {
    id: replace(SCENARIOS[id], step_limit=3, make=partial(make, SCENARIOS[id]))
    for id in ("frozen-lake", "frozen-lake-slippery")
}


def use_near_lakes(patch: pytest.MonkeyPatch) -> None:
    for id, scenario in NEAR.items():
        patch.setitem(SCENARIOS, id, scenario)


def play_near_lakes() -> None:
    """From now on, in this process."""
    SCENARIOS.update(NEAR)


lake = replace(NEAR["frozen-lake"], id="near-lake")

if __name__ == "__main__":
    from msgrpo.cli import main

    play_near_lakes()
    main()
