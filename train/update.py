"""One update: which turns it sees and how they are packed, a pass over them, and the learning rate of the run.

The turns are split into *minibatches*, one step of the optimizer each. A minibatch goes through the model in
*micro-batches* of as many turns as memory holds, whose gradients add up to that of its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from msgrpo.errors import RunError
from msgrpo.models.shared_prefix import common_prefix_length, longest_sharing, trunk_and_head
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines.contract import MOST_APART
from msgrpo.train.groups import Group, Lesson, PerTurn, Sample
from msgrpo.train.policy import Pairs, Policy
from msgrpo.train.ranks import ALONE, Ranks
from msgrpo.train.rivals.actfocus import token_weights
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rivals.echo import observed_tokens

WARM_UP = 5  # updates over which the learning rate rises to its value
MAX_GRAD_NORM = 0.2  # a rare k3 spike must not steer AdamW for long
SUMS = ("loss", "kl", "clip_share", "ratio", "echo", "mismatch")
Done = Callable[[int], None]  # minibatches done


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: TrainConfig,
    generator: torch.Generator,
    step: int,
    ranks: Ranks = ALONE,
    done: Done = lambda minibatch: None,
) -> dict[str, float]:
    """A pass over the kept turns: for each minibatch, accumulate the gradient of the loss and step once.

    Of several ranks each computes its share of every minibatch; the gradients are summed, so all take the same step.
    The first minibatch is computed with the very weights that the newest rollouts were sampled with: there, how far
    the trainer's log-probabilities are from the engine's is a property of the two programs (`engine/mismatch_…`, in
    nats a token). Returns it with the means over the minibatches (`update/…`), for the metrics. Raises RunError where
    the loss or its gradient is not finite.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    totals = dict.fromkeys((*SUMS, "grad_norm"), 0.0)
    mismatch: dict[str, float] = {}
    steps = 0
    for part in minibatches(samples, config.minibatches, generator):
        optimizer.zero_grad()
        sums, furthest = _joined(ranks.gather([_accumulate(policy, part, ranks, config)]))
        ranks.sum_gradients(policy.parameters)
        if not steps and any(sample.was_sampled for sample in part):
            mismatch = {"engine/mismatch_max": furthest, "engine/mismatch_mean": sums["mismatch"]}
        totals = {name: value + sums.get(name, 0.0) for name, value in totals.items()}
        totals["grad_norm"] += float(clip_grad_norm_(policy.parameters, MAX_GRAD_NORM))
        if not math.isfinite(totals["loss"] + totals["grad_norm"]):
            raise not_finite(config, step, f"{totals['loss']}, gradient {totals['grad_norm']}")
        optimizer.step()
        steps += 1
        done(steps)
    left_out = {"mismatch", *(name for name in ("echo", "kl") if not getattr(config.loss, name))}
    computed = (name for name in totals if steps and name not in left_out)  # of no step there is no mean
    means = {f"update/{name}": totals[name] / steps for name in computed}
    bound = {"engine/mismatch_bound": MOST_APART[policy.model.dtype]}
    return means | mismatch | bound | {"update/kept_turns": float(sum(sample.was_sampled for sample in samples))}


def not_finite(config: TrainConfig, step: int, what: str) -> RunError:
    """The error of a loss that is no number. `--resume` keeps the learning rate."""
    return RunError(
        f"the loss is not finite in update {step + 1}: {what}",
        fix=f"begin anew in another --out with --set learning_rate={config.learning_rate / 10:.2g} (it was "
        f"{config.learning_rate:.2g}); --resume goes on from the last checkpoint with the same settings",
    )


def check_mismatch(stats: Mapping[str, float]) -> None:
    """Raise RunError where fresh rollouts were sampled from another distribution than the trainer's."""
    mean, bound = stats.get("engine/mismatch_mean", 0.0), stats["engine/mismatch_bound"]
    if stats["rollout/staleness"] == 0 and not mean <= bound:
        raise RunError(
            f"engine and trainer differ by {mean:.3g} nats a token on average (bound {bound:g}; largest "
            f"{stats['engine/mismatch_max']:.3g}): the rollouts came from other weights or another computation",
            fix="the last checkpoint is kept; check that the servers have this base, in the trainer's dtype",
        )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Up over the first updates, constant to the middle of the run, then down in a line, to no less than a twentieth.

    A run that is resumed with more steps goes on by the schedule of the longer run.
    """
    return config.learning_rate * min(1.0, (step + 1) / WARM_UP, max(0.05, 2 * (1 - step / config.steps)))


def _accumulate(
    policy: Policy, part: Sequence[Sample], ranks: Ranks, config: TrainConfig
) -> tuple[dict[str, float], float]:
    """Backward through this rank's micro-batches of the minibatch `part`; over all ranks their gradients add up to
    that of

        Σ_micro loss(micro) · n(micro) / n(part)  −  echo · Σ_observed log pθ / |observed|

    `loss` is the mean over the n answer tokens of a micro-batch (with `over=turn` over its n turns). Where a token
    was not sampled, since a teacher says it, there is no old log-probability (NaN) and the current one takes its
    place: the ratio is 1. Returns this rank's part of the sums, of which `kl`, `clip_share` and `ratio` are means
    over the minibatch's answer tokens, `echo` over the observed and `mismatch` over the sampled ones; and the largest
    difference from the engine's log-probabilities.
    """
    answered = sum(len(sample.answer_ids) for sample in part)
    sampled = sum(len(sample.answer_ids) for sample in part if sample.was_sampled)
    observed = sum(len(sample.observed) for sample in part)
    totals, furthest = dict.fromkeys(SUMS, 0.0), 0.0
    for micro, counts in _micro_batches_of_rank(policy, part, ranks, config.micro_batch.tokens):
        in_micro = sum(len(sample.answer_ids) for sample in micro.samples)
        share = in_micro / answered if config.loss.over == "token" else len(micro.samples) / len(part)
        reference = policy.reference_logprobs(micro.prefix, micro.pairs) if config.loss.kl else None
        logprobs, _ = policy.logprobs(micro.prefix, micro.pairs)
        now = logprobs.detach()
        old = torch.where(micro.old_logprobs_NT.isnan(), now, micro.old_logprobs_NT)
        loss, stats = config.loss(
            logprobs, old, now if reference is None else reference, micro.advantages_NT, micro.answer_NT
        )
        whole = loss * share
        if observed:
            echo = -(logprobs * micro.observed_NT).sum() / observed
            whole = whole + config.loss.echo * echo
        policy.together("a backward pass")
        (whole * counts).backward()  # type: ignore[no-untyped-call]
        if not counts:
            continue
        off = (now - old).abs() * micro.answer_NT
        furthest = max(furthest, float(off.max()))
        totals["loss"] += float(whole.detach())
        totals["echo"] += float(echo.detach()) if observed else 0.0
        totals["mismatch"] += float(off.sum()) / max(sampled, 1)
        for name, value in stats.items():
            totals[name] += float(value) * in_micro / answered
    return totals, furthest


def _micro_batches_of_rank(
    policy: Policy, part: Sequence[Sample], ranks: Ranks, max_tokens: int
) -> Iterator[tuple[MicroBatch, int]]:
    """This rank's micro-batches of a minibatch, each with 1, or with 0 where it does not count.

    Where the base is sharded all ranks must compute equally often: the micro-batches are planned for all and dealt
    in turn; who gets none in the last turn computes one that does not count.
    """
    device, sharing = policy.model.device, policy.longest_sharing
    if not policy.is_sharded:
        yield from ((micro, 1) for micro in micro_batches(ranks.share(part), max_tokens, device, sharing))
        return
    planned = list(micro_batches(part, max_tokens, device, sharing))
    for first in range(0, len(planned), ranks.count):
        place = first + ranks.rank
        yield planned[min(place, len(planned) - 1)], int(place < len(planned))


def _joined(parts: Sequence[tuple[dict[str, float], float]]) -> tuple[dict[str, float], float]:
    """The ranks' sums added, and the largest of their largest."""
    return {name: sum(sums[name] for sums, _ in parts) for name in SUMS}, max(furthest for _, furthest in parts)


@dataclass(frozen=True)
class MicroBatch:
    """N turns that go through the model together: the shared prefix once, then each one's own tokens.

    The T columns are those of the answer with what was observed after it; the two masks say which token belongs to
    which, 1 or 0.
    """

    samples: Sequence[Sample]
    prefix: list[int]
    pairs: list[tuple[list[int], list[int]]]
    old_logprobs_NT: Tensor
    advantages_NT: Tensor
    answer_NT: Tensor
    observed_NT: Tensor

    def of_answers(self, values_NT: Tensor) -> list[list[float]]:
        """For each turn the values of its answer's tokens."""
        rows = zip(values_NT, self.answer_NT.bool(), strict=True)
        return [row[of_answer].tolist() for row, of_answer in rows]


@dataclass(frozen=True)
class Picked:
    """A group that has something to teach: the credit of every turn, [j][t], and which episodes the update sees."""

    group: Group
    credits: PerTurn
    kept: list[int]

    def lessons(self, config: TrainConfig, tokenizer: Any) -> Iterator[Lesson]:
        """Every turn of every kept episode, with its credit."""
        for j in self.kept:
            episode, turns = self.group.episodes[j] if self.group.episodes else None, self.group.turns[j]
            for turn, following, advantage in zip(turns, [*turns[1:], None], self.credits[j], strict=True):
                assert turn.completion is not None
                weights, observed = tuple[float, ...](), tuple[int, ...]()
                if config.credit.words != 1:
                    weights = token_weights(turn.completion, tokenizer, config.credit.words)
                if config.loss.echo and following is not None:
                    observed = observed_tokens(following.state, tokenizer)
                yield Lesson(Sample(turn.completion, advantage, weights, observed), turn, episode)


def pick(groups: Sequence[Group], config: TrainConfig, learner: Learner) -> list[Picked]:
    """The groups that have something to teach, and which of their episodes the update sees.

    A teacher has something to say of those groups too in which all episodes went alike, and so has the next
    observation.
    """
    picked, always = [], config.teacher is not None or config.loss.echo > 0
    for group, credits in zip(groups, advantages(groups, config, learner), strict=True):
        if always or any(any(of_episode) for of_episode in credits):
            picked.append(Picked(group, credits, config.select.kept(group, learner)))
    return picked


def samples_of(
    picked: Sequence[Picked], config: TrainConfig, learner: Learner
) -> tuple[list[Sample], dict[str, float]]:
    """The turns that the update sees of the picked groups, and what the teacher adds to them where there is one.

    With them come the figures of teacher and loss, for the metrics.
    """
    every = [lesson for one in picked for lesson in one.lessons(config, learner.policy.tokenizer)]
    samples, figures = [lesson.sample for lesson in every], dict[str, float]()
    if config.teacher is not None:
        samples, figures = config.teacher.taught(every, learner)
    if config.loss.asks_policy:
        samples, more = config.loss.prepared(samples, learner, config.micro_batch.tokens)
        figures |= more
    return samples, figures


def advantages(groups: Sequence[Group], config: TrainConfig, learner: Learner) -> list[PerTurn]:
    """The advantage of every turn of an update's groups, [group][j][t], by the run's credit and objectives."""
    credits = config.credit.of_groups(groups, learner)
    if config.credit.scale == "update":
        credits = scaled_by_update(credits)
    if config.objectives is not None:
        credits = [
            config.objectives.combined(of_group, group) for of_group, group in zip(credits, groups, strict=True)
        ]
    return credits


def scaled_by_update(groups: Sequence[PerTurn]) -> list[PerTurn]:
    """Divide every credit, [group][j][t] in units of reward, by the root of the mean square over all turns.

    Zeros stay zeros; a group whose credits are small beside the others' keeps them small.
    """
    flat = torch.tensor(
        [value for group in groups for of_episode in group for value in of_episode], dtype=torch.float64
    )
    root = float(flat.square().mean().sqrt()) if len(flat) else 0.0
    if not root:
        return list(groups)
    return [[[value / root for value in of_episode] for of_episode in group] for group in groups]


def minibatches(samples: Sequence[Sample], count: int, generator: torch.Generator) -> Iterator[list[Sample]]:
    """A random partition into at most `count` parts of nearly equal size.

    Turns with the same prompt stand side by side: their actions are compared in one step, and the prompt is
    computed once.
    """
    prompts = list(dict.fromkeys(sample.prompt_ids for sample in samples))
    place = dict(zip(prompts, torch.randperm(len(prompts), generator=generator).tolist(), strict=True))
    ordered = sorted(samples, key=lambda sample: place[sample.prompt_ids])
    bounds = [len(ordered) * part // count for part in range(count + 1)]
    for low, high in pairwise(bounds):
        if low < high:
            yield ordered[low:high]


def micro_batches(
    samples: Sequence[Sample], max_tokens: int, device: torch.device, sharing: int
) -> Iterator[MicroBatch]:
    """Split by length, so that little is padding, into parts of about `max_tokens` tokens.

    Counted is what each turn has of its own, filled up to the longest; the prefix that all prompts share is not, but
    for turns of more than `sharing` tokens: these read it whole each (`shared_prefix.longest_sharing`).
    """
    if not samples:
        return
    ordered = sorted(samples, key=lambda sample: sample.tokens)
    common = common_prefix_length([list(sample.prompt_ids) for sample in ordered])
    part: list[Sample] = []
    shared = common
    for sample in ordered:
        shares = common if sample.tokens <= sharing else 0
        if part and (shares != shared or (len(part) + 1) * (sample.tokens - shared) > max_tokens):
            yield _pack(part, shared, device)
            part = []
        part.append(sample)
        shared = shares
    yield _pack(part, shared, device)


def logprobs_of(
    samples: Sequence[Sample],
    max_tokens: int,
    model: Any,
    forward: Callable[[list[int], Pairs], tuple[Tensor, Tensor]],
) -> list[tuple[float, ...]]:
    """For each turn log p of its answer's tokens, by this model's `forward(prefix, pairs)`, without a gradient."""
    by_sample: dict[int, tuple[float, ...]] = {}
    sharing = longest_sharing(trunk_and_head(model)[0])
    with torch.no_grad():
        for micro in micro_batches(samples, max_tokens, model.device, sharing):
            logprobs, _ = forward(micro.prefix, micro.pairs)
            for sample, row in zip(micro.samples, micro.of_answers(logprobs), strict=True):
                by_sample[id(sample)] = tuple(row)
    return [by_sample[id(sample)] for sample in samples]


def _pack(part: Sequence[Sample], shared: int, device: torch.device) -> MicroBatch:
    pairs = [(list(one.prompt_ids[shared:]), [*one.answer_ids, *one.observed]) for one in part]
    longest = max(len(after) for _, after in pairs)
    old, advantages, answer, observed = (torch.zeros(len(part), longest) for _ in range(4))
    for i, sample in enumerate(part):
        end = longest - len(sample.observed)
        own = slice(end - len(sample.answer_ids), end)
        old[i, own] = torch.tensor(sample.old_logprobs)
        advantages[i, own] = torch.tensor(sample.advantages)
        answer[i, own], observed[i, end:] = 1, 1
    columns = [tensor.to(device) for tensor in (old, advantages, answer, observed)]
    return MicroBatch(tuple(part), list(part[0].prompt_ids[:shared]), pairs, *columns)
