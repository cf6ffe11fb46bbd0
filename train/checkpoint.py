"""Complete, atomic checkpoints: killed at any moment, a resumed run goes on as if nothing had happened.

With `ahead=k` one thing differs: the first rollouts after a resume are played by the newest version, where the run
would have played them by older ones.

A checkpoint holds the adapter, the optimizer, what choices remember of earlier updates, and the counters. There is no
generator state to keep beyond that: every random draw is a function of (run seed, update, …).
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from msgrpo.errors import of_the_machine
from msgrpo.files import digest, replacing_folder

KEEP = 2


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Progress:
    """Where a run stands: updates done, start seed to go on from, and the counters that its summary needs."""

    step: Annotated[int, Field(ge=0)] = 0
    next_start: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    flat_groups: int = 0
    # of the next rollouts, where it is adapted
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


@dataclass(frozen=True)
class State:
    """A copy of all that the next update depends on, as it was when the last one had ended."""

    progress: Progress
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    memory: dict[str, torch.Tensor] = field(default_factory=dict)  # of the run's choices, from earlier updates


def save(run: Path, state: State) -> Path:
    """Write `checkpoints/step-N` in one move and drop all but the last two.

    Raises OSError where there is no room; what was there before stays.
    """
    folder = run / "checkpoints" / f"step-{state.progress.step:06d}"
    saved = {part: getattr(state, part) for part in ("adapter", "optimizer", "memory")}
    saved["progress"] = asdict(state.progress)
    for left in folder.parent.glob("*.part"):  # by a killed writer
        shutil.rmtree(left, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder, full=True) as part:
        with (part / "state.pt").open("wb") as file:
            torch.save(saved, file)
        (part / "sha256").write_text(digest(part / "state.pt"))
    for old in _folders(run)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def load_latest(run: Path) -> tuple[State | None, list[Path]]:
    """The newest checkpoint that is whole, and those passed over because they are not."""
    damaged: list[Path] = []
    for folder in reversed(_folders(run)):
        try:
            files = (folder / "state.pt", folder / "sha256")  # a pipe in their place would be read for ever
            if all(map(Path.is_file, files)) and files[1].read_text() == digest(files[0]):
                return _state(torch.load(folder / "state.pt", weights_only=True, map_location="cpu")), damaged
        except Exception as error:  # whatever a file holds that somebody changed
            if of_the_machine(error):  # an older one must not take its place
                raise
        damaged.append(folder)
    return None, damaged


def _state(saved: Any) -> State:
    """Raises ValueError, TypeError or KeyError for what is no state."""
    parts = ("adapter", "optimizer", "memory")
    if not isinstance(saved, dict):
        raise TypeError("a state is no dict")
    saved = {"memory": {}} | saved  # it is not in the checkpoints of older versions
    if not all(isinstance(saved[part], dict) for part in parts):
        raise TypeError("a state holds progress, adapter, optimizer and memory")
    if not all(isinstance(tensor, torch.Tensor) for part in ("adapter", "memory") for tensor in saved[part].values()):
        raise TypeError("an adapter and a memory are made of tensors")
    if not all(map(_is_plain, saved["adapter"].values())):
        raise TypeError("an adapter's tensors hold floating-point numbers, all of them")
    return State(Progress(**saved["progress"]), *(saved[part] for part in parts))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_meta


def check_optimizer(saved: Any, own: torch.optim.Optimizer) -> None:
    """Raise ValueError, TypeError or KeyError for a state from which AdamW cannot take its next step: torch itself
    looks at the number of weights alone, and fails in that step.
    """
    groups, states = saved["param_groups"], saved["state"]
    if not (isinstance(states, dict) and isinstance(groups, list) and all(isinstance(one, dict) for one in groups)):
        raise TypeError("it is no optimizer's state")
    if lacking := [name for name in ("betas", "eps", "weight_decay") for one in groups if name not in one]:
        raise ValueError(f"it has no {', '.join(lacking)}")
    weights = [weight for group in own.param_groups for weight in group["params"]]
    for place, weight in enumerate(weights):
        kept = states.get(place)
        means = [kept["exp_avg"], kept["exp_avg_sq"]] if kept is not None else []
        if any(not _is_plain(mean) or mean.shape != weight.shape for mean in means):
            raise ValueError(f"its means of weight {place} do not have the weight's shape")


def _folders(run: Path) -> list[Path]:
    """All checkpoints, in the order of their updates: a million comes after 999,999."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))
