"""One update: passes over the kept turns, in minibatches of micro-batches, and the learning rate of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grad_norm_

from msgrpo_agent.errors import RunError
from train.batch import Sample, micro_batches, minibatches
from train.config import TrainConfig
from train.msgrpo import policy_loss
from train.policy import Policy

WARM_UP = 5  # updates over which the learning rate rises to its value


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: TrainConfig,
    generator: torch.Generator,
    step: int,
) -> dict[str, float]:
    """Passes over the kept turns: for each minibatch, accumulate the gradient of `policy_loss` and step once."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    totals: dict[str, float] = {"loss": 0.0, "kl": 0.0, "clip_share": 0.0, "ratio": 0.0, "grad_norm": 0.0}
    steps = 0
    for _ in range(config.epochs if samples else 0):
        for part in minibatches(samples, config.minibatches, generator):
            optimizer.zero_grad()
            for name, value in _accumulate(policy, part, config).items():
                totals[name] += value
            totals["grad_norm"] += float(clip_grad_norm_(policy.parameters, config.max_grad_norm))
            if not math.isfinite(totals["loss"] + totals["grad_norm"]):
                raise RunError(
                    f"the loss is not finite in update {step + 1}: {totals['loss']}, gradient {totals['grad_norm']}",
                    fix="the last checkpoint is kept; try a smaller --set learning_rate=…",
                )
            optimizer.step()
            steps += 1
    return {name: value / max(steps, 1) for name, value in totals.items()} | {"kept_turns": float(len(samples))}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Up over the first updates, constant to the middle of the run, then down in a line to a twentieth.

    A run that is resumed with more steps goes on by the schedule of the longer run.
    """
    return config.learning_rate * min(1.0, (step + 1) / WARM_UP, max(0.05, 2 * (1 - step / config.steps)))


def _accumulate(policy: Policy, part: Sequence[Sample], config: TrainConfig) -> dict[str, float]:
    """Backward through one minibatch in micro-batches; the sum of their weighted losses is the minibatch's."""
    device = policy.model.device
    tokens = sum(len(sample.answer_ids) for sample in part)
    totals: dict[str, float] = {"loss": 0.0, "kl": 0.0, "clip_share": 0.0, "ratio": 0.0}
    for micro in micro_batches(part, config.micro_batch_tokens, device):
        in_micro = sum(len(answer) for _, answer in micro.pairs)
        weight = in_micro / tokens if config.aggregate == "token" else len(micro.pairs) / len(part)
        reference = policy.reference_logprobs(micro.prefix, micro.pairs) if config.kl_coef else None
        logprobs, mask = policy.logprobs(micro.prefix, micro.pairs)
        loss, stats = policy_loss(
            logprobs,
            micro.old_logprobs_NT,
            logprobs.detach() if reference is None else reference,
            micro.advantages_N,
            mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            aggregate=config.aggregate,
        )
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        totals["loss"] += float(loss.detach()) * weight
        for name, value in stats.items():
            totals[name] += float(value) * in_micro / tokens
    return totals
