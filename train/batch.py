"""From groups to tensors: which episodes an update sees, and how their turns are packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from msgrpo.agent import Completion
from msgrpo.models.shared_prefix import common_prefix_length
from msgrpo.train.collect import Group
from msgrpo.train.config import TrainConfig
from msgrpo.train.credit import ESTIMATORS, Advantages, in_common, of_episodes
from msgrpo.train.objectives import combined
from msgrpo.train.selection import keep_indices, widest_groups


@dataclass(frozen=True)
class Sample:
    """One turn of a kept episode: the engine's own completion, its advantage, and how much of it each token has.

    `weights` is empty where all tokens have the whole of it [P].
    """

    completion: Completion
    advantage: float
    weights: tuple[float, ...] = ()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.completion.prompt_ids

    @property
    def answer_ids(self) -> tuple[int, ...]:
        return self.completion.token_ids

    @property
    def old_logprobs(self) -> tuple[float, ...]:
        return self.completion.logprobs

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class MicroBatch:
    """N turns that go through the model together: the shared prefix once, then each one's own tokens."""

    prefix: list[int]
    pairs: list[tuple[list[int], list[int]]]
    old_logprobs_NT: Tensor
    advantages_NT: Tensor


@dataclass(frozen=True)
class Picked:
    """A group that has something to teach: the credit of every turn, [j][t], and which episodes the update sees."""

    group: Group
    credits: Advantages
    kept: list[int]

    def samples(self) -> Iterator[Sample]:
        """Every turn of every kept episode, with its credit."""
        for j in self.kept:
            for turn, advantage in zip(self.group.turns[j], self.credits[j], strict=True):
                assert turn.completion is not None
                yield Sample(turn.completion, advantage)


def pick(
    groups: Sequence[Group],
    config: TrainConfig,
    generator: torch.Generator,
    values: Sequence[Advantages] | None = None,
) -> list[Picked]:
    """The groups that have something to teach. `values` are those of a critic, [group][j][t]."""
    widest = widest_groups([group.returns_G for group in groups], config.drop_groups)
    seen = [groups[g] for g in widest]
    picked = []
    for group, credits in zip(seen, advantages(seen, config, values and [values[g] for g in widest]), strict=True):
        if not any(any(of_episode) for of_episode in credits):
            continue
        keep = min(config.keep, len(group.turns))
        kept = keep_indices(group.advantages_G, group.returns_G, config.selection, keep, generator)
        picked.append(Picked(group, credits, list(kept)))
    return picked


def advantages(
    groups: Sequence[Group], config: TrainConfig, values: Sequence[Advantages] | None = None
) -> list[Advantages]:
    """The advantage of every turn of an update's groups, [group][j][t], by the run's estimator and objectives."""
    credits = [credit(group, config, values[g] if values else None) for g, group in enumerate(groups)]
    if config.scale == "update":
        credits = in_common(credits)
    return [
        combined(one, group.turns, group.origin, group.returns_G, config.objectives, config.objective_weights)
        for one, group in zip(credits, groups, strict=True)
    ]


def credit(group: Group, config: TrainConfig, values: Advantages | None) -> Advantages:
    """What the run's estimator says of each turn of a group, divided by the group's spread or in units of reward."""
    steps = group.trajectories()
    if values is not None:
        steps = [
            [replace(step, value=value) for step, value in zip(one, of_episode, strict=True)]
            for one, of_episode in zip(steps, values, strict=True)
        ]
    divided = config.scale == "group"
    episodes_G = of_episodes(group.advantages_G, group.returns_G, divided)
    return ESTIMATORS[config.credit](steps, episodes_G, config.gamma, config.lam, config.state_weight, divided)


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


def micro_batches(samples: Sequence[Sample], max_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """Split by length, so that little is padding, into parts of about `max_tokens` tokens.

    Counted is what each turn has of its own, filled up to the longest; the prefix that all prompts share is not.
    """
    ordered = sorted(samples, key=lambda sample: sample.tokens)
    shared = common_prefix_length([list(sample.prompt_ids) for sample in ordered])
    part: list[Sample] = []
    for sample in ordered:
        if part and (len(part) + 1) * (sample.tokens - shared) > max_tokens:
            yield _pack(part, shared, device)
            part = []
        part.append(sample)
    yield _pack(part, shared, device)


def _pack(part: Sequence[Sample], shared: int, device: torch.device) -> MicroBatch:
    longest = max(len(sample.answer_ids) for sample in part)
    old, advantages = torch.zeros(len(part), longest), torch.zeros(len(part), longest)
    for i, sample in enumerate(part):
        own = slice(longest - len(sample.answer_ids), longest)
        old[i, own] = torch.tensor(sample.old_logprobs)
        advantages[i, own] = sample.advantage * torch.tensor(sample.weights or [1.0] * len(sample.answer_ids))
    return MicroBatch(
        list(part[0].prompt_ids[:shared]),
        [(list(sample.prompt_ids[shared:]), list(sample.answer_ids)) for sample in part],
        old.to(device),
        advantages.to(device),
    )
