"""Players that bracket every score: random, and the reference player that a scenario brings along.

They read the game itself, not its text, so their rows are ceilings and floors and never a model's rivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgrpo.agent import Decision, OnText, View
from msgrpo.errors import GameFaultError, UsageError
from msgrpo.game import Game, Scenario, stream
from msgrpo.limits import asked_of, games_code, passing_faults


def check_reference(scenario: Scenario) -> None:
    """Raises UsageError for a scenario without a reference player."""
    if scenario.reference is None:
        raise UsageError(
            f"{scenario.id} has no reference player, so nothing is known to be optimal there",
            fix="play it with another agent, or give its Scenario a reference=function(game, player)",
        )


def best_actions(scenario: Scenario, game: Game, player: str) -> Sequence[str]:
    """The best actions that the scenario's reference player knows, who sees a copy of the state.

    Raises UsageError where it has none, GameFaultError where it fails, or gives what is not legal there.
    """
    check_reference(scenario)
    assert scenario.reference is not None
    with games_code(scenario.id):
        with asked_of("reference"):
            actions = scenario.reference(game.copy(), player)
        best = list(actions) if isinstance(actions, (list, tuple)) else sorted(actions)  # a set has no order
        if not best or not set(best) <= set(game.legal(player)):
            raise GameFaultError(
                f"reference() gave {str(actions)[:80]}, not some of the legal actions", rule="reference"
            )
        return best


def known_best(scenario: Scenario, game: Game, player: str) -> Sequence[str] | None:
    """The best actions; None without a reference player, and where it fails. A fatal fault is raised."""
    if scenario.reference is None:
        return None
    with passing_faults():
        return best_actions(scenario, game, player)
    return None


def description_of(scenario: Scenario, game: Game, player: str) -> str:
    """What the scenario's `describe` says of a state, which it sees a copy of. The scenario must have one.

    Raises GameFaultError where it fails, or gives what cannot stand before an action.
    """
    assert scenario.describe is not None
    with games_code(scenario.id):
        with asked_of("describe"):
            words: object = scenario.describe(game.copy(), player)
        if not isinstance(words, str):
            raise GameFaultError(f"describe() gave a {type(words).__name__}, no text", rule="describe")
        if "<action>" in words:
            raise GameFaultError(f"describe() names an action itself: {words[:80]!r}", rule="describe")
        return words


@dataclass
class RandomAgent:
    """Each action that is legal now with the same probability, seeded by the turn."""

    spec: str = "random"

    def settings(self) -> dict[str, Any]:
        return {"model": "random"}

    def choose(self, view: View) -> str:
        """The action of this turn: the same for the same seed."""
        return str(stream(view.seed, "random-agent").choice(view.legal()))

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        return Decision(self.choose(view))

    async def close(self) -> None:
        """Nothing to close."""


@dataclass
class OptimalAgent:
    """The scenario's reference player: on Frozen Lake the exact optimum within the step limit, on Snake a search."""

    spec: str = "optimal"
    why_not: ClassVar[str] = "nothing is known to be optimal there"  # said where it cannot play

    def settings(self) -> dict[str, Any]:
        return {"model": "dynamic programming or search"}

    def can_play(self, scenario: Scenario) -> bool:
        """Whether the scenario brings a reference player."""
        return scenario.reference is not None

    def choose(self, view: View) -> str:
        """One of the best actions that are known: the same for the same seed."""
        best = best_actions(view.scenario, view.game, view.player)
        return str(stream(view.seed, "ties").choice(list(best)))

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        return Decision(self.choose(view))

    async def close(self) -> None:
        """Nothing to close."""
