"""What a move was worth: the value of every action in a state, and what an agent lost by the one it chose.

    regret(a) = max_a' Q(s, a') − Q(s, a)

Q is the expected return from s on if the best known player goes on after the action. It is exact on Frozen Lake and
in tic-tac-toe; elsewhere playouts estimate it, and a difference counts only where it is larger than their noise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from msgrpo.episode import Episode, Turn, play_again
from msgrpo.errors import GameFaultError
from msgrpo.game import MOST_POINTS, AnyText, Game, Judge, Judgement, Outcome, Scenario
from msgrpo.limits import asked_of, games_code

FUTURES, HORIZON = 8, 8  # and their steps; a compromise between noise and time


def playouts(best: Callable[[Any, str], list[str]]) -> Judge:
    """A judge that plays on after each action, all players by `best`, with the same futures for every action.

    Q(s, a) is the mean return of the HORIZON steps that begin with the action. The luck of each future is drawn
    from its number alone, so that the differences between actions are not made by luck.
    """

    def judge(game: Game, player: str) -> Judgement:
        actions: list[str | None] = [*game.legal(player), None]
        returns = np.array([[_future(game, player, a, luck, best) for luck in range(FUTURES)] for a in actions])
        means = returns.mean(axis=1)
        apart = returns[int(means.argmax())] - returns
        errors = apart.std(axis=1, ddof=1) / np.sqrt(FUTURES)
        return Judgement(
            dict(zip(actions, means.tolist(), strict=True)), dict(zip(actions, errors.tolist(), strict=True))
        )

    return judge


def _future(game: Game, player: str, action: str | None, luck: int, best: Callable[[Any, str], list[str]]) -> float:
    twin, had = game.with_luck(luck), game.returns[player]
    for step in range(HORIZON):
        if twin.outcome is not Outcome.PLAYING:
            break
        chosen: dict[str, str | None] = {who: best(twin, who)[0] for who in twin.to_move}
        twin.step(chosen | ({player: action} if step == 0 else {}))
    return twin.returns[player] - had


def judgement_of(scenario: Scenario, game: Game, player: str) -> Judgement:
    """What the scenario's judge says of a state, which it sees a copy of. The scenario must have a judge.

    Raises GameFaultError where the judge fails, or does not say what each legal action and None are worth.
    """
    assert scenario.judge is not None
    with games_code(scenario.id):
        with asked_of("judge"):
            judgement = scenario.judge(game.copy(), player)
        legal = game.legal(player)
        if isinstance(legal, AnyText):
            raise GameFaultError("a game of the player's own words has no judge that values each text", rule="judge")
        if not isinstance(judgement, Judgement):
            raise GameFaultError(f"judge() gave {str(judgement)[:80]}, no Judgement", rule="judge")
        if set(judgement.values) != {*legal, None}:
            raise GameFaultError(
                f"judge() values {str([*judgement.values])[:80]}, not each legal action and None", rule="judge"
            )
        return Judgement(_numbers(judgement.values), _numbers(judgement.errors))


def _numbers(said: Mapping[str | None, float]) -> dict[str | None, float]:
    """What a judge says of each action as plain numbers. Raises GameFaultError for those that no game pays."""
    try:
        numbers = {action: float(number) for action, number in said.items() if not isinstance(number, str)}
    except (TypeError, ValueError, OverflowError):
        numbers = {}
    if len(numbers) < len(said) or not all(abs(number) <= MOST_POINTS for number in numbers.values()):
        what = f"not finite numbers up to {MOST_POINTS:g}"
        raise GameFaultError(f"judge() gave {str(dict(said))[:80]}, {what}", rule="judge")
    return numbers


def judged(scenario: Scenario, episode: Episode) -> list[Judgement]:
    """The judgement of every turn of an episode, in the order of its turns. The scenario must have a judge."""
    return [judgement_of(scenario, game, turn.player) for turn, game in decided(scenario, episode)]


def regrets(scenario: Scenario, episode: Episode) -> list[float]:
    """What each turn of an episode lost. Raises GameFaultError where the judge has no number for its action."""
    judgements = judged(scenario, episode)
    with games_code(scenario.id):
        return [one.regret(turn.action) for one, turn in zip(judgements, episode.turns, strict=True)]


def decided(scenario: Scenario, episode: Episode) -> Iterator[tuple[Turn, Game]]:
    """Every turn of an episode and the state in which it was decided. It is one game, which goes on between turns."""
    game = scenario.new(episode.start_seed, episode.chance_seed)
    for _, step in groupby(episode.turns, key=lambda turn: turn.step):
        turns = list(step)
        for turn in turns:
            yield turn, game
        play_again(scenario.id, game, turns)


async def add_regrets(scenario: Scenario, episode: Episode, *, aside: bool = True) -> None:
    """Write each turn's regret into the episode; write nothing if the judge itself fails.

    `aside`: in a thread, so that others are asked meanwhile, and how many of them is the clock's.
    """
    try:
        lost = await asyncio.to_thread(regrets, scenario, episode) if aside else regrets(scenario, episode)
    except GameFaultError as fault:  # an episode is not lost because nobody can say what its moves were worth
        if fault.fatal:
            raise
        return
    for turn, regret in zip(episode.turns, lost, strict=True):
        turn.regret = regret
