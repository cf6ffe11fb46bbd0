"""Evaluations of games that are at odds with their scenario: the game is named, and no record is called damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from msgrpo.errors import GameFaultError
from msgrpo.evals.suites import episode_seeds
from msgrpo.games import get_scenario
from tests.evals_helpers import eval_here

FILE = """
from msgrpo.game import Game, Scenario

class Odd(Game):
    actions = ("on", "back")

    def __init__(self, start_seed, chance_seed):
        super().__init__(3)
        self.start = start_seed
        {begin}

    def observe(self, player):
        return f"start {{self.start}}, step {{self.steps}}"

    def _advance(self, actions):
        return {{"player": 1.0}}

    {more}

scenario = Scenario("odd", "odd", "Go.", 3, "[test]", Odd, actions=Odd.actions, {fields})
"""


def odd_game(folder: Path, begin: str = "", more: str = "", fields: str = "") -> str:
    """The name of a game of three steps with something odd in it."""
    file = folder / "odd.py"
    file.write_text(FILE.format(begin=begin, more=more, fields=fields))
    return f"{file}:scenario"


def test_a_start_that_fails_is_named_each_time_it_is_asked_for(tmp_path: Path) -> None:
    """The second time was a RuntimeError: the fault had ended the iterator of starts, and `eval` asks twice."""
    name = odd_game(tmp_path, begin="raise ValueError('no start')")
    for _ in range(2):
        with pytest.raises(GameFaultError, match="no start"):
            episode_seeds(get_scenario(name), 1)
    with pytest.raises(GameFaultError, match="no start"):
        eval_here(tmp_path / "alone", agents=["random"], scenarios=[name])
    beside = eval_here(tmp_path / "two", agents=["random"], scenarios=["frozen-lake", name], episodes=70)
    assert [row.scenario for row in beside.rows] == ["frozen-lake"]
    assert "no start" in beside.fatal
