"""Answers to a batch of prompts, a token at a time; a row that has ended leaves, with its keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from msgrpo.agent import Sampling
from msgrpo.models.sampler import sample, uniforms
from msgrpo.models.shared_prefix import (
    common_prefix_length,
    compute_prefix,
    distinct_rows,
    left_pad,
    new_cache,
    positions,
    select_rows,
    shareable_length,
)

# Matrix products of fewer rows than this are summed in another order (measured: MKL), so a batch does not shrink
# further: an answer stays the same to the last digit, and a step of four rows costs what a step of one does.
FEWEST_ROWS = 4


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


class Batch:
    """Rows that are answered together, and the model's keys and values of them."""

    def __init__(self, trunk: Any, head: Any, rows: Sequence[Row], pad_id: int) -> None:
        self.rows = list(rows)
        self._trunk, self._head = trunk, head
        distinct, row_of = distinct_rows([row.prompt for row in rows])
        self._longest = max(len(row.prompt) + row.most for row in rows)
        shared = shareable_length(trunk, common_prefix_length(distinct), self._longest)
        ids, self._mask = left_pad([row[shared:] for row in distinct], pad_id, trunk.device)
        self._place = positions(self._mask, shared)
        self._prefix = compute_prefix(trunk, distinct[0][:shared])
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
        hidden = self._trunk(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=self._place,
            past_key_values=self._cache,
            use_cache=True,
            **self._prefix,
        ).last_hidden_state[:, -1:]
        logits: Tensor = self._head(hidden)[:, 0].float()
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
    abandoned: Callable[[], bool],
) -> None:
    """Write the answers of a batch's rows.

    `on_token` hears of every token; `abandoned` is asked before every token. Raises AbandonedError.
    """
    for n in count():
        if abandoned():
            raise AbandonedError
        tokens, logprobs = sample(batch.logits, sampling, uniforms([row.seed for row in batch.rows], n))
        for row, token, logprob in zip(batch.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not row.ended:
                row.tokens.append(token)
                row.logprobs.append(logprob)
                row.ended = token in stop_ids or len(row.tokens) == row.most
                on_token(row)
        if all(row.ended for row in batch.rows):
            return
        batch.append(tokens[batch.drop_ended()])
