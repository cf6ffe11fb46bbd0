"""The contract, the registry, and Frozen Lake against Gymnasium's own environment."""

from itertools import islice

import gymnasium
import numpy as np
import pytest

from msgrpo.contract import check_game
from msgrpo.errors import GameError, UsageError
from msgrpo.game import SPLITS, Game, Outcome, Scenario, split_of
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.frozen_lake import GYM_ACTION, FrozenLake
from msgrpo.games.search import optimal_lake_actions, optimal_success


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_scenario_keeps_the_contract(scenario: Scenario) -> None:
    check_game(scenario)


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
