"""explore=branch(episodes=8): where a group disagrees most, copies of the game go on with new luck.

VinePPO (arXiv 2410.01679) and Tree-GRPO (arXiv 2509.21240): episodes that part in the middle are compared from there
on, so what happened before is no noise to them. After the G episodes of a start, one state is chosen, the one with
the largest

    Σ_{(j,t) in s} (Q(s, a_jt) − V(s))²              Q and V: means of returns to go within the group

over states after the first turn in which different actions were tried. `episodes` go on from there; they are a group
of their own, credited like any other. They cost answers: equal budget means equal answers generated, and
`rollout/turns` counts theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from pydantic import Field

from msgrpo.episode import Episode, replay
from msgrpo.game import Game, Scenario
from msgrpo.train.groups import Group, Trajectories, groups_of
from msgrpo.train.rivals.contract import Explore, Further, Playing, Settings
from msgrpo.train.rivals.discounted import action_gains, by_state


@dataclass(frozen=True)
class Fork:
    """A state in which a group of a scenario disagreed, and the place of the start among the update's."""

    scenario: Scenario
    start_seed: int
    game: Callable[[], Game]  # its episode played again up to there; raises GameFaultError
    place: int
    seats: tuple[str, ...]  # the policy's


class Branch(Explore):
    """Where a group disagrees most, copies of the game go on with new luck."""

    name = "branch"
    copies_games = True
    episodes: int = Field(ge=2, le=100_000, description="that go on from the state each group disagrees about most")
    gamma: float = Field(1.0, gt=0, le=1, description="γ, discount of the returns to go that find the state")

    def check(self, config: Settings) -> None:
        super().check(config)
        if config.prompt.history:
            raise ValueError(
                "explore=branch begins in mid-game, where a prompt with history lacks the turns before: take "
                "explore=none, or a prompt without history"
            )

    def further(self, playing: Playing, episodes: Sequence[Episode]) -> Further:
        forks = self.forks(playing, episodes)
        branched = playing.gathered(
            [
                partial(
                    playing.go_on,
                    scenario=fork.scenario,
                    game=fork.game,
                    seats=fork.seats,
                    start=fork.start_seed,
                    parts=(playing.config.seed, playing.step, fork.place, "branch", k),
                )
                for fork in forks
                for k in range(self.episodes)
            ]
        )
        groups = (
            Group.of(
                partial(_state_of, fork), branched[i * self.episodes : (i + 1) * self.episodes], player, fork.place
            )
            for i, fork in enumerate(forks)
            for player in fork.seats
        )
        return Further([group for group in groups if group is not None], branched)

    def forks(self, playing: Playing, episodes: Sequence[Episode]) -> list[Fork]:
        """For each start the state that its episodes disagree about most; none where no state tells actions apart."""
        forks = []
        for place, (scenario, start_seed, seats, of_start) in enumerate(playing.by_start(episodes)):
            groups = groups_of(scenario, of_start, seats, place)
            states = [
                (*state, i) for i, group in enumerate(groups) if (state := disputed(group.trajectories(), self.gamma))
            ]
            if states:
                _, j, t, i = max(states)
                turn = groups[i].turns[j][t]
                episode = next(candidate for candidate in of_start if any(turn is other for other in candidate.turns))
                game = cache(partial(replay, scenario, episode, turn.step))
                forks.append(Fork(scenario, start_seed, game, place, seats))
        return forks


def disputed(trajectories: Trajectories, gamma: float) -> tuple[float, int, int] | None:
    """What is at stake in the state that the group disagrees about most, and one (j, t) at which it was met."""
    gains = action_gains(trajectories, gamma)
    stakes = [
        (sum(gains[j][t] ** 2 for j, t in places), *places[0])
        for places in by_state(trajectories).values()
        if places[0][1] > 0
    ]
    return max((state for state in stakes if state[0] > 1e-9), default=None)


def _state_of(fork: Fork, episode: Episode) -> Game:
    """The state from which an episode went on, with its luck."""
    return fork.game().with_luck(episode.chance_seed)
