"""One forward pass over the shared prefix of many prompts, for rollouts and for the update.

All prompts of a scenario begin with the same instructions and rules. A causal model's keys and values of those
tokens do not depend on what follows, so they are computed once for one row and every row attends to them. The
result equals the plain forward pass over the full prompts, and so does the gradient, which flows through the
shared keys and values (a test holds both).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def common_prefix_length(rows: Sequence[list[int]]) -> int:
    """How many leading token ids all rows share, leaving each row at least one token of its own."""
    shortest = min(len(row) for row in rows)
    first, last = min(rows), max(rows)  # lexicographic: what these two share, all share
    length = next((i for i in range(shortest) if first[i] != last[i]), shortest)
    return min(length, shortest - 1)


def left_pad(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both (N, S), padded on the left so that all rows end together."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        mask[i, width - len(row) :] = 1
    return ids.to(device), mask.to(device)


class _BufferLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that writes into one buffer instead of concatenating at every token (no gradients)."""

    def __init__(self, keys: Tensor, values: Tensor, rows: int, room: int) -> None:
        super().__init__()
        self._used = keys.shape[2]
        self.dtype, self.device = keys.dtype, keys.device
        shape = (rows, keys.shape[1], self._used + room, keys.shape[3])
        self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, : self._used] = keys
        self._values[:, :, : self._used] = values
        self._view()
        self.is_initialized = True

    def _view(self) -> None:
        self.keys = self._keys[:, :, : self._used]
        self.values = self._values[:, :, : self._used]

    def select(self, rows: Tensor) -> None:
        """Let row i go on from what row `rows[i]` holds."""
        self._keys, self._values = self._keys[rows], self._values[rows]
        self._view()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self._used + key_states.shape[2]
        self._keys[:, :, self._used : end] = key_states
        self._values[:, :, self._used : end] = value_states
        self._used = end
        self._view()
        return self.keys, self.values


def prefix_cache(model: Any, prefix_ids: Sequence[int], rows: int, room: int | None = None) -> DynamicCache:
    """Keys and values of the prefix, computed for one row and shared by `rows`.

    With `room`, a buffer for that many further tokens a row (generation); without, tensors that keep the
    gradient (update). `model` is the transformer without its head: it is called with `use_cache=True`.
    """
    cache = DynamicCache()
    if prefix_ids:
        ids = torch.tensor([list(prefix_ids)], device=model.device)
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    for i, layer in enumerate(cache.layers):
        if room is not None:
            cache.layers[i] = _BufferLayer(layer.keys, layer.values, rows, room)
        else:
            layer.keys = layer.keys.expand(rows, -1, -1, -1)
            layer.values = layer.values.expand(rows, -1, -1, -1)
    return cache


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Repeat, drop or reorder the rows of a cache made by `prefix_cache` with `room`."""
    for layer in cache.layers:
        layer.select(rows)


def hidden_states(
    model: Any, prefix_ids: Sequence[int], rows: Sequence[Sequence[int]], pad_id: int
) -> tuple[Tensor, Tensor]:
    """Last hidden states (N, S, D) of `rows`, each continuing the prefix, with their mask (N, S); left-padded.

    With an empty prefix it is the plain forward pass, without a cache.
    """
    ids, mask = left_pad(rows, pad_id, model.device)
    shared = {"past_key_values": prefix_cache(model, prefix_ids, len(rows))} if prefix_ids else {}
    output = model(
        input_ids=ids,
        attention_mask=with_prefix(mask, len(prefix_ids)),
        position_ids=positions(mask, len(prefix_ids)),
        use_cache=bool(prefix_ids),
        **shared,
    )
    return output.last_hidden_state, mask


def answer_logprobs(
    trunk: Any,
    head: Any,
    prefix_ids: Sequence[int],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    pad_id: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """log p of every answer token, (N, T) and its mask (N, T); answers end together, shorter ones start later.

    `pairs` holds, for each row, the rest of the prompt after the prefix and the answer's token ids. The
    distribution is softmax(logits / temperature), that of the sampler. The head is applied to answers only.
    """
    hidden, _ = hidden_states(trunk, prefix_ids, [[*rest, *answer][:-1] for rest, answer in pairs], pad_id)
    targets, mask = left_pad([answer for _, answer in pairs], 0, hidden.device)
    logits = head(hidden[:, -targets.shape[1] :]).float() / temperature
    logprobs = torch.gather(logits, 2, targets[:, :, None])[:, :, 0] - logits.logsumexp(-1)
    return logprobs * mask, mask


def positions(mask_NS: Tensor, prefix_length: int) -> Tensor:
    """Position ids (N, S): every row goes on where the prefix ended, wherever its padding stops."""
    return prefix_length + (mask_NS.cumsum(1) - 1).clamp(min=0)


def with_prefix(mask_NS: Tensor, prefix_length: int) -> Tensor:
    """The attention mask (N, P + S) of rows that all see the whole prefix."""
    return torch.cat([mask_NS.new_ones(len(mask_NS), prefix_length), mask_NS], dim=1)
