"""`check_game`: the contract of a TSMG as a test that ships with it. Run it over a game of your own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice

import numpy as np

from msgrpo_agent.errors import GameError
from msgrpo_agent.game import SPLITS, Game, Outcome, Scenario, stream


def check_game(scenario: Scenario, *, plays: int = 20, seed: int = 0) -> None:
    """Play random games, with ⊥ among the moves, and raise GameError at the first breach of the contract.

    Checked: fixed players and actions; texts that are not empty and do not change by being asked for;
    finite rewards for every player; the step limit; refusals after the end and of wrong moves; start and luck
    each reproducible by its own seed; the start not depending on the luck; copies that go on alike and apart;
    training and evaluation starts that are there and apart.
    """
    generator = stream(seed, f"check-{scenario.id}")
    _check_splits(scenario)
    for play in range(plays):
        start, chance = (int(x) for x in generator.integers(2**31, size=2))
        game = scenario.new(start, chance)
        _check_start(scenario, game, start, chance)
        twin = scenario.new(start, chance)
        while game.outcome is Outcome.PLAYING:
            moves = _random_moves(game, generator)
            fork = game.copy()
            rewards = game.step(moves)
            _check_step(scenario, game, rewards)
            for other, name in ((twin, "a game with the same seeds"), (fork, "a copy")):
                same = other.step(moves) == rewards and _seen(other) == _seen(game)
                _require(same and other.outcome is game.outcome, scenario, f"{name} went another way in play {play}")
        _check_end(scenario, game)


def _require(holds: bool, scenario: Scenario, what: str) -> None:
    if not holds:
        raise GameError(f"{scenario.id} breaks the contract: {what}")


def _seen(game: Game) -> list[str]:
    return [game.observe(player) for player in game.players]


def _random_moves(game: Game, generator: np.random.Generator) -> dict[str, str | None]:
    choices: list[str | None] = [*game.actions, None]
    return {player: choices[int(generator.integers(len(choices)))] for player in game.players}


def _check_splits(scenario: Scenario) -> None:
    train, val, test = ({scenario.start_key(s) for s in islice(scenario.starts(split), 10)} for split in SPLITS)
    alone = len(train | val | test) == 1
    _require(alone or not train & (val | test), scenario, "training shares a start with validation or test")


def _check_start(scenario: Scenario, game: Game, start: int, chance: int) -> None:
    _require(game.outcome is Outcome.PLAYING and game.steps == 0, scenario, "a new game is not at its start")
    _require(
        game.players == scenario.players and game.actions == scenario.actions, scenario, "players or actions vary"
    )
    _require(len(set(game.actions)) == len(game.actions) > 1, scenario, "actions are not two or more distinct names")
    _require(_seen(game) == _seen(game), scenario, "observing changes what is observed")
    _require(_seen(game) == _seen(scenario.new(start, chance + 1)), scenario, "the start depends on the luck")
    _require(game.step_limit == scenario.step_limit > 0, scenario, "the step limit is not the scenario's")


def _check_step(scenario: Scenario, game: Game, rewards: dict[str, float]) -> None:
    _require(set(rewards) == set(game.players), scenario, f"rewards are for {sorted(rewards)}, not for every player")
    _require(all(math.isfinite(r) for r in rewards.values()), scenario, f"a reward is not finite: {rewards}")
    _require(all(text.strip() for text in _seen(game)), scenario, "an observation is empty")
    cells = game.board().cells
    _require(len({len(row) for row in cells}) == 1, scenario, "the board's rows differ in length")
    unknown = {cell for row in cells for cell in row} - set(game.board().legend)
    _require(not unknown, scenario, f"the legend lacks {sorted(unknown)}")
    for wrong in ({}, dict.fromkeys(game.players, "no such action")):
        if game.outcome is Outcome.PLAYING:
            _require(_refuses(game, wrong), scenario, f"step takes {wrong}")


def _check_end(scenario: Scenario, game: Game) -> None:
    _require(game.steps <= game.step_limit, scenario, f"{game.steps} steps, limit {game.step_limit}")
    _require(_refuses(game, dict.fromkeys(game.players)), scenario, "step goes on after the end")
    _require(scenario.goal == (game.success is not None), scenario, "success and the scenario's goal do not agree")


def _refuses(game: Game, moves: Mapping[str, str | None]) -> bool:
    try:
        game.step(moves)
    except GameError:
        return True
    return False
