from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from msgrpo.errors import UsageError
from msgrpo.game import SPLITS, Split, split_of
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.gym_env import ScenarioEnv, env_id, layers, planes, planes_shape, register_envs

SINGLE = [scenario for scenario in SCENARIOS.values() if len(scenario.players) == 1]


@pytest.mark.parametrize("scenario", SINGLE, ids=lambda s: s.id)
def test_gymnasiums_own_check(scenario: object) -> None:
    env = gymnasium.make(f"msgrpo/{scenario.id}-v0", render_mode="ansi")  # type: ignore[attr-defined]
    check_env(env.unwrapped)


def test_several_players_are_refused_and_not_registered() -> None:
    with pytest.raises(UsageError, match="several players"):
        ScenarioEnv("snake-duel")
    assert "msgrpo/snake-duel-v0" not in gymnasium.registry
    register_envs()  # again: no warning, no error


def test_planes_by_hand() -> None:
    scenario = get_scenario("frozen-lake")
    game = scenario.new(7, 0)
    assert layers(scenario) == ("G", "O", "P")
    shape = planes_shape(scenario)
    assert shape == (4, 4, 4)
    found = planes(game, layers(scenario), shape)
    board = game.board().cells
    for y in range(4):
        for x in range(4):
            lit = [glyph for glyph, on in zip("GOP", found[:3, y, x], strict=True) if on]
            assert lit == ([] if board[y][x] == "_" else [board[y][x]])
    assert found[3].reshape(-1).tolist() == [1] + [0] * 15
    game.step({"player": "up"})
    assert planes(game, layers(scenario), shape)[3].reshape(-1).argmax() == 1


def test_every_step_of_a_long_game_has_a_cell_of_its_own() -> None:
    scenario = get_scenario("frozen-lake-4x4")
    shape, game = planes_shape(scenario), scenario.new(0, 0)
    assert shape == (3 + 7, 4, 4)  # 100 steps need seven planes of 16 cells
    game.steps = 99
    clock = planes(game, layers(scenario), shape)[3:].reshape(-1)
    assert [int(clock.sum()), int(clock.argmax())] == [1, 99]


@pytest.mark.parametrize("split", SPLITS)
def test_starts_keep_to_the_split(split: Split) -> None:
    env = ScenarioEnv("frozen-lake", split=split)
    env.reset(seed=0)
    for _ in range(30):
        _, info = env.reset()
        assert split_of(env.scenario.start_key(info["start_seed"])) == split


def test_a_certain_episode_can_be_asked_for_and_plays_like_the_game() -> None:
    env = ScenarioEnv("snake")
    _, info = env.reset(options={"start_seed": 5, "chance_seed": 6})
    assert info == {"start_seed": 5, "chance_seed": 6}
    game = env.scenario.new(5, 6)
    for action in (0, 2, 3):
        observation, reward, terminated, truncated, _ = env.step(np.int64(action))
        assert reward == game.step({"snake1": game.actions[action]})["snake1"]
        assert np.array_equal(observation, planes(game, env.glyphs, env.shape))
        if terminated or truncated:
            break


def test_success_and_the_limit_are_told() -> None:
    env = ScenarioEnv("frozen-lake")
    env.reset(seed=1)
    ended = truncated = False
    info: dict[str, object] = {}
    while not (ended or truncated):
        _, _, ended, truncated, info = env.step(np.int64(0))  # up, from the top row: stays where it is
    assert (ended, truncated, info["success"]) == (False, True, False)


def test_step_before_reset() -> None:
    with pytest.raises(UsageError, match="before reset"):
        ScenarioEnv("snake").step(np.int64(0))


def test_ids() -> None:
    assert env_id(get_scenario("snake")) == "msgrpo/snake-v0"


def test_an_unknown_split_is_refused_when_it_is_named() -> None:
    with pytest.raises(UsageError, match="no split is named 'eval'"):
        gymnasium.make("msgrpo/frozen-lake-v0", split="eval")


@pytest.mark.parametrize("action", [-1, 4, 1.5, "up", None])
def test_an_action_that_is_none_is_refused(action: object) -> None:
    env = gymnasium.make("msgrpo/frozen-lake-v0", disable_env_checker=True).unwrapped
    env.reset(seed=0)
    with pytest.raises(UsageError, match="is no action of frozen-lake"):
        env.step(action)


@pytest.mark.parametrize("seed", [-1, 1.5, "x"])
@pytest.mark.parametrize("name", ["start_seed", "chance_seed"])
def test_a_seed_that_is_none_is_refused(name: str, seed: object) -> None:
    """A start below 0 was blamed on the game, and 1.5 was taken for 1."""
    with pytest.raises(UsageError, match=f"{name} is {seed!r}, no whole number"):
        ScenarioEnv("snake").reset(options={name: seed})


GAME = """
from msgrpo.game import AnyText, Board, Game, Scenario

class Doors(Game):
    actions = ("left", "right")

    def __init__(self, start_seed, chance_seed):
        super().__init__(3)

    def legal(self, player):
        return ("left",)

    def observe(self, player):
        return "two doors"

    def board(self):
        return Board((("P", "."),), {"P": "you", ".": "floor"})

    def _advance(self, actions):
        return {"player": float(actions["player"] is not None)}

scenario = Scenario("doors", "doors", "Go.", 3, "[test]", Doors, actions=Doors.actions, one_start=True)
talk = Scenario("talk", "talk", "Talk.", 3, "[test]", Doors, actions=AnyText(), one_start=True)
"""


def test_an_action_that_is_not_legal_in_the_state_is_none(tmp_path: Path) -> None:
    """It ended the program that learns, msgrpo train-dqn too; a game without listed actions was an AssertionError."""
    (tmp_path / "doors.py").write_text(GAME)
    env = ScenarioEnv(f"{tmp_path / 'doors.py'}:scenario")
    env.reset()
    assert [env.step(np.int64(number))[1] for number in (0, 1)] == [1.0, 0.0]
    with pytest.raises(UsageError, match="talk lists no actions"):
        ScenarioEnv(f"{tmp_path / 'doors.py'}:talk")
