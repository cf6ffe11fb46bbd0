"""Reading what a run wrote about itself: its rows, and the learning curve drawn from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgrpo_agent.errors import RunError

METRICS = "metrics.jsonl"


def read(run: Path) -> list[dict[str, Any]]:
    """All complete rows of a run; a torn last line is passed over."""
    file = run / METRICS
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            if number != len(lines):
                raise RunError(f"{file}:{number} is damaged", fix="start again in another --out") from error
    return rows


def draw_curve(run: Path, title: str, score: str) -> Path:
    """`curve.png`: the training return of every update, and the evaluations with their intervals."""
    from matplotlib.figure import Figure

    rows = read(run)
    updates = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    returns = [float(r.get("rollout/return", r.get("return", 0.0))) for r in updates]  # `return` in older runs
    axes.plot([r["step"] for r in updates], returns, color="#9aa5b1", lw=1.2, label="training return")
    middle = [r[score] for r in evaluations]
    spread = [
        [m - r[f"{score}_low"] for m, r in zip(middle, evaluations, strict=True)],
        [r[f"{score}_high"] - m for m, r in zip(middle, evaluations, strict=True)],
    ]
    steps = [r["step"] for r in evaluations]
    axes.errorbar(steps, middle, yerr=spread, fmt="o-", color="#0b7285", capsize=3, label=f"{score}, 95 %")
    axes.set(xlabel="update", ylabel=score, title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(run / "curve.png", dpi=140)
    return run / "curve.png"
