"""objectives=fixed(format=0.2, brevity=0.1): what counts besides the return, each normalised in the group.

    A_jt = w_return · credit_jt + Σ_o w_o · (o_j − mean o) / std o

o_j is what objective o says of episode j. The return keeps its credit by turns; the others are of whole episodes. A
sum of rewards would let the objective with the largest numbers win; here each has the same spread, and its weight
decides.

    fixed      w_return = 1, the others as set
    variance   w_o = c_o · var(o) / Σ c var, with c_return = 1 and the others as set: an objective about which the
               group does not differ says nothing (DVAO, arXiv 2605.25604)

The variances are in each objective's own units, which is why c is needed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from msgrpo.episode import Turn
from msgrpo.game import Game
from msgrpo.train.groups import Group, PerTurn
from msgrpo.train.msgrpo import group_advantages
from msgrpo.train.rivals.contract import Objectives, Settings

Origin = Callable[[], Game]  # makes a game in the state in which the episode began


def form(turns: Sequence[Turn], origin: Origin) -> float:
    """The share of answers that held a legal action."""
    return sum(turn.failure is None for turn in turns) / len(turns)


def brevity(turns: Sequence[Turn], origin: Origin) -> float:
    """Minus the mean number of an answer's tokens."""
    return -sum(turn.completion_tokens for turn in turns) / len(turns)


def words(turns: Sequence[Turn], origin: Origin) -> float:
    """Whether the first thought is true, where it has nano's form: all episodes of a group begin in one state."""
    from msgrpo.train.nano.gate import is_true

    return float(is_true(turns[0], origin()))


OBJECTIVES: Mapping[str, Callable[[Sequence[Turn], Origin], float]] = {
    "format": form,
    "brevity": brevity,
    "words": words,
}


class Weighted(Objectives):
    """Objectives with their weights; what has none is not compared."""

    format: float = Field(0.0, description="share of answers that hold a legal action")
    brevity: float = Field(0.0, description="minus the mean number of tokens")
    words: float = Field(0.0, description="whether the first thought is true (nano's form of thought)")

    def check(self, config: Settings) -> None:
        if self.words:
            from msgrpo.train.nano.gate import check_words

            check_words(config)

    @abstractmethod
    def weights(self, values: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, float]:
        """The weight of each objective, from its values in a group (G)."""

    def combined(self, credit: PerTurn, group: Group) -> PerTurn:
        scales = {name: scale for name, scale in self.model_dump().items() if scale}
        values = {
            name: torch.tensor(
                [OBJECTIVES[name](turns, partial(group.origin, j)) for j, turns in enumerate(group.turns)],
                dtype=torch.float64,
            )
            for name in scales
        }
        weight = self.weights({"return": group.returns_G, **values}, {"return": 1.0, **scales})
        others = sum((weight[name] * group_advantages(value) for name, value in values.items()), torch.zeros(1))
        others = others.expand(len(credit))
        return [
            [weight["return"] * value + float(other) for value in of_episode]
            for of_episode, other in zip(credit, others, strict=True)
        ]


class Fixed(Weighted):
    """The weights are those that were set."""

    name = "fixed"

    def weights(self, values: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, float]:
        return dict(scales)


class Variance(Weighted):
    """Each weight is in proportion to the objective's variance within the group."""

    name = "variance"

    def check(self, config: Settings) -> None:
        super().check(config)
        if any(scale < 0 for scale in self.model_dump().values()):
            raise ValueError("objectives=variance divides by a sum, so every objective must be 0 or more")

    def weights(self, values: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, float]:
        spread = {name: scales[name] * float(value.var(correction=0)) for name, value in values.items()}
        total = sum(spread.values())
        return {name: value / total if total > 0 else 0.0 for name, value in spread.items()}
