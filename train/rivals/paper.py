"""The paper's own choices (arXiv 2508.10839), by the equations of `msgrpo.py`; the other files here are rivals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from msgrpo.train.rivals.contract import Credit, Learner, Loss, Sampled

if TYPE_CHECKING:  # see contract.py: the equations load torch where they are first used
    from torch import Tensor

    from msgrpo.train.groups import Group, PerTurn


class WholeReturn(Credit):
    """A_j on every turn of episode j: the whole return credits every turn alike."""

    name = "episode"

    def of_groups(self, groups: Sequence[Group], learner: Learner) -> list[PerTurn]:
        pairs = [zip(group.of_episodes(self.scale), group.turns, strict=True) for group in groups]
        return [[[advantage] * len(turns) for advantage, turns in of_group] for of_group in pairs]


class AAW(Sampled):
    """G′ of G without replacement, p_j ∝ exp |A_j|."""

    name = "aaw"

    def kept(self, group: Group, learner: Learner) -> list[int]:
        from msgrpo.train.msgrpo import aaw_sample

        keep = min(self.keep, len(group.turns))
        drawn: list[int] = aaw_sample(group.advantages_G, keep, learner.generator).tolist()
        return drawn


class Clip(Loss):
    """−min(w A, clip(w, 1 − low, 1 + high) A) + β k3."""

    name = "clip"
    low: float = Field(0.2, gt=0, lt=1, description="ε_low")
    high: float = Field(0.28, gt=0, description="ε_up; larger than ε_low keeps rare tokens alive (DAPO)")

    def __call__(
        self, logprobs_NT: Tensor, old_NT: Tensor, reference_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from msgrpo.train.msgrpo import policy_loss

        return policy_loss(
            logprobs_NT,
            old_NT,
            reference_NT,
            advantages_NT,
            mask_NT,
            clip_low=self.low,
            clip_high=self.high,
            kl_coef=self.kl,
            aggregate=self.over,
        )
