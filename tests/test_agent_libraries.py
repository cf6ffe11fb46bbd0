"""MiniGrid and OpenSpiel: the contract for many of their games, and ours held against their own environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from msgrpo_agent.contract import check_game
from msgrpo_agent.errors import UsageError
from msgrpo_agent.game import Outcome
from msgrpo_agent.games import get_scenario
from msgrpo_agent.games.minigrid_game import ACTIONS, MiniGridGame, things
from msgrpo_agent.games.outside import FIXED
from msgrpo_agent.games.spiel_game import SpielGame
from msgrpo_agent.references import OptimalAgent, RandomAgent
from msgrpo_agent.rollout import play_episode

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
    for start in range(20):
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


def test_no_legal_action_loses_a_game_of_two() -> None:
    game = get_scenario("spiel:connect_four").new(0, 0)
    assert game.step({"player1": None}) == {"player1": -1.0, "player2": 1.0}
    assert game.outcome is Outcome.TERMINATED
    assert game.ending == "player1 gave no legal action"


def test_without_a_search_optimal_says_so() -> None:
    from msgrpo_agent.references import best_actions

    scenario = get_scenario("spiel:leduc_poker")
    with pytest.raises(UsageError, match="has no reference player"):
        best_actions(scenario, scenario.new(0, 0), "player1")
