"""teacher="model(of=adapter:runs/x)": another model says how likely it would have been to write each token.

The advantage of token y_i of an answer to prompt s gets beside it

    w (log q(y_i | s, y_<i) − log p(y_i | s, y_<i))

with w the teacher's `weight`, q the teacher and p the policy that played: the gradient of −KL(p ‖ q), estimated from
what was sampled, each token by itself (on-policy distillation: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649). The
teacher reads the policy's tokens, so both must have one vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import Field
from torch import Tensor

from msgrpo.agent import LanguageAgent
from msgrpo.errors import UsageError
from msgrpo.models.local import LocalModel
from msgrpo.models.shared_prefix import answer_logprobs, trunk_and_head
from msgrpo.specs import make_agent
from msgrpo.text import Clean
from msgrpo.train.groups import Lesson, Sample
from msgrpo.train.policy import Pairs
from msgrpo.train.rivals.contract import Learner, Teacher
from msgrpo.train.update import logprobs_of

TOKENS = 16_384  # own tokens of one forward pass


class Model(Teacher):
    """Another language model in this process, with the policy's vocabulary."""

    name = "model"
    asks_policy = True
    of: Clean = Field(description="the teacher: adapter:DIR, nano:SCENARIO or base:DIR")

    def prepare(self) -> None:
        loaded(self.of)

    def taught(self, lessons: Sequence[Lesson], learner: Learner) -> tuple[list[Sample], dict[str, float]]:
        teacher, tokenizer = loaded(self.of), learner.policy.tokenizer
        if teacher.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UsageError(
                f"teacher={self} has another vocabulary than the policy, so it cannot read the policy's tokens",
                fix="name a teacher with the same base",
            )
        samples, further = [], []
        for lesson, says in zip(lessons, self._logprobs(teacher, lessons, learner), strict=True):
            sample = lesson.sample
            further += [q - p for q, p in zip(says, sample.old_logprobs, strict=True)]
            advantages = [
                self.returns * advantage + self.weight * (q - p)
                for advantage, q, p in zip(sample.advantages, says, sample.old_logprobs, strict=True)
            ]
            samples.append(replace(sample, advantage=1.0, weights=tuple(advantages)))
        return samples, {"teacher/kl": -sum(further) / len(further)} if further else {}

    def _logprobs(self, teacher: LocalModel, lessons: Sequence[Lesson], learner: Learner) -> list[tuple[float, ...]]:
        """log q of every token of every answer; each rank computes its share."""
        trunk, head = trunk_and_head(teacher.model)

        def forward(prefix: list[int], pairs: Pairs) -> tuple[Tensor, Tensor]:
            return answer_logprobs(trunk, head, prefix, pairs, teacher.pad_id, learner.policy.temperature)

        own = learner.ranks.share([lesson.sample for lesson in lessons])
        says = logprobs_of(own, TOKENS, teacher.model, forward)
        return learner.ranks.gather(says)


@cache
def loaded(spec: str) -> LocalModel:
    """The model that an agent's name stands for. Raises UsageError where it is none in this process."""
    agent: Any = make_agent(spec)
    if not isinstance(agent, LanguageAgent) or not isinstance(agent.model, LocalModel):
        raise UsageError(
            f"teacher=model(of={spec}) is no language model in this process",
            fix="name adapter:DIR, nano:SCENARIO or base:DIR",
        )
    return agent.model
