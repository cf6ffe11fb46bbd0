"""`check_game` finds each breach of the contract: a game with one fault for every promise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
import pytest

from msgrpo_agent.contract import check_game
from msgrpo_agent.errors import GameError, UsageError
from msgrpo_agent.game import SPLITS, Board, Game, Outcome, Scenario, stream
from msgrpo_agent.games import SCENARIOS

DIE = np.random.default_rng(0)  # a global generator, which a game must not use
COUNT = count()


class Walk(Game):
    """A faultless little game: find the end of a row; luck sometimes pushes you."""

    def __init__(self, start: int, chance: int) -> None:
        super().__init__(step_limit=6)
        self.place = start % 7
        self.luck = stream(chance, "walk")

    @property
    def success(self) -> bool | None:
        return self.place == 9

    def observe(self, player: str) -> str:
        return f"step {self.steps} place {self.place}"

    def board(self) -> Board:
        return Board((tuple("P" if i == self.place else "." for i in range(10)),), {"P": "you", ".": "empty"})

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        push = int(self.luck.integers(3)) - 1
        self.place = max(0, min(9, self.place + push + {"right": 1, "left": -1}.get(actions["player"] or "", 0)))
        self._over = self.place == 9
        return {"player": float(self._over)}


def scenario(game: Callable[[int, int], Game], **fields: Any) -> Scenario:
    return replace(Scenario("walk", "walk", "Walk right.", 6, "ours", game, goal=True), **fields)


def test_the_faultless_game_passes() -> None:
    check_game(scenario(Walk))


class LuckyStart(Walk):
    def __init__(self, start: int, chance: int) -> None:
        super().__init__(start + chance, chance)


class OtherActions(Walk):
    actions = ("left", "right")


class OneAction(Walk):
    actions = ("right",)


class Twice(Walk):
    actions = ("right", "right")


class Restless(Walk):
    def observe(self, player: str) -> str:
        return f"{super().observe(player)} {next(COUNT)}"


class OtherLimit(Walk):
    def __init__(self, start: int, chance: int) -> None:
        super().__init__(start, chance)
        self.step_limit = 5


class Begun(Walk):
    def __init__(self, start: int, chance: int) -> None:
        super().__init__(start, chance)
        self.steps = 1


class NoReward(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        super()._advance(actions)
        return {}


class Infinite(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return {"player": super()._advance(actions)["player"] + float("inf")}


class Silent(Walk):
    def observe(self, player: str) -> str:
        return super().observe(player) if self.steps == 0 else " "


class Ragged(Walk):
    def board(self) -> Board:
        return Board((("P",), ("P", "P")), {"P": "you"})


class NoLegend(Walk):
    def board(self) -> Board:
        return Board((("?",),), {})


class TakesAnything(Walk):
    def step(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        known = {"player": actions.get("player") if actions.get("player") in self.actions else None}
        return super().step(known)


class NeverOver(Walk):
    def step(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        if self.outcome is not Outcome.PLAYING:
            return {"player": 0.0}
        return super().step(actions)


class GlobalLuck(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.place = int(DIE.integers(9))
        return {"player": 0.0}


class SharedLuck(Walk):
    """A copy that draws from the same generator as the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLuck:
        twin = copy.copy(self)
        twin.returns = dict(self.returns)
        return twin


class Aimless(Walk):
    @property
    def success(self) -> bool | None:
        return None


@pytest.mark.parametrize(
    ("game", "fields", "says"),
    [
        (LuckyStart, {}, "the start depends on the luck"),
        (OtherActions, {}, "players or actions vary"),
        (Walk, {"players": ("one", "two")}, "players or actions vary"),
        (OneAction, {"actions": ("right",)}, "two or more distinct"),
        (Twice, {"actions": ("right", "right")}, "two or more distinct"),
        (Restless, {}, "observing changes"),
        (OtherLimit, {}, "the step limit is not the scenario's"),
        (Begun, {}, "not at its start"),
        (NoReward, {}, "not for every player"),
        (Infinite, {}, "a reward is not finite"),
        (Silent, {}, "an observation is empty"),
        (Ragged, {}, "rows differ in length"),
        (NoLegend, {}, "the legend lacks"),
        (TakesAnything, {}, "step takes"),
        (NeverOver, {}, "goes on after the end"),
        (GlobalLuck, {}, "went another way"),
        (SharedLuck, {}, "went another way"),
        (Aimless, {}, "success and the scenario's goal"),
    ],
)
def test_every_breach_is_found(game: Callable[[int, int], Game], fields: dict[str, Any], says: str) -> None:
    with pytest.raises(GameError, match=says):
        check_game(scenario(game, **fields))


@pytest.mark.parametrize("starts", [1, 2, 3, 7])
def test_a_game_with_few_starts_has_all_splits_and_they_are_apart(starts: int) -> None:
    """With two starts neither may fall into a held-out share, and looking for one went on for ever."""
    few = scenario(lambda start, chance: Walk(start % starts, chance))
    check_game(few)
    seen = {split: {few.start_key(seed) for seed in islice(few.starts(split), 50)} for split in SPLITS}
    assert all(seen.values())
    assert starts == 1 or not seen["train"] & (seen["val"] | seen["test"])
    assert starts <= 2 or not seen["val"] & seen["test"]
    assert len(set().union(*seen.values())) == starts


@pytest.mark.parametrize("id", SCENARIOS)
def test_values_of_a_scenario_are_those_of_its_games(id: str) -> None:
    game = SCENARIOS[id].new(0, 0)
    assert (SCENARIOS[id].players, SCENARIOS[id].actions) == (game.players, game.actions)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(UsageError, match="no split is named 'eval'"):
        SCENARIOS["snake"].starts("eval")  # type: ignore[arg-type]
