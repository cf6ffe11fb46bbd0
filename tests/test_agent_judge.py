"""What a move was worth: exact on the lake, by playouts in Snake; endings with their cause."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msgrpo.episode import GAME_FAULT, play_episode, replay
from msgrpo.errors import GameError, GameFaultError
from msgrpo.game import BLUNDER, MISTAKE, AnyText, Game, Judgement, Outcome, Scenario
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.games.search import optimal_success
from msgrpo.games.snake import Cell, Snake
from msgrpo.judge import add_regrets, decided, judged, judgement_of
from msgrpo.references import OptimalAgent, RandomAgent, best_actions, description_of, known_best


def played(scenario: Scenario, agent: OptimalAgent | RandomAgent, seed: int):
    agents = dict.fromkeys(scenario.players, agent)
    return asyncio.run(play_episode(scenario, agents, start_seed=seed, chance_seed=seed, sampling_seed=seed))


def test_signs_and_regrets_by_hand() -> None:
    judgement = Judgement({"up": 0.7, "down": 0.65, "left": 0.55, "right": 0.1, None: 0.7})
    assert judgement.exact
    assert judgement.best == ["up"]
    assert [judgement.sign(a) for a in ("up", "down", "left", "right", None)] == ["", "", "?", "??", ""]
    assert judgement.regret("right") == pytest.approx(0.6)
    assert MISTAKE < BLUNDER


def test_a_loss_within_the_noise_is_none() -> None:
    """The wrong variant, without the noise, would call it a blunder."""
    judgement = Judgement({"up": 1.0, "down": 0.5}, {"up": 0.0, "down": 0.3})
    assert not judgement.exact
    assert (judgement.regret("down"), judgement.sign("down")) == (0.0, "")
    assert Judgement({"up": 1.0, "down": 0.5}).sign("down") == "??"


@settings(max_examples=25)
@given(
    id=st.sampled_from(["frozen-lake", "frozen-lake-slippery"]), seed=st.integers(0, 10**6), steps=st.integers(0, 4)
)
def test_on_the_lake_the_value_is_the_exact_optimum(id: str, seed: int, steps: int) -> None:
    scenario = get_scenario(id)
    assert scenario.judge is not None
    game = scenario.new(seed, seed)
    for _ in range(steps):
        if game.outcome is Outcome.PLAYING:
            game.step({"player": "right"})
    if game.outcome is Outcome.PLAYING:
        judgement = scenario.judge(game, "player")
        assert judgement.value == pytest.approx(optimal_success(game))
        assert set(judgement.values) == {*game.actions, None}
        assert judgement.regret(None) >= 0


def test_on_the_lake_to_pass_is_worth_what_is_left_after_it() -> None:
    scenario = get_scenario("frozen-lake-slippery")
    assert scenario.judge is not None
    game = scenario.new(3, 3)
    values = []
    while game.steps < game.step_limit - 1:
        values.append(scenario.judge(game, "player").values[None])
        game.step({"player": None})
        assert values[-1] == optimal_success(game)
    assert values[0] > values[-1] == 0


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_optimum_never_regrets_on_the_lake(seed: int) -> None:
    scenario = get_scenario("frozen-lake")
    episode = played(scenario, OptimalAgent(), seed)
    found = judged(scenario, episode)
    assert [judgement.regret(turn.action) for judgement, turn in zip(found, episode.turns, strict=True)] == [
        pytest.approx(0)
    ] * len(episode.turns)


def test_in_snake_the_apple_is_worth_more_than_the_wall() -> None:
    scenario = get_scenario("snake-solo")
    game = scenario.new(0, 0)
    assert isinstance(game, Snake)
    game.bodies = {"snake1": [(0, 5)]}
    game.items = {"apple": [(1, 5), (9, 9), (9, 8), (9, 7), (9, 6)]}
    assert scenario.judge is not None
    judgement = scenario.judge(game, "snake1")
    assert judgement.best == ["right"]
    assert judgement.sign("left") == "??"
    assert judgement.values["left"] == pytest.approx(-1)  # into the wall, and the game is over
    assert game.steps == 0


def test_the_same_position_is_judged_the_same() -> None:
    scenario = get_scenario("snake")
    assert scenario.judge is not None
    assert scenario.judge(scenario.new(3, 3), "snake1") == scenario.judge(scenario.new(3, 4), "snake1")  # not by luck


def test_regrets_are_written_and_a_random_player_has_more() -> None:
    scenario = get_scenario("frozen-lake")
    sums = []
    for agent in (OptimalAgent(), RandomAgent()):
        episodes = [played(scenario, agent, seed) for seed in range(10)]
        for episode in episodes:
            asyncio.run(add_regrets(scenario, episode))
        sums.append(sum(turn.regret or 0 for episode in episodes for turn in episode.turns))
        assert all(turn.regret is not None for episode in episodes for turn in episode.turns)
    assert sums[0] == 0
    assert sums[1] > 2  # of ten, most were lost by somebody


def test_a_game_that_refuses_its_own_moves_when_it_is_played_again_is_at_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was taken for somebody's wrong move, which ended training with teacher=optimal or explore=branch."""
    lake = get_scenario("frozen-lake")
    episode = played(lake, RandomAgent(), 3)
    monkeypatch.setattr(FrozenLake, "legal", lambda game, player: ("swim",))
    with pytest.raises(GameFaultError, match=r"played again, it refuses a move: .* is no action now; legal: swim"):
        replay(lake, episode, 1)
    with pytest.raises(GameFaultError, match="played again"):
        list(decided(lake, episode))


WORTH: dict[str | None, Any] = {"up": 1.0, "down": 0.0, "left": 0.0, "right": 0.0, None: 0.0}


def refused(game: object, player: str) -> Judgement:
    raise GameError("the game cannot draw new luck", fix="define _draw_luck")


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        (lambda game, player: Judgement({"up": 1.0}), "not each legal action and None"),
        (lambda game, player: Judgement(WORTH | {"jump": 1.0}), "not each legal action and None"),
        (lambda game, player: Judgement(WORTH | {"up": float("nan")}), "not finite numbers"),
        (lambda game, player: Judgement(WORTH | {"up": None}), "not finite numbers"),
        (
            lambda game, player: Judgement(WORTH | {"up": 1e16}),
            "not finite numbers up to",
        ),  # no record holds the loss
        (lambda game, player: Judgement(WORTH | {"up": "1"}), "not finite numbers"),
        (lambda game, player: Judgement(WORTH, {"up": float("inf")}), "not finite numbers"),
        (lambda game, player: WORTH, "no Judgement"),
        (refused, "cannot draw new luck"),
        (lambda game, player: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_a_judge_that_says_nonsense_is_a_fault_of_the_game_and_nobody_regrets(judge: Any, says: str) -> None:
    lake = get_scenario("frozen-lake")
    episode = played(lake, RandomAgent(), 3)
    wrong = replace(lake, judge=judge)
    with pytest.raises(GameFaultError, match=says):
        judgement_of(wrong, wrong.new(3, 3), "player")
    asyncio.run(add_regrets(wrong, episode))
    assert {turn.regret for turn in episode.turns} == {None}


def test_a_fault_of_the_game_that_a_judge_meets_keeps_its_name() -> None:
    def judge(game: Game, player: str) -> Judgement:
        raise GameFaultError("returns are no numbers", rule="returns", fatal=True)

    lake = replace(get_scenario("frozen-lake"), judge=judge)
    with pytest.raises(GameFaultError, match="returns are no numbers") as error:
        judgement_of(lake, lake.new(3, 3), "player")
    assert (error.value.rule, error.value.fatal) == ("returns", True)


def test_a_reference_player_and_a_description_are_given_a_copy() -> None:
    """One that played on to see what follows moved the game itself: its record had every second step only."""

    def reference(game: Any, player: str) -> list[str]:
        game.step({player: "up"})
        return ["up"]

    def describe(game: Any, player: str) -> str:
        game.step({player: "up"})
        return "it goes up"

    lake = replace(get_scenario("frozen-lake"), reference=reference, describe=describe)
    game = lake.new(3, 3)
    assert best_actions(lake, game, "player") == ["up"]
    assert description_of(lake, game, "player") == "it goes up"
    assert game.steps == 0


async def test_a_reference_player_that_the_game_refuses_costs_the_episode_alone() -> None:
    """It ended the whole evaluation, as if somebody else had moved wrongly."""

    def reference(game: Any, player: str) -> list[str]:
        game.step({player: "fly"})
        return ["up"]

    lake = replace(get_scenario("frozen-lake"), reference=reference)
    episode = await play_episode(lake, {"player": OptimalAgent()}, start_seed=3, chance_seed=3, sampling_seed=3)
    assert episode.error == GAME_FAULT
    assert "reference() failed: " in str(episode.error_message)
    assert known_best(lake, lake.new(3, 3), "player") is None


def test_a_judge_is_given_a_copy_and_its_numbers_are_plain_ones() -> None:
    def judge(game: Any, player: str) -> Judgement:
        game.step({player: "up"})
        return Judgement({action: np.float32(value) for action, value in WORTH.items()})

    lake = replace(get_scenario("frozen-lake"), judge=judge)
    game = lake.new(3, 3)
    judgement = judgement_of(lake, game, "player")
    assert game.steps == 0
    assert judgement.values == WORTH
    assert {type(value) for value in judgement.values.values()} == {float}


def test_no_judge_can_value_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = replace(get_scenario("frozen-lake"), judge=lambda game, player: Judgement(WORTH))
    game = lake.new(3, 3)
    monkeypatch.setattr(type(game), "legal", lambda self, player: AnyText(self.actions))
    with pytest.raises(GameFaultError, match="own words"):
        judgement_of(lake, game, "player")


# ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────


def snake(bodies: dict[str, list[Cell]], id: str = "snake-duel") -> Snake:
    game = get_scenario(id).new(0, 0)
    assert isinstance(game, Snake)
    game.bodies = bodies
    game.items = {"apple": [(9, 9), (9, 8), (9, 7), (9, 6), (9, 5)]}
    return game


@pytest.mark.parametrize(
    ("bodies", "moves", "said"),
    [
        ({"snake1": [(9, 0)], "snake2": [(5, 5)]}, ("right", "up"), "snake1 hit the wall at (10,0)"),
        (
            {"snake1": [(1, 1)], "snake2": [(3, 1)]},
            ("right", "left"),
            "snake1 met snake2 head on at (2,1), snake2",
        ),
        (
            {"snake1": [(1, 1)], "snake2": [(2, 1)]},
            ("right", "left"),
            "snake1 met snake2 head on at (2,1), snake2",
        ),
        (
            {"snake1": [(2, 3)], "snake2": [(4, 2), (3, 2), (2, 2), (1, 2)]},
            ("down", "right"),
            "snake1 bit snake2 at (2,2)",
        ),
        (
            {"snake1": [(1, 1), (1, 2), (2, 2), (2, 1), (3, 1)], "snake2": [(8, 8)]},
            ("right", "up"),
            "snake1 bit itself at (2,1)",
        ),
    ],
)
def test_who_dies_is_told_of_what_and_stays_on_the_board(
    bodies: dict[str, list[Cell]], moves: tuple[str, str], said: str
) -> None:
    head = bodies["snake1"][0]
    game = snake(bodies)
    game.step(dict(zip(game.players, moves, strict=True)))
    assert game.ending.startswith(said)
    board = game.board()
    glyph = board.cells[9 - head[1]][head[0]]
    assert (glyph, board.roles[glyph]) == ("1", "lost")


def test_the_one_enemy_is_called_so() -> None:
    game = snake({"snake1": [(1, 1)], "enemy1": [(5, 1), (4, 1), (3, 1), (2, 1), (2, 2), (3, 2)]}, "snake")
    game.step({"snake1": "right"})
    assert game.ending == "snake1 bit the enemy at (2,1)"


def test_on_the_lake_the_end_says_where_and_marks_it() -> None:
    scenario = get_scenario("frozen-lake")
    ends = {}
    for seed in range(40):
        episode = played(scenario, RandomAgent(), seed)
        game = scenario.new(seed, seed)
        for turn in episode.turns:
            game.step({"player": turn.action})
        board = game.board()
        assert board is not None
        ends[game.ending.split(" at ")[0]] = board.roles["P"]
    won = {"goal reached": "won"} if "goal reached" in ends else {}
    assert ends == {"fell in the hole": "lost", "out of steps": "own"} | won


@pytest.mark.parametrize("id", [s.id for s in SCENARIOS.values() if s.family == "snake"])
def test_bodies_hang_together_and_heads_look_somewhere(id: str) -> None:
    scenario = get_scenario(id)
    episode = played(scenario, OptimalAgent(), 5)
    game = scenario.new(5, 5)
    for step in range(episode.turns[-1].step + 1):
        game.step({turn.player: turn.action for turn in episode.turns if turn.step == step})
        board = game.board()
        assert board is not None
        for chain in board.chains:
            assert all(abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 for a, b in pairwise(chain))
            assert board.facing[chain[0]] in game.actions
