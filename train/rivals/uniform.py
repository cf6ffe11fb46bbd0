"""select=uniform: G′ of G episodes without replacement, all alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from msgrpo.train.rivals.contract import Sampled

if TYPE_CHECKING:
    from msgrpo.train.groups import Group


class Uniform(Sampled):
    name = "uniform"

    def kept(self, group: Group, generator: torch.Generator) -> list[int]:
        drawn: list[int] = torch.randperm(len(group.turns), generator=generator)[: self.keep].tolist()
        return drawn
