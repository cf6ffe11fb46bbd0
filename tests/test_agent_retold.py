"""Games in other words: what happens is the plain game's, what is read is not, and both say the same."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msgrpo.agent import Agent
from msgrpo.contract import check_game
from msgrpo.episode import play_episode
from msgrpo.errors import UsageError
from msgrpo.evals.suites import RETOLD, episode_seeds, suite
from msgrpo.evals.verify import first_difference
from msgrpo.game import Outcome
from msgrpo.games import get_scenario, recorded_scenario
from msgrpo.games.retold import PLACE, TELLINGS, Retold
from msgrpo.references import OptimalAgent, RandomAgent

ALL = [f"{plain}~{telling}" for plain in RETOLD for telling in TELLINGS]


@pytest.mark.parametrize("name", ALL)
def test_a_retelling_keeps_the_contract_of_games(name: str) -> None:
    check_game(get_scenario(name), plays=3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("agent", [OptimalAgent(), RandomAgent()], ids=lambda agent: agent.spec)
def test_who_does_not_read_plays_the_plain_game_and_the_retelling_alike(name: str, agent: Agent) -> None:
    told = get_scenario(name)
    plain = get_scenario(str(told.plain))
    assert episode_seeds(told, 6) == episode_seeds(plain, 6)
    for seeds in episode_seeds(told, 6):
        one, other = (
            asyncio.run(
                play_episode(
                    scenario,
                    dict.fromkeys(scenario.players, agent),
                    start_seed=seeds.start,
                    chance_seed=seeds.chance,
                    sampling_seed=seeds.sampling,
                )
            )
            for scenario in (plain, told)
        )
        assert [turn.reward for turn in one.turns] == [turn.reward for turn in other.turns]
        assert (one.success, one.returns, one.outcome) == (other.success, other.returns, other.outcome)
        assert first_difference(other) is None


@pytest.mark.parametrize("name", ALL)
def test_a_retelling_reads_differently(name: str) -> None:
    told = get_scenario(name)
    plain = get_scenario(str(told.plain))
    seen = [scenario.new(3, 3).observe(scenario.players[0]) for scenario in (plain, told)]
    assert (plain.rules, plain.actions, seen[0]) != (told.rules, told.actions, seen[1])
    assert told.start_key(3) == plain.start_key(3)  # held out by the same board


def cells_named(text: str, word: str) -> set[tuple[int, int]]:
    (line,) = re.findall(rf"{word} ((?:\(\d+,\d+\) ?)+)", text)[:1]
    return {(int(x), int(y)) for x, y in PLACE.findall(line)}


def cells_drawn(text: str, glyph: str) -> set[tuple[int, int]]:
    rows = [line.split() for line in text.split("\n") if re.fullmatch(r"\d+( \S)+", line)]
    return {(x, int(label)) for label, *cells in rows for x, cell in enumerate(cells) if cell == glyph}


@given(start=st.integers(0, 500), steps=st.lists(st.sampled_from(["up", "down", "left", "right", None]), max_size=6))
@settings(max_examples=30, deadline=None)
def test_words_and_board_of_a_retelling_name_the_same_cells(start: int, steps: list[str | None]) -> None:
    """Coordinates and drawing are changed together, in every state that comes."""
    for telling, apple, glyph in (
        ("mirrored", "Apples", "A"),
        ("from-top", "Apples", "A"),
        ("symbols", "Apples", "Q"),
        ("stones", "Stones", "A"),
        ("noise", "Apples", "A"),
    ):
        scenario = get_scenario(f"snake~{telling}")
        game = scenario.new(start, start)
        for step in steps:
            if game.outcome is not Outcome.PLAYING:
                break
            text = game.observe("snake1")
            assert cells_named(text, apple) == cells_drawn(text, glyph)
            (head,) = cells_named(text, "You are snake 1: head")
            assert cells_drawn(text, "1") == {head}
            game.step({"snake1": step})


def test_the_mirror_moves_as_it_looks() -> None:
    """In what a player reads, `left` makes x smaller, also where left and right have changed places."""
    game = get_scenario("snake-solo~mirrored").new(5, 5)
    before = next(iter(cells_named(game.observe("snake1"), "head")))
    game.step({"snake1": "left" if before[0] else "right"})
    after = next(iter(cells_named(game.observe("snake1"), "head")))
    assert after == (before[0] - 1 if before[0] else before[0] + 1, before[1])
    assert isinstance(game, Retold)


def test_names_of_actions_are_the_retellings_own() -> None:
    scenario = get_scenario("snake~actions")
    assert scenario.actions == ("north", "south", "west", "east")
    game = scenario.new(1, 1)
    assert game.legal("snake1") == scenario.actions
    assert "north is y+1" in scenario.rules
    assert "bottom left" in scenario.rules  # a place, no action


def test_harm_is_said_last_and_nothing_is_lost() -> None:
    plain, late, shuffled = (get_scenario(f"snake-poison-apple{name}").rules for name in ("", "~late", "~shuffled"))
    assert sorted(plain.split()) == sorted(late.split()) == sorted(shuffled.split())
    assert late.index("Apples (A) are worth -1") > late.index("There are 20 steps")


@pytest.mark.parametrize(
    "name",
    [
        *("snake~rocks", "spiel:tic_tac_toe~", "snake~../x", "spiel:tic_tac_toe~noise"),
        *("snake~actions~from-top", "snake~stones~stones"),
        *(f"gym:BabyAI-GoToObj-v0~{telling}" for telling in TELLINGS),  # nothing in its text says what is where
    ],
)
def test_a_telling_that_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        get_scenario(name)


def test_a_record_of_a_retelling_loads_no_code(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not loaded because a record says so"):
        recorded_scenario(f"{tmp_path}/evil.py:scenario~noise")


def test_the_suite_has_every_telling_beside_the_plain_game() -> None:
    ids = [scenario.id for scenario in suite("semantic")]
    assert ids == [told for plain in RETOLD for told in (plain, *(f"{plain}~{name}" for name in TELLINGS))]
