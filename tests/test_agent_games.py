"""The contract, the registry, and Frozen Lake against Gymnasium's own environment."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from msgrpo.contract import check_game
from msgrpo.errors import GameError, UsageError
from msgrpo.game import SPLITS, Game, Outcome, Scenario, split_of
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.frozen_lake import GYM_ACTION, FrozenLake
from msgrpo.games.search import optimal_lake_actions, optimal_success, optimal_values, snake_scores
from msgrpo.games.snake import ahead


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_scenario_keeps_the_contract(scenario: Scenario) -> None:
    check_game(scenario)


@pytest.mark.parametrize(
    "name", ["msgrpo_agent/games/higher.py", "examples/nim.py", "spiel:2048", "gym:MiniGrid-Empty-5x5-v0"]
)
def test_after_the_last_step_no_further_one_is_said_to_come(name: str) -> None:
    """A game without a board shows this text at its end: what `msgrpo games new` writes said step 9 of 8."""
    if name.startswith("spiel"):
        pytest.importorskip("pyspiel")
    file = Path(__file__).parents[1] / name
    game = get_scenario(f"{file}:scenario" if file.exists() else name).new(0, 0)
    game.steps = game.step_limit
    assert game.observe(game.players[0]).startswith(f"Step {game.step_limit} of {game.step_limit}.")


@pytest.mark.parametrize("id", [*SCENARIOS, "snake~stones"])
@pytest.mark.parametrize("before", [0, 6])
def test_games_that_were_copied_do_not_influence_each_other(id: str, before: int) -> None:
    """A game, its copies and those with other luck go the way that each goes by itself, though they move in turns."""
    scenario = get_scenario(id)
    way = np.random.default_rng(1)
    first, *ways = ([_moves_of(scenario, way) for _ in range(n)] for n in (before, 20, 20))
    ways = [ways[0], ways[0], *[ways[1]] * 3]

    def reached() -> Game:
        game = scenario.new(3, 3)
        for move in first:
            _step(game, move)
        return game

    def family(game: Game) -> list[Game]:
        other = game.with_luck(7)
        return [game, game.copy(), other, other.copy(), game.with_luck(8).with_luck(7).copy()]

    alone = []
    for number in range(5):
        one = family(reached())[number]
        alone.append([_step(one, move) for move in ways[number]])
    together = family(reached())
    found = [
        [_step(one, move) for one, move in zip(together, moves, strict=True)] for moves in zip(*ways, strict=True)
    ]
    assert [list(steps) for steps in zip(*found, strict=True)] == alone
    assert alone[0] == alone[1]
    assert alone[2] == alone[3] == alone[4]


def test_a_copy_goes_on_with_the_luck_that_its_game_has_used() -> None:
    """An enemy's moves are drawn one after the other: a copy does not begin with them anew."""
    game = get_scenario("snake").new(3, 3)
    for move in ("up", "right", "down"):
        _step(game, {"snake1": move})
    copied, anew = game.copy(), game.with_luck(3)
    ways = [[_step(one, {"snake1": move}) for move in ("left", "up", "left", "up")] for one in (game, copied, anew)]
    assert ways[0] == ways[1] != ways[2]


def test_other_luck_on_ice_keeps_the_place_and_slips_as_a_game_of_that_luck() -> None:
    scenario = get_scenario("frozen-lake-8x8")
    moves = ({"player": move} for move in ("right", "down") * 4)
    walked, other, alone = scenario.new(0, 3), scenario.new(0, 3).with_luck(7), scenario.new(0, 7)
    ways = [(_step(walked, move), _step(other, move), _step(alone, move)) for move in moves]
    assert [way[1] for way in ways] == [way[2] for way in ways] != [way[0] for way in ways]
    assert walked.observe("player") != scenario.new(0, 3).observe("player")
    assert walked.with_luck(7).observe("player") == walked.observe("player")


def test_the_scores_of_a_snake_are_of_its_state_and_belong_to_who_asked() -> None:
    game = get_scenario("snake").new(3, 3)
    scores = snake_scores(game, "snake1")
    snake_scores(game, "snake1").clear()
    assert snake_scores(game.copy(), "snake1") == scores
    for change in ("bodies", "items"):
        other = game.copy()
        cells = getattr(other, change)["enemy1" if change == "bodies" else "apple"]
        cells[0] = ahead(ahead(game.bodies["snake1"][0], "up"), "up")
        assert snake_scores(other, "snake1") != scores


def _moves_of(scenario: Scenario, way: np.random.Generator) -> dict[str, str | None]:
    choices = (*scenario.actions, None)
    return {player: choices[int(way.integers(len(choices)))] for player in scenario.players}


def _step(game: Game, moves: Mapping[str, str | None]) -> tuple[object, ...]:
    """What is seen after a step; of a game that is over, what is seen then."""
    rewards = game.step(moves) if game.outcome is Outcome.PLAYING else None
    return rewards, dict(game.returns), game.outcome, game.ending, [game.observe(player) for player in game.players]


def test_check_game_finds_luck_in_the_start() -> None:
    lake = get_scenario("frozen-lake")

    def lucky(start: int, chance: int) -> Game:
        return lake.new(start + chance, chance)

    broken = Scenario("broken", "x", "x", lake.step_limit, "ours", lucky, goal=True)
    with pytest.raises(GameError, match="seen at the start depends on the chance seed"):
        check_game(broken)


def test_unknown_scenario_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="frozen-lake"):
        get_scenario("frozen-lak")


@pytest.mark.parametrize(("id", "slippery"), [("frozen-lake", False), ("frozen-lake-slippery", True)])
def test_frozen_lake_walks_as_gymnasium_does(id: str, slippery: bool) -> None:
    """Thousands of random steps, the same seed: the same cells, rewards and ends."""
    generator = np.random.default_rng(1)
    steps = 0
    for start in range(250):
        game = get_scenario(id).new(start, start + 7)
        assert isinstance(game, FrozenLake)
        reference = gymnasium.make(
            "FrozenLake-v1", desc=list(game.desc), is_slippery=slippery, max_episode_steps=game.step_limit
        )
        reference.reset(seed=start + 7)
        while game.outcome is Outcome.PLAYING:
            action = str(generator.choice(game.actions))
            seen, reward, terminated, truncated, _ = reference.step(GYM_ACTION[action])
            assert game.step({"player": action}) == {"player": reward}
            assert game.cell == divmod(int(seen), len(game.desc))
            assert (game.outcome is Outcome.TERMINATED) == terminated
            assert (game.outcome is not Outcome.PLAYING) == (terminated or truncated)
            steps += 1
    assert steps > 1000


def test_no_action_uses_up_the_step_and_its_luck() -> None:
    """The slip of step t is a function of t: passing once does not shift later slips."""
    scenario = get_scenario("frozen-lake-4x4")
    passed, moved = scenario.new(0, 3), scenario.new(0, 3)
    passed.step({"player": None})
    moved.step({"player": "up"})
    assert isinstance(passed, FrozenLake)
    assert passed.cell == (0, 0)
    assert passed.steps == 1
    assert passed.env.np_random.random() == moved.env.np_random.random()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("id", "known"), [("frozen-lake-4x4", 0.7442), ("frozen-lake-8x8", 0.9132)])
def test_the_optimum_within_the_limit_is_the_known_one(id: str, known: float) -> None:
    game = get_scenario(id).new(0, 0)
    assert isinstance(game, FrozenLake)
    assert optimal_success(game) == pytest.approx(known, abs=5e-5)


def test_the_optimal_player_reaches_what_dynamic_programming_promises() -> None:
    scenario = get_scenario("frozen-lake-4x4")
    wins = 0
    for chance in range(400):
        game = scenario.new(0, chance)
        while game.outcome is Outcome.PLAYING:
            assert isinstance(game, FrozenLake)
            game.step({"player": optimal_lake_actions(game)[0]})
        wins += bool(game.success)
    assert wins / 400 == pytest.approx(0.7442, abs=4 * (0.7442 * 0.2558 / 400) ** 0.5)


@pytest.mark.parametrize("place", [0, -1])
def test_where_several_ways_win_the_optimal_player_takes_a_shortest(place: int) -> None:
    won = 0
    for start in range(12):
        game = get_scenario("frozen-lake").new(start, 0)
        assert isinstance(game, FrozenLake)
        q, _ = optimal_values(game.desc, False, game.step_limit)
        shortest = next((k for k in range(len(q)) if q[k, game.state].max() == 1), None)
        while shortest and game.outcome is Outcome.PLAYING:
            game.step({"player": optimal_lake_actions(game)[place]})
        won += bool(game.success)
        assert game.steps == (shortest or 0)
    assert won > 6


@pytest.mark.parametrize("family", sorted({scenario.family for scenario in SCENARIOS.values()}))
def test_no_board_of_a_family_stands_in_two_splits(family: str) -> None:
    """Neither in one scenario nor across them: a map that trains the slippery lake is no test of the dry one."""
    several = [scenario for scenario in SCENARIOS.values() if scenario.family == family and not scenario.one_start]
    keys = {
        split: {s.new(seed, 0).board().text() for s in several for seed in islice(s.starts(split), 300)}
        for split in SPLITS
    }
    assert not keys["train"] & (keys["val"] | keys["test"])
    assert not keys["val"] & keys["test"]
    assert min(map(len, keys.values())) > 100


@pytest.mark.parametrize("id", ["frozen-lake-4x4", "frozen-lake-8x8"])
def test_the_maps_that_everybody_knows_are_maps_of_training(id: str) -> None:
    """They have one start, so nano and any training sees them; no random lake of validation or test may be one."""
    assert split_of(get_scenario(id).start_key(0)) == "train"


def test_the_lake_without_a_hole_is_a_map_of_training() -> None:
    """It is a quarter of what the slippery lake draws: in a test it would be most of the test."""
    scenario = get_scenario("frozen-lake-slippery")
    empty = {s for s in range(60) if "O" not in scenario.new(s, 0).board().text()}
    assert len(empty) > 5
    assert empty <= set(islice(scenario.starts("train"), 60))
