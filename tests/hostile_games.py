"""A game of three steps, from which the tests make games that misbehave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgrpo.episode import play_episode
from msgrpo.game import Game, Scenario
from msgrpo.references import RandomAgent


class Walk(Game):
    """Three steps, each pays 1."""

    actions = ("on", "back")

    def __init__(self, start_seed: int, chance_seed: int) -> None:
        super().__init__(3)

    def observe(self, player: str) -> str:
        return f"step {self.steps}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return {"player": 1.0}


def scenario(game: type[Game], **more: Any) -> Scenario:
    fields = {"actions": Walk.actions, "one_start": True} | more
    return Scenario("hostile", "hostile", "Walk.", 3, "[test]", game, **fields)


async def played(game: type[Game], **more: Any) -> Any:
    of = scenario(game, **more)
    return await play_episode(of, {"player": RandomAgent()}, start_seed=0, chance_seed=0, sampling_seed=0)
