"""A causal language model in this process (transformers, PEFT), answering waiting turns in lock-step batches."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from msgrpo.agent import Completion, OnText, Sampling
from msgrpo.errors import EndpointError, ModelError
from msgrpo.models.chat import ChatFormat
from msgrpo.models.sampler import sample, uniforms
from msgrpo.models.shared_prefix import (
    answer_logprobs,
    common_prefix_length,
    compute_prefix,
    distinct_rows,
    left_pad,
    new_cache,
    positions,
    select_rows,
    shareable_length,
)
from msgrpo.models.trunk import evaluating, trunk_and_head
from msgrpo.parse import action_span
from msgrpo.prompt import Prompt


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


@dataclass
class _Queue:
    waiting: list[_Waiting] = field(default_factory=list)
    flush: asyncio.Task[None] | None = None


class LocalModel:
    """Lθ over a transformers causal LM (an adapter may be inside).

    `complete` calls that wait at the same time, in one event loop, are answered as one batch; several loops take
    turns. Sampling is counter-based: the n-th token of a turn depends on the turn's seed and n alone, and how many
    there may be on its own prompt, never on what else is in the batch.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        chat: Mapping[str, Any] | None = None,
        max_batch: int = 512,
    ) -> None:
        self.name = name
        self.extra_settings: dict[str, Any] = {}  # what else a record says about the model
        self.model = model
        self.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer, chat)
        self.max_batch = max_batch
        self._queues: dict[asyncio.AbstractEventLoop, _Queue] = {}  # of each event loop that waits for answers
        self._lock = threading.Lock()
        self.stop_ids = stop_ids(model, tokenizer)
        self.pad_id = pad_id(model, tokenizer)

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
        queue = self._queues.setdefault(loop, _Queue())
        queue.waiting.append(waiting)
        if queue.flush is None or queue.flush.done():
            queue.flush = loop.create_task(self._answer(queue))
        return await waiting.answer

    async def close(self) -> None:
        """Wait until the turns of this event loop are answered."""
        queue = self._queues.pop(asyncio.get_running_loop(), None)
        if queue is not None and queue.flush is not None and not queue.flush.done():
            await asyncio.wait([queue.flush])

    async def _answer(self, queue: _Queue) -> None:
        """Answer what waits in one event loop: its futures may be completed from nowhere else."""
        await asyncio.sleep(0)  # let every coroutine that is ready add its turn
        while queue.waiting:
            batch = [w for w in queue.waiting if not w.answer.cancelled()]
            queue.waiting = []
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
                self._completed,
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
            if waiting.answer.done():
                continue
            if isinstance(completion, EndpointError):
                waiting.answer.set_exception(completion)
            else:
                waiting.answer.set_result(completion)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        actions: Sequence[tuple[str, ...]] | None = None,
    ) -> list[Completion]:
        """Answer prompts that share a prefix, as one batch.

        Raises EndpointError for a prompt that is longer than the model's context.
        """
        found = self._completed(prompts, sampling, seeds, actions=actions)
        for one in found:
            if isinstance(one, EndpointError):
                raise one
        return [one for one in found if isinstance(one, Completion)]

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer may have."""
        base, _ = trunk_and_head(self.model)
        return getattr(base.config, "max_position_embeddings", None) or sys.maxsize

    def _completed(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        actions: Sequence[tuple[str, ...]] | None = None,
        stream: Any = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> list[Completion | EndpointError]:
        """The answers in the order of the prompts; in the place of one that is too long, why there is none.

        `abandoned` is asked before every token: a person who leaves, or takes the seat over, does not wait for the
        rest of the answer.
        """
        rows, asked = self.chat.ids(prompts), actions or [()] * len(prompts)
        known = self.model.get_input_embeddings().weight.shape[0]
        if (largest := max(map(max, rows))) >= known:
            raise ModelError(f"the tokenizer of {self.name} gives token {largest}, the model knows {known} of them")
        fitting = [i for i, row in enumerate(rows) if len(row) < self.context]
        found: list[Completion | EndpointError] = [
            EndpointError(
                f"the prompt has {len(row)} tokens, the model's context {self.context}", kind="context_length"
            )
            for row in rows
        ]
        if fitting:
            told = None if stream is None else (lambda row, text: stream(fitting[row], text))
            answers = self._answered(
                [rows[i] for i in fitting],
                sampling,
                [seeds[i] for i in fitting],
                [asked[i] for i in fitting],
                told,
                abandoned,
            )
            for i, answer in zip(fitting, answers, strict=True):
                found[i] = answer
        return found

    def _answered(
        self,
        rows: list[list[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        actions: Sequence[tuple[str, ...]],
        stream: Any,
        abandoned: Callable[[], bool],
    ) -> list[Completion]:
        began = time.perf_counter()
        with self._lock, torch.inference_mode(), evaluating(self.model):
            generated = self._generate_ids(rows, sampling, seeds, stream, abandoned)
            probabilities = [
                self._action_probabilities(row, ids, asked) if asked else None
                for row, (ids, _), asked in zip(rows, generated, actions, strict=True)
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
                    model=self.name,
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
        room = [min(sampling.max_tokens, self.context - len(row)) for row in rows]  # of each answer
        longest = max(room)
        shared = shareable_length(base, common_prefix_length(distinct), max(map(len, rows)) + longest)
        ids, mask = left_pad([row[shared:] for row in distinct], self.pad_id, self.model.device)
        prefix = compute_prefix(base, rows[0][:shared])
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
            logits = head(hidden[:, None])[:, 0].float()
            if n == 0 and bool(logits.isnan().any()):
                raise ModelError(f"the model {self.name} answers with no numbers (NaN): its weights are damaged")
            tokens, logprobs = sample(logits, sampling, uniforms(seeds, n))
            for i, (token, logprob, going) in enumerate(
                zip(tokens.tolist(), logprobs.tolist(), alive.tolist(), strict=True)
            ):
                if going:
                    out[i][0].append(token)
                    out[i][1].append(logprob)
                    if stream is not None:
                        stream(i, self.tokenizer.decode(out[i][0], skip_special_tokens=True))
            full = torch.tensor([n + 1 >= most for most in room], device=self.model.device)
            alive = alive & ~torch.isin(tokens, stops) & ~full
            if not bool(alive.any()):
                break
            ids = tokens[:, None]
            place = (place[:, -1:] + 1).clamp(max=self.context - 1)  # rows that have ended go on beyond their room
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


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end an answer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)


def pad_id(model: Any, tokenizer: Any) -> int:
    """What fills a batch up; it is masked wherever it stands."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids(model, tokenizer)))
