"""What a study says when it has ended: each arm's scores, its differences from the first arm, table and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from msgrpo.errors import RunError
from msgrpo.evals.stats import FEW_SEEDS, crossed_interval, seeds_alike
from msgrpo.files import replace_bytes
from msgrpo.run_log import METRICS, read_rows
from msgrpo.text import counted, interval_text

Curve = Mapping[str, list[float]]


def reported(
    study: Mapping[str, Any], values: Mapping[str, Sequence[Sequence[float]]], curves: Mapping[str, Sequence[Curve]]
) -> dict[str, Any]:
    """Every arm: its test score over all seeds, what it had reached at equal answers and seconds, and its difference
    from the first arm on the same seeds and starts.

    `values[arm][seed]` are the scores of the test episodes, the same starts in the same order for all; `curves` those
    of `curve`.
    """
    first = next(iter(values))
    budget = {
        axis: min(float(curve[axis][-1]) for of_arm in curves.values() for curve in of_arm)
        for axis in ("answers", "seconds")
    }
    arms: dict[str, Any] = {}
    for arm in values:
        difference = [list(np.subtract(a, b)) for a, b in zip(values[arm], values[first], strict=True)]
        arms[arm] = {
            "test": _crossed(values[arm]),
            "difference": None if arm == first else _crossed(difference),
            "by_seed": [float(np.mean(curve)) for curve in values[arm]],
            "seeds_alike": seeds_alike(values[arm], seed=0),
            "values": values[arm],
            "curves": curves[arm],
            **{f"at_equal_{axis}": _at(curves[arm], axis, limit) for axis, limit in budget.items()},
        }
    return {"study": study, "budget": budget, "first": first, "arms": arms}


def _crossed(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "interval": crossed_interval(values, seed=0)}


def _at(curves: Sequence[Curve], axis: str, limit: float) -> dict[str, Any]:
    """The validation score where `limit` answers or seconds were spent, between evaluations in a straight line."""
    scores = [float(np.interp(limit, curve[axis], curve["score"])) for curve in curves]
    return {"mean": float(np.mean(scores)), "by_seed": scores}


def curve(folder: Path, updates: int) -> dict[str, list[float]]:
    """At each evaluation of a run: updates, answers generated so far, seconds of training, and the validation
    score. Raises RunError where its metrics do not reach from before the first update to after the last.
    """
    rows = read_rows(folder)
    answers, seconds = {0: 0.0}, {0: 0.0}
    for row in rows:
        if row["kind"] == "train":
            answers[row["step"]] = answers.get(row["step"] - 1, 0.0) + row["rollout/turns"]
            seconds[row["step"]] = row["time/total"]
    seen = [row for row in rows if row["kind"] == "eval"]
    steps = [row["step"] for row in seen]
    if not {0, updates} <= set(steps) or not set(range(updates + 1)) <= answers.keys():
        raise RunError(
            f"{folder / METRICS} lacks rows of this run, which had {updates} updates: it was damaged after it was "
            "written",
            fix=f"play this run again: remove {folder}, and start the same command",
        )
    return {
        "updates": [float(step) for step in steps],
        "answers": [answers[step] for step in steps],
        "seconds": [seconds[step] for step in steps],
        "score": [float(row[row["score"]]) for row in seen],
    }


COLUMNS = (
    "arm",
    "test score",
    "− first arm",
    "seeds from … to",
    "alike: p",
    "at equal answers",
    "at equal seconds",
)


def lines(report: Mapping[str, Any]) -> list[list[str]]:
    """The table: one line an arm."""

    def span(interval: Mapping[str, Any]) -> str:
        return f"{np.mean(interval['by_seed']):.3f} ({min(interval['by_seed']):.3f} … {max(interval['by_seed']):.3f})"

    def shown(interval: Mapping[str, Any] | None, sign: str = "") -> str:
        if interval is None:
            return "–"
        low, high = interval["interval"]
        return f"{interval['mean']:{sign}.3f} {interval_text(low, high, f'{sign}.3f')}"

    return [
        [
            arm,
            shown(result["test"]),
            shown(result["difference"], "+"),
            f"{min(result['by_seed']):.3f} … {max(result['by_seed']):.3f}",
            f"{result['seeds_alike']:.3f}",
            span(result["at_equal_answers"]),
            span(result["at_equal_seconds"]),
        ]
        for arm, result in report["arms"].items()
    ]


def caption(report: Mapping[str, Any]) -> str:
    study, budget, first = report["study"], report["budget"], report["arms"][report["first"]]
    done = len(first["by_seed"])
    seeds = ("" if done == study["seeds"] else f"{done} of ") + counted(study["seeds"], "seed")
    updates = {tuple(curve["updates"]) for arm in report["arms"].values() for curve in arm["curves"]}
    after = f" (after {', '.join(f'{step:.0f}' for step in updates.pop())} updates)" if len(updates) == 1 else ""
    return (
        f"{study['scenario']}, {seeds} an arm, {counted(study['test_episodes'], 'test start')}; 95 % intervals "
        f"{behind(done)}. *Alike: p*: how often seeds of one quality would be as far apart (permutation within the "
        "starts). "
        f"At {budget['answers']:,.0f} answers and at {budget['seconds']:,.0f} seconds: the mean on the validation "
        f"starts, and the lowest and the highest seed; in a straight line between evaluations{after}."
    )


def behind(seeds: int) -> str:
    """In words, over what an interval of so many training seeds is taken."""
    if seeds == 1:
        return "over the starts of one seed alone: another seed may lie outside"
    if seeds < FEW_SEEDS:
        return f"over {seeds} seeds and the starts, with Student's quantiles, since {seeds} seeds are few"
    return f"over {seeds} seeds and the starts (bootstrap)"


def markdown(report: Mapping[str, Any]) -> str:
    table = [COLUMNS, ["---"] * len(COLUMNS), *lines(report)]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in table)
    return f"{report['study']['question']}\n\n{rows}\n\n{caption(report)}\n"


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Learning curves over answers and over seconds: the mean over seeds, and a band from the lowest to the
    highest.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, axis in zip(figure.subplots(1, 2, sharey=True), ("answers", "seconds"), strict=True):
        for arm, result in report["arms"].items():
            limit = min(curve[axis][-1] for curve in result["curves"])
            xs = np.linspace(0, limit, 60)
            ys = np.stack([np.interp(xs, curve[axis], curve["score"]) for curve in result["curves"]])
            (line,) = axes.plot(xs, ys.mean(axis=0), label=arm)
            axes.fill_between(xs, ys.min(axis=0), ys.max(axis=0), alpha=0.12, color=line.get_color())
        axes.set(xlabel=axis, ylabel="validation score")
        axes.grid(alpha=0.25)
    figure.axes[0].legend(frameon=False)
    figure.suptitle(fill(report["study"]["question"], 120, break_on_hyphens=False), fontsize=10, parse_math=False)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=140)
    replace_bytes(file, image.getvalue())
