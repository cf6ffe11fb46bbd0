"""explore=refill(rounds=2): a start whose returns are all equal is replaced by a fresh one.

DAPO's dynamic sampling (arXiv 2503.14476): a group with equal returns has no advantage and teaches nothing, so as
many new starts are played as were flat, and again for those that are flat among them, `rounds` times at most. (A
credit that compares turns, such as `to-go`, may still learn from the flat ones: they stay in the update.) An update
then has about as many groups that teach whatever the policy's success is. What is played for it costs answers: equal
budget means equal answers, and `rollout/turns` counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from msgrpo.episode import Episode
from msgrpo.train.groups import Group
from msgrpo.train.rivals.contract import Explore, Further, Playing


class Refill(Explore):
    """A start whose returns are all equal is replaced by a fresh one."""

    name = "refill"
    rounds: int = Field(2, ge=1, le=100, description="how often at most the flat ones are replaced")

    def further(self, playing: Playing, episodes: Sequence[Episode]) -> Further:
        groups, added = list[Group](), list[Episode]()
        for _ in range(self.rounds):
            flat = sum(playing.flat(episodes))
            if not flat:
                break
            playing = playing.fresh(flat)
            episodes = playing.played()
            groups += playing.groups(episodes)
            added += episodes
        return Further(groups, added, playing.next_start)
