"""MS-GRPO: Multi-Step Group-Relative Policy Optimization (arXiv 2508.10839). The whole method, as pure functions.

One training step, for one group of G episodes that share their start:

    C_j = Σ_t (r_jt + Φ_jt)                                composite_returns
    A_j = (C_j − mean C) / std C, or 0 if all are equal     group_advantages
    keep G′ of G without replacement, p_j ∝ exp |A_j|       aaw_sample
    −min(w A, clip(w, 1−ε_low, 1+ε_up) A) + β k3            policy_loss, for every token of every kept step

r_jt is the reward of step t of episode j, Φ_jt a shaping term (the format penalty); w = pθ/p_old the ratio of the
token's probabilities now and when it was played; k3 a penalty on the distance from the reference model, β its weight.

What differs from textbook GRPO: the group is one of *episodes*, not of answers; the return of the whole episode
credits every token of every step alike; and the update sees only a part of the group, chosen for the size of
its advantage. docs/algorithm.md goes through one update in words. Shapes are in the names: G episodes of a group,
N turns (one prompt and its answer each), T tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Aggregate = Literal["token", "turn"]
K3_MAX = 100.0  # of one token: p_ref/pθ up to about 105
FAR = 20.0  # nats: beyond every bound of a ratio, and its exponential is still finite, or the gradient would be NaN


def composite_returns(rewards: Sequence[Sequence[float]], shaping: Sequence[Sequence[float]]) -> Tensor:
    """C_j = Σ_t (r_jt + Φ_jt): one undiscounted number for each episode.

    Args:
        rewards: for each of the G episodes its environment rewards, one a step; lengths may differ.
        shaping: the shaping terms Φ of the same steps (minus the format penalty where an answer has no legal action).

    Returns:
        returns_G, float64.

    Raises:
        ValueError: the two do not have the same episodes and steps.
    """
    if [len(r) for r in rewards] != [len(s) for s in shaping]:
        raise ValueError("rewards and shaping need the same episodes and the same steps")
    return torch.tensor([sum(r) + sum(s) for r, s in zip(rewards, shaping, strict=True)], dtype=torch.float64)


def group_advantages(returns_G: Tensor) -> Tensor:
    """A_j = (C_j − mean C) / std C, and 0 for every episode if all returns are equal.

    The standard deviation is that of the population (divided by G, not G − 1): the group is not a sample from
    which another spread is estimated, it is what is being normalised, and then mean A² = 1 for every G. No
    epsilon is added to it: only groups with equal returns would need one, and these are handled exactly. Returns that
    differ by rounding alone are equal: by a billionth of the largest, or of 1 where all are smaller.
    (The paper's abstract names neither; TRL divides by G − 1 and adds 1e-4, veRL likewise with 1e-6.)
    """
    centred = returns_G - returns_G.mean()
    spread = centred.square().mean().sqrt()
    if returns_G.max() - returns_G.min() <= 1e-9 * max(1.0, float(returns_G.abs().max())):
        return torch.zeros_like(returns_G)
    return centred / spread


def aaw_sample(advantages_G: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """Absolute-advantage-weighted sampling: `keep` episodes without replacement, p_j ∝ exp |A_j|.

    Successive draws: each takes one of the episodes still there with probability exp|A_j| / Σ exp|A_i| over
    those. With keep = G it is a permutation of all.

    Returns:
        Indices (keep), int64, in the order drawn.

    Raises:
        ValueError: keep is not between 1 and G.
    """
    if not 1 <= keep <= len(advantages_G):
        raise ValueError(f"keep must be between 1 and the group's {len(advantages_G)} episodes, not {keep}")
    return torch.multinomial(advantages_G.abs().softmax(0), keep, replacement=False, generator=generator)


def policy_loss(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    ref_logprobs_NT: Tensor,
    advantages_N: Tensor,
    mask_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    aggregate: Aggregate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped token loss with a penalty on the divergence from the reference.

        w    = exp(log pθ − log p_old)                      p_old: the engine that sampled the tokens
        ℓ    = −min(w A, clip(w, 1 − clip_low, 1 + clip_high) A) + kl_coef · k3
        k3   = p_ref/pθ − log(p_ref/pθ) − 1 ≥ 0             see `k3`

    Args:
        logprobs_NT: log pθ of the sampled tokens; the only input through which the gradient flows.
        old_logprobs_NT: of the same tokens, as the rollout engine reported them.
        ref_logprobs_NT: of the same tokens, the model with its adapter switched off.
        advantages_N: one for each turn: its episode's; (N, T) where tokens differ (`rivals/actfocus.py`).
        mask_NT: 1 where a token was generated, 0 on padding. Every turn has a token, and its numbers are finite:
            the engines see to it.
        clip_low, clip_high: ε_low and ε_up: w is clipped to [1 − ε_low, 1 + ε_up]. No unit.
        kl_coef: β.
        aggregate: `token`, the mean over all tokens (long answers weigh more), or `turn`, the mean over turns
            of each turn's mean (every decision weighs the same).

    Returns:
        The scalar loss, and detached means over tokens: `kl`, `clip_share` (tokens whose gradient the clip
        removed), `ratio`.
    """
    mask = mask_NT.to(logprobs_NT.dtype)
    advantages = advantages_N.to(logprobs_NT.dtype).reshape(len(mask), -1)
    ratio = ratio_of(logprobs_NT - old_logprobs_NT)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    kl = k3(ref_logprobs_NT - logprobs_NT)
    cut = ratio * advantages > clipped * advantages
    return averaged(kl_coef * kl - surrogate, mask, aggregate, kl=kl, clip_share=cut, ratio=ratio)


def averaged(
    losses_NT: Tensor, mask_NT: Tensor, aggregate: Aggregate, **measured_NT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The scalar mean of the tokens' losses, and of what else was measured of each token the detached mean.

    Args:
        mask_NT: 1 where a token counts, else 0; every turn has one that does.
        aggregate: of the losses, as in `policy_loss`; what is measured is a mean over tokens.
    """
    losses, tokens = losses_NT * mask_NT, mask_NT.sum()
    loss = losses.sum() / tokens if aggregate == "token" else (losses.sum(1) / mask_NT.sum(1)).mean()
    return loss, {name: ((value * mask_NT).sum() / tokens).detach() for name, value in measured_NT.items()}


def ratio_of(log_w: Tensor) -> Tensor:
    """w = exp(log w), cut off at e^20: an infinite w would make the gradient NaN, also where the clip removes it.

    The ratio of a whole turn (`rivals/ratio.py`) is a product over its tokens, and gets as far in a long answer.
    """
    return log_w.clamp(max=FAR).exp()


def k3(log_r_NT: Tensor) -> Tensor:
    """r − log r − 1 ≥ 0 of every token, r = p_ref/pθ: Schulman's low-variance estimate of KL(pθ ‖ p_ref).

    Its mean over tokens of pθ is that divergence. Its gradient, since nothing flows through the choice of the tokens,
    is (1 − r) ∇ log pθ, whose mean is the gradient of KL(p_ref ‖ pθ): GRPO's penalty (arXiv 2402.03300) is the same.

    A token that the policy has all but given up is sampled once in a hundred thousand times, and its r is then of
    that size: it would outweigh all other tokens of the update. So k3 is cut off at `K3_MAX` (veRL does so at 10),
    and a token beyond it pulls no more.
    """
    log_r = log_r_NT.clamp(max=FAR)
    return (log_r.exp() - log_r - 1).clamp(max=K3_MAX)
