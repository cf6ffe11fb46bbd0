"""credit=to-go: (R_jt − mean R) / std R over all turns of the group (Williams 1992; Sutton and Barto, ch. 13)."""

from __future__ import annotations

from collections.abc import Sequence

from msgrpo.train.groups import PerTurn, Trajectories
from msgrpo.train.rivals.discounted import Discounted, centred, like, returns_to_go


class ToGo(Discounted):
    """The return to go, centred and scaled over all turns of the group: rewards before a turn are noise to it."""

    name = "to-go"

    def of_group(self, trajectories: Trajectories, of_episodes_G: Sequence[float]) -> PerTurn:
        returns = returns_to_go(trajectories, self.gamma)
        return like(centred([value for of_episode in returns for value in of_episode], self.scale), returns)
