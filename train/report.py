"""How a training run shows itself: a live display on a terminal, plain lines elsewhere, silence for machines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from train.config import TrainConfig

SHOWN = {
    "return": "return",
    "success": "success",
    "invalid": "invalid",
    "kl": "KL",
    "clip_share": "clipped",
    "flat_groups": "flat groups",
}


class Quiet:
    """For `--json`: nothing."""

    def note(self, text: str) -> None:
        """Not shown."""

    def update(self, step: int, values: dict[str, float]) -> None:
        """Not shown."""

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Not shown."""


class Lines:
    """For pipes and logs: a line an evaluation, and one every ten updates."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        self.console, self.config = console, config

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, step: int, values: dict[str, float]) -> None:
        if step % 10 == 0 or step == self.config.steps:
            self.note(f"update {step}/{self.config.steps}: {_line(values)}")

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        self.note(f"held-out after {step} updates: {score_text(values)}")


class LiveDisplay(Lines):
    """For a terminal: a bar with the time left over a table of the last update, evaluations above it."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        super().__init__(console, config)
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.progress.add_task("updates", total=config.steps, rate="")
        self.live = Live(self._render({}), console=console, refresh_per_second=4)
        self._last = time.monotonic()

    def _render(self, values: dict[str, float]) -> Table:
        grid = Table.grid()
        grid.add_row(self.progress)
        grid.add_row(Text(_line(values), style="dim"))
        return grid

    def update(self, step: int, values: dict[str, float]) -> None:
        now = time.monotonic()
        rate = values["turns"] / (now - self._last)
        self._last = now
        self.progress.update(self.task, completed=step, rate=f"{rate:.0f} turns/s")
        self.live.update(self._render(values))


def _line(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {values[key]:.3f}" for key, name in SHOWN.items() if key in values)


def score_text(values: dict[str, Any]) -> str:
    """`success 0.912 [0.865, 0.944]`, with the interval's level said once by the caller."""
    score = "success" if "success" in values else "return"
    return f"{score} {values[score]:.3f} [{values[f'{score}_low']:.3f}, {values[f'{score}_high']:.3f}]"


def closing_line(summary: dict[str, Any]) -> str:
    """What the run changed, in one line with its 95 % interval."""
    change = summary["change"]
    p = f", McNemar p = {summary['mcnemar_p']:.2g}" if "mcnemar_p" in summary else ""
    return (
        f"{summary['base']} on {summary['scenario']}, {summary['episodes']} held-out starts: "
        f"{score_text(summary['before'])} → {score_text(summary['after'])}; "
        f"change {change['mean']:+.3f}, 95 % interval [{change['low']:+.3f}, {change['high']:+.3f}]{p}; "
        f"{summary['training_seconds']:.0f} s of training"
    )


@contextmanager
def reporter(console: Console, config: TrainConfig, *, as_json: bool) -> Iterator[Quiet | Lines]:
    """The display that fits where the output goes."""
    if as_json:
        yield Quiet()
    elif console.is_terminal:
        shown = LiveDisplay(console, config)
        with shown.live:
            yield shown
    else:
        yield Lines(console, config)
