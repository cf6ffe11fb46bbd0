"""What a caller from Python gives by mistake: an error that says what it is, and no error of Python's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from msgrpo.agent import LanguageAgent
from msgrpo.contract import check_game
from msgrpo.episode import play_episode
from msgrpo.errors import UsageError
from msgrpo.evals.leaderboard import build
from msgrpo.games import get_scenario
from msgrpo.references import RandomAgent
from msgrpo.specs import make_agent

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


@pytest.mark.parametrize("name", [None, 3, ["frozen-lake"], LAKE, RandomAgent()])
def test_names_are_text(name: Any) -> None:
    with pytest.raises(UsageError, match=r"the name of a scenario is .*, no str"):
        get_scenario(name)
    with pytest.raises(UsageError, match=r"the name of an agent is .*, no str"):
        make_agent(name)


@pytest.mark.parametrize(
    ("argument", "given", "kind"),
    [
        ("sampling", {"temperature": 0}, "Sampling"),
        ("template", "brief", "PromptTemplate"),
        ("chat", "x", "Mapping"),
        ("endpoint", "x", "Mapping"),
    ],
)
def test_arguments_of_an_agent_are_checked_where_it_is_made(argument: str, given: Any, kind: str) -> None:
    """Two of them were errors of Python in the first turn, which an evaluation had begun by then."""
    with pytest.raises(UsageError, match=f"{argument} is .*, no {kind}"):
        make_agent("endpoint:http://127.0.0.1:1/v1#m", **{argument: given})


@pytest.mark.parametrize(("count", "given"), [("plays", "1"), ("plays", 1.5), ("seed", -1), ("seed", None)])
def test_a_game_is_checked_with_whole_numbers(count: str, given: Any) -> None:
    with pytest.raises(UsageError, match=f"{count} is {given!r}, no whole number from"):
        check_game(LAKE, **{count: given})


@pytest.mark.parametrize("plays", [None, "runs/down", ([], [])])
def test_a_leaderboard_is_built_of_plays(plays: Any) -> None:
    """Both of what load_plays gives in one argument was an AttributeError."""
    with pytest.raises(UsageError, match=r"plays is|one of the plays is"):
        build(plays)
    assert build([], "a note").notes == ["a note"]  # each of its letters was one


async def test_a_model_of_ones_own_answers_with_a_completion() -> None:
    class Plain:
        name, extra_settings = "plain", {}

        async def complete(self, *given: Any, **more: Any) -> Any:
            return "<action>up</action>"

        async def close(self) -> None: ...

    with pytest.raises(UsageError, match="the answer of plain is '<action>up</action>', no Completion"):
        await play_episode(LAKE, {"player": LanguageAgent("plain", Plain())}, **SEEDS)


def test_a_split_that_is_no_text_is_none() -> None:
    nothing: Any = None
    with pytest.raises(UsageError, match="no split is named None"):
        LAKE.starts(nothing)
