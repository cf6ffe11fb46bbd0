"""credit=lambda: Σ_k (γλ)^k δ_t+k / rms, with δ_t = r_t + γ V(s_t+1) − V(s_t) and a table for V.

This is generalized advantage estimation (GAE, arXiv 1506.02438); rms is the root of the mean square over all turns of
the group. Source: GAGPO (arXiv 2605.13217).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from msgrpo.train.groups import PerTurn, Trajectories
from msgrpo.train.rivals.discounted import Discounted, by_state, generalized_advantages, mean, returns_to_go, scaled


class Lambda(Discounted):
    """V(s) is the mean return to go of the group's turns in s."""

    name = "lambda"
    lam: float = Field(0.95, ge=0, le=1, description="λ of GAE; 1: the return to go, 0: reward and next value")

    def of_group(self, trajectories: Trajectories, of_episodes_G: Sequence[float]) -> PerTurn:
        returns = returns_to_go(trajectories, self.gamma)
        table = {state: mean([returns[j][t] for j, t in at]) for state, at in by_state(trajectories).items()}
        values = [[table[step.state] for step in steps] for steps in trajectories]
        return scaled(generalized_advantages(trajectories, values, self.gamma, self.lam), trajectories, self.scale)
