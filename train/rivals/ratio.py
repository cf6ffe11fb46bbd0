"""Other uses of the ratio w = pθ/p_old in the loss: of whole turns, clipped and kept, or bounded twice.

p_old is the policy that played, as in `msgrpo.policy_loss`; low and high are the ε of a clip, of icepop the bounds of
w itself; sg(x) is x without its gradient; A is the token's advantage. The loss of a token:

    gspo     −min(s A, clip(s, 1−low, 1+high) A),  s = exp mean_t log w_t        (GSPO, arXiv 2507.18071)
    turn     the same with s = exp Σ_t log w_t: an answer is one action          (Turn-PPO, arXiv 2512.17008)
    cispo    −sg(min(w, 1+high)) A log pθ: a clipped token still teaches         (MiniMax-M1, arXiv 2506.13585)
    dual     min(ℓ, −c A) where A < 0, ℓ the clipped loss: a token whose probability has risen far counts no more than
             c times its advantage                                               (dual-clip PPO, arXiv 1912.09729)
    icepop   −sg(w · [low ≤ w ≤ high]) A log pθ: tokens of another policy drop out  (IcePop, arXiv 2510.18855)

To each comes the penalty β k3 of `msgrpo.policy_loss`, token by token. A turn is the whole answer: what GSPO calls a
sequence. GSPO's mean is over sequences, which is `over=turn` here; with `over=token`, as by default, a turn weighs by
its length. IcePop's bounds are on the ratio of trainer and engine with the same weights, and a clip stands beside
them; here one ratio, from the engine's old weights to pθ, has both parts, as in INTELLECT-3 (arXiv 2512.16144),
and the default bounds are ours (there 0.5 and 5).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field
from torch import Tensor

from msgrpo.train.msgrpo import averaged, k3, ratio_of
from msgrpo.train.rivals.contract import Loss


class _Surrogate(Loss):
    """A loss that is its own surrogate plus the usual penalty."""

    @abstractmethod
    def surrogate(self, log_w_NT: Tensor, logprobs_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor) -> Surrogate:
        """What is to be maximised, for every token (N, T); the ratio; and where its gradient is cut off."""

    def __call__(
        self, logprobs_NT: Tensor, old_NT: Tensor, reference_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask = mask_NT.to(logprobs_NT.dtype)
        advantages = advantages_NT.to(logprobs_NT.dtype).reshape(len(mask), -1)
        surrogate, ratio, cut = self.surrogate((logprobs_NT - old_NT) * mask, logprobs_NT, advantages, mask)
        kl = k3(reference_NT - logprobs_NT)
        return averaged(self.kl * kl - surrogate, mask, self.over, kl=kl, clip_share=cut, ratio=ratio)


Surrogate = tuple[Tensor, Tensor, Tensor]


class _Clipped(_Surrogate):
    low: float = Field(0.2, gt=0, lt=1, description="ε_low")
    high: float = Field(0.28, gt=0, description="ε_up; larger than ε_low keeps rare tokens alive (DAPO)")

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Surrogate:
        whole = ratio * advantages
        bounded = ratio.clamp(1 - self.low, 1 + self.high) * advantages
        return torch.minimum(whole, bounded), ratio, whole > bounded


class Gspo(_Clipped):
    """One ratio for a turn: the geometric mean of its tokens'. Its spread is small, and so are GSPO's bounds."""

    name = "gspo"
    by_token = False
    low: float = Field(3e-4, gt=0, lt=1, description="ε_low")
    high: float = Field(4e-4, gt=0, description="ε_up; larger than ε_low keeps rare tokens alive (DAPO)")

    def surrogate(self, log_w_NT: Tensor, logprobs_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor) -> Surrogate:
        mean = log_w_NT.sum(1, keepdim=True) / mask_NT.sum(1, keepdim=True)
        return self.clipped(ratio_of(mean).expand_as(log_w_NT), advantages_NT)


class TurnRatio(_Clipped):
    """One ratio for a turn: the product of its tokens'."""

    name = "turn"
    by_token = False

    def surrogate(self, log_w_NT: Tensor, logprobs_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor) -> Surrogate:
        return self.clipped(ratio_of(log_w_NT.sum(1, keepdim=True)).expand_as(log_w_NT), advantages_NT)


class Cispo(_Surrogate):
    """The weight is clipped, and not the gradient: rare tokens that an update wants are never cut off."""

    name = "cispo"
    high: float = Field(0.28, gt=0, description="ε_up, of the weight; it has no lower bound")

    def surrogate(self, log_w_NT: Tensor, logprobs_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor) -> Surrogate:
        ratio = ratio_of(log_w_NT.detach())
        weight = ratio.clamp(max=1 + self.high)
        return weight * advantages_NT * logprobs_NT, ratio, ratio > weight


class Dual(_Clipped):
    """The paper's clip, and a bound on the loss of a token whose advantage is negative."""

    name = "dual"
    most: float = Field(3.0, gt=1, description="c: the largest weight of a token whose advantage is negative")

    def surrogate(self, log_w_NT: Tensor, logprobs_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor) -> Surrogate:
        usual, ratio, cut = self.clipped(ratio_of(log_w_NT), advantages_NT)
        least = self.most * advantages_NT
        beyond = (advantages_NT < 0) & (usual < least)
        return torch.where(beyond, least.expand_as(usual), usual), ratio, cut | beyond


class Icepop(_Surrogate):
    """Importance weights without a clip; what lies outside their bounds is left out. For rollouts that are old.

    With whole=true the bounds are those of a turn's mean, exp mean_t log w_t: a turn is left out as a whole.
    """

    name = "icepop"
    low: float = Field(0.5, gt=0, lt=1, description="the smallest weight that still counts")
    high: float = Field(2.0, gt=1, description="the largest one")
    whole: bool = Field(False, description="leave out whole turns, by the mean of their tokens")

    def surrogate(self, log_w_NT: Tensor, logprobs_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor) -> Surrogate:
        log_w = log_w_NT.detach()
        ratio = ratio_of(log_w)
        judged = ratio
        if self.whole:
            judged = (log_w.sum(1, keepdim=True) / mask_NT.sum(1, keepdim=True)).exp().expand_as(ratio)
        outside = (judged < self.low) | (judged > self.high)
        return torch.where(outside, 0.0, ratio) * advantages_NT * logprobs_NT, ratio, outside
