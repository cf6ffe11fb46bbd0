"""One forward pass over what many prompts share, for rollouts and for the update.

All prompts of a scenario begin with the same instructions and rules. A causal model's keys and values of those
tokens do not depend on what follows, so they are computed once, for one row, and every row attends to them.
Prompts that are equal altogether (a group's first turn, a state that several episodes come to) are computed once,
too. The result equals the plain forward pass over the full prompts, and so does the gradient, which flows through
the shared keys and values (a test holds both).

It is an attention function of transformers' own interface: `share_prefixes(model)` selects it, and calls without
a prefix are transformers' `sdpa`.

A model is used in two parts: the trunk gives hidden states, the head logits. Between head and logits a model may
scale (Granite, Cohere) or cap (Gemma 2): `OwnHead` lets the model's own forward do that part, whatever it is.
`proof.py` shows at load time that both, put together as here, compute what the model does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

LOGITS = 2**26  # logits that the head computes at once: 256 MiB in float32
SPARE = 64  # tokens for which a buffer of keys and values has room beyond those that it holds
Prefix = list[tuple[Tensor, Tensor]]  # for each layer: keys and values (KV, P, D) of the prefix


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_prefix: Prefix | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(q [K_prefix, K_own]ᵀ · scaling) [V_prefix, V_own], the prefix's keys and values computed once.

    Args:
        query: (N, H, L, D); key, value: (N, KV, S, D), each row's own tokens; H is a multiple of KV.
        attention_mask: (N, 1, L, S), True where a row may look at its own tokens; None for a plain causal one.
        shared_prefix: keys and values that every token of every row sees; None is transformers' `sdpa`.

    Returns:
        (N, L, H, D), and None for the weights.
    """
    if shared_prefix is None:
        plain, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return plain, None
    prefix_key, prefix_value = shared_prefix[module.layer_idx]
    if query.shape[2] == 1:
        return _attend_one(query, key, value, attention_mask, scaling, prefix_key, prefix_value), None
    (n, _, length, _), own, seen = query.shape, key.shape[2], prefix_key.shape[1]
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, length, own, dtype=torch.bool, device=query.device).tril(own - length)
    attention_mask = attention_mask.expand(n, 1, length, own)
    mask = torch.cat([attention_mask.new_ones(n, 1, length, seen), attention_mask], dim=-1)
    keys = torch.cat([prefix_key.expand(n, -1, -1, -1), key], dim=2)
    values = torch.cat([prefix_value.expand(n, -1, -1, -1), value], dim=2)
    if query.device.type == "cpu":  # whose kernel takes a mask with grouped heads, without repeating them
        out = scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    joined, _ = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling, **kwargs)
    return joined, None


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    prefix_key: Tensor,
    prefix_value: Tensor,
) -> Tensor:
    """The same for one query a row, as in generation: all rows read the one copy of the prefix where it lies."""
    n, heads, _, width = query.shape
    kv, seen = key.shape[1], prefix_key.shape[1]
    # Scores are sums of large numbers that cancel: rounded to bfloat16 they would be far worse than SDPA's.
    q = (query.float() * (scaling or width**-0.5)).reshape(n, kv, -1, width)  # (N, KV, H/KV, D)
    to_prefix = q.transpose(0, 1).reshape(kv, -1, width) @ prefix_key.float().transpose(1, 2)
    to_own = q @ key.float().transpose(2, 3)
    if attention_mask is not None:
        to_own = to_own.masked_fill(~attention_mask, torch.finfo(to_own.dtype).min)
    scores = torch.cat([to_prefix.view(kv, n, -1, seen).transpose(0, 1), to_own], dim=-1)
    weights = scores.softmax(-1).to(query.dtype)
    on_prefix, on_own = torch.split(weights, [seen, key.shape[2]], dim=-1)
    from_prefix = on_prefix.transpose(0, 1).reshape(kv, -1, seen) @ prefix_value  # (KV, N * H/KV, D)
    out = from_prefix.view(kv, n, -1, width).transpose(0, 1) + on_own @ value
    return out.reshape(n, 1, heads, width)


NAME = "shared_prefix"
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def share_prefixes(model: Any) -> None:
    """Let a model's attention take a shared prefix."""
    model.set_attn_implementation(NAME)


def common_prefix_length(rows: Sequence[list[int]]) -> int:
    """How many leading token ids all rows share, leaving each row at least one token of its own."""
    shortest = min(len(row) for row in rows)
    first, last = min(rows), max(rows)  # lexicographic: what these two share, all share
    length = next((i for i in range(shortest) if first[i] != last[i]), shortest)
    return min(length, shortest - 1)


def shareable_length(trunk: Any, common: int, longest: int) -> int:
    """How much of a common prefix of `common` tokens may be computed once, for rows of up to `longest` tokens.

    All of it, or nothing where a row is longer than `longest_sharing`.
    """
    return common if longest <= longest_sharing(trunk) else 0


def longest_sharing(trunk: Any) -> int:
    """The tokens of the longest row that may share a prefix: the shortest window of a layer, within which a row's end
    sees the prefix's beginning; 0 where the model was found not to share (`proof.prepare`).
    """
    return window(trunk) if trunk.config._attn_implementation == NAME else 0


def window(trunk: Any) -> int:
    """The tokens that every layer looks back on; by the modules where they say it, by the config too."""
    windows = [getattr(module, "sliding_window", None) for module in trunk.modules()]
    windows += [getattr(trunk.config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((width for width in windows if isinstance(width, int) and width > 0), default=sys.maxsize)


def left_pad(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both (N, S), padded on the left so that all rows end together."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
        mask[i, width - len(row) :] = 1
    return ids.to(device), mask.to(device)


def positions(mask_NS: Tensor, prefix_length: int) -> Tensor:
    """Position ids (N, S): every row goes on where the prefix ended, wherever its padding stops."""
    return prefix_length + (mask_NS.cumsum(1) - 1).clamp(min=0)


def compute_prefix(trunk: Any, prefix_ids: Sequence[int]) -> dict[str, Prefix]:
    """The keyword argument for calls of `trunk` that go on from the prefix; empty for an empty prefix.

    `trunk` is the transformer without its head. Layers that are checkpointed in training would drop the keys
    and values, so this one row is computed in evaluation mode.
    """
    if not prefix_ids:
        return {}
    cache, training = DynamicCache(), trunk.training
    ids = torch.tensor([list(prefix_ids)], device=trunk.device)
    trunk.eval()
    try:
        trunk(input_ids=ids, past_key_values=cache, use_cache=True)
    finally:
        trunk.train(training)
    return {NAME: [(layer.keys[0], layer.values[0]) for layer in cache.layers]}


class _BufferLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that writes into a buffer with room to spare instead of concatenating at every token.

    Buffers are (N, KV, room, D), of which the first `rows` rows and `used` tokens are in use. (No gradients.)
    """

    buffers: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.used = 0, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        states = (key_states, value_states)
        end = self.used + key_states.shape[2]
        if not self.is_initialized:
            self.rows = len(key_states)
            self.buffers = tuple(_room(like, self.rows, end + SPARE) for like in states)
            self.is_initialized = True
        elif end > self.buffers[0].shape[2]:
            self.copy_rows(slice(self.rows), self.rows, end + SPARE)
        for buffer, new in zip(self.buffers, states, strict=True):
            buffer[: self.rows, :, self.used : end] = new
        self.used = end
        self.view()
        return self.keys, self.values

    def copy_rows(self, chosen: slice | list[int], rows: int, room: int) -> None:
        """Go on in new buffers, which hold the chosen rows."""
        old, self.buffers = self.buffers, tuple(_room(buffer, rows, room) for buffer in self.buffers)
        for buffer, kept in zip(self.buffers, old, strict=True):
            buffer[:, :, : self.used] = kept[chosen, :, : self.used]

    def select(self, rows: list[int]) -> None:
        if len(rows) > len(self.buffers[0]):
            self.copy_rows(rows, len(rows), self.buffers[0].shape[2])
        elif moved := [(to, source) for to, source in enumerate(rows) if to != source]:
            to, source = map(list, zip(*moved, strict=True))
            for buffer in self.buffers:
                buffer[to, :, : self.used] = buffer[source, :, : self.used]
        self.rows = len(rows)
        self.view()

    def view(self) -> None:
        self.keys, self.values = (buffer[: self.rows, :, : self.used] for buffer in self.buffers)


def _room(like: Tensor, rows: int, room: int) -> Tensor:
    return like.new_empty(rows, like.shape[1], room, like.shape[3])


def new_cache(layers: int) -> DynamicCache:
    """A cache for generation."""
    cache = DynamicCache()
    cache.layers = [_BufferLayer() for _ in range(layers)]
    return cache


def select_rows(cache: DynamicCache, rows: list[int]) -> None:
    """Let row i of a `new_cache` go on from what row `rows[i]` holds; rows that are not named leave."""
    for layer in cache.layers:
        layer.select(rows)


def distinct_rows(rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The different rows, and for each row which of them it is: a group begins with one prompt, G times."""
    index: dict[tuple[int, ...], int] = {}
    row_of = [index.setdefault(tuple(row), len(index)) for row in rows]
    return [list(row) for row in index], row_of


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]
    """A trunk's output of which a model may ask for more than there is (router logits, caches): that is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):
    """Stands where the trunk stood, and returns what it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class OwnHead:
    """Hidden states (N, T, width) → logits (N, T, V), by the model's own forward without its trunk."""

    def __init__(self, inner: Any) -> None:
        self._tail = copy.copy(inner)  # the same modules, but for the trunk
        self._tail._modules = inner._modules | {inner.base_model_prefix: _Given()}
        self.vocabulary: int = inner.get_output_embeddings().weight.shape[0]

    def __call__(self, hidden_NTD: Tensor) -> Tensor:
        logits: Tensor = self._tail(inputs_embeds=hidden_NTD, use_cache=False).logits
        return logits


def trunk_and_head(model: Any) -> tuple[Any, OwnHead]:
    """The transformer without its head, and what follows it; an adapter's layers inside stay active."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return inner.base_model, OwnHead(inner)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for as long: a model in training mode with checkpointed layers keeps no cache."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def plain_logprobs(model: Any, prompt: list[int], answer: list[int], temperature: float = 1.0) -> Tensor:
    """log p (T) of an answer's tokens by `model(ids).logits`: no shared prefix, no padding, no cache.

    A model that can leave the logits of the prompt out does so: with a large vocabulary they fill a GPU.
    """
    ids, last = torch.tensor([[*prompt, *answer]], device=model.device), len(answer) + 1
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    kept = {"logits_to_keep": last} if "logits_to_keep" in signature(inner.forward).parameters else {}
    logits = model(input_ids=ids, use_cache=False, **kept).logits[0, -last:-1].float() / temperature
    logprobs: Tensor = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
    return logprobs


def answer_logprobs(
    trunk: Any,
    head: Any,
    prefix_ids: Sequence[int],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    pad_id: int,
    temperature: float = 1.0,
    *,
    merge: bool = True,
) -> tuple[Tensor, Tensor]:
    """log p of every answer token, (N, T) and its mask (N, T); answers end together, shorter ones start later.

    `pairs` holds, for each row, the rest of the prompt after the prefix and the answer's token ids. Answers to
    the same prompt attend to one computation of it; layers that are checkpointed keep no keys and values, so
    there, beyond a layer's window, and without `merge`, every row is computed whole. The distribution is
    softmax(logits / temperature), that of the sampler.
    The head is applied to answers only, and never to more of them at once than `LOGITS` allows.
    """
    longest = len(prefix_ids) + max(len(rest) + len(answer) for rest, answer in pairs)
    beyond = longest > window(trunk)  # then distances count, and they must not be counted over padding in a row
    if prefix_ids and not shareable_length(trunk, len(prefix_ids), longest):
        pairs, prefix_ids = [([*prefix_ids, *rest], answer) for rest, answer in pairs], []
    targets, answered = left_pad([answer for _, answer in pairs], 0, trunk.device)
    checkpointed = trunk.training and trunk.is_gradient_checkpointing
    prompts, row_of = distinct_rows([rest for rest, _ in pairs])
    if len(prompts) == len(pairs) or checkpointed or beyond or not merge:
        ids, mask = left_pad([[*rest, *answer][:-1] for rest, answer in pairs], pad_id, trunk.device)
        hidden = run(trunk, ids, mask, prefix_ids, compute_prefix(trunk, prefix_ids))[:, -targets.shape[1] :]
    else:
        hidden = _answer_after_prompt(trunk, prefix_ids, prompts, row_of, targets, answered, pad_id)
    is_answer = answered.bool()
    logprobs = token_logprobs(head, hidden[is_answer], targets[is_answer], temperature)
    return torch.zeros(targets.shape, device=trunk.device).masked_scatter(is_answer, logprobs), answered


def last_hidden(trunk: Any, prefix_ids: Sequence[int], rests: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """The last hidden state (N, D) at the end of each prompt; `rests` are what follows the prefix in each."""
    longest = len(prefix_ids) + max(map(len, rests))
    if prefix_ids and not shareable_length(trunk, len(prefix_ids), longest):
        rests, prefix_ids = [[*prefix_ids, *rest] for rest in rests], []
    ids, mask = left_pad(rests, pad_id, trunk.device)
    return run(trunk, ids, mask, prefix_ids, compute_prefix(trunk, prefix_ids))[:, -1]


def token_logprobs(head: Any, hidden_MD: Tensor, targets_M: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[target] (M), in parts, so that M x V logits never lie in memory at once.

    Where there are several parts their logits are computed again for the gradient instead of being kept.
    """
    rows = max(1, LOGITS // head.vocabulary)
    if len(hidden_MD) <= rows:
        return _part_logprobs(head, hidden_MD, targets_M, temperature)
    parts = [
        checkpoint(_part_logprobs, head, hidden, targets, temperature, use_reentrant=False)
        for hidden, targets in zip(torch.split(hidden_MD, rows), torch.split(targets_M, rows), strict=True)
    ]
    return torch.cat(parts)


def _part_logprobs(head: Any, hidden_MD: Tensor, targets_M: Tensor, temperature: float) -> Tensor:
    logits = head(hidden_MD[None])[0].float()
    if temperature != 1:  # the usual one would only copy them
        logits = logits / temperature
    logprobs: Tensor = logits.gather(1, targets_M[:, None])[:, 0] - logits.logsumexp(-1)
    return logprobs


def _answer_after_prompt(
    trunk: Any,
    prefix_ids: Sequence[int],
    prompts: Sequence[list[int]],
    row_of: Sequence[int],
    targets_NT: Tensor,
    answered_NT: Tensor,
    pad_id: int,
) -> Tensor:
    """Hidden states (N, T, width) that predict the answers' tokens: each prompt once, then all answers to it."""
    prefix, cache = compute_prefix(trunk, prefix_ids), DynamicCache()
    ids, mask = left_pad(prompts, pad_id, trunk.device)
    rows = torch.tensor(row_of, device=trunk.device)
    last = run(trunk, ids, mask, prefix_ids, prefix, cache)[:, -1:]
    first = taken(last, rows)  # predicts each answer's first token
    if targets_NT.shape[1] == 1:
        return first
    for layer in cache.layers:
        layer.keys, layer.values = taken(layer.keys, rows), taken(layer.values, rows)
    follows = answered_NT[:, :-1]
    given, seen = targets_NT[:, :-1].masked_fill(follows == 0, pad_id), torch.cat([mask[rows], follows], dim=1)
    later = run(trunk, given, seen, prefix_ids, prefix, cache)
    starts = answered_NT[:, 1:] > follows  # in these columns an answer begins after its padding
    later = torch.where(starts[:, :, None], first, later)
    return torch.cat([first, later], dim=1)


def taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows], whose gradient is summed in one order: on a CPU that of index_select, elsewhere of indexing."""
    return tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows]


def run(
    trunk: Any,
    ids: Tensor,
    mask: Tensor,
    prefix_ids: Sequence[int],
    prefix: dict[str, Prefix],
    cache: DynamicCache | None = None,
) -> Tensor:
    """The last hidden states (N, L, width) of ids (N, L); the mask (N, S) covers what the cache holds, too."""
    place = positions(mask, len(prefix_ids))[:, -ids.shape[1] :]
    hidden: Tensor = trunk(
        input_ids=ids,
        attention_mask=mask,
        position_ids=place,
        past_key_values=cache,
        use_cache=cache is not None,
        **prefix,
    ).last_hidden_state
    return hidden
