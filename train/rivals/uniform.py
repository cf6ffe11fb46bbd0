"""select=uniform: G′ of G episodes without replacement, all alike."""

from __future__ import annotations

import torch

from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Sampled


class Uniform(Sampled):
    name = "uniform"

    def kept(self, group: Group, generator: torch.Generator) -> list[int]:
        drawn: list[int] = torch.randperm(len(group.turns), generator=generator)[: self.keep].tolist()
        return drawn
