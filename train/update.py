"""One update: a pass over the kept turns, in minibatches of micro-batches, and the learning rate of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn.utils import clip_grad_norm_

from msgrpo.errors import RunError
from msgrpo.train.config import TrainConfig
from msgrpo.train.groups import Sample, micro_batches, minibatches
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE, Ranks

WARM_UP = 5  # updates over which the learning rate rises to its value
MAX_GRAD_NORM = 0.2  # a rare k3 spike must not steer AdamW for long
SUMS = ("loss", "kl", "clip_share", "ratio", "mismatch")
# Nats a token, engine from trainer, on fresh rollouts: bfloat16 kernels differ by some hundredths, float32 by 1e-6.
MISMATCH = {torch.float32: 1e-3, torch.bfloat16: 0.15}
Done = Callable[[int], None]  # minibatches done


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: TrainConfig,
    generator: torch.Generator,
    step: int,
    ranks: Ranks = ALONE,
    done: Done = lambda minibatch: None,
) -> dict[str, float]:
    """A pass over the kept turns: for each minibatch, accumulate the gradient of the loss and step once.

    Of several ranks each computes its share of every minibatch; the gradients are summed, so all take the same step.
    The first minibatch is computed with the very weights that the newest rollouts were sampled with: there, how far
    the trainer's log-probabilities are from the engine's is a property of the two programs (`engine/mismatch_…`).
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    totals = dict.fromkeys((*SUMS, "grad_norm"), 0.0)
    mismatch: dict[str, float] = {}
    steps = 0
    for part in minibatches(samples, config.minibatches, generator) if samples else ():
        optimizer.zero_grad()
        sums, furthest = _joined(ranks.gather([_accumulate(policy, part, ranks.share(part), config)]))
        ranks.sum_gradients(policy.parameters)
        mismatch = mismatch or {"engine/mismatch_max": furthest, "engine/mismatch_mean": sums["mismatch"]}
        totals = {name: value + sums.get(name, 0.0) for name, value in totals.items()}
        totals["grad_norm"] += float(clip_grad_norm_(policy.parameters, MAX_GRAD_NORM))
        if not math.isfinite(totals["loss"] + totals["grad_norm"]):
            raise RunError(
                f"the loss is not finite in update {step + 1}: {totals['loss']}, gradient {totals['grad_norm']}",
                fix='checkpoints from before are kept; try a smaller --set learning_rate=… or loss="clip(kl=…)"',
            )
        optimizer.step()
        steps += 1
        done(steps)
    means = {f"update/{name}": value / max(steps, 1) for name, value in totals.items() if name != "mismatch"}
    return means | mismatch | {"update/kept_turns": float(len(samples))}


def check_mismatch(stats: dict[str, float], staleness: int, dtype: torch.dtype) -> None:
    """Raise RunError where fresh rollouts were sampled from another distribution than the trainer's."""
    mean, bound = stats.get("engine/mismatch_mean", 0.0), MISMATCH[dtype]
    if staleness == 0 and not mean <= bound:
        raise RunError(
            f"engine and trainer differ by {mean:.3g} nats a token on average (bound {bound:g}; largest "
            f"{stats['engine/mismatch_max']:.3g}): the rollouts came from other weights or another computation",
            fix="the last checkpoint is kept; check that the servers have this base, in the trainer's dtype",
        )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Up over the first updates, constant to the middle of the run, then down in a line to a twentieth.

    A run that is resumed with more steps goes on by the schedule of the longer run.
    """
    return config.learning_rate * min(1.0, (step + 1) / WARM_UP, max(0.05, 2 * (1 - step / config.steps)))


def _accumulate(
    policy: Policy, part: Sequence[Sample], mine: Sequence[Sample], config: TrainConfig
) -> tuple[dict[str, float], float]:
    """Backward through `mine`, this rank's share of the minibatch `part`, in micro-batches.

    The weights are those in the whole minibatch: the sum over micro-batches and ranks is its loss. Returns the sums,
    and the largest difference from the engine's log-probabilities.
    """
    device = policy.model.device
    tokens = sum(len(sample.answer_ids) for sample in part)
    totals, furthest = dict.fromkeys(SUMS, 0.0), 0.0
    for micro in micro_batches(mine, config.micro_batch_tokens, device) if mine else ():
        in_micro = sum(len(answer) for _, answer in micro.pairs)
        weight = in_micro / tokens if config.loss.over == "token" else len(micro.pairs) / len(part)
        reference = policy.reference_logprobs(micro.prefix, micro.pairs) if config.loss.kl else None
        logprobs, mask = policy.logprobs(micro.prefix, micro.pairs)
        loss, stats = config.loss(
            logprobs,
            micro.old_logprobs_NT,
            logprobs.detach() if reference is None else reference,
            micro.advantages_NT,
            mask,
        )
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        off = (logprobs.detach() - micro.old_logprobs_NT).abs() * mask
        furthest = max(furthest, float(off.max()))
        totals["loss"] += float(loss.detach()) * weight
        totals["mismatch"] += float(off.sum()) / tokens
        for name, value in stats.items():
            totals[name] += float(value) * in_micro / tokens
    return totals, furthest


def _joined(parts: Sequence[tuple[dict[str, float], float]]) -> tuple[dict[str, float], float]:
    """The ranks' sums added, and the largest of their largest."""
    return {name: sum(sums[name] for sums, _ in parts) for name in SUMS}, max(furthest for _, furthest in parts)
