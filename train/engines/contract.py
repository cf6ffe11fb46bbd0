"""The contract of an engine, and the canary that proves which weights an engine plays with.

Rollouts from the base or from a stale adapter are the most common silent fault of this field: nothing fails, and the
policy gradient is that of other data. So nothing is played by a version before it has been proved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from msgrpo.agent import Completion, LanguageModel, Sampling
from msgrpo.episode import observation_of
from msgrpo.errors import RunError
from msgrpo.game import Scenario
from msgrpo.limits import games_code
from msgrpo.models.shared_prefix import common_prefix_length, evaluating, plain_logprobs
from msgrpo.prompt import Prompt, PromptTemplate
from msgrpo.train.policy import AdapterState, Policy


class Engine(Protocol):
    """Plays turns with the weights of a named version, and returns the exact token ids and log-probabilities."""

    def load(self, version: int) -> LanguageModel:
        """Lθ with the policy's weights as they are now, proved by the canary.

        Its completions carry token ids, the log-probabilities of the distribution that they were drawn from, and the
        version's name. Whoever holds it calls `close` when it has played all that it will. Raises RunError when the
        engine plays with other weights.
        """
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


# How many nats two computations by the same weights may be apart about a token before the run stops: in the mean, in
# fresh rollouts too (`update.check_mismatch`); and at most, on the canary's prompts. Two bfloat16 computations of a
# 0.5B are 0.01 to 0.03 apart in the mean, those in float32 1e-6; and one uncertain token in a hundred by ten times
# that: a bound on the largest alone stopped a healthy run.
MOST_APART = {torch.float32: 1e-3, torch.bfloat16: 0.15}
LARGEST = {torch.float32: 1e-3, torch.bfloat16: 1.0}
# The mean is also judged by the rounding that is to be expected of these very tokens, since that of sure answers is
# far below the tolerance: nano in bfloat16 is at a tenth of it, an engine that reports another temperature (1, not
# 0.7) at ten times as much.
ROUNDINGS, LEAST_BOUND = 8, 2e-3
LARGE_LOGIT = 8  # of a token that may be sampled; from 8 to 16 the numbers of a format lie 8 eps apart
ROWS, TOKENS = 3, 48  # enough to come to the action: the words before it may be certain whatever the weights are
FEW = 20  # one token in so many does not count, the furthest off, where rounding may be why (`_many`)
SEEDS = (11, 12, 13)


def canary_prompts(scenario: Scenario) -> list[Prompt]:
    """Prompts of different lengths from one scenario: the start, cut off at different places."""
    game = scenario.new(0, 0)
    with games_code(scenario.id):
        observed = observation_of(game, scenario.players[0])
    texts = [observed[: len(observed) * (i + 1) // ROWS] for i in range(ROWS)]
    return [PromptTemplate().render(scenario, text) for text in texts]


def canary_sampling(temperature: float) -> Sampling:
    """As rollouts are sampled: an engine that reports log-probabilities at another temperature is seen."""
    return Sampling(temperature=temperature, max_tokens=TOKENS)


def check(policy: Policy, who: str, generated: Sequence[Completion], previous: Sequence[AdapterState] = ()) -> float:
    """Fail unless engine, trainer and a plain forward pass agree on the log-probabilities of the same tokens.

    `generated` are the engine's answers to `canary_prompts`. They are cut to different lengths, so that errors of
    padding and of the selection of rows show too. The trainer computes them in a padded batch after the shared
    prefix; the plain forward pass computes each row alone, by the model's own code. An engine that is clearly closer
    to the base, or to a version before (`previous`, the newest last), than to the trainer plays with those weights,
    and fails too. Many tokens must say so: in bfloat16 the few uncertain ones of a sure answer are moved further by
    rounding than by a small update, and two of 120 stopped a healthy run of SmolLM2.

    How far trainer and plain forward are apart is taken for rounding. One rounded logit moves a token's log p by up
    to (1 - p) times the logit's spacing; in float32 differences far below the tolerance are seen.
    Returns the largest difference in log-probability; raises RunError if it, or the mean, is more than the
    tolerance.
    """
    answers = [
        replace(answer, token_ids=answer.token_ids[:length], logprobs=answer.logprobs[:length])
        for answer, length in ((answer, max(1, len(answer.token_ids) - i)) for i, answer in enumerate(generated))
    ]
    engine = torch.tensor([value for answer in answers for value in answer.logprobs])
    with torch.no_grad(), evaluating(policy.model):
        ours = _trainer_logprobs(policy, answers)
        plain = _plain(policy, answers)
        others = {"the base": _under(policy, answers, policy.model.disable_adapter)}
        for ago, state in enumerate(reversed(previous), 1):
            name = "the version before" if ago == 1 else f"the version {ago} updates before"
            others[name] = _under(policy, answers, partial(policy.holding, state))
    many = _many(policy, engine, ours)
    near, name = min((float((engine - other)[many].abs().mean()), name) for name, other in others.items())
    far = float((engine - ours)[many].abs().mean())
    if near < far / 2 and far > 2 * _rounding(policy, ours[many], plain[many]):
        raise RunError(
            f"{who} plays with the weights of {name}: its log-probabilities differ by {near:.3g} nats from "
            f"those, by {far:.3g} from the current ones"
        )
    of_mean, of_largest = MOST_APART[policy.model.dtype], LARGEST[policy.model.dtype]
    rounding, largest = _rounding(policy, ours, plain), 0.0
    for name, theirs in {who: engine, "the model's own forward": plain}.items():
        gaps = (ours - theirs).abs()  # NaN stays NaN
        mean, most = float(gaps.mean()), float(gaps.max())
        bound = min(of_mean, max(ROUNDINGS * rounding, LEAST_BOUND))
        if not (mean <= bound and most <= of_largest):
            raise RunError(
                f"{name} and the trainer disagree by {mean:.3g} nats a token, at most {most:.3g}, on fixed prompts "
                f"(tolerance {bound:.2g}, at most {of_largest:g}): rollouts would come from other weights than those "
                "being trained, or this model computes something that the trainer does not"
            )
        largest = max(largest, most)
    return largest


def _rounding(policy: Policy, ours: Tensor, plain: Tensor) -> float:
    """How far two computations by the same weights may be apart in the mean."""
    return max(float((ours - plain).abs().mean()), float(_rounded_logit(policy, ours).mean()))


def _rounded_logit(policy: Policy, logprobs: Tensor) -> Tensor:
    """How far one rounded logit moves each token's log p, at most."""
    return LARGE_LOGIT * torch.finfo(policy.model.dtype).eps * (1 - logprobs.exp())


def _many(policy: Policy, engine: Tensor, ours: Tensor) -> Tensor:
    """All tokens but the one in twenty, at least one per answer, that differs most, if rounding may be why."""
    gaps = (engine - ours).abs()
    most = gaps >= gaps.topk(min(len(gaps), max(ROWS, len(gaps) // FEW))).values[-1]
    return ~(most & (gaps <= ROUNDINGS * _rounded_logit(policy, ours)))


def _trainer_logprobs(policy: Policy, answers: Sequence[Completion]) -> Tensor:
    """log pθ of all answers' tokens, one after another, as the update computes them."""
    shared = common_prefix_length([list(answer.prompt_ids) for answer in answers])
    pairs = [(list(answer.prompt_ids[shared:]), list(answer.token_ids)) for answer in answers]
    logprobs, mask = policy.logprobs(list(answers[0].prompt_ids[:shared]), pairs)
    return logprobs[mask.bool()].cpu()


def _plain(policy: Policy, answers: Sequence[Completion]) -> Tensor:
    temperature = policy.temperature
    rows = [plain_logprobs(policy.model, list(a.prompt_ids), list(a.token_ids), temperature) for a in answers]
    return torch.cat(rows)


def _under(
    policy: Policy, answers: Sequence[Completion], weights: Callable[[], AbstractContextManager[Any]]
) -> Tensor:
    with weights():
        return _trainer_logprobs(policy, answers)
