"""loss=decoupled(cap=2): the clip is relative to the policy before the update; weights correct for old rollouts.

    −min(v, cap) · min(w A, clip(w, 1 − low, 1 + high) A) + β k3,    w = pθ / p_now,    v = p_now / p_old

p_now is the policy as the update begins, by one more forward pass over the update's turns; p_old is the version, and
the program, that sampled them. `loss=clip` counts from the rollouts: where those are several versions old, tokens
are cut off before the update has taken a step. Of fresh rollouts from the trainer's own process v = 1, and it is the
clip.

Sources: the decoupled objective (arXiv 2110.00641), in asynchronous training of language models AReaL (2505.24298);
the cap of 2 was TRL's first default for rollouts by vLLM (later 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from msgrpo.train.groups import Sample
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rivals.paper import Clip
from msgrpo.train.update import logprobs_of


class Decoupled(Clip):
    """The clip is relative to the policy at the update's beginning; importance weights correct for old rollouts."""

    name = "decoupled"
    asks_policy = True
    cap: float = Field(2.0, ge=1, description="the largest importance weight of a token")

    def prepared(
        self, samples: Sequence[Sample], learner: Learner, tokens: int
    ) -> tuple[list[Sample], dict[str, float]]:
        policy = learner.policy
        own = learner.ranks.share(samples)
        now = learner.ranks.gather(logprobs_of(own, tokens, policy.model, policy.logprobs))
        off = [
            abs(b - a)
            for sample, logprobs in zip(samples, now, strict=True)
            for a, b in zip(sample.old_logprobs, logprobs, strict=True)
            if not math.isnan(a)
        ]
        figures = {"engine/mismatch_mean": math.fsum(off) / len(off), "engine/mismatch_max": max(off)} if off else {}
        return [self._weighted(*pair) for pair in zip(samples, now, strict=True)], figures

    def _weighted(self, sample: Sample, now: tuple[float, ...]) -> Sample:
        """The turn as if it had been sampled now, with the weight min(v, cap) on each token's advantage."""
        parts = sample.weights or (1.0,) * len(now)
        most = math.log(self.cap)
        logs = [
            (a, 0.0) if math.isnan(a) else (b, min(b - a, most))  # what nobody sampled keeps its ratio of 1
            for a, b in zip(sample.old_logprobs, now, strict=True)
        ]
        logprobs = tuple(logprob for logprob, _ in logs)
        weights = tuple(part * math.exp(log_v) for part, (_, log_v) in zip(parts, logs, strict=True))
        return replace(sample, completion=replace(sample.completion, logprobs=logprobs), weights=weights)
