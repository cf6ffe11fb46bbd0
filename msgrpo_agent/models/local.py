"""A causal language model in this process (transformers, PEFT), answering waiting turns in lock-step batches."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msgrpo_agent.agent import Completion, OnText, Sampling
from msgrpo_agent.errors import ModelError
from msgrpo_agent.models.shared_prefix import (
    answer_logprobs,
    common_prefix_length,
    compute_prefix,
    distinct_rows,
    left_pad,
    new_cache,
    positions,
    select_rows,
    share_prefixes,
)
from msgrpo_agent.parse import action_span
from msgrpo_agent.prompt import Prompt

_MARK = "\u241fcontent\u241f"


class ChatFormat:
    """Prompt → token ids through the tokenizer's chat template, which is rendered once, not every turn."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template",
                fix="use an instruction-tuned model",
            )
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
        self._head, _, self._tail = rendered.partition(_MARK)

    def ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        texts = [self._head + p.prefix + p.state + self._tail for p in prompts]
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return encoded


class _AbandonedError(Exception):
    """Nobody waits for what is being generated any more."""


@dataclass
class _Waiting:
    prompt: Prompt
    sampling: Sampling
    seed: int
    actions: tuple[str, ...]
    on_text: OnText | None
    answer: asyncio.Future[Completion]


class LocalModel:
    """Lθ over a transformers causal LM (an adapter may be inside).

    `complete` calls that wait at the same time are answered as one batch. Sampling is counter-based: the n-th
    token of a turn depends on the turn's seed and n alone, never on what else is in the batch.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, *, max_batch: int = 512) -> None:
        self.name = name
        self.extra_settings: dict[str, Any] = {}  # what else a record says about the model
        share_prefixes(model)
        self.model = model
        self.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer)
        self.max_batch = max_batch
        self._waiting: list[_Waiting] = []
        self._flush: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self.stop_ids = _stop_ids(model, tokenizer)
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.stop_ids)

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Completion:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(prompt, sampling, seed, tuple(actions), on_text, loop.create_future())
        self._waiting.append(waiting)
        if self._flush is None or self._flush.done():
            self._flush = loop.create_task(self._answer_waiting())
        return await waiting.answer

    async def close(self) -> None:
        if self._flush is not None and not self._flush.done():
            await asyncio.wait([self._flush])

    async def _answer_waiting(self) -> None:
        await asyncio.sleep(0)  # let every coroutine that is ready add its turn
        while self._waiting:
            batch = [w for w in self._waiting if not w.answer.cancelled()]
            self._waiting = []
            groups: dict[tuple[str, Sampling], list[_Waiting]] = defaultdict(list)
            for waiting in batch:
                groups[waiting.prompt.prefix, waiting.sampling].append(waiting)
            for (_, sampling), group in groups.items():
                for i in range(0, len(group), self.max_batch):
                    await self._answer_group(group[i : i + self.max_batch], sampling)
            await asyncio.sleep(0)

    async def _answer_group(self, group: list[_Waiting], sampling: Sampling) -> None:
        loop = asyncio.get_running_loop()

        def stream(row: int, text: str) -> None:
            hook = group[row].on_text
            if hook is not None:
                loop.call_soon_threadsafe(hook, text)

        try:
            completions = await asyncio.to_thread(
                self.generate,
                [w.prompt for w in group],
                sampling,
                [w.seed for w in group],
                actions=[w.actions for w in group],
                stream=stream if any(w.on_text for w in group) else None,
                abandoned=lambda: all(w.answer.cancelled() for w in group),
            )
        except Exception as error:
            for waiting in group:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        for waiting, completion in zip(group, completions, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(completion)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        actions: Sequence[tuple[str, ...]] | None = None,
        stream: Any = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Answer prompts that share a prefix, as one batch. `abandoned` is asked before every token: a person who
        leaves, or takes the seat over, does not wait for the rest of the answer."""
        began = time.perf_counter()
        rows = self.chat.ids(prompts)
        with self._lock, torch.inference_mode(), evaluating(self.model):
            generated = self._generate_ids(rows, sampling, seeds, stream, abandoned)
            probabilities = [
                self._action_probabilities(row, ids, asked) if asked else None
                for row, (ids, _), asked in zip(rows, generated, actions or [()] * len(rows), strict=True)
            ]
        elapsed = time.perf_counter() - began
        completions = []
        for row, (ids, logprobs), known in zip(rows, generated, probabilities, strict=True):
            stopped = bool(ids) and ids[-1] in self.stop_ids
            completions.append(
                Completion(
                    text=self.tokenizer.decode(ids, skip_special_tokens=True),
                    finish_reason="stop" if stopped else "length",
                    prompt_tokens=len(row),
                    completion_tokens=len(ids),
                    latency_s=elapsed,
                    action_probabilities=known,
                    prompt_ids=tuple(row),
                    token_ids=tuple(ids),
                    logprobs=tuple(logprobs),
                )
            )
        return completions

    def _generate_ids(
        self,
        rows: list[list[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        stream: Any,
        abandoned: Callable[[], bool],
    ) -> list[tuple[list[int], list[float]]]:
        base, head = trunk_and_head(self.model)
        distinct, row_of = distinct_rows(rows)
        shared = common_prefix_length(distinct)
        ids, mask = left_pad([row[shared:] for row in distinct], self.pad_id, self.model.device)
        prefix = compute_prefix(base, rows[0][:shared])
        context = getattr(base.config, "max_position_embeddings", None) or sys.maxsize
        longest = max(1, min(sampling.max_tokens, context - max(map(len, rows))))
        cache = new_cache(base.config.num_hidden_layers, room=ids.shape[1] + longest)
        place = positions(mask, shared)
        out: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
        alive = torch.ones(len(rows), dtype=torch.bool, device=self.model.device)
        stops = torch.tensor(sorted(self.stop_ids), device=self.model.device)
        for n in range(longest):
            if abandoned():
                raise _AbandonedError
            hidden = base(
                input_ids=ids,
                attention_mask=mask,
                position_ids=place,
                past_key_values=cache,
                use_cache=True,
                **prefix,
            ).last_hidden_state[:, -1]
            if n == 0 and len(distinct) < len(rows):  # from here on equal prompts get different answers
                repeat = torch.tensor(row_of, device=self.model.device)
                select_rows(cache, repeat)
                hidden, place, mask = hidden[repeat], place[repeat], mask[repeat]
            tokens, logprobs = sample(head(hidden).float(), sampling, uniforms(seeds, n))
            for i, (token, logprob, going) in enumerate(
                zip(tokens.tolist(), logprobs.tolist(), alive.tolist(), strict=True)
            ):
                if going:
                    out[i][0].append(token)
                    out[i][1].append(logprob)
                    if stream is not None:
                        stream(i, self.tokenizer.decode(out[i][0], skip_special_tokens=True))
            alive = alive & ~torch.isin(tokens, stops)
            if not bool(alive.any()):
                break
            ids = tokens[:, None]
            place = place[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        return out

    def _action_probabilities(
        self, prompt_ids: list[int], answer_ids: list[int], actions: tuple[str, ...]
    ) -> dict[str, float] | None:
        """P(action | prompt, the answer up to its last action tag), over the legal actions; None without a tag.

        All actions go through the model as one batch, after the prompt and the words that they share; the head, as
        wide as the vocabulary, sees nothing but the few tokens in which the actions differ.
        """
        text = self.tokenizer.decode(answer_ids, skip_special_tokens=True)
        span = action_span(text)
        if span is None:
            return None
        before, after = text[: span[0]], text[span[1] : span[1] + len("</action>")]
        rows = [
            prompt_ids + self.tokenizer(before + action + after, add_special_tokens=False)["input_ids"]
            for action in actions
        ]
        shared = common_prefix_length(rows)
        trunk, head = trunk_and_head(self.model)
        pairs = [(row[shared - 1 : shared], row[shared:]) for row in rows]
        logprobs, _ = answer_logprobs(trunk, head, rows[0][: shared - 1], pairs, self.pad_id)
        return dict(zip(actions, logprobs.sum(1).softmax(0).tolist(), strict=True))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for as long: a model in training mode with checkpointed layers keeps no cache."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


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


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)


def trunk_and_head(model: Any) -> tuple[Any, Any]:
    """The transformer without its head, and the head; an adapter's layers inside stay active."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return inner.base_model, inner.get_output_embeddings()
