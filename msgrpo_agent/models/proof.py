"""The proof at load time that a causal LM's trunk and head, put together as we do, compute what the model does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msgrpo.errors import ModelError
from msgrpo.models.shared_prefix import answer_logprobs, evaluating, plain_logprobs, share_prefixes, trunk_and_head

# Mean difference in log-probability, ours from the model's own: rounding is below, any other arithmetic is above.
AGREES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_PREFIX, _RESTS, _ANSWERS = 8, (2, 5, 9), (6, 3, 4)  # lengths of the probe's rows: padded on every side


def prepare(model: Any, name: str) -> None:
    """Let the model share prefixes if it then computes what it did before; raise ModelError if it cannot be used.

    Decided by the loaded model, not by its name: a probe of padded rows that share a prefix goes through the model's
    own forward, row by row, and through ours. Where they disagree, the model keeps its own attention and every row
    is computed whole; where they still disagree, training would compute something else than the model does.
    """
    own = model.config._attn_implementation
    with torch.no_grad(), evaluating(model):
        rows = _probe_rows(model)
        truth = _own_logprobs(model, rows)
        share_prefixes(model)
        gap = _gap(model, rows, truth)
        if gap <= AGREES[model.dtype]:
            return
        model.set_attn_implementation(own)
        gap = _gap(model, rows, truth)
    if not gap <= AGREES[model.dtype]:
        raise ModelError(
            f"{name} ({model.config.model_type}) cannot be used: log-probabilities of padded rows differ from those "
            f"of its own forward by {gap:.3g} nats on average",
            fix="use a causal transformer (attention in every layer) that transformers runs in padded batches",
        )


def _probe_rows(model: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids; all prompts begin alike."""
    known = model.get_input_embeddings().num_embeddings
    ids = [3 + (i * i * 7 + 5 * i) % max(1, known - 3) for i in range(200)]
    head, rows, at = ids[:_PREFIX], [], _PREFIX
    for rest, answer in zip(_RESTS, _ANSWERS, strict=True):
        rows.append((head + ids[at : at + rest], ids[at + rest : at + rest + answer]))
        at += rest + answer
    rows.append((rows[0][0], ids[at : at + 5]))  # two answers to one prompt: it is computed once, and kept in a cache
    return rows


def _own_logprobs(model: Any, rows: list[tuple[list[int], list[int]]]) -> Tensor:
    """log p of every answer token, one after another, by `model(ids).logits` of each row alone."""
    return torch.cat([plain_logprobs(model, prompt, answer) for prompt, answer in rows])


def _gap(model: Any, rows: list[tuple[list[int], list[int]]], truth: Tensor) -> float:
    """The mean difference of ours from the truth; infinite where ours cannot be computed at all."""
    trunk, head = trunk_and_head(model)
    pairs = [(prompt[_PREFIX:], answer) for prompt, answer in rows]
    try:
        ours, mask = answer_logprobs(trunk, head, rows[0][0][:_PREFIX], pairs, pad_id=0)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return float("inf")  # recurrent layers and the like take none of this
    return float((ours[mask.bool()].cpu() - truth).abs().mean())
