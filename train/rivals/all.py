"""select=all: the update sees every episode of every group."""

from __future__ import annotations

from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Learner, Select


class All(Select):
    """Every episode of every group."""

    name = "all"

    def kept(self, group: Group, learner: Learner) -> list[int]:
        return list(range(len(group.turns)))
