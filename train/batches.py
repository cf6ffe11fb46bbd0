"""How turns are packed: minibatches, one optimizer step each, and micro-batches, one forward pass each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from msgrpo.models.shared_prefix import common_prefix_length, longest_sharing, trunk_and_head
from msgrpo.train.groups import Sample

Pairs = Sequence[tuple[list[int], list[int]]]  # of each turn what follows the prefix in its prompt, and its answer


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
        """Of each turn the values of its answer's tokens."""
        rows = zip(values_NT, self.answer_NT.bool(), strict=True)
        return [row[of_answer].tolist() for row, of_answer in rows]


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
    """Of each turn log p of its answer's tokens, by this model's `forward(prefix, pairs)`, without a gradient."""
    by_sample: dict[int, tuple[float, ...]] = {}
    sharing = longest_sharing(trunk_and_head(model)[0])
    with torch.no_grad():
        for micro in micro_batches(samples, max_tokens, model.device, sharing) if samples else ():
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
