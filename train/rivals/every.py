"""select=all: the update sees every episode of every group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from msgrpo.train.rivals.contract import Select

if TYPE_CHECKING:
    from msgrpo.train.groups import Group


class All(Select):
    name = "all"

    def kept(self, group: Group, generator: torch.Generator) -> list[int]:
        return list(range(len(group.turns)))
