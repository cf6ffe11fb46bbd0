"""Sampling: one uniform number a token, a pure function of (seed, position), inverted through the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from msgrpo.agent import Sampling


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
    if sampling.temperature == 0:
        tokens = logits_NV.argmax(-1)
        return tokens, logits_NV.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    logprobs = (logits_NV / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1:
        logprobs = _nucleus(logprobs, sampling.top_p)
    cumulative = logprobs.double().exp().cumsum(-1)
    target = uniforms_N.to(cumulative.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=logits_NV.shape[1] - 1)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _nucleus(logprobs_NV: Tensor, top_p: float) -> Tensor:
    ranked, order = logprobs_NV.sort(-1, descending=True)
    before = ranked.exp().cumsum(-1) - ranked.exp()
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
    return logprobs_NV.masked_fill(dropped, -math.inf).log_softmax(-1)
