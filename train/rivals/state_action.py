"""credit=state-action: (Q(s, a) − V(s)) / rms, the root of the mean square over all turns of the group.

Sources: RTMC (arXiv 2604.11037), BiPACE (arXiv 2606.25556).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgrpo.train.groups import PerTurn, Trajectories
from msgrpo.train.rivals.discounted import Discounted, action_gains, scaled


class StateAction(Discounted):
    """Q and V are means of returns to go: answers with the same action share what they brought.

    Divided by the root of the mean square over all turns; not centred, since it is centred in every state already.
    """

    name = "state-action"

    def of_group(self, trajectories: Trajectories, of_episodes_G: Sequence[float]) -> PerTurn:
        return scaled(action_gains(trajectories, self.gamma), trajectories, self.scale)
