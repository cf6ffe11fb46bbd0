"""Higher or lower: guess how the next card compares with the one on the table."""

from collections.abc import Mapping

from msgrpo.game import Game, Scenario, stream

CARDS, ROUNDS = 9, 8
RULES = (
    f"Higher or lower. A card from 1 to {CARDS} lies on the table; the next one is drawn, each with the same chance. "
    f"Say whether it will be higher, lower or the same: 1 point if you are right. There are {ROUNDS} rounds. "
    "An answer without a legal action is a wrong guess."
)


class Higher(Game):
    actions = ("higher", "lower", "same")

    def __init__(self, start_seed: int, chance_seed: int) -> None:
        super().__init__(step_limit=ROUNDS)
        self.card = int(stream(start_seed, "first-card").integers(1, CARDS + 1))
        self._draw_luck(chance_seed)

    def _draw_luck(self, chance_seed: int) -> None:
        self.deck = stream(chance_seed, "deck")

    def observe(self, player: str) -> str:
        return f"Step {min(self.steps + 1, ROUNDS)} of {ROUNDS}. On the table: {self.card}."

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        following = int(self.deck.integers(1, CARDS + 1))
        right = "higher" if following > self.card else "lower" if following < self.card else "same"
        self.card = following
        return {"player": float(actions["player"] == right)}


def best(game: Higher, player: str) -> list[str]:
    """The reference player, for the agent `optimal`: what most of the cards agree with."""
    counts = {"higher": CARDS - game.card, "lower": game.card - 1, "same": 1}
    return [action for action, count in counts.items() if count == max(counts.values())]


def describe(game: Higher, player: str) -> str:
    """Something true about the state, for a model to learn from: `msgrpo teach`."""
    return f"{game.card}: higher {CARDS - game.card} lower {game.card - 1} same 1."


scenario = Scenario(
    id="higher", family="higher", rules=RULES, step_limit=ROUNDS, source="[ours]", make=Higher,
    actions=Higher.actions, reference=best, describe=describe,
)  # fmt: skip


def test_my_game() -> None:
    from msgrpo.contract import check_game

    check_game(scenario)
