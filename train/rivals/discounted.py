"""What several estimators of credit are made of: returns to go, turns by state, and division by a spread."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from msgrpo.train.groups import Group, PerTurn, Trajectories
from msgrpo.train.msgrpo import group_advantages
from msgrpo.train.rivals.contract import Credit, Learner


class Discounted(Credit):
    """An estimator by returns to go, one group at a time."""

    gamma: float = Field(1.0, gt=0, le=1, description="γ, discount of returns to go")

    def of_groups(self, groups: Sequence[Group], learner: Learner) -> list[PerTurn]:
        return [self.of_group(group.trajectories(), group.of_episodes(self.scale)) for group in groups]

    @abstractmethod
    def of_group(self, trajectories: Trajectories, of_episodes_G: Sequence[float]) -> PerTurn:
        """The credit of every turn, [j][t]; `of_episodes_G` are the advantages A_j of the whole episodes."""


def returns_to_go(trajectories: Trajectories, gamma: float) -> PerTurn:
    """R_jt = r_jt + γ R_j,t+1, from the last turn back."""
    returns = []
    for steps in trajectories:
        following, of_episode = 0.0, []
        for step in reversed(steps):
            following = step.reward + gamma * following
            of_episode.append(following)
        returns.append(of_episode[::-1])
    return returns


def by_state(trajectories: Trajectories) -> Mapping[Hashable, list[tuple[int, int]]]:
    """(j, t) of all turns in each state."""
    places: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for j, steps in enumerate(trajectories):
        for t, step in enumerate(steps):
            places[step.state].append((j, t))
    return places


def action_gains(trajectories: Trajectories, gamma: float) -> PerTurn:
    """Q(s, a) − V(s) for every turn, in units of reward: means of returns to go by state and action, and by state."""
    returns = returns_to_go(trajectories, gamma)
    gains = [[0.0] * len(steps) for steps in trajectories]
    for places in by_state(trajectories).values():
        value = mean([returns[j][t] for j, t in places])
        of_action: dict[str | None, list[float]] = defaultdict(list)
        for j, t in places:
            of_action[trajectories[j][t].action].append(returns[j][t])
        for j, t in places:
            gains[j][t] = mean(of_action[trajectories[j][t].action]) - value
    return gains


def generalized_advantages(trajectories: Trajectories, values: PerTurn, gamma: float, lam: float) -> PerTurn:
    """A_jt = Σ_k (γλ)^k δ_j,t+k with δ_jt = r_jt + γ V(s_j,t+1) − V(s_jt); V is 0 after the last turn.

    Generalized advantage estimation (GAE, arXiv 1506.02438).
    """
    advantages = []
    for steps, of_episode in zip(trajectories, values, strict=True):
        advantage, following, reversed_advantages = 0.0, 0.0, []
        for step, value in zip(reversed(steps), reversed(of_episode), strict=True):
            advantage = step.reward + gamma * following - value + gamma * lam * advantage
            following = value
            reversed_advantages.append(advantage)
        advantages.append(reversed_advantages[::-1])
    return advantages


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def centred(returns: Sequence[float], scale: str) -> Tensor:
    """Less their mean, and divided by their standard deviation if `scale=group`; zeros where they are all equal."""
    values = torch.tensor(returns, dtype=torch.float64)
    advantages = group_advantages(values)
    return advantages if scale == "group" else advantages * values.std(correction=0)


def like(flat: Tensor, shape: PerTurn) -> PerTurn:
    """The values of a flat tensor in the shape [j][t]."""
    return [part.tolist() for part in torch.split(flat, [len(of_episode) for of_episode in shape])]


def scaled(values: PerTurn, trajectories: Trajectories, scale: str) -> PerTurn:
    """Divided by the root of the mean square over all turns if `scale=group`.

    Zeros stay zeros, and what is rounding beside the rewards becomes zero.
    """
    flat = torch.tensor([value for of_episode in values for value in of_episode], dtype=torch.float64)
    least = 1e-9 * max(1.0, max(sum(abs(step.reward) for step in of_episode) for of_episode in trajectories))
    root = flat.square().mean().sqrt()
    if root <= least:
        return like(torch.zeros_like(flat), values)
    return like(flat / root, values) if scale == "group" else values
