"""select=uniform: G′ of G episodes without replacement, all alike."""

from __future__ import annotations

import torch

from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Learner, Sampled


class Uniform(Sampled):
    """G′ of G without replacement, all alike."""

    name = "uniform"

    def kept(self, group: Group, learner: Learner) -> list[int]:
        drawn: list[int] = torch.randperm(len(group.turns), generator=learner.generator)[: self.keep].tolist()
        return drawn
