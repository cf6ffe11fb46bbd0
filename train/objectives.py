"""Objectives beside the return: `--set 'objectives={"brevity": 0.2}'`, each normalised within the group by itself.

    A_jt = w_return · credit_jt + Σ_o w_o · (o_j − mean o) / std o

The return keeps its credit by turns; the others are of whole episodes. A sum of rewards would let the objective with
the largest numbers win; here each has the same spread, and its weight decides. `objective_weights`:

    fixed      w_return = 1, the others as set
    variance   w_o = c_o · var(o) / Σ c var, with c_return = 1 and the others as set: an objective about which the
               group does not differ says nothing (DVAO, arXiv 2605.25604)

The variances are in each objective's own units, which is why c is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from msgrpo.episode import Turn
from msgrpo.game import Game
from msgrpo.train.credit import Advantages
from msgrpo.train.msgrpo import group_advantages
from msgrpo.train.nano.words import Words, truth

Weights = Literal["fixed", "variance"]


def form(turns: Sequence[Turn], origin: Game) -> float:
    """The share of answers that held a legal action."""
    return sum(turn.failure is None for turn in turns) / len(turns)


def brevity(turns: Sequence[Turn], origin: Game) -> float:
    """Minus the mean number of an answer's tokens."""
    return -sum(turn.completion_tokens for turn in turns) / len(turns)


def words(turns: Sequence[Turn], origin: Game) -> float:
    """Whether the first thought is true, where it has nano's form: all episodes of a group begin in one state."""
    return float(truth(Words.read(turns[0].answer or ""), origin, turns[0].player).whole)


OBJECTIVES: Mapping[str, Callable[[Sequence[Turn], Game], float]] = {
    "format": form,
    "brevity": brevity,
    "words": words,
}


def combined(
    credit: Advantages,
    turns: Sequence[Sequence[Turn]],
    origin: Callable[[int], Game],
    returns_G: Tensor,
    scales: Mapping[str, float],
    weights: Weights,
) -> Advantages:
    """The advantages of a group's objectives together, [j][t]; without others than the return, `credit` itself."""
    if not scales:
        return credit
    values = {
        name: torch.tensor([OBJECTIVES[name](one, origin(j)) for j, one in enumerate(turns)], dtype=torch.float64)
        for name in scales
    }
    share = shares({"return": returns_G, **values}, {"return": 1.0, **scales}, weights)
    others = sum((share[name] * group_advantages(value) for name, value in values.items()), torch.zeros(1))
    others = others.expand(len(credit))
    return [
        [share["return"] * value + float(other) for value in one] for one, other in zip(credit, others, strict=True)
    ]


def shares(values: Mapping[str, Tensor], scales: Mapping[str, float], weights: Weights) -> dict[str, float]:
    """The weight of each objective, from its values in a group (G)."""
    if weights == "fixed":
        return dict(scales)
    spread = {name: scales[name] * float(value.var(correction=0)) for name, value in values.items()}
    whole = sum(spread.values())
    return {name: value / whole if whole > 0 else 0.0 for name, value in spread.items()}
