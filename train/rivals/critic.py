"""credit=critic: GAE with a linear value head on the trunk's last hidden state of each prompt (PPO, arXiv 1707.06347;
GAE, arXiv 1506.02438).

V(s) = v · h(s), where h(s) is that hidden state (the trunk is the model without its output layer) and v minimises Σ
(R_jt − v · h(s_jt))² + ρ |v|² over the turns of the update's *other* starts. PPO learns such a head by gradient; here
the minimum is computed exactly, so there is no second learning rate. And no turn's own luck is in its value, which
would bias the advantage towards 0.

With memory=m the turns of earlier updates count too, those of k updates ago with the weight (1 − 1/m)^k, about m
updates in all: recursive least squares with a forgetting factor. Their hidden states are those of the policy that
played them. Only Σ h hᵀ and Σ R h are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from msgrpo.episode import Turn
from msgrpo.models.shared_prefix import common_prefix_length, evaluating, shareable_length, trunk_and_head
from msgrpo.train.groups import Group, PerTurn, Trajectories
from msgrpo.train.rivals.contract import Credit, Learner, Trained
from msgrpo.train.rivals.discounted import generalized_advantages, returns_to_go, scaled

ROWS, TOKENS = 64, 16_384  # prompts of one forward pass, and their own tokens, filled up to the longest
RIDGE = 1e-2  # ρ of the fit, as a share of Σ h² over all turns, the mean over the features

Prompt = tuple[int, ...]


class Critic(Credit):
    """Σ_k (γλ)^k δ_t+k / rms over all turns, with the values of a head that was fitted on the other starts."""

    name = "critic"
    one_game = True
    asks_policy = True
    gamma: float = Field(1.0, gt=0, le=1, description="γ, discount of returns to go")
    lam: float = Field(0.95, ge=0, le=1, description="λ of GAE; 1: the return to go, 0: reward and next value")
    memory: float = Field(1.0, ge=1, le=1e6, description="m, updates that the head is fitted on; 1: this one alone")

    def of_groups(self, groups: Sequence[Group], learner: Learner) -> list[PerTurn]:
        values = critic_values(learner, groups, self.gamma, self.memory) if groups else []
        return [
            self.of_values(group.trajectories(), of_group) for group, of_group in zip(groups, values, strict=True)
        ]

    def of_values(self, trajectories: Trajectories, values: PerTurn) -> PerTurn:
        """The credit of a group's turns, given their values, [j][t]."""
        advantages = generalized_advantages(trajectories, values, self.gamma, self.lam)
        return scaled(advantages, trajectories, self.scale)


def critic_values(learner: Learner, groups: Sequence[Group], gamma: float, memory: float = 1.0) -> list[PerTurn]:
    """V(s) of every turn: [group][j][t]. Each rank computes a part of the hidden states; all fit the same heads.

    `learner.memory` holds what earlier updates say, and from now on what this one does.
    """
    ranks = learner.ranks
    prompts = sorted({_prompt(turn) for group in groups for one in group.turns for turn in one})
    own_states = hidden_states(learner.policy, ranks.share(prompts))
    features = dict(zip(prompts, ranks.gather([row.clone() for row in own_states]), strict=True))
    states = [torch.stack([features[_prompt(turn)] for one in group.turns for turn in one]) for group in groups]
    targets = [_returns(group, gamma) for group in groups]
    sums = list(map(sums_of, states, targets))
    past = learner.memory.get(Critic.name)
    fitted = left_out_values(states, sums, [group.place for group in groups], past)
    if memory > 1:
        learner.memory[Critic.name] = (1 - 1 / memory) * _together(sums, past)
    return [
        [part.tolist() for part in torch.split(values, [len(one) for one in group.turns])]
        for group, values in zip(groups, fitted, strict=True)
    ]


def left_out_values(
    states: Sequence[Tensor], sums: Sequence[Tensor], places: Sequence[int], past: Tensor | None = None
) -> list[Tensor]:
    """For each group its values (M), by the head that was fitted on all groups but those of its start.

    Args:
        states: for each group the hidden states (M, D) of its turns.
        sums: what they and their returns to go say, as `sums_of` (D+1, D+2).
        places: the start of each group. Both seats of a game share its episodes: what one lost the other won, so
            neither may be the other's data.
        past: what earlier updates say, likewise.

    A constant is one of the features, and it is not shrunk. Where all groups have one start and there is no past,
    there is no other data, and each group's value is the mean of its own returns to go.
    """
    if len(set(places)) == 1 and past is None:
        return [(one[-1, -1] / one[-1, -2]).expand(len(x)) for x, one in zip(states, sums, strict=True)]
    whole = _together(sums, past)
    shrink = RIDGE * whole.diagonal()[:-1].mean() * torch.eye(len(whole), dtype=whole.dtype)
    shrink[-1, -1] = 1e-9
    heads = {}
    for place in set(places):
        others = whole - torch.stack([one for one, other in zip(sums, places, strict=True) if other == place]).sum(0)
        heads[place] = torch.linalg.solve(others[:, :-1] + shrink, others[:, -1])
    return [_with_constant(x) @ heads[place] for x, place in zip(states, places, strict=True)]


def _with_constant(states: Tensor) -> Tensor:
    return torch.cat([states, states.new_ones(len(states), 1)], dim=1)


def _together(sums: Sequence[Tensor], past: Tensor | None) -> Tensor:
    return torch.stack([*sums] if past is None else [*sums, past]).sum(0)


def sums_of(states: Tensor, targets: Tensor) -> Tensor:
    """Σ h hᵀ over the turns, and Σ R h as its last column; the last feature is the constant."""
    x = _with_constant(states)
    return torch.cat([x.T @ x, (x.T @ targets)[:, None]], dim=1)


def hidden_states(policy: Trained, prompts: Sequence[Prompt]) -> Tensor:
    """The trunk's last hidden state (N, D) at the end of each prompt, float64, on the CPU, without a gradient."""
    states = []
    shared = common_prefix_length([list(prompt) for prompt in prompts]) if prompts else 0
    longest = max(map(len, prompts), default=1)
    own = longest - shareable_length(trunk_and_head(policy.model)[0], shared, longest)
    rows = min(ROWS, max(1, TOKENS // own))
    with torch.no_grad(), evaluating(policy.model):
        for at in range(0, len(prompts), rows):
            part = prompts[at : at + rows]
            states.append(policy.hidden(list(part[0][:shared]), [list(prompt[shared:]) for prompt in part]))
    return torch.cat(states).double().cpu() if states else torch.zeros(0, 0, dtype=torch.float64)


def _prompt(turn: Turn) -> Prompt:
    assert turn.completion is not None
    return turn.completion.prompt_ids


def _returns(group: Group, gamma: float) -> Tensor:
    returns = returns_to_go(group.trajectories(), gamma)
    return torch.tensor([value for one in returns for value in one], dtype=torch.float64)
