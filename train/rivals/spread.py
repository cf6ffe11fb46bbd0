"""select=spread: the G′ episodes whose returns have the largest variance (PODS, arXiv 2504.13818)."""

from __future__ import annotations

from torch import Tensor

from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Learner, Sampled


class Spread(Sampled):
    """The G′ episodes whose returns have the largest variance."""

    name = "spread"

    def kept(self, group: Group, learner: Learner) -> list[int]:
        return largest_spread(group.returns_G, min(self.keep, len(group.turns)))


def largest_spread(returns_G: Tensor, keep: int) -> list[int]:
    """The `keep` episodes whose returns have the largest variance.

    They are the k highest and the keep − k lowest for some k (Theorem 1 of the paper), so keep + 1 subsets are
    compared.
    """
    order = returns_G.argsort(stable=True).tolist()
    candidates = [order[: keep - k] + order[len(order) - k :] for k in range(keep + 1)]
    return max(candidates, key=lambda chosen: float(returns_G[chosen].var(correction=0)))
