"""Branches: where a group disagrees most, copies of the game go on with new luck (`--set branch=K`).

VinePPO (arXiv 2410.01679) and Tree-GRPO (arXiv 2509.21240): episodes that part in the middle are compared from there
on, so what happened before is no noise to them. After the G episodes of a start, one state is chosen, the one with

    max_s Σ_{(j,t) in s} (Q(s, a_jt) − V(s))²        Q and V: means of returns to go within the group

over states after the first turn in which different actions were tried. K episodes go on from there; they are a group
of their own, credited like any other. They cost answers: equal budget means equal answers generated, and
`rollout/turns` counts theirs.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgrpo.agent import Agent, LanguageAgent, LanguageModel, Sampling
from msgrpo.episode import Episode
from msgrpo.game import Game, Scenario
from msgrpo.limits import games_code
from msgrpo.rewards import Shaping
from msgrpo.rollout import derive_seed, new_episode, play_on, replay
from msgrpo.train.collect import POLICY, Group, OnEnded, Start, beginning, seated, seats_in, silent, together
from msgrpo.train.config import TrainConfig
from msgrpo.train.credit import Trajectories, action_gains, by_state
from msgrpo.train.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Fork:
    """A state in which a group of a scenario disagreed, and the place of the start among the update's."""

    scenario: Scenario
    start_seed: int
    game: Game
    place: int
    seats: tuple[str, ...]  # the policy's


def forks(episodes: Sequence[Episode], config: TrainConfig, step: int, starts: Sequence[Start]) -> list[Fork]:
    """For each start the state that its episodes disagree about most; none where no state tells actions apart."""
    found = []
    for g, ((scenario, start), seats) in enumerate(zip(starts, seats_in(starts, config, step), strict=True)):
        of_start = episodes[g * config.group_size : (g + 1) * config.group_size]
        found_in = (Group.of(beginning(scenario), of_start, player, g) for player in seats)
        groups = [group for group in found_in if group is not None]
        places = [
            (*place, i) for i, group in enumerate(groups) if (place := disputed(group.trajectories(), config.gamma))
        ]
        if places:
            _, j, t, i = max(places)
            turn = groups[i].turns[j][t]
            episode = next(one for one in of_start if any(turn is other for other in one.turns))
            found.append(Fork(scenario, start, replay(scenario, episode, turn.step), g, seats))
    return found


def disputed(trajectories: Trajectories, gamma: float) -> tuple[float, int, int] | None:
    """What is at stake in the state that the group disagrees about most, and one (j, t) at which it was met."""
    gains = action_gains(trajectories, gamma)
    found = [
        (sum(gains[j][t] ** 2 for j, t in places), *places[0])
        for places in by_state(trajectories).values()
        if places[0][1] > 0
    ]
    return max((place for place in found if place[0] > 1e-9), default=None)


async def play_forks(
    model: LanguageModel,
    config: TrainConfig,
    step: int,
    found: Sequence[Fork],
    sampling: Sampling,
    ranks: Ranks = ALONE,
    ended: OnEnded = silent,
    opponent: Agent | None = None,
) -> list[Episode]:
    """Play this rank's share of `config.branch` episodes from each fork."""
    agent, shaping = LanguageAgent(POLICY, model, sampling, config.prompt), Shaping(config.format_penalty)

    def one(fork: Fork, k: int) -> Coroutine[Any, Any, Episode]:
        where = (config.seed, step, fork.place, "branch", k)
        agents = seated(fork.scenario, fork.seats, agent, opponent)
        return _from(fork, agents, derive_seed("chance", *where), derive_seed("sampling", *where), shaping)

    mine = ranks.share([(fork, k) for fork in found for k in range(config.branch)])
    return await together(agent, [partial(one, fork, k) for fork, k in mine], ended)


async def _from(fork: Fork, agents: Mapping[str, Agent], chance: int, sampling: int, shaping: Shaping) -> Episode:
    episode = new_episode(fork.scenario, agents, fork.start_seed, chance, sampling)
    with games_code(fork.scenario.id):
        game = fork.game.with_luck(chance)
    await play_on(game, episode, fork.scenario, agents, shaping)
    return episode


def _at(fork: Fork, episode: Episode) -> Game:
    """The state from which an episode went on."""
    return fork.game


def branch_groups(episodes: Sequence[Episode], size: int, found: Sequence[Fork]) -> list[Group]:
    """The episodes that went on from each fork, compared with each other."""
    groups = (
        Group.of(partial(_at, fork), episodes[i * size : (i + 1) * size], player, fork.place)
        for i, fork in enumerate(found)
        for player in fork.seats
    )
    return [group for group in groups if group is not None]
