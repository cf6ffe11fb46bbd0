"""The policy's weights at a service that speaks Tinker's protocol: update, checkpoints, the adapter.

Games, prompts, groups, credit and selection are computed here, by the same loop; one kept turn is one row there.
Services add up the losses of tokens, where ours is a mean: so each token's advantage is divided by what the mean
divides by. The optimizer is AdamW with our numbers, on a gradient that is clipped as ours is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msgrpo.errors import ModelError, RunError, UsageError
from msgrpo.models.loading import local_tokenizer
from msgrpo.run_log import SUMMARY
from msgrpo.train.checkpoint import Progress, State
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines.tinker import BOUND, TinkerEngine
from msgrpo.train.groups import Sample
from msgrpo.train.ranks import Ranks
from msgrpo.train.rivals.paper import Clip
from msgrpo.train.sinks import Reporter
from msgrpo.train.tinker.cost import Meter
from msgrpo.train.tinker.download import FILES, download
from msgrpo.train.tinker.service import Service, TrainingRow
from msgrpo.train.update import MAX_GRAD_NORM, Done, learning_rate, minibatches, not_finite

# As ours. With the protocol's own eps, 1e-12, gradients that are only rounding would make whole steps.
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": MAX_GRAD_NORM}


class TinkerWeights:
    """pθ at the service, with its tokenizer here."""

    def __init__(self, config: TrainConfig, out: Path, ranks: Ranks, report: Reporter) -> None:
        if ranks.count > 1:
            raise UsageError(
                f"backend=tinker needs one process, and {ranks.count} were started", fix="without torchrun"
            )
        assert isinstance(config.loss, Clip)  # the settings were checked
        self._config, self._loss, self._report = config, config.loss, report
        self.service = Service(config, Meter.of(config, out))
        self.tokenizer = local_tokenizer(config.base) or self.service.tokenizer()
        self.temperature = config.temperature
        self.memory: dict[str, Tensor] = {}

    @property
    def policy(self) -> TinkerWeights:
        return self

    @property
    def model(self) -> Any:
        raise _away()

    def logprobs(self, prefix: list[int], pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        raise _away()

    def hidden(self, prefix: list[int], rests: Sequence[list[int]]) -> Tensor:
        raise _away()

    def engine(self, out: Path, fleet: Any) -> TinkerEngine:
        return TinkerEngine(self.service, self.tokenizer, self._config)

    def update(
        self, samples: Sequence[Sample], generator: torch.Generator, step: int, done: Done
    ) -> dict[str, float]:
        """A pass over the kept turns: a gradient and a step of the service for each minibatch."""
        meter, proof = self.service.meter, self.service.proof
        parts = list(minibatches(samples, self._config.minibatches, generator))
        turns = sum(sample.tokens for sample in samples)
        meter.reserve(**proof | {"train": turns + proof["train"]})  # with the next version's canary, or nothing
        meter.unused(**proof)
        adam = ADAM | {"learning_rate": learning_rate(self._config, step)}
        totals = dict.fromkeys(("loss", "clip_share", "ratio"), 0.0)
        mismatch: dict[str, float] = {}
        for number, part in enumerate(parts, 1):
            logprobs, norm = self.service.step(rows(part, self._loss.over), (self._loss.low, self._loss.high), adam)
            stats, off = self._measured(part, logprobs)
            mismatch = mismatch or {
                "engine/mismatch_max": float(off.max()),
                "engine/mismatch_mean": float(off.mean()),
            }
            for name, value in (stats | ({} if norm is None else {"grad_norm": norm})).items():
                totals[name] = totals.get(name, 0.0) + value / len(parts)
            if not math.isfinite(totals["loss"]):
                raise not_finite(self._config, step, str(totals["loss"]))
            done(number)
        means = {f"update/{name}": value for name, value in totals.items() if parts}  # of no step there is no mean
        bound = {"engine/mismatch_bound": BOUND}
        return means | mismatch | bound | {"update/kept_turns": float(len(samples)), "cost/usd": meter.spent}

    def _measured(
        self, part: Sequence[Sample], logprobs: Sequence[Sequence[float]]
    ) -> tuple[dict[str, float], Tensor]:
        """The minibatch's loss and its parts by our own equation, and |log p − log p sampled| of every token.

        There is no reference to measure `kl` against.
        """
        longest = max(map(len, logprobs))
        new, old, advantages, mask = torch.zeros(4, len(part), longest, dtype=torch.float64)
        for i, (sample, found) in enumerate(zip(part, logprobs, strict=True)):
            own = slice(0, len(found))
            new[i, own], old[i, own] = torch.tensor(found).double(), torch.tensor(sample.old_logprobs).double()
            advantages[i, own] = torch.tensor(sample.advantages).double()
            mask[i, own] = 1.0
        loss, stats = self._loss(new, old, new, advantages, mask)
        measured = {"loss": float(loss)} | {name: float(stats[name]) for name in ("clip_share", "ratio")}
        return measured, (new - old).abs()[mask.bool()]

    def copy(self, progress: Progress) -> State:
        """No weights: they are there. By the count of steps it is seen whether they are still these."""
        return State(progress, {}, {"steps": self.service.steps})

    def kept(self, state: State) -> State | None:
        if state.optimizer["steps"] != self.service.steps:
            self._report.note(
                f"update {state.progress.step} is not saved: the service has begun the next one. The last checkpoint "
                "is kept"
            )
            return None
        return replace(state, optimizer={"path": self.service.save(f"step-{state.progress.step:06d}")})

    def restore(self, state: State) -> None:
        path = state.optimizer["path"]  # KeyError where the checkpoint is of another backend
        self.service.load(str(path))

    def write(self, out: Path, state: State) -> None:
        """The adapter comes at the end: see `finished`. One that came at the end of fewer updates goes: it would be
        played as this run's, also where the new one cannot be downloaded.
        """
        if not (out / SUMMARY).exists():
            for name in FILES:
                (out / name).unlink(missing_ok=True)

    def finished(self, out: Path) -> dict[str, Any]:
        """Download the adapter where the service offers it; the summary says where it is, and what the run cost."""
        meter, there = self.service.meter, self.service.export("final")
        try:
            download(self.service.urls(there), out, self._config.base, self.service.url)
            here: str | None = str(out)
            self._report.note(f"the adapter was downloaded to {out}; at the service it is {there}")
        except (RunError, ModelError) as error:
            here = None
            self._report.note(f"the adapter is at the service, {there}, and not here: {error.message}")
        self._report.note(f"cost: at most ${meter.spent:.4f} ({meter.price.source})")
        remote = {"service": self.service.host, "adapter_there": there, "adapter_here": here, "cost": meter.summary()}
        return {"backend": "tinker"} | remote


def _away() -> UsageError:
    return UsageError("a choice asks the policy's own layers, and backend=tinker keeps them at a service")


def rows(part: Sequence[Sample], over: str) -> list[TrainingRow]:
    """The turns of a minibatch with the loss's mean in their advantages: the sum over all tokens of −min(w A, …) is
    then our loss.

    Over tokens, A is divided by the tokens of the minibatch; over turns, by the turns and the tokens of its own turn.
    """
    tokens = sum(len(sample.answer_ids) for sample in part)
    return [
        TrainingRow(
            sample.prompt_ids,
            sample.answer_ids,
            sample.old_logprobs,
            [
                value / (tokens if over == "token" else len(part) * len(sample.answer_ids))
                for value in sample.advantages
            ],
        )
        for sample in part
    ]
