"""TextArena's games: the contract, games that do not disturb each other, and ours held against their own."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("textarena")

import textarena

from msgrpo.agent import ParseFailure, parse_action
from msgrpo.contract import check_game, examine
from msgrpo.episode import observation_of, play_episode
from msgrpo.errors import GameFaultError, UsageError
from msgrpo.game import AnyText, Game, Outcome, Scenario, stream
from msgrpo.games import get_scenario, recorded_scenario
from msgrpo.games import textarena_game as arena
from msgrpo.prompt import PromptTemplate
from msgrpo.references import RandomAgent

GAMES = (
    "Bandit-v0",
    "Blackjack-v0",
    "FrozenLake-v0-train",
    "GuessTheNumber-v0",
    "LightsOut-v0",
    "Mastermind-v0",
    "Secretary-v0",
    "TowerOfHanoi-v0-train",
    "TicTacToe-v0",
    "WildTicTacToe-v0-train",
    "ConnectFour-v0-train",
    "KuhnPoker-v0-train",
    "Nim-v0",
    "IteratedRockPaperScissors-v0",
    "IteratedMatchingPennies-v0",
    "SimpleNegotiation-v0-short",
)
DRAW = ("Bandit-v0", "PigDice-v0", "2048-v0-ultra-easy-train")  # these draw numbers as they go


@pytest.mark.parametrize("name", GAMES)
def test_games_of_textarena_keep_the_contract(name: str) -> None:
    check_game(get_scenario(f"ta:{name}"), plays=1)


def moves(scenario: Scenario, seed: int) -> Iterator[tuple[Any, ...]]:
    """All that is seen of a game of random moves, one step at a time."""
    game, generator = scenario.new(seed, seed), stream(seed, "moves")
    for _ in range(30):
        yield game.observe(game.to_move[0]), game.legal(game.to_move[0]), dict(game.returns)
        if game.outcome is not Outcome.PLAYING:
            return
        game.step({player: str(generator.choice(game.legal(player))) for player in game.to_move})


def in_turns(scenarios: list[Scenario]) -> list[list[tuple[Any, ...]]]:
    """The games of several scenarios, one step of each after the other, and somebody who draws in between."""
    plays, seen = [moves(one, 3 + i) for i, one in enumerate(scenarios)], [[] for _ in scenarios]
    going = True
    while going:
        going = False
        for play, trace in zip(plays, seen, strict=True):
            step = next(play, None)
            if step is not None:
                going = True
                trace.append(step)
            random.random()
            np.random.random()
    return seen


def test_games_in_turns_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes as it goes alone; without a state of its own for each, they do not."""
    scenarios = [get_scenario(f"ta:{name}") for name in (*DRAW, DRAW[0])]
    alone = [list(moves(one, 3 + i)) for i, one in enumerate(scenarios)]
    assert in_turns(scenarios) == alone
    monkeypatch.setattr(arena, "set_generators", lambda states: None)
    assert in_turns(scenarios) != alone


def test_whoever_else_draws_is_not_disturbed() -> None:
    scenario = get_scenario(f"ta:{DRAW[0]}")
    random.seed(5)
    np.random.seed(5)
    wanted = [(random.random(), np.random.random()) for _ in range(3)]
    random.seed(5)
    np.random.seed(5)
    play = moves(scenario, 1)
    drawn = []
    for _ in range(3):
        next(play)
        drawn.append((random.random(), np.random.random()))
    assert drawn == wanted


def test_games_in_threads_do_not_disturb_each_other() -> None:
    scenario = get_scenario(f"ta:{DRAW[1]}")
    alone = [list(moves(scenario, seed)) for seed in range(4)]
    seen: dict[int, list[tuple[Any, ...]]] = {}

    def play(seed: int) -> None:
        seen[seed] = list(moves(scenario, seed))

    threads = [threading.Thread(target=play, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[seed] for seed in range(4)] == alone


@pytest.mark.parametrize("name", ["TicTacToe-v0-train", "FrozenLake-v0", "KuhnPoker-v0"])
async def test_a_game_shows_and_pays_what_textarena_does(name: str) -> None:
    """The same moves in an environment of TextArena's own: the same texts, the same rewards at the end."""
    scenario = get_scenario(f"ta:{name}")
    for start in range(4):
        game = scenario.new(start, start)
        assert isinstance(game, arena.ArenaGame)
        own, generator = textarena.make(name), stream(start, "moves")
        own.reset(num_players=len(scenario.players), seed=start)
        random.setstate(game._generators[0])
        done = False
        while not done:
            number, text = own.get_observation()
            player = scenario.players[number]
            assert game.to_move == (player,)
            assert game.observe(player).split("\n", 1)[1] == text.strip()
            action = str(generator.choice(game.legal(player)))
            paid = game.step({player: action})
            done, _ = own.step(f"[{action}]")
            assert done == (game.outcome is Outcome.TERMINATED)
        assert paid == {scenario.players[i]: reward for i, reward in own.close()[0].items()}


def test_legal_are_the_moves_that_textarena_takes() -> None:
    game = get_scenario("ta:TicTacToe-v0").new(0, 0)
    game.step({"player0": "4"})
    assert game.legal("player1") == tuple("01235678")
    assert game.legal("player1") == game.copy().legal("player1")
    guess = get_scenario("ta:GuessTheNumber-v0").new(0, 0)
    guess.step({"player": "7"})
    assert "7" not in guess.legal("player") or guess.outcome is not Outcome.PLAYING


def test_no_move_is_a_warning_and_a_second_one_loses() -> None:
    game = get_scenario("ta:TicTacToe-v0").new(0, 0)
    assert game.step({"player0": None}) == {"player0": 0.0, "player1": 0.0}
    assert "attempted an invalid move" in game.observe("player0")
    assert game.to_move == ("player0",)
    assert game.step({"player0": None}) == {"player0": -1.0, "player1": 1.0}
    assert game.outcome is Outcome.TERMINATED


def test_a_secret_that_nobody_sees_is_another_one_with_another_seed() -> None:
    """Its starts look the same and are not; so no start is held out, and it is not taken for a game of one start."""
    scenario = get_scenario("ta:GuessTheNumber-v0")
    assert (scenario.one_start, scenario.hidden, scenario.holds_out) == (False, True, False)
    assert get_scenario("ta:TicTacToe-v0").one_start
    assert get_scenario("ta:FrozenLake-v0").holds_out
    assert get_scenario("ta:KuhnPoker-v0").hidden


async def test_a_game_of_own_words_takes_any_text_and_shows_examples() -> None:
    scenario = get_scenario("ta:Mastermind-v0")
    game = scenario.new(0, 0)
    assert isinstance(game.legal("player"), AnyText)
    assert game.own_actions("player") == ()
    assert "Legal now" not in observation_of(game, "player")
    assert "Actions: your own words" in PromptTemplate().render(scenario, "s").prefix
    said = parse_action("I try <action>[1 2 3 4]</action>", scenario.actions, game.legal("player"))
    assert (said.action, said.failure) == ("[1 2 3 4]", None)
    assert parse_action("<action> </action>", scenario.actions, game.legal("player")).failure is ParseFailure.ILLEGAL
    before = game.observe("player")
    game.step({"player": "[1 2 3 4]"})
    assert game.observe("player") != before
    episode = await play_episode(scenario, {"player": RandomAgent()}, start_seed=1, chance_seed=1, sampling_seed=1)
    assert episode.error is None


def test_what_is_not_in_a_list_may_still_be_too_long_or_empty() -> None:
    words = AnyText(["[go]"])
    assert "anything" in words
    assert " " not in words
    assert "x" * 5000 not in words
    assert 3 not in words


def test_the_check_names_what_does_not_hold() -> None:
    """TextArena's Countdown pays a sentence where a number belongs."""
    found = examine(get_scenario("ta:Countdown-v0"), plays=2)
    assert [breach.rule for breach in found.breaches] == ["rewards"]
    game: Game = get_scenario("ta:Countdown-v0").new(0, 0)
    with pytest.raises(GameFaultError, match="a reward is no number"):  # noqa: PT012
        for _ in range(2):
            game.step({"player": None})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("TicTacTo-v0", "TextArena has no game 'TicTacTo-v0'"),
        ("TicTacToe-v0-raw", "its state is no text"),
        ("GuessWho-v0", "it asks a model at openrouter.ai"),
        ("UsedCarNegotiation-v0", "FileNotFoundError"),
    ],
)
def test_what_cannot_be_played_is_refused_with_its_reason(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        get_scenario(f"ta:{name}")


def test_a_game_of_words_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "has", lambda resource: False)
    with pytest.raises(UsageError, match="NLTK's word lists") as refused:
        get_scenario("ta:Wordle-v0")
    assert refused.value.fix is not None
    assert "nltk.downloader words" in refused.value.fix


def test_a_record_may_name_a_game_of_textarena() -> None:
    assert recorded_scenario("ta:TicTacToe-v0").id == "ta:TicTacToe-v0"
