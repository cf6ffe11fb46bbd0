"""What a caller from Python gives by mistake: an error that says what it is, and no error of Python's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from msgrpo.episode import play_episode
from msgrpo.errors import UsageError
from msgrpo.games import get_scenario
from msgrpo.references import RandomAgent

LAKE = get_scenario("frozen-lake")
SEEDS = {"start_seed": 1, "chance_seed": 2, "sampling_seed": 3}


async def test_seeds_of_numpy_are_seeds() -> None:
    """Each such episode was recorded as a fault of the game, which takes Python's numbers only."""
    of_numpy: Any = {name: np.int64(seed) for name, seed in SEEDS.items()}
    plain = await play_episode(LAKE, {"player": RandomAgent()}, **SEEDS)
    same = await play_episode(LAKE, {"player": RandomAgent()}, **of_numpy)
    assert (same.error, same.turns) == (None, plain.turns)


@pytest.mark.parametrize("seats", [RandomAgent(), [RandomAgent()], "random"])
async def test_the_agents_of_an_episode_are_named_by_their_seats(seats: Any) -> None:
    with pytest.raises(UsageError, match=r"agents is .*, not a dict of the players player"):
        await play_episode(LAKE, seats, **SEEDS)


@pytest.mark.parametrize("penalty", ["a", None, math.nan, math.inf])
async def test_a_format_penalty_is_a_number(penalty: Any) -> None:
    """The agent was blamed where it gave no action; elsewhere nothing was said."""
    with pytest.raises(UsageError, match="format_penalty is"):
        await play_episode(LAKE, {"player": RandomAgent()}, **SEEDS, format_penalty=penalty)
