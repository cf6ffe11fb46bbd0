"""credit=state: A_j + weight · (R_jt − mean_s R) / std_s R, mean and std over the turns in the same state.

GiGPO, arXiv 2505.10978.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from msgrpo.train.groups import PerTurn, Trajectories
from msgrpo.train.rivals.discounted import Discounted, by_state, centred, returns_to_go


class StateReturn(Discounted):
    """The episode's advantage plus `weight` times the advantage among the turns in the same state.

    A state that was met once, or where all returns to go are equal, adds nothing. A prompt holds all that the policy
    could have used, so the objection of HGPO (arXiv 2602.22817) to grouping by the last observation does not arise.
    """

    name = "state"
    weight: float = Field(1.0, ge=0, description="of the advantage within a state")

    def of_group(self, trajectories: Trajectories, of_episodes_G: Sequence[float]) -> PerTurn:
        returns = returns_to_go(trajectories, self.gamma)
        credits = [[advantage] * len(steps) for advantage, steps in zip(of_episodes_G, trajectories, strict=True)]
        for places in by_state(trajectories).values():
            among = centred([returns[j][t] for j, t in places], self.scale)
            for (j, t), advantage in zip(places, among, strict=True):
                credits[j][t] += self.weight * float(advantage)
        return credits
