"""Credit: what each turn of a group's episodes is worth. `episode` is the paper's; the others are its rivals.

Each takes the G trajectories of a group as `Step`s, and the advantages A_j that `msgrpo.py` gave its episodes
(`of_episodes_G`, see `of_episodes`), and returns an advantage for every turn. R_jt = Σ_{k≥t} γ^{k−t}
r_jk is the return to go, r the reward with its shaping. Turns are in the same *state* if their prompts are equal: a
prompt holds all that the policy sees, the number of the step included, so nothing of the history is hidden that the
policy could have used (the objection of HGPO, arXiv 2602.22817, to grouping by the last observation does not arise).

    episode        A_j                                           [P] arXiv 2508.10839
    to-go          (R_jt − mean R) / std R over all turns        Williams 1992; Sutton and Barto, ch. 13
    state          A_j + w · (R_jt − mean_s R) / std_s R         GiGPO, arXiv 2505.10978
    state-action   (mean_{s,a} R − mean_s R) / rms over all      RTMC, arXiv 2604.11037; BiPACE, arXiv 2606.25556
    lambda         Σ_k (γλ)^k δ_{t+k} / rms over all             GAE on a table of states; GAGPO, arXiv 2605.13217
    critic         the same with the values of `critic.py`       PPO, arXiv 1707.06347; GAE, arXiv 1506.02438

*rms*: the root of the mean square, not centred.

Each divides by a spread of its own group, as [P] does: then a start where nearly all episodes end alike weighs as
much as any other. With `divided=False` they stay in units of reward, and `in_common` divides all groups of an update
by one root of the mean square, as PPO does: the spread of a group is no part of its gradient (Dr. GRPO, arXiv
2503.20783).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from msgrpo.train.msgrpo import group_advantages

Credit = Literal["episode", "to-go", "state", "state-action", "lambda", "critic"]
CREDITS: tuple[Credit, ...] = get_args(Credit)
Scale = Literal["group", "update"]


@dataclass(frozen=True)
class Step:
    """One turn, as far as credit goes: where it was decided, what, and the reward (with shaping) that followed.

    `value` is the critic's estimate of the return to go, where there is a critic.
    """

    state: Hashable
    action: str | None
    reward: float
    value: float = 0.0


Trajectories = Sequence[Sequence[Step]]
Advantages = list[list[float]]  # [j][t]


def of_episodes(advantages_G: Tensor, returns_G: Tensor, divided: bool) -> Tensor:
    """A_j = (C_j − mean C) / std C of each episode, or in units of reward, C_j − mean C; zeros if all are equal."""
    return advantages_G if divided else advantages_G * returns_G.std(correction=0)


def returns_to_go(trajectories: Trajectories, gamma: float) -> Advantages:
    """R_jt = r_jt + γ R_j,t+1, from the last turn back."""
    found = []
    for steps in trajectories:
        going, returns = 0.0, []
        for step in reversed(steps):
            going = step.reward + gamma * going
            returns.append(going)
        found.append(returns[::-1])
    return found


def episode(
    trajectories: Trajectories, of_episodes_G: Tensor, gamma: float, lam: float, weight: float, divided: bool
) -> Advantages:
    """A_j on every turn of episode j."""
    return [[advantage] * len(steps) for advantage, steps in zip(of_episodes_G.tolist(), trajectories, strict=True)]


def to_go(
    trajectories: Trajectories, of_episodes_G: Tensor, gamma: float, lam: float, weight: float, divided: bool
) -> Advantages:
    """The return to go, centred and scaled over all turns of the group: rewards before a turn are noise to it."""
    going = returns_to_go(trajectories, gamma)
    return _like(_centred([value for one in going for value in one], divided), going)


def state(
    trajectories: Trajectories, of_episodes_G: Tensor, gamma: float, lam: float, weight: float, divided: bool
) -> Advantages:
    """The episode's advantage plus `weight` times the advantage among the turns in the same state.

    A state that was met once, or where all returns to go are equal, adds nothing.
    """
    going = returns_to_go(trajectories, gamma)
    found = episode(trajectories, of_episodes_G, gamma, lam, weight, divided)
    for places in by_state(trajectories).values():
        among = _centred([going[j][t] for j, t in places], divided)
        for (j, t), advantage in zip(places, among, strict=True):
            found[j][t] += weight * float(advantage)
    return found


def state_action(
    trajectories: Trajectories, of_episodes_G: Tensor, gamma: float, lam: float, weight: float, divided: bool
) -> Advantages:
    """Q(s, a) − V(s), both means of returns to go; answers with the same action share what they brought.

    Scaled by the root of the mean square over all turns; not centred, since it is centred in every state already.
    """
    return _scaled(action_gains(trajectories, gamma), trajectories, divided)


def action_gains(trajectories: Trajectories, gamma: float) -> Advantages:
    """Q(s, a) − V(s) for every turn, in units of reward: what is known of an action that was tried beside others."""
    going = returns_to_go(trajectories, gamma)
    found = [[0.0] * len(steps) for steps in trajectories]
    for places in by_state(trajectories).values():
        value = _mean([going[j][t] for j, t in places])
        of_action: dict[str | None, list[float]] = defaultdict(list)
        for j, t in places:
            of_action[trajectories[j][t].action].append(going[j][t])
        for j, t in places:
            found[j][t] = _mean(of_action[trajectories[j][t].action]) - value
    return found


def gae(
    trajectories: Trajectories, of_episodes_G: Tensor, gamma: float, lam: float, weight: float, divided: bool
) -> Advantages:
    """A_jt = Σ_k (γλ)^k δ_j,t+k with δ_jt = r_jt + γ V(s_j,t+1) − V(s_jt), V(s) the mean return to go in s.

    V is 0 after the last turn. Scaled by the root of the mean square over all turns.
    """
    going = returns_to_go(trajectories, gamma)
    table = {state: _mean([going[j][t] for j, t in places]) for state, places in by_state(trajectories).items()}
    values = [[table[step.state] for step in steps] for steps in trajectories]
    return _scaled(_gae(trajectories, values, gamma, lam), trajectories, divided)


def critic(
    trajectories: Trajectories, of_episodes_G: Tensor, gamma: float, lam: float, weight: float, divided: bool
) -> Advantages:
    """`gae` with V from the critic, which knows states that were met only once by what the model makes of them."""
    values = [[step.value for step in steps] for steps in trajectories]
    return _scaled(_gae(trajectories, values, gamma, lam), trajectories, divided)


def _gae(trajectories: Trajectories, values: Advantages, gamma: float, lam: float) -> Advantages:
    found = []
    for steps, of_episode in zip(trajectories, values, strict=True):
        advantage, following, advantages = 0.0, 0.0, []
        for step, value in zip(reversed(steps), reversed(of_episode), strict=True):
            advantage = step.reward + gamma * following - value + gamma * lam * advantage
            following = value
            advantages.append(advantage)
        found.append(advantages[::-1])
    return found


Estimator = Callable[[Trajectories, Tensor, float, float, float, bool], Advantages]
ESTIMATORS: Mapping[Credit, Estimator] = {
    "episode": episode,
    "to-go": to_go,
    "state": state,
    "state-action": state_action,
    "lambda": gae,
    "critic": critic,
}


def in_common(groups: Sequence[Advantages]) -> list[Advantages]:
    """All groups of an update, [group][j][t] in units of reward, by the root of the mean square over all turns.

    Zeros stay zeros; a group whose credits are small beside the others' keeps them small.
    """
    flat = _tensor([value for group in groups for one in group for value in one])
    root = float(flat.square().mean().sqrt()) if len(flat) else 0.0
    return [[[value / root for value in one] for one in group] for group in groups] if root else list(groups)


def by_state(trajectories: Trajectories) -> Mapping[Hashable, list[tuple[int, int]]]:
    """(j, t) of all turns in each state."""
    places: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for j, steps in enumerate(trajectories):
        for t, step in enumerate(steps):
            places[step.state].append((j, t))
    return places


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _flat(values: Advantages) -> Tensor:
    return _tensor([value for one in values for value in one])


def _centred(returns: Sequence[float], divided: bool) -> Tensor:
    """Less their mean, and divided by their spread or not; zeros where they are all equal."""
    values = _tensor(returns)
    return of_episodes(group_advantages(values), values, divided)


def _like(flat: Tensor, shape: Advantages) -> Advantages:
    return [part.tolist() for part in torch.split(flat, [len(one) for one in shape])]


def _scaled(values: Advantages, trajectories: Trajectories, divided: bool) -> Advantages:
    """Divided by the root of the mean square or not; zeros, and what is rounding beside the rewards, become zeros."""
    flat = _flat(values)
    least = 1e-9 * max(1.0, max(sum(abs(step.reward) for step in one) for one in trajectories))
    root = flat.square().mean().sqrt()
    if root <= least:
        return _like(torch.zeros_like(flat), values)
    return _like(flat / root, values) if divided else values
