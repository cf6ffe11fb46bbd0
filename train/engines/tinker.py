"""Rollouts by a service that speaks Tinker's protocol; each version is proved before it plays (`contract.py`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import torch

from msgrpo.agent import Completion, OnText, Sampling
from msgrpo.errors import RunError
from msgrpo.loops import run_async
from msgrpo.prompt import ChatFormat, Prompt
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines.contract import MOST_APART, ROWS, SEEDS, TOKENS, canary_prompts, canary_sampling
from msgrpo.train.tinker.service import Service, TrainingRow

BOUND = MOST_APART[torch.bfloat16]  # nobody says in what a service computes


class TinkerModel:
    """Lθ of one version."""

    def __init__(self, name: str, service: Service, sampler: Any, tokenizer: Any, chat: ChatFormat) -> None:
        self.name = name
        self.extra_settings: dict[str, Any] = {}
        self.sampler = sampler
        self._service, self._tokenizer, self._chat = service, tokenizer, chat
        self._stop_ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Completion:
        """The service's answer. Raises RunError where there is none: no turn is ever made up."""
        prompt_ids = self._chat.ids([prompt])[0]
        began = time.perf_counter()
        ids, logprobs, reason = await self._service.sample(self.sampler, prompt_ids, sampling, seed, self._stop_ids)
        known = len(self._tokenizer)
        if max(ids) >= known:
            raise RunError(
                f"the service's answer has token {max(ids)}, and the tokenizer {known}: it has another one",
                fix="give --base the folder of the very model that the service has",
            )
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        if on_text is not None:
            on_text(text)
        return Completion(
            text=text,
            finish_reason="stop" if reason == "stop" else "length",
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(ids),
            latency_s=time.perf_counter() - began,
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            model=self.name,
        )

    async def close(self) -> None:
        """The session is the engine's."""


class TinkerEngine:
    """Publishes the weights for each version and plays with them."""

    def __init__(self, service: Service, tokenizer: Any, config: TrainConfig) -> None:
        self._service, self._tokenizer = service, tokenizer
        self._prompts = canary_prompts(config.scenarios[0])
        self._sampling = canary_sampling(config.temperature)
        self._chat = ChatFormat(tokenizer, config.chat)
        read = sum(map(len, self._chat.ids(self._prompts)))
        whole = read + ROWS * TOKENS
        service.proof = {"prefill": read + 2 * whole, "sample": ROWS * (TOKENS + 2), "train": whole}
        self._before: tuple[TinkerModel, int] | None = None  # the last version, and the steps it has

    def load(self, version: int) -> TinkerModel:
        name = f"policy-v{version:06d}"
        model = TinkerModel(name, self._service, self._service.sampler(), self._tokenizer, self._chat)
        self._prove(model)
        self._before = model, self._service.steps
        return model

    def _prove(self, model: TinkerModel) -> None:
        """Compare three computations of the same answers: sampling them, reading them, and the trainer's own.

        Raises RunError where two are too far apart, and where the sampler reads exactly what the version before did
        although steps were taken in between.
        """
        answers = run_async(self._answers(model))
        turns = [TrainingRow(answer.prompt_ids, answer.token_ids) for answer in answers]
        read = run_async(self._read(model, turns))
        trained = [value for values in self._service.forward(turns) for value in values]
        sampled = [value for answer in answers for value in answer.logprobs]
        for what, values in (("reading its own answers", sampled), ("the weights that are trained", trained)):
            apart = sum(abs(a - b) for a, b in zip(read, values, strict=True)) / len(read)
            if not apart <= BOUND:
                raise RunError(
                    f"the service at {self._service.host} samples {model.name} and {what} differ by {apart:.3g} nats "
                    f"a token on average (bound {BOUND:g}): rollouts would come from other weights than those "
                    "being trained",
                    fix="the last checkpoint is kept; unpublished weights do this, or another temperature",
                )
        before, steps = self._before or (model, self._service.steps)
        if steps != self._service.steps and run_async(self._read(before, turns)) == read:
            raise RunError(
                f"the service at {self._service.host} plays {model.name} with the weights of the version before: "
                "their log-probabilities are equal to the last digit",
                fix="the last checkpoint is kept; the service did not publish the update",
            )

    async def _answers(self, model: TinkerModel) -> list[Completion]:
        asked = zip(self._prompts, SEEDS, strict=True)
        return await asyncio.gather(*(model.complete(prompt, self._sampling, seed) for prompt, seed in asked))

    async def _read(self, model: TinkerModel, turns: Sequence[TrainingRow]) -> list[float]:
        """log p of all tokens of the answers, one after another."""
        by_turn = await asyncio.gather(*(self._service.logprobs(model.sampler, turn) for turn in turns))
        return [value for values in by_turn for value in values]

    def close(self) -> None:
        self._service.close()
