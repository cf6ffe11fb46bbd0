"""Where the time of an update goes, and what the shared prefix saves; everything side by side in one run.

    python benchmarks/speed.py --scenario frozen-lake --result benchmarks/results/speed-frozen-lake.json

Rollouts: the project's engine against transformers' `model.generate` on the full prompts of the very same
lock-step batches (merged weights, the same sampling settings and token limit). Update: forward and backward
with the shared prefix against the plain forward and backward over full prompts, the same turns in the same
micro-batches. Ratios are medians over rounds that alternate the two sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import facts
from torch import Tensor

from msgrpo.agent import Completion
from msgrpo.games import get_scenario
from msgrpo.models.local import LocalModel
from msgrpo.models.shared_prefix import left_pad
from msgrpo.models.trunk import trunk_and_head
from msgrpo.prompt import Prompt
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.evaluate import evaluate
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rollouts import Players, Playing, RolloutSource
from msgrpo.train.update import MicroBatch, micro_batches, pick, update


class Recorder:
    """Passes `generate` calls on and keeps their prompts: the batches that rollouts really have."""

    def __init__(self, engine: LocalModel) -> None:
        self.batches: list[list[Prompt]] = []
        self._generate = engine.generate
        engine.generate = self  # type: ignore[method-assign, assignment]

    def __call__(self, prompts: list[Prompt], *args: Any, **kwargs: Any) -> list[Completion]:
        self.batches.append(list(prompts))
        return self._generate(prompts, *args, **kwargs)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def plain_generate(engine: LocalModel, prompts: list[Prompt], config: TrainConfig) -> object:
    ids, mask = left_pad(engine.chat.ids(prompts), engine.pad_id, engine.model.device)
    with torch.inference_mode():
        return engine.model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=config.temperature, top_k=0, top_p=1.0,
            max_new_tokens=config.max_tokens, eos_token_id=sorted(engine.stop_ids), pad_token_id=engine.pad_id,
        )  # fmt: skip


def plain_logprobs(policy: Policy, part: MicroBatch) -> tuple[Tensor, Tensor]:
    """The forward pass over the full prompts, each row for itself, with transformers' own attention."""
    trunk, head = trunk_and_head(policy.model)
    rows = [[*part.prefix, *rest, *answer][:-1] for rest, answer in part.pairs]
    ids, mask = left_pad(rows, policy.pad_id, policy.model.device)
    targets, answered = left_pad([answer for _, answer in part.pairs], 0, policy.model.device)
    hidden = trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -targets.shape[1] :]
    logprobs = (head(hidden).float() / policy.temperature).log_softmax(-1)
    return torch.gather(logprobs, 2, targets[:, :, None])[:, :, 0] * answered, answered


def forward_backward(policy: Policy, parts: list[MicroBatch], *, shared: bool) -> None:
    for part in parts:
        logprobs, mask = policy.logprobs(part.prefix, part.pairs) if shared else plain_logprobs(policy, part)
        (logprobs * part.advantages_NT).sum().div(mask.sum()).backward()
    policy.model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    config = make_config(given.preset, settings=given.settings, given={"scenario": given.scenario})
    config = config.model_copy(update={"learning_rate": 1e-12})  # the same policy in every round
    scenario, policy = get_scenario(config.scenario), Policy(config)
    model = HfEngine(policy, scenario, config).load(0)
    recorder = Recorder(model)
    optimizer = torch.optim.AdamW(policy.parameters)
    learner, players = Learner(policy, ALONE, torch.Generator().manual_seed(0)), Players(config)

    first = 0
    times: dict[str, list[float]] = {"rollout_s": [], "update_s": [], "reference_s": [], "evaluation_s": []}
    rates: dict[str, list[float]] = {"turns": [], "new_tokens": [], "update_tokens": []}
    generate_s, shared_generate_s, update_shared_s, update_plain_s = [], [], [], []
    for step in range(given.rounds + 1):
        recorder.batches = []
        began = time.perf_counter()
        starts, first = RolloutSource(players).next_starts(first)
        playing = Playing(players, step, model, config.sampling, starts)
        episodes = asyncio.run(playing.play())
        groups = playing.groups(episodes)
        rollout = time.perf_counter() - began
        picked = pick(groups, config, learner)
        samples = [sample for one in picked for sample in one.samples(config, policy.tokenizer)]
        parts = list(micro_batches(samples, config.micro_batch_tokens, policy.model.device))
        whole = timed(lambda: update(policy, optimizer, samples, config, learner.generator, step))
        reference = timed(lambda: [policy.reference_logprobs(part.prefix, part.pairs) for part in parts])
        batches = recorder.batches
        fast = timed(lambda: [recorder._generate(b, config.sampling, range(len(b))) for b in batches])
        plain = timed(lambda: [plain_generate(model, b, config) for b in batches])
        shared = timed(lambda: forward_backward(policy, parts, shared=True))
        full = timed(lambda: forward_backward(policy, parts, shared=False))
        if step == 0:
            continue  # warm-up
        for name, value in (("rollout_s", rollout), ("update_s", whole), ("reference_s", reference)):
            times[name].append(value)
        turns = [turn for episode in episodes for turn in episode.turns]
        rates["turns"].append(len(turns) / rollout)
        rates["new_tokens"].append(sum(turn.completion_tokens for turn in turns) / rollout)
        rates["update_tokens"].append(sum(sample.tokens for sample in samples) / whole)
        shared_generate_s.append(fast)
        generate_s.append(plain)
        update_shared_s.append(shared)
        update_plain_s.append(full)
    times["evaluation_s"].append(timed(lambda: evaluate(model, players)))
    result = {
        "machine": facts() | {"threads": torch.get_num_threads()},
        "config": config.model_dump(),
        "an_update": {name: median(values) for name, values in times.items()},
        "rollout": {
            "turns_per_second": median(rates["turns"]),
            "new_tokens_per_second": median(rates["new_tokens"]),
            "over_generate": median(a / b for a, b in zip(generate_s, shared_generate_s, strict=True)),
        },
        "update": {
            "prompt_and_answer_tokens_per_second": median(rates["update_tokens"]),
            "over_plain": median(a / b for a, b in zip(update_plain_s, update_shared_s, strict=True)),
        },
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }
    given.result.parent.mkdir(parents=True, exist_ok=True)
    given.result.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("an_update", "rollout", "update")}, indent=2))


if __name__ == "__main__":
    main()
