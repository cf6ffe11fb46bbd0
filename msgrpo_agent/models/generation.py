"""Answers to a batch of prompts, a token at a time; a row that has ended leaves, with its keys and values.

A token is drawn by one uniform number, a pure function of (seed, position), inverted through the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from msgrpo.agent import Sampling
from msgrpo.models.shared_prefix import (
    answer_logprobs,
    common_prefix_length,
    compute_prefix,
    distinct_rows,
    left_pad,
    new_cache,
    positions,
    run,
    select_rows,
    shareable_length,
    token_logprobs,
    window,
)

# Matrix products of fewer rows than this are summed in another order (measured: MKL), so a batch does not shrink
# further: an answer stays the same to the last digit, and a step of four rows costs what a step of one does.
FEWEST_ROWS = 4
BLOCK = 1024  # tokens of a large vocabulary that are looked at together
PART = 2**22  # logits that a processor works on at once: 16 MiB, which stay in its cache
GPU_PART = 2**27  # that a GPU works on at once: there what counts is how few kernels are started
LARGEST = 1 - 2.0**-53  # of a uniform number
PROMPT_TOKENS = 2**18  # that are computed at once, filled up to the longest prompt, without what all have in common
TOKENS = 2**14  # that are held at once while texts are compared, each with keys and values of its own


class AbandonedError(Exception):
    """Nobody waits for what is being generated any more."""


@dataclass(eq=False)
class Row:
    """One turn: its prompt's token ids, and the answer as far as it is written."""

    prompt: list[int]
    seed: int
    most: int  # tokens that the answer may have
    actions: tuple[str, ...] = ()  # whose probabilities are wanted
    on_text: Callable[[str], None] | None = None  # hears the answer as it grows
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    action_probabilities: dict[str, float] | None = None
    ended: bool = False


def parts_of(trunk: Any, rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in their order, in equal parts of at most PROMPT_TOKENS tokens: that bounds the memory of prompts.

    It depends on nothing but the rows, so which of them are a batch does not either.
    """
    longest = max(len(row.prompt) + row.most for row in rows)
    shared = shareable_length(trunk, common_prefix_length([row.prompt for row in rows]), longest)
    most = max(FEWEST_ROWS, PROMPT_TOKENS // max(len(row.prompt) - shared for row in rows))
    size = math.ceil(len(rows) / math.ceil(len(rows) / most))
    return [list(rows[at : at + size]) for at in range(0, len(rows), size)]


class Batch:
    """Rows that are answered together, and the model's keys and values of them."""

    def __init__(self, trunk: Any, head: Any, rows: Sequence[Row], pad_id: int) -> None:
        self.rows = list(rows)
        self._trunk, self._head, self._pad_id = trunk, head, pad_id
        distinct, row_of = distinct_rows([row.prompt for row in rows])
        self._longest = max(len(row.prompt) + row.most for row in rows)
        shared = shareable_length(trunk, common_prefix_length(distinct), self._longest)
        ids, self._mask = left_pad([row[shared:] for row in distinct], pad_id, trunk.device)
        self._place = positions(self._mask, shared)
        self._prefix_ids = distinct[0][:shared]
        self._prefix = compute_prefix(trunk, self._prefix_ids)
        self._cache = new_cache(trunk.config.num_hidden_layers)
        self.logits = self._forward(ids)  # (N, V) of each row's next token
        if len(distinct) < len(rows):  # from here on equal prompts get different answers
            self.logits = self.logits[row_of]
            self._select(row_of)

    def append(self, tokens: Tensor) -> None:
        """Let every row go on with its token (N)."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        # A row that has ended and is kept goes on beyond its room, but not beyond the model's positions.
        self._place = (self._place[:, -1:] + 1).clamp(max=self._longest - 1)
        self.logits = self._forward(tokens[:, None])

    def logprobs_of(self, endings: Mapping[int, list[list[int]]]) -> dict[int, list[float]]:
        """For each row the log-probabilities of texts after what all of its texts have in common.

        `endings` holds, for each row by its place, the token ids of whole texts, prompt included. What a text shares
        with the row is not computed again: its keys and values are there.
        """
        asked = [(place, texts, *self._known(place, texts)) for place, texts in endings.items()]
        longest = max(len(text) for _, texts, *_ in asked for text in texts) + self._mask.shape[1]
        if longest > window(self._trunk):  # then distances count, and there are gaps between a row's keys
            return {place: self._from_the_beginning(texts) for place, texts in endings.items()}
        most = max(1, TOKENS // longest)  # texts at once: a row of chess has two hundred
        parts = [
            (place, texts[at : at + most], known, common)
            for place, texts, known, common in asked
            for at in range(0, len(texts), most)
        ]
        logprobs: dict[int, list[float]] = {place: [] for place in endings}
        size = max(1, most // max(len(texts) for _, texts, *_ in parts))
        for at in range(0, len(parts), size):
            for place, of_texts in self._continued(parts[at : at + size]):
                logprobs[place] += of_texts
        return logprobs

    def _known(self, place: int, texts: list[list[int]]) -> tuple[int, int]:
        """How many of a row's tokens its texts can go on from, and how many the texts have in common."""
        row, common = self.rows[place], common_prefix_length(texts)
        cached = (row.prompt + row.tokens[:-1])[: common - 1]  # the last common token is computed: the next follows
        agree = next((i for i, token in enumerate(cached) if token != texts[0][i]), len(cached))
        return max(agree, len(self._prefix_ids)), common

    def _continued(self, asked: Sequence[tuple[int, list[list[int]], int, int]]) -> list[tuple[int, list[float]]]:
        """The texts of all these rows as one batch, each on a copy of its row's keys and values; in their order."""
        width = self._mask.shape[1]
        starts = [width - len(self.rows[place].prompt + self.rows[place].tokens[:-1]) for place, *_ in asked]
        ends = [start + known for start, (_, _, known, _) in zip(starts, asked, strict=True)]
        places = [place for place, texts, *_ in asked for _ in texts]
        cache = DynamicCache()
        for layer, cached in enumerate(self._cache.layers):
            cache.update(cached.keys[places, :, : max(ends)], cached.values[places, :, : max(ends)], layer)
        mask = self._mask[places, : max(ends)]
        cut = torch.tensor([end for end, (_, texts, *_) in zip(ends, asked, strict=True) for _ in texts])
        mask = mask * (torch.arange(max(ends)) < cut[:, None]).to(mask)
        given, seen = left_pad(
            [text[known:-1] for _, texts, known, _ in asked for text in texts], self._pad_id, mask.device
        )
        targets, wanted = left_pad([text[common:] for _, texts, _, common in asked for text in texts], 0, mask.device)
        mask = torch.cat([mask, seen], dim=1)
        hidden = run(self._trunk, given, mask, self._prefix_ids, self._prefix, cache)[:, -targets.shape[1] :]
        chosen = wanted.bool()
        logprobs = token_logprobs(self._head, hidden[chosen], targets[chosen], 1.0)
        sums = torch.zeros(targets.shape, device=mask.device).masked_scatter(chosen, logprobs).sum(1).tolist()
        return [(place, [sums.pop(0) for _ in texts]) for place, texts, *_ in asked]

    def _from_the_beginning(self, texts: list[list[int]]) -> list[float]:
        common = common_prefix_length(texts)
        pairs = [(text[common - 1 : common], text[common:]) for text in texts]
        most, sums = max(1, TOKENS // max(map(len, texts))), list[float]()
        for at in range(0, len(pairs), most):
            part = pairs[at : at + most]
            logprobs, _ = answer_logprobs(self._trunk, self._head, texts[0][: common - 1], part, self._pad_id)
            sums += logprobs.sum(1).tolist()
        return sums

    def drop_ended(self) -> list[int]:
        """Let the rows that have ended leave; returns the places of those that stay, in their new order."""
        kept = kept_rows([row.ended for row in self.rows])
        if len(kept) < len(self.rows):
            self.rows = [self.rows[i] for i in kept]
            self._select(kept)
        return kept

    def _select(self, rows: list[int]) -> None:
        select_rows(self._cache, rows)
        self._mask, self._place = self._mask[rows], self._place[rows]

    def _forward(self, ids: Tensor) -> Tensor:
        hidden = (
            self._trunk(
                input_ids=ids,
                attention_mask=self._mask,
                position_ids=self._place,
                past_key_values=self._cache,
                use_cache=True,
                **self._prefix,
            )
            .last_hidden_state[:, -1]
            .contiguous()
        )  # for rows that do not lie close, `linear` copies its weights N times
        logits: Tensor = self._head(hidden[None])[0].float()
        return logits


def kept_rows(ended: Sequence[bool]) -> list[int]:
    """The rows that stay: the last ones take the places of those that have ended, so that few are moved.

    Rows that have ended stay where fewer than FEWEST_ROWS would be left.
    """
    size = min(len(ended), max(FEWEST_ROWS, ended.count(False)))
    movers = [i for i in range(size, len(ended)) if not ended[i]]
    return [movers.pop() if ended[i] and movers else i for i in range(size)]


def answer(
    batch: Batch,
    sampling: Sampling,
    stop_ids: frozenset[int],
    on_token: Callable[[Row], None],
    on_ended: Callable[[Batch, list[int]], None],
    abandoned: Callable[[], bool],
) -> None:
    """Write the answers of a batch's rows.

    `on_token` hears of every token, `on_ended` of the places of rows that have just ended, while the batch still
    holds their keys and values. `abandoned` is asked before every token. Raises AbandonedError.
    """
    for n in count():
        if abandoned():
            raise AbandonedError
        tokens, logprobs = sample(batch.logits, sampling, uniforms([row.seed for row in batch.rows], n))
        ended = []
        for place, (row, token, logprob) in enumerate(
            zip(batch.rows, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if not row.ended:
                row.tokens.append(token)
                row.logprobs.append(logprob)
                row.ended = token in stop_ids or len(row.tokens) == row.most
                on_token(row)
                if row.ended:
                    ended.append(place)
        on_ended(batch, ended)
        if all(row.ended for row in batch.rows):
            return
        batch.append(tokens[batch.drop_ended()])


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
    size = max(1, (PART if logits_NV.device.type == "cpu" else GPU_PART) // logits_NV.shape[1])
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
