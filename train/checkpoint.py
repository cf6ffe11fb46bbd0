"""Complete, atomic checkpoints: killed at any moment, a resumed run goes on as if nothing had happened.

With `ahead=1` one thing differs: the first rollouts after a resume are played by the newest version, where the run
would have played them by the one before.

A checkpoint holds the adapter, the optimizer, and the counters. There is no generator state to keep beyond
that: every random draw is a function of (run seed, update, …).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from msgrpo_agent.errors import RunError

KEEP = 2


@dataclass(frozen=True)
class Progress:
    """Where a run stands: updates done, start seed to go on from, and the counters that its summary needs."""

    step: int = 0
    next_start: int = 0
    seconds: float = 0.0
    flat_groups: int = 0
    temperature: float | None = None  # of the next rollouts, where it is adapted


@dataclass(frozen=True)
class State:
    """A copy of all that the next update depends on, as it was when the last one had ended."""

    progress: Progress
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def save(run: Path, state: State) -> Path:
    """Write `checkpoints/step-N` in one move and drop all but the last two.

    Raises RunError where there is no room; what was there before stays.
    """
    folder = run / "checkpoints" / f"step-{state.progress.step:06d}"
    part = folder.with_suffix(".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        held = {"progress": vars(state.progress), "adapter": state.adapter, "optimizer": state.optimizer}
        torch.save(held, part / "state.pt")
        (part / "sha256").write_text(_digest(part / "state.pt"))
        _sync(part / "state.pt")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        shutil.rmtree(part, ignore_errors=True)
        raise RunError(
            f"the checkpoint {folder} cannot be written: {error}",
            fix="free some disk space, then go on with the same command and --resume",
        ) from error
    for old in _folders(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def load_latest(run: Path) -> tuple[dict[str, Any] | None, list[Path]]:
    """The newest checkpoint that is whole, and those passed over because they are not."""
    damaged: list[Path] = []
    for folder in reversed(_folders(run)):
        try:
            if (folder / "sha256").read_text() == _digest(folder / "state.pt"):
                return torch.load(folder / "state.pt", weights_only=True, map_location="cpu"), damaged
        except (OSError, UnicodeDecodeError):
            pass  # reported below, as any other damage
        damaged.append(folder)
    return None, damaged


def _folders(run: Path) -> list[Path]:
    return sorted(p for p in (run / "checkpoints").glob("step-*") if p.suffix != ".part")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
