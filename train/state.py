"""Where a run stands after its last whole update, and how it goes on from a checkpoint."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from msgrpo.errors import RunError, UsageError
from msgrpo.models.paths import ADAPTER_WEIGHTS
from msgrpo.train import checkpoint
from msgrpo.train.checkpoint import Progress, State
from msgrpo.train.config import TrainConfig
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import Ranks
from msgrpo.train.rollouts import Rollouts
from msgrpo.train.sinks import Reporter


class RunState:
    """What a checkpoint holds, and what a stopped update goes back to.

    An update may be given up at any moment: its own state is a copy, taken when the update before it had ended.
    """

    def __init__(self, out: Path, policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        self._out, self._policy, self._optimizer = out, policy, optimizer
        self.progress = progress
        self._saved = progress.step
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
            temperature=self._policy.temperature,
        )
        self._state = self._copy()

    def save(self) -> None:
        """The checkpoint, and the adapter of the same update beside it; once for each update."""
        if self.step == self._saved:
            return
        checkpoint.save(self._out, self._state)
        self._policy.save_adapter(self._out, self._state.adapter)
        self._saved = self.step

    def rewrite_adapter(self) -> None:
        """Write the restored checkpoint's adapter again: a crash after the checkpoint may have left an older one."""
        if self.step:
            self._policy.save_adapter(self._out, self._state.adapter)

    def _copy(self) -> State:
        return State(self.progress, self._policy.adapter_state(), _on_cpu(self._optimizer.state_dict()))


def _on_cpu(state: Any) -> Any:
    """A copy of nested state with its tensors in the CPU's memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else copy.deepcopy(state)


def restore(
    out: Path,
    config: TrainConfig,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    report: Reporter,
    ranks: Ranks,
) -> Progress:
    """Go on from the newest whole checkpoint, or from the beginning; every rank from what the first one read."""
    state = None
    if ranks.first:
        state, damaged = checkpoint.load_latest(out)
        for folder in damaged:
            report.note(f"the checkpoint {folder} is damaged and was passed over")
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
    policy.temperature = progress.temperature or config.temperature
    if progress.step > config.steps:
        raise UsageError(
            f"--out {out} has {progress.step} updates already, more than the {config.steps} asked for",
            fix=f"--steps {progress.step}, or more",
        )
    policy.load_adapter_state(state.adapter)
    try:
        optimizer.load_state_dict(state.optimizer)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"the newest checkpoint of {out} holds the optimizer of another run: {error}",
            fix=f"keep {out} and begin anew in another --out",
        ) from error
    report.note(f"going on after update {progress.step}")
    return progress
