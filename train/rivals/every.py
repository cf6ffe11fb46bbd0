"""select=all: the update sees every episode of every group."""

from __future__ import annotations

import torch

from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Select


class All(Select):
    name = "all"

    def kept(self, group: Group, generator: torch.Generator) -> list[int]:
        return list(range(len(group.turns)))
