"""Where a run writes how it goes: one list of sinks, each told of every update and evaluation.

Metric names are paths (`rollout/return`, `update/kl`, `engine/mismatch_max`). A sink that fails is dropped with a
note and never ends the run; `metrics.jsonl` is the run's own record, so what the disk refuses there does end it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from msgrpo.errors import UsageError, first_line, nearest
from msgrpo.extras import needs
from msgrpo.files import replace_text
from msgrpo.run_log import METRICS, read_rows
from msgrpo.text import as_json
from msgrpo.train.config import TrainConfig
from msgrpo.train.diagnosis import Adviser

Measured = dict[str, Any]


class Sink(Protocol):
    """Takes what a run measures."""

    def update(self, step: int, values: Measured) -> None:
        """An update has ended."""

    def evaluation(self, step: int, values: Measured) -> None:
        """An evaluation has ended; `values` has `score`, its mean and interval, and every episode's value."""

    def close(self) -> None:
        """The run has ended."""


class Reporter(Sink, Protocol):
    """The console: a sink that also says what goes on now."""

    def note(self, text: str) -> None:
        """Say something once."""

    def doing(self, text: str) -> None:
        """Say what is going on now; the next call replaces it."""

    def stopping(self) -> None:
        """Say at once that the run was asked to stop, and what it still waits for."""


class JsonLines:
    """`metrics.jsonl`. On resume, rows after the checkpoint's update are dropped: they are about to be written
    again.
    """

    def __init__(self, out: Path, from_step: int) -> None:
        self.file = out / METRICS
        kept = [row for row in read_rows(out) if row["step"] <= from_step]
        replace_text(self.file, "".join(as_json(row) + "\n" for row in kept))

    def update(self, step: int, values: Measured) -> None:
        self._write({"kind": "train", "step": step, **values})

    def evaluation(self, step: int, values: Measured) -> None:
        self._write({"kind": "eval", "step": step, **values})

    def _write(self, row: Measured) -> None:
        with self.file.open("a") as handle:
            handle.write(as_json(row) + "\n")

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoard:
    def __init__(self, out: Path, config: TrainConfig, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=from_step + 1)

    def update(self, step: int, values: Measured) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def evaluation(self, step: int, values: Measured) -> None:
        self.update(step, paths(values))

    def close(self) -> None:
        self._board.close()


class _Tracker:
    """What W&B and Trackio have in common: a run that logs and finishes."""

    _run: Any

    def update(self, step: int, values: Measured) -> None:
        self._run.log(values, step=step)

    def evaluation(self, step: int, values: Measured) -> None:
        self._run.log(paths(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WeightsAndBiases(_Tracker):
    """A W&B run named after the folder; goes on in the same one when resumed. WANDB_MODE=offline keeps it here."""

    def __init__(self, out: Path, config: TrainConfig, from_step: int) -> None:
        import wandb

        identity = out / "wandb-id"
        if not identity.is_file():
            replace_text(identity, secrets.token_hex(4))
        self._run = wandb.init(
            project="msgrpo", name=out.name, id=identity.read_text(), resume="allow", dir=out,
            config=config.model_dump(),
        )  # fmt: skip


class Trackio(_Tracker):
    """A Trackio run, stored on this machine: `trackio show --project msgrpo` draws it."""

    def __init__(self, out: Path, config: TrainConfig, from_step: int) -> None:
        import trackio

        resume = "allow" if from_step else "never"
        self._run = trackio.init(project="msgrpo", name=out.name, config=config.model_dump(), resume=resume)


LOGS: dict[str, Callable[[Path, TrainConfig, int], Sink]] = {"wandb": WeightsAndBiases, "trackio": Trackio}


def paths(values: Measured) -> dict[str, float]:
    """An evaluation's numbers under metric paths."""
    return {f"eval/{name}": value for name, value in values.items() if isinstance(value, (int, float))}


def check_logs(names: Sequence[str]) -> None:
    """Raise UsageError for a name that is no sink, MissingExtraError for one that is not installed."""
    for name in names:
        if name not in LOGS:
            raise UsageError(f"--log {name}: no such logger", fix=nearest(name, LOGS))
        with needs(f"--log {name}", name):
            import_module(name)


class Sinks:
    """All sinks of a run as one. `report` and the record must work; any other is dropped when it fails."""

    def __init__(self, report: Reporter, required: Sequence[Sink], others: Sequence[Sink]) -> None:
        self._report = report
        self._required, self._others = [report, *required], list(others)

    def update(self, step: int, values: Measured) -> None:
        self._tell(lambda sink: sink.update(step, values))

    def evaluation(self, step: int, values: Measured) -> None:
        self._tell(lambda sink: sink.evaluation(step, values))

    def close(self) -> None:
        self._tell(lambda sink: sink.close())

    def _tell(self, call: Callable[[Sink], None]) -> None:
        for sink in self._required:
            call(sink)
        for sink in list(self._others):
            try:
                call(sink)
            except Exception as error:  # somebody else's library, network and disk
                self._others.remove(sink)
                self._report.note(f"{type(sink).__name__} failed and is left out from now on: {first_line(error)}")


def open_sinks(out: Path, config: TrainConfig, from_step: int, report: Reporter, logs: Sequence[str]) -> Sinks:
    """The console, the record, what a person should hear of the run, TensorBoard, and those asked for by name."""
    record = JsonLines(out, from_step)
    adviser = Adviser(config.model_dump(), list(read_rows(out)), report.note)
    makers: list[Callable[[Path, TrainConfig, int], Sink]] = [TensorBoard, *(LOGS[name] for name in logs)]
    others: list[Sink] = [adviser]
    for maker in makers:
        try:
            others.append(maker(out, config, from_step))
        except Exception as error:
            report.note(f"{maker.__name__} cannot be used and is left out: {first_line(error)}")
    return Sinks(report, [record], others)
