"""select=uniform: G′ of G episodes, drawn uniformly without replacement."""

from __future__ import annotations

import torch

from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Learner, Sampled


class Uniform(Sampled):
    """G′ of G, drawn uniformly without replacement."""

    name = "uniform"

    def kept(self, group: Group, learner: Learner) -> list[int]:
        drawn: list[int] = torch.randperm(len(group.turns), generator=learner.generator)[: self.keep].tolist()
        return drawn
