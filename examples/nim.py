"""Nim, a game of two in one file: `msgrpo play examples/nim.py:scenario --agent human --against optimal`.

It shows what the simplest games do not need: players who take turns, and actions that are not always legal.
"""

from collections.abc import Mapping

from msgrpo.game import Game, Scenario, stream

LIMIT = 12
RULES = (
    "Nim. Stones lie on a heap. The players take turns; each takes one, two or three stones, never more than there "
    "are. Who takes the last stone wins 1 point, the other loses 1. An answer without a legal action takes one stone."
)


class Nim(Game):
    players = ("first", "second")
    actions = ("one", "two", "three")

    def __init__(self, start_seed: int) -> None:
        super().__init__(step_limit=LIMIT)
        self.stones = int(stream(start_seed, "heap").integers(5, LIMIT + 1))

    @property
    def to_move(self) -> tuple[str, ...]:
        return (self.players[self.steps % 2],)

    def legal(self, player: str) -> tuple[str, ...]:
        return self.actions[: self.stones] or self.actions

    def observe(self, player: str) -> str:
        return f"Step {min(self.steps + 1, LIMIT)} of {LIMIT}. You are the {player} player. Stones: {self.stones}."

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        ((player, action),) = actions.items()
        self.stones -= self.actions.index(action or "one") + 1
        self._over = self.stones == 0
        other = self.players[1 - self.players.index(player)]
        return {player: float(self._over), other: -float(self._over)}

    @property
    def ending(self) -> str:
        winners = [player for player, points in self.returns.items() if points > 0]
        return f"{winners[0]} won" if winners else ""

    def _draw_luck(self, chance_seed: int) -> None:
        """There is none."""


def best(game: Nim, player: str) -> list[str]:
    """Leave a multiple of four; where that cannot be done, all moves lose alike."""
    winning = game.actions[game.stones % 4 - 1] if game.stones % 4 else None
    return [winning] if winning else list(game.legal(player))


def describe(game: Nim, player: str) -> str:
    """What each move leaves."""
    left = (f"{action} leaves {game.stones - i}" for i, action in enumerate(game.legal(player), start=1))
    return f"{game.stones}: {' '.join(left)}."


scenario = Scenario(
    "nim",
    "nim",
    RULES,
    LIMIT,
    "Bouton 1901",
    lambda start, chance: Nim(start),
    players=Nim.players,
    actions=Nim.actions,
    reference=best,
    describe=describe,
)
