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

from msgrpo.agent import Completion, OnText, Sampling, action_span
from msgrpo.errors import EndpointError, ModelError
from msgrpo.models.generation import Batch, Row, answer, parts_of
from msgrpo.models.shared_prefix import evaluating, trunk_and_head
from msgrpo.prompt import ChatFormat, Prompt


@dataclass
class _Waiting:
    model: LocalModel
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
        # Of each event loop that waits for answers. Models that have the same ones answer in turn, in rounds:
        # `agent.answer_in_turn`.
        self.queues: dict[asyncio.AbstractEventLoop, _Queue] = {}
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
        waiting = _Waiting(self, prompt, sampling, seed, tuple(actions), on_text, loop.create_future())
        queue = self.queues.setdefault(loop, _Queue())
        queue.waiting.append(waiting)
        if queue.flush is None or queue.flush.done():
            queue.flush = loop.create_task(_answer(queue))
        return await waiting.answer

    async def close(self) -> None:
        """Wait until the turns of this event loop are answered."""
        queue = self.queues.pop(asyncio.get_running_loop(), None)
        if queue is not None and queue.flush is not None and not queue.flush.done():
            await asyncio.wait([queue.flush])

    async def _answered(self, group: list[_Waiting], sampling: Sampling) -> Sequence[Completion | Exception]:
        """The answers to one batch, in a thread; where there is none, why."""
        loop = asyncio.get_running_loop()

        def in_loop(hook: OnText) -> OnText:
            def call(text: str) -> None:
                loop.call_soon_threadsafe(hook, text)

            return call

        try:
            return await asyncio.to_thread(
                self._completed,
                [w.prompt for w in group],
                sampling,
                [w.seed for w in group],
                actions=[w.actions for w in group],
                on_text=[w.on_text and in_loop(w.on_text) for w in group],
                abandoned=lambda: all(w.answer.cancelled() for w in group),
            )
        except Exception as error:
            return [error] * len(group)

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
        completions = self._completed(prompts, sampling, seeds, actions=actions)
        for completion in completions:
            if isinstance(completion, EndpointError):
                raise completion
        return [completion for completion in completions if isinstance(completion, Completion)]

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
        on_text: Sequence[OnText | None] | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> list[Completion | EndpointError]:
        """The answers in the order of the prompts; in the place of one that is too long, why there is none.

        `abandoned` is asked before every token: a person who leaves, or takes the seat over, does not wait for the
        rest of the answer.
        """
        ids, context = self.chat.ids(prompts), self.context
        known = self.model.get_input_embeddings().weight.shape[0]
        if (largest := max(map(max, ids))) >= known:
            raise ModelError(f"the tokenizer of {self.name} gives token {largest}, the model knows {known} of them")
        rows = [
            Row(prompt, seed, min(sampling.max_tokens, context - len(prompt)), asked, hook)
            for prompt, seed, asked, hook in zip(
                ids, seeds, actions or [()] * len(ids), on_text or [None] * len(ids), strict=True
            )
        ]
        began = time.perf_counter()
        self.answer_rows([row for row in rows if row.most > 0], sampling, abandoned)
        elapsed = time.perf_counter() - began
        return [self._completion(row, elapsed) if row.most > 0 else _too_long(row, context) for row in rows]

    def answer_rows(self, rows: list[Row], sampling: Sampling, abandoned: Callable[[], bool] = lambda: False) -> None:
        """Write the rows' answers, and the probabilities of the actions that they name."""
        if not rows:
            return
        with self._lock, torch.inference_mode(), evaluating(self.model):
            for part in parts_of(trunk_and_head(self.model)[0], rows):
                self._answer_part(part, sampling, abandoned)

    def _answer_part(self, rows: list[Row], sampling: Sampling, abandoned: Callable[[], bool]) -> None:
        """Answer the rows as one batch, whose keys and values are gone when this returns."""
        batch = Batch(*trunk_and_head(self.model), rows, self.pad_id)
        if bool(batch.logits.isnan().any()):
            raise ModelError(f"the model {self.name} answers with no numbers (NaN): its weights are damaged")
        answer(batch, sampling, self.stop_ids, self._say, self._compare_actions, abandoned)

    def _completion(self, row: Row, elapsed_s: float) -> Completion:
        return Completion(
            text=self._text(row),
            finish_reason="stop" if row.tokens[-1] in self.stop_ids else "length",
            prompt_tokens=len(row.prompt),
            completion_tokens=len(row.tokens),
            latency_s=elapsed_s,
            action_probabilities=row.action_probabilities,
            prompt_ids=tuple(row.prompt),
            token_ids=tuple(row.tokens),
            logprobs=tuple(row.logprobs),
            model=self.name,
        )

    def _say(self, row: Row) -> None:
        if row.on_text is not None:
            row.on_text(self._text(row))

    def _text(self, row: Row) -> str:
        text: str = self.tokenizer.decode(row.tokens, skip_special_tokens=True)
        return text

    def _compare_actions(self, batch: Batch, places: list[int]) -> None:
        """P(action | prompt, the answer up to its last action tag) over a row's actions; none without a tag.

        All actions of all rows that have just ended go through the model as one batch, after the keys and values
        that are there; the head, as wide as the vocabulary, sees nothing but the few tokens in which they differ.
        """
        texts = {place: self._with_actions(batch.rows[place]) for place in places}
        asked = {place: found for place, found in texts.items() if found}
        for place, logprobs in (batch.logprobs_of(asked) if asked else {}).items():
            row = batch.rows[place]
            shares = torch.tensor(logprobs).softmax(0).tolist()
            row.action_probabilities = dict(zip(row.actions, shares, strict=True))

    def _with_actions(self, row: Row) -> list[list[int]]:
        """The row's token ids up to its last action tag, once with each of the actions in it; empty without one."""
        text = self._text(row) if row.actions else ""
        if not row.actions or (span := action_span(text)) is None:
            return []
        before, after = text[: span[0]], text[span[1] : span[1] + len("</action>")]
        answers = self.tokenizer([before + action + after for action in row.actions], add_special_tokens=False)
        return [row.prompt + ids for ids in answers["input_ids"]]


async def _answer(queue: _Queue) -> None:
    """Answer what waits in one event loop: its futures may be completed from nowhere else.

    All answers of a round are given at its end. So which turns wait together, and with them the rounding of their
    batches, depends on no clock.
    """
    await asyncio.sleep(0)  # let every coroutine that is ready add its turn
    while queue.waiting:
        batch = [w for w in queue.waiting if not w.answer.cancelled()]
        queue.waiting = []
        groups: dict[tuple[LocalModel, str, Sampling], list[_Waiting]] = defaultdict(list)
        for waiting in batch:
            groups[waiting.model, waiting.prompt.prefix, waiting.sampling].append(waiting)
        answered: list[tuple[_Waiting, Completion | Exception]] = []
        for (model, _, sampling), group in groups.items():
            for i in range(0, len(group), model.max_batch):
                part = group[i : i + model.max_batch]
                answered += zip(part, await model._answered(part, sampling), strict=True)
        for waiting, outcome in answered:
            if waiting.answer.done():
                continue
            if isinstance(outcome, Exception):
                waiting.answer.set_exception(outcome)
            else:
                waiting.answer.set_result(outcome)
        await asyncio.sleep(0)


def _too_long(row: Row, context: int) -> EndpointError:
    return EndpointError(
        f"the prompt has {len(row.prompt)} tokens, the model's context {context}", kind="context_length"
    )


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end an answer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*listed, tokenizer.eos_token_id] if i is not None)


def pad_id(model: Any, tokenizer: Any) -> int:
    """What fills a batch up; it is masked wherever it stands."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids(model, tokenizer)))
