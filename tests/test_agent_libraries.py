"""MiniGrid and OpenSpiel: the contract for many of their games, and ours held against their own environments."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils import EzPickle

from msgrpo.contract import check_game
from msgrpo.episode import play_episode
from msgrpo.errors import GameError, UsageError
from msgrpo.game import Outcome
from msgrpo.games import get_scenario
from msgrpo.games.gymnasium_game import gym_scenario
from msgrpo.games.minigrid_game import ACTIONS, MiniGridGame, things
from msgrpo.games.outside import FIXED
from msgrpo.games.spiel_game import SpielGame
from msgrpo.references import OptimalAgent, RandomAgent

LEVELS = [
    *FIXED,
    "gym:MiniGrid-DoorKey-5x5-v0",
    "gym:MiniGrid-LavaGapS5-v0",
    "gym:MiniGrid-Dynamic-Obstacles-5x5-v0",
    "gym:MiniGrid-Fetch-5x5-N2-v0",
    "gym:BabyAI-GoToRedBallGrey-v0",
]
GAMES = [
    "tic_tac_toe",
    "connect_four",
    "2048",
    "leduc_poker",
    "kuhn_poker",
    "goofspiel",
    "pig",
    "blackjack",
    "nim",
    "catch",
    "stones_and_gems",
    "twixt",  # its text has a terminal's colours
]


@pytest.mark.parametrize("name", LEVELS)
def test_levels_of_minigrid_keep_the_contract(name: str) -> None:
    check_game(get_scenario(name), plays=2)


@pytest.mark.parametrize("name", GAMES)
def test_games_of_openspiel_keep_the_contract(name: str) -> None:
    check_game(get_scenario(f"spiel:{name}"), plays=3)


@pytest.mark.parametrize("name", list(FIXED))
def test_a_level_pays_what_minigrid_pays(name: str) -> None:
    """The same seeds and actions in MiniGrid's own environment: the same view, reward and end."""
    env_id, limit = FIXED[name]
    scenario = get_scenario(name)
    generator = np.random.default_rng(0)
    for start in range(6):
        game = scenario.new(start, 0)
        own = gymnasium.make(env_id, max_steps=limit, disable_env_checker=True)
        own.reset(seed=start)
        while game.outcome is Outcome.PLAYING:
            action = str(generator.choice(ACTIONS))
            observation, reward, terminated, truncated, _ = own.step(ACTIONS.index(action))
            assert game.step({"player": action}) == {"player": float(reward)}
            assert isinstance(game, MiniGridGame)
            assert (game.observation["image"] == observation["image"]).all()
            assert game.outcome is not Outcome.PLAYING or not (terminated or truncated)


def test_a_level_without_a_limit_of_ours_has_its_own_or_64_steps() -> None:
    """BabyAI says 0 before its first reset."""
    assert get_scenario("gym:BabyAI-GoToRedBallGrey-v0").step_limit == 64
    assert get_scenario("gym:MiniGrid-Fetch-5x5-N2-v0").step_limit == 64
    assert get_scenario("babyai-goto").step_limit == FIXED["babyai-goto"][1]


async def test_the_bot_solves_what_is_its_ceiling() -> None:
    for name, least in (("babyai-goto", 0.9), ("minigrid-empty", 1.0)):
        scenario = get_scenario(name)
        won = []
        for start in range(10):
            agents = {"player": OptimalAgent()}
            episode = await play_episode(scenario, agents, start_seed=start, chance_seed=0, sampling_seed=0)
            won.append(bool(episode.success))
        assert sum(won) / len(won) >= least, name


def test_what_is_seen_is_told_where_it_is() -> None:
    """Walk to the place that the text names, and the thing is right before the player."""
    seen = 0
    for start in range(120):
        game = get_scenario("babyai-goto").new(start, 0)
        assert isinstance(game, MiniGridGame)
        for name, forward, right in things(game.observation):
            if right == 0 and forward > 0:
                for _ in range(forward - 1):
                    game.step({"player": "forward"})
                assert f"Right before you: {name}." in game.observe("player") or game.outcome is not Outcome.PLAYING
                seen += 1
                break
    assert seen


def test_a_broken_level_is_refused() -> None:
    with pytest.raises(UsageError, match="known to be broken"):
        get_scenario("gym:BabyAI-KeyInBox-v0")


async def test_the_search_player_never_loses_at_tic_tac_toe() -> None:
    """Its value is known: a draw."""
    scenario = get_scenario("spiel:tic_tac_toe")
    for seat in (0, 1):
        for seed in range(3):
            agents = dict(
                zip(scenario.players, (OptimalAgent(), RandomAgent())[:: 1 if seat == 0 else -1], strict=True)
            )
            episode = await play_episode(scenario, agents, start_seed=0, chance_seed=0, sampling_seed=seed)
            assert episode.returns[scenario.players[seat]] >= 0


def test_hidden_cards_stay_hidden() -> None:
    """In Kuhn poker neither player reads the other's card."""
    for start in range(6):
        game = get_scenario("spiel:kuhn_poker").new(start, 0)
        assert isinstance(game, SpielGame)
        one, two = (game.observe(player).rsplit("\n", 1)[1] for player in game.players)
        assert one[:1] != two[:1]


def test_a_person_is_told_the_side_and_what_is_played_for() -> None:
    sides = {}
    for name in ("chess", "connect_four", "tic_tac_toe", "kuhn_poker"):
        game = get_scenario(f"spiel:{name}").new(0, 0)
        sides[name] = [game.side(player) for player in game.players]
    assert sides == {
        "chess": ["Black", "White"],
        "connect_four": ["x", "o"],
        "tic_tac_toe": ["x", "o"],
        "kuhn_poker": ["player1", "player2"],
    }
    first = get_scenario("spiel:chess").new(0, 0)
    assert [first.side(player) for player in first.to_move] == ["White"]
    aims = {
        "kuhn_poker": "The winner gains what the loser loses, at most 2 points; a draw is worth 0.",
        "2048": "You play for points, between 0 and 20480 a game;",
        "tiny_hanabi": "All play together for the same points, between 0 and 10 a game;",
        "matrix_pd": "Everybody plays for points of their own, between 0 and 10 a game;",
    }
    assert all(aim in get_scenario(f"spiel:{name}").rules for name, aim in aims.items())


def test_the_first_row_of_a_board_of_text_stands_above_the_others() -> None:
    game = get_scenario("spiel:2048").new(0, 0)
    assert game.observe("player").split("\n")[:5] == [
        "Step 1 of 400.",  # and not who they are, where nobody else plays
        "0    0    0    0",
        "0    0    0    0",
        "0    2    0    0",
        "0    4    0    0",
    ]


def test_a_chess_move_may_be_typed_as_programs_write_it() -> None:
    import pyspiel

    game = get_scenario("spiel:chess").new(0, 0)
    assert isinstance(game, SpielGame)
    game.state = pyspiel.load_game("chess").new_initial_state("8/P6k/8/8/8/8/8/R3K3 w Q - 0 1")
    others = game.other_names("player2")
    wanted = {"a7a8q": "a8=Q", "a7a8n": "a8=N", "e1c1": "O-O-O", "a1b1": "Rb1"}
    assert {name: others.get(name) for name in wanted} == wanted
    assert set(others.values()) == set(game.legal("player2"))
    assert get_scenario("spiel:connect_four").new(0, 0).other_names("player1") == {}


def test_no_legal_action_loses_a_game_of_two() -> None:
    game = get_scenario("spiel:connect_four").new(0, 0)
    assert game.step({"player1": None}) == {"player1": -1.0, "player2": 1.0}
    assert game.outcome is Outcome.TERMINATED
    assert game.ending == "player1 gave no legal action"


def test_without_a_search_optimal_says_so() -> None:
    from msgrpo.references import best_actions

    scenario = get_scenario("spiel:leduc_poker")
    with pytest.raises(UsageError, match="has no reference player"):
        best_actions(scenario, scenario.new(0, 0), "player1")


class Forgetful(gymnasium.Env[int, int], EzPickle):
    """Its copies begin anew: EzPickle builds them from the constructor's arguments."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        EzPickle.__init__(self)
        self.total = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.total = int(self.np_random.integers(5, 20))
        return self.total, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.total += action + int(self.np_random.integers(2))
        return self.total, float(action), self.total > 25, False, {}


def test_an_environment_whose_copies_forget_is_copied_by_its_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    if "Forgetful-v0" not in gymnasium.registry:
        gymnasium.register("Forgetful-v0", entry_point=Forgetful)

    def seen(env: Forgetful, observation: int) -> str:
        return f"total {env.total}"

    forgetful = gym_scenario("forgetful", "Forgetful-v0", ("wait", "add"), seen, rules="Add.", step_limit=20)
    assert copy.deepcopy(Forgetful()).total == 0  # what makes the plain copy wrong
    check_game(forgetful, plays=5)
    monkeypatch.setattr("msgrpo.games.gymnasium_game.EzPickle", type(None))
    with pytest.raises(GameError, match="breaks the contract"):
        check_game(forgetful, plays=5)


def test_an_environment_with_other_actions_is_refused() -> None:
    with pytest.raises(UsageError, match="not 3 numbered ones"):
        gym_scenario("cart", "CartPole-v1", ("a", "b", "c"), lambda env, seen: "x", rules="x", step_limit=5)
    with pytest.raises(UsageError, match="not 2 numbered ones"):
        gym_scenario("pole", "Pendulum-v1", ("a", "b"), lambda env, seen: "x", rules="x", step_limit=5)


def test_a_copy_of_a_game_with_new_luck_has_that_luck() -> None:
    """The luck that was drawn in mid-game is part of what is played again."""
    if "Forgetful-v0" not in gymnasium.registry:
        gymnasium.register("Forgetful-v0", entry_point=Forgetful)
    scenario = gym_scenario(
        "forgetful", "Forgetful-v0", ("wait", "add"), lambda env, seen: f"total {env.total}", rules="x", step_limit=20
    )
    for chance in range(8):
        game = scenario.new(1, 0)
        game.step({"player": "add"})
        lucky = game.with_luck(chance)
        copied = lucky.copy()
        for _ in range(3):
            lucky.step({"player": "wait"})
            copied.step({"player": "wait"})
        assert lucky.observe("player") == copied.observe("player")


NO_GAMES = [
    "gym:phys2d/CartPole-v1",
    "gym:GymV21Environment-v0",
    "spiel:mfg_crowd_modelling",
    "spiel:crossword",  # its actions have no numbers
    "spiel:tarok",  # draws its chance inside OpenSpiel, as the next does
    "spiel:negotiation",
]


@pytest.mark.parametrize("name", NO_GAMES)
def test_what_is_no_game_of_these_libraries_is_one_message(name: str) -> None:
    with pytest.raises(UsageError):
        get_scenario(name)


def test_a_package_that_a_level_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniGrid's WFC levels need packages that MiniGrid does not bring: they ended in a traceback."""
    gymnasium = pytest.importorskip("gymnasium")

    def lacking(*given: Any, **options: Any) -> Any:
        raise gymnasium.error.DependencyNotInstalled("imageio is missing")

    monkeypatch.setattr("minigrid.minigrid_env.MiniGridEnv.reset", lacking)
    with pytest.raises(UsageError, match="MiniGrid-Empty-6x6-v0 lacks a package: imageio is missing"):
        get_scenario("gym:MiniGrid-Empty-6x6-v0")


def test_tic_tac_toe_is_judged_exactly() -> None:
    """The start is a draw whatever is played; who does not block loses, and only then."""
    pytest.importorskip("pyspiel")
    scenario = get_scenario("spiel:tic_tac_toe")
    assert scenario.judge is not None
    game = scenario.new(0, 0)
    start = scenario.judge(game, "player1")
    assert start.exact
    assert [q for action, q in start.values.items() if action is not None] == [0.0] * 9
    assert start.sign(None) == "??"
    for action in ("x(0,0)", "o(1,1)", "x(0,1)"):
        game.step({game.to_move[0]: action})
    judgement = scenario.judge(game, "player2")
    assert judgement.best == ["o(0,2)"]
    assert judgement.regret("o(2,2)") == 1.0
    assert get_scenario("spiel:connect_four").judge is None  # far too long to be searched to its end
