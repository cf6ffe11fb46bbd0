"""How a training run shows itself: a live display on a terminal, plain lines elsewhere, silence for machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from msgrpo.run_log import CALLED
from msgrpo.text import counted, interval_text, printable
from msgrpo.train.config import TrainConfig
from msgrpo.train.sinks import Measured

SHOWN = {key: name for key, name in CALLED.items() if key != "rollout/entropy"}  # a line has no room for more


LOG_EVERY_S = 10.0  # between lines about what is going on, where there is no terminal
STOPPING = (
    "stopping: {} is given up and will be done again, all updates before it are being saved; "
    "Ctrl-C once more stops without saving"
)


class Quiet:
    """For `--json`, and for all ranks but the first: nothing is shown."""

    def note(self, text: str) -> None:
        """Not shown."""

    def doing(self, text: str) -> None:
        """Not shown."""

    def stopping(self) -> None:
        """Not shown."""

    def update(self, step: int, values: Measured) -> None:
        """Not shown."""

    def evaluation(self, step: int, values: Measured) -> None:
        """Not shown."""

    def close(self) -> None:
        """Nothing was opened."""


class Lines:
    """For pipes and logs: a line an evaluation, one every ten updates, and what goes on now and then."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        self.console, self.config = console, config
        self.now, self._told = "the start", time.monotonic()

    def note(self, text: str) -> None:
        self._told = time.monotonic()
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def doing(self, text: str) -> None:
        self.now = text
        if time.monotonic() - self._told >= LOG_EVERY_S:
            self.note(text)

    def stopping(self) -> None:
        self.note(STOPPING.format(self.now.partition(":")[0]))

    def update(self, step: int, values: Measured) -> None:
        if step % 10 == 0 or step == self.config.steps:
            self.note(f"update {step}/{self.config.steps}: {_line(values)}")

    def evaluation(self, step: int, values: Measured) -> None:
        self.note(f"evaluation after {counted(step, 'update')}: {score_text(values)}")

    def close(self) -> None:
        """Whoever opened the console closes it."""


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
            speed_estimate_period=24 * 3600,  # an update may take minutes, and rich looks back for half of one
        )
        self.task = self.progress.add_task("updates", total=config.steps, rate="")
        self.values: dict[str, float] = {}
        self.live = Live(get_renderable=self._render, console=console, refresh_per_second=4)
        self._last = time.monotonic()

    def _render(self) -> Table:
        grid = Table.grid()
        grid.add_row(self.progress)
        grid.add_row(Text(self.now, style="cyan"))
        grid.add_row(Text(_line(self.values), style="dim"))
        return grid

    def doing(self, text: str) -> None:
        self.now = text

    def update(self, step: int, values: Measured) -> None:
        now = time.monotonic()
        rate = values["rollout/turns"] / (now - self._last)
        self._last = now
        self.progress.update(self.task, completed=step, rate=f"{rate:.0f} turns/s")
        self.values = values


def _line(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {values[key]:.3f}" for key, name in SHOWN.items() if key in values)


def score_text(values: dict[str, Any]) -> str:
    """`success 0.912 [0.865, 0.944]`, with the interval's level said once by the caller."""
    score = "success" if "success" in values else "return"
    return f"{score} {values[score]:.3f} {interval_text(values[f'{score}_low'], values[f'{score}_high'], '.3f')}"


def closing_line(summary: dict[str, Any]) -> str:
    """What the run changed, in one line with its 95 % interval."""
    change = summary["change"]
    of = f" of {summary['evaluated_on']}" if summary["evaluated_on"] != summary["scenario"] else ""
    p = f", McNemar p = {summary['mcnemar_p']:.2g}" if "mcnemar_p" in summary else ""
    return (
        f"{summary['base']} on {summary['scenario']}, {summary['episodes']} validation starts{of}: "
        f"{score_text(summary['before'])} → {score_text(summary['after'])}; "
        f"change {change['mean']:+.3f}, 95 % interval {interval_text(change['low'], change['high'])}{p}; "
        f"{summary['training_seconds']:.0f} s of training"
    )


@contextmanager
def reporter(console: Console, config: TrainConfig, *, silent: bool) -> Iterator[Quiet | Lines]:
    """The display that fits where the output goes."""
    if silent:
        yield Quiet()
    elif console.is_terminal:
        shown = LiveDisplay(console, config)
        with shown.live:
            yield shown
    else:
        yield Lines(console, config)


@contextmanager
def teaching(console: Console, *, silent: bool) -> Iterator[Callable[[Any], None]]:
    """A callback that shows how far `msgrpo teach` is: a bar on a terminal, a line now and then elsewhere."""
    if silent or not console.is_terminal:
        yield _taught_lines(console, silent)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("reading the game", total=None)

        def show(pace: Any) -> None:
            text = f"loss {pace.loss:.3f}, {pace.rows_per_s:.3g} rows/s"
            bar.update(task, completed=pace.step, total=pace.steps, description=text)

        yield show


def _taught_lines(console: Console, silent: bool) -> Callable[[Any], None]:
    last = time.monotonic()

    def show(pace: Any) -> None:
        nonlocal last
        if silent or (time.monotonic() - last < LOG_EVERY_S and pace.step != pace.steps):
            return
        last = time.monotonic()
        console.print(
            f"step {pace.step} of {pace.steps}: loss {pace.loss:.3f}, {pace.rows_per_s:.3g} rows/s, "
            f"{pace.left_s / 60:.1f} minutes left",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    return show
