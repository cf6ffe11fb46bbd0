"""Players that bracket every score: random, and the reference player that a scenario brings along.

They read the game itself, not its text, so their rows are ceilings and floors and never a model's rivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgrpo_agent.agent import Decision, OnText, View
from msgrpo_agent.errors import UsageError
from msgrpo_agent.game import Game, Scenario, stream


def best_actions(scenario: Scenario, game: Game, player: str) -> Sequence[str]:
    """The best actions that the scenario's reference player knows. Raises UsageError where it has none."""
    if scenario.reference is None:
        raise UsageError(
            f"{scenario.id} has no reference player, so nothing is known to be optimal there",
            fix="play it with another agent, or give its Scenario a reference=function(game, player)",
        )
    return scenario.reference(game, player)


@dataclass
class RandomAgent:
    """Each action that is legal now with the same probability, seeded by the turn."""

    spec: str = "random"

    def settings(self) -> dict[str, Any]:
        return {"model": "random"}

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        return Decision(str(stream(view.seed, "random-agent").choice(view.game.legal(view.player))))

    async def close(self) -> None:
        """Nothing to close."""


@dataclass
class OptimalAgent:
    """The scenario's reference player: on Frozen Lake the exact optimum within the step limit, on Snake a search."""

    spec: str = "optimal"

    def settings(self) -> dict[str, Any]:
        return {"model": "dynamic programming or search"}

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        best = best_actions(view.scenario, view.game, view.player)
        return Decision(str(stream(view.seed, "ties").choice(list(best))))

    async def close(self) -> None:
        """Nothing to close."""
