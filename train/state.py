"""Where a run stands after its last whole update, and how it goes on from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from msgrpo.errors import RunError, UsageError
from msgrpo.models.lora import ADAPTER_WEIGHTS
from msgrpo.text import counted
from msgrpo.train import checkpoint
from msgrpo.train.checkpoint import Progress, State
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines.contract import Engine
from msgrpo.train.ranks import Ranks
from msgrpo.train.rivals.contract import Trained
from msgrpo.train.rollouts import Rollouts
from msgrpo.train.sinks import Reporter

if TYPE_CHECKING:
    from msgrpo.train.engines.fleet import Fleet
    from msgrpo.train.groups import Sample


class Weights(Protocol):
    """The policy's weights and their optimizer: in this process (`loop.LocalWeights`), or at a service
    (`tinker.weights.TinkerWeights`).
    """

    temperature: float  # of the next rollouts
    memory: dict[str, torch.Tensor]  # of the run's choices, from earlier updates (`rivals.contract.Learner`)

    @property
    def policy(self) -> Trained:
        """The policy, as far as a choice may look into it."""
        ...

    def engine(self, out: Path, fleet: Fleet | None) -> Engine:
        """What plays rollouts with them."""
        ...

    def update(
        self, samples: Sequence[Sample], generator: torch.Generator, step: int, done: Callable[[int], None]
    ) -> dict[str, float]:
        """A pass over the kept turns; see `update.update`."""
        ...

    def copy(self, progress: Progress) -> State:
        """All that the next update depends on, as it is now."""
        ...

    def kept(self, state: State) -> State | None:
        """What a checkpoint of this state holds; None where it cannot be kept any more."""
        ...

    def restore(self, state: State) -> None:
        """Take over what a checkpoint holds. Raises RunError where it is another policy's."""
        ...

    def write(self, out: Path, state: State) -> None:
        """The adapter of this state as files, where it is here."""
        ...

    def finished(self, out: Path) -> dict[str, Any]:
        """What is to be done after the last update, and what the summary says of it."""
        ...


class RunState:
    """What a checkpoint holds, and what a stopped update goes back to.

    An update may be given up at any moment: its own state is a copy, taken when the update before it had ended.
    """

    def __init__(self, out: Path, weights: Weights, progress: Progress) -> None:
        self._out, self._weights = out, weights
        self.progress = progress
        self.saved = progress.step  # updates that the newest checkpoint holds
        self._state = self._copy()

    @property
    def step(self) -> int:
        """Updates done, which is also the number of the policy's version."""
        return self.progress.step

    def advance(self, rollouts: Rollouts, seconds: float) -> None:
        """An update has ended."""
        self.progress = replace(
            self.progress,
            step=self.step + 1,
            next_start=rollouts.next_start,
            seconds=self.progress.seconds + seconds,
            flat_groups=self.progress.flat_groups + sum(group.is_flat for group in rollouts.groups),
            temperature=self._weights.temperature,
        )
        self._state = self._copy()

    def _copy(self) -> State:
        return replace(self._weights.copy(self.progress), memory=on_cpu(self._weights.memory))

    def save(self) -> None:
        """The checkpoint, and the adapter of the same update beside it; once for each update."""
        if self.step == self.saved:
            return
        state = self._weights.kept(self._state)
        if state is not None:
            checkpoint.save(self._out, state)
            self._weights.write(self._out, state)
            self.saved = self.step

    def rewrite_adapter(self) -> None:
        """Write the restored checkpoint's adapter again: a crash after the checkpoint may have left an older one."""
        if self.step:
            self._weights.write(self._out, self._state)


def on_cpu(state: Any) -> Any:
    """A copy of nested state with its tensors in the CPU's memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    return [on_cpu(value) for value in state] if isinstance(state, list) else copy.deepcopy(state)


def restore(out: Path, config: TrainConfig, weights: Weights, report: Reporter, ranks: Ranks) -> Progress:
    """Go on from the newest whole checkpoint, or from the beginning; every rank from what the first one read."""
    state = None
    if ranks.first:
        state, damaged = checkpoint.load_latest(out)
        for folder in damaged:
            report.note(f"the checkpoint {folder} is damaged, or of another version, and was passed over")
        if state is None and (damaged or (out / ADAPTER_WEIGHTS).exists()):
            raise RunError(
                f"{out} holds a trained adapter and no checkpoint that can be gone on from: going on would begin at "
                "0 and overwrite it",
                fix=f"keep {out} and begin anew in another --out",
            )
    state = ranks.broadcast(state)
    if state is None:
        return Progress()
    progress = state.progress
    weights.temperature = progress.temperature or config.temperature
    weights.memory = state.memory
    if progress.step > config.steps:
        raise UsageError(
            f"--out {out} has {counted(progress.step, 'update')} already, more than the {config.steps} asked for",
            fix=f"--steps {progress.step}, or more",
        )
    try:
        weights.restore(state)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"the newest checkpoint of {out} holds the optimizer of another run: {error}",
            fix=f"keep {out} and begin anew in another --out",
        ) from error
    report.note(f"going on after update {progress.step}")
    return progress
