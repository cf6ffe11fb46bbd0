"""Lakes for `benchmarks/doctor.py`: one that nobody can fail on, one whose goal is out of reach, and two whose reward
pays for something else than the goal, so that a run learns that instead."""

from collections.abc import Callable, Mapping

from msgrpo.game import Scenario
from msgrpo.games.frozen_lake import FrozenLake, random_map, rules


class Wrong(FrozenLake):
    """A lake that pays for steps `right` names, whatever they lead to."""

    def __init__(self, desc: tuple[str, ...], steps: int, luck: int, right: Callable[[int], str]) -> None:
        super().__init__(desc, False, steps, luck)
        self.right = right

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        pays = actions["player"] == self.right(self.cell[1])
        super()._advance(actions)
        return {"player": float(pays)}


def _lake(name: str, steps: int, make: Callable[[int, int], FrozenLake]) -> Scenario:
    actions = ("left", "down", "right", "up")
    return Scenario(
        name, "frozen-lake", rules(False, steps), steps, "[ours]", make, actions=actions, one_start=True, goal=True
    )


easy = _lake("easy-lake", 20, lambda start, luck: FrozenLake(("SF", "FG"), False, 20, luck))
hard = _lake("hard-lake", 5, lambda start, luck: FrozenLake(("SFFFFFFG",), False, 5, luck))
wall = _lake("wall-lake", 8, lambda start, luck: Wrong(random_map(4, 0.8, start), 8, luck, lambda column: "left"))
sway = _lake(
    "sway-lake",
    8,
    lambda start, luck: Wrong(random_map(4, 0.8, start), 8, luck, lambda column: "left" if column % 2 else "right"),
)
