"""gate=widest: the groups with the smallest variance of returns are passed over (RAGEN-2, arXiv 2604.06268: there
regularisation outweighs what the task says).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Gate


class Widest(Gate):
    """Passes the groups whose returns differ most."""

    name = "widest"
    one_game = True
    drop: float = Field(0.25, ge=0, lt=1, description="share of the groups that is passed over")

    def passing(self, groups: Sequence[Group]) -> list[int]:
        order = sorted(range(len(groups)), key=lambda g: float(groups[g].returns_G.var(correction=0)))
        return sorted(order[int(self.drop * len(groups)) :])
