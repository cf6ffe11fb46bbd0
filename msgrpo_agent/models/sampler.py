"""Sampling: one uniform number a token, a pure function of (seed, position), inverted through the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from msgrpo.agent import Sampling

BLOCK = 1024  # tokens of a large vocabulary that are looked at together
PART = 2**22  # logits that are worked on at once: 16 MiB, which stay in the processor's cache
LARGEST = 1 - 2.0**-53  # of a uniform number


def uniforms(seeds: Sequence[int], n: int) -> Tensor:
    """One number in [0, 1) a row, a pure function of (seed, n): SplitMix64's output function."""
    with np.errstate(over="ignore"):
        z = np.array(seeds, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(n + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return torch.from_numpy((z >> np.uint64(11)).astype(np.float64) / 2.0**53)


def sample(logits_NV: Tensor, sampling: Sampling, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (N) by inversion of the cumulative distribution, and their log-probabilities (N).

    The log-probabilities are those of the distribution sampled from (after temperature and top-p); greedy
    decoding reports them at temperature 1.
    """
    size = max(1, PART // logits_NV.shape[1])
    parts = [
        _sample(logits_NV[at : at + size], sampling, uniforms_N[at : at + size])
        for at in range(0, len(logits_NV), size)
    ]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample(logits_NV: Tensor, sampling: Sampling, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    if sampling.temperature == 0:
        tokens = logits_NV.argmax(-1, keepdim=True)
        return tokens[:, 0], logits_NV.log_softmax(-1).gather(1, tokens)[:, 0]
    logits_NV = logits_NV if sampling.temperature == 1 else logits_NV / sampling.temperature
    logprobs = logits_NV.log_softmax(-1)
    if sampling.top_p < 1:
        logprobs = _nucleus(logprobs, sampling.top_p)
    tokens = _inverse(logprobs, uniforms_N.to(logprobs.device)[:, None])
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _inverse(logprobs_NV: Tensor, uniforms_N1: Tensor) -> Tensor:
    """For each row the token (N, 1) in whose part of [0, 1) its number lies, the parts in the tokens' order.

    First the block of tokens is looked for, by the blocks' sums, then the token in it: a cumulative sum in double
    precision over a whole vocabulary of 152,000 costs ten times as much.
    """
    size = logprobs_NV.shape[1]
    if size <= BLOCK:
        return _searched(logprobs_NV.double().exp(), uniforms_N1)[0]
    weights = logprobs_NV.exp()
    whole = size - size % BLOCK
    sums = weights[:, :whole].view(len(weights), -1, BLOCK).sum(-1)
    sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    block, inside = _searched(sums.double(), uniforms_N1)
    tokens = block * BLOCK + torch.arange(BLOCK, device=block.device)
    weights = logprobs_NV.gather(1, tokens.clamp(max=size - 1)).double().exp().masked_fill(tokens >= size, 0)
    return block * BLOCK + _searched(weights, inside)[0]


def _searched(weights_NK: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Where the numbers fall among the weights (N, 1), and how far into that weight (N, 1), in [0, 1)."""
    ends = weights_NK.cumsum(-1)
    target = uniforms_N1 * ends[:, -1:]
    place = torch.searchsorted(ends, target, right=True).clamp(max=weights_NK.shape[1] - 1)
    end, weight = ends.gather(1, place), weights_NK.gather(1, place)
    return place, (1 - (end - target) / weight).clamp(0, LARGEST)


def _nucleus(logprobs_NV: Tensor, top_p: float) -> Tensor:
    """The most likely tokens whose mass reaches top_p, normalised; the others have log-probability -inf."""
    ranked, order = _ranked(logprobs_NV, top_p)
    kept = torch.zeros_like(logprobs_NV, dtype=torch.bool).scatter(1, order, _mass_before(ranked) < top_p)
    return logprobs_NV.masked_fill(~kept, -math.inf).log_softmax(-1)


def _ranked(logprobs_NV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The highest log-probabilities and their tokens: a few, where those hold top_p of the mass, or all."""
    if logprobs_NV.shape[1] > BLOCK:
        ranked, order = logprobs_NV.topk(BLOCK, -1)
        if bool((_mass_before(ranked)[:, -1] >= top_p).all()):
            return ranked, order
    return logprobs_NV.sort(-1, descending=True)


def _mass_before(ranked_NK: Tensor) -> Tensor:
    masses = ranked_NK.double().exp()
    return masses.cumsum(-1) - masses
