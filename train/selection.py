"""Which episodes of a group an update sees. `aaw` is the paper's; the others are its rivals.

aaw       G′ of G without replacement, p_j ∝ exp |A_j|      [P] arXiv 2508.10839
uniform   G′ of G, all alike
spread    the G′ whose returns have the largest variance    PODS, arXiv 2504.13818
all       every episode

Before it, whole groups may be passed over: those in whose returns there is little to learn from (`widest_groups`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from msgrpo.train.msgrpo import aaw_sample

Selection = Literal["aaw", "uniform", "spread", "all"]


def keep_indices(
    advantages_G: Tensor, returns_G: Tensor, selection: Selection, keep: int, generator: torch.Generator
) -> list[int]:
    """The indices of the kept episodes; those that are drawn come in the order drawn."""
    size = len(advantages_G)
    if selection == "all":
        return list(range(size))
    if selection == "uniform":
        return torch.randperm(size, generator=generator)[:keep].tolist()
    if selection == "spread":
        return largest_spread(returns_G, keep)
    return aaw_sample(advantages_G, keep, generator).tolist()


def largest_spread(returns_G: Tensor, keep: int) -> list[int]:
    """The `keep` episodes whose returns have the largest variance.

    They are the k highest and the keep − k lowest for some k (Theorem 1 of the paper), so keep + 1 subsets are
    compared.
    """
    order = returns_G.argsort(stable=True).tolist()
    candidates = [order[: keep - k] + order[len(order) - k :] for k in range(keep + 1)]
    return max(candidates, key=lambda chosen: float(returns_G[chosen].var(correction=0)))


def widest_groups(returns: Sequence[Tensor], drop: float) -> list[int]:
    """The indices of the groups that are left, in their order, when the share `drop` of them has been passed over:
    those with the smallest variance of returns (RAGEN-2, arXiv 2604.06268: there regularisation outweighs what the
    task says).
    """
    order = sorted(range(len(returns)), key=lambda g: float(returns[g].var(correction=0)))
    return sorted(order[int(drop * len(returns)) :])
