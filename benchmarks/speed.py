"""Where the time of an update goes, and what the shared prefix saves; everything side by side in one run.

    python benchmarks/speed.py --scenario frozen-lake --result runs/speed-frozen-lake.json
    python benchmarks/speed.py --base models/qwen --preset paper --peak-tflops 989 --result runs/qwen.json

Rollouts: the project's engine against transformers' `model.generate` on the full prompts of the very same
lock-step batches (the same weights, sampling settings and token limit). Update: forward and backward with the
shared prefix against the plain forward and backward over full prompts, the same turns in the same micro-batches.
Ratios are medians over rounds that alternate the two sides. The operations of an update are counted by torch
(`FlopCounterMode`); with the processor's peak given, its share is said.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from machine import facts, options, write
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from msgrpo.agent import Sampling
from msgrpo.games import get_scenario
from msgrpo.models.generation import Row
from msgrpo.models.local import LocalModel
from msgrpo.models.shared_prefix import evaluating, left_pad, trunk_and_head
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.evaluate import evaluate
from msgrpo.train.groups import Group, PerTurn
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rollouts import Players, Playing, RolloutSource
from msgrpo.train.update import MicroBatch, Picked, micro_batches, pick, update


def attention_flop(query: Any, key: Any, *rest: Any, **named: Any) -> int:
    """Two matrix products; torch's own count refuses fewer heads of keys than of queries."""
    n, heads, length, width = query
    return 4 * int(n * heads * length * key[2] * width)


def attention_backward_flop(grad: Any, query: Any, key: Any, *rest: Any, **named: Any) -> int:
    """Five matrix products."""
    return attention_flop(query, key) * 5 // 2


ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{part}"): count
    for kind in ("flash", "efficient", "cudnn")
    for part, count in (("", attention_flop), ("_backward", attention_backward_flop))
}


class Recorder:
    """Passes `answer_rows` calls on and keeps their prompts: the batches that rollouts really have."""

    def __init__(self, engine: LocalModel) -> None:
        self.batches: list[list[Row]] = []
        self._answer = engine.answer_rows
        engine.answer_rows = self  # type: ignore[method-assign, assignment]

    def __call__(self, rows: list[Row], *args: Any) -> None:
        self.batches.append([Row(row.prompt, row.seed, row.most) for row in rows])
        self._answer(rows, *args)

    def again(self, batches: list[list[Row]], sampling: Sampling) -> None:
        for batch in batches:
            self._answer([Row(row.prompt, row.seed, row.most) for row in batch], sampling)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def plain_generate(engine: LocalModel, batch: list[Row], config: TrainConfig) -> object:
    ids, mask = left_pad([row.prompt for row in batch], engine.pad_id, engine.model.device)
    # In training mode layers that are checkpointed drop their cache.
    with torch.inference_mode(), evaluating(engine.model):
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


def alternating(group: Group) -> PerTurn:
    return [[float((-1) ** j)] * len(turns) for j, turns in enumerate(group.turns)]


def forward_backward(policy: Policy, parts: list[MicroBatch], *, shared: bool) -> None:
    for part in parts:
        logprobs, mask = policy.logprobs(part.prefix, part.pairs) if shared else plain_logprobs(policy, part)
        (logprobs * part.advantages_NT).sum().div(mask.sum()).backward()  # type: ignore[no-untyped-call]
    policy.model.zero_grad()


def operations(policy: Policy, part: MicroBatch) -> int:
    """Floating-point operations of a micro-batch's forward and backward pass, recomputation included."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counted:
        forward_backward(policy, [part], shared=True)
    return int(counted.get_total_flops())


def main() -> None:
    parser = options(__doc__, result=True)
    parser.add_argument("--scenario", default="frozen-lake")
    parser.add_argument("--base", default="nano")
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, help="of the processor, dense, in the dtype of the weights")
    given = parser.parse_args()
    config = make_config(
        given.preset, settings=given.settings, given={"scenario": given.scenario, "base": given.base}
    )
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
        picked = pick(groups, config, learner) or [
            Picked(group, alternating(group), config.select.kept(group, learner)) for group in groups
        ]  # random weights: no group says anything
        samples = [lesson.sample for one in picked for lesson in one.lessons(config, policy.tokenizer)]
        parts = list(micro_batches(samples, config.micro_batch.tokens, policy.model.device, policy.longest_sharing))
        whole = timed(lambda: update(policy, optimizer, samples, config, learner.generator, step))
        reference = timed(lambda: [policy.reference_logprobs(part.prefix, part.pairs) for part in parts])
        batches = recorder.batches
        fast = timed(lambda: recorder.again(batches, config.sampling))
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
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    times["evaluation_s"].append(timed(lambda: evaluate(model, players)))
    result: dict[str, Any] = {
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
        "peak_gpu_gib": memory,
    }
    write(given.result, result)
    tflop = sum(operations(policy, part) for part in parts) / 1e12
    share = tflop / whole / given.peak_tflops if given.peak_tflops else None
    result["update"] |= {"tflop": tflop, "share_of_peak": share}
    write(given.result, result)
    print(json.dumps({key: result[key] for key in ("an_update", "rollout", "update")}, indent=2))


if __name__ == "__main__":
    main()
