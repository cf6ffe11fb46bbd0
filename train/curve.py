"""The learning curve of a run, drawn from its rows."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from textwrap import fill

from msgrpo.files import replace_bytes
from msgrpo.run_log import read_rows


def draw_curve(run: Path, title: str, score: str, where: str = "") -> Path:
    """`curve.png`: the training return of every update, and the evaluations with their intervals.

    `where` says what they were played on, where training plays more: " on frozen-lake".
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = read_rows(run)
    updates = [row for row in rows if row["kind"] == "train"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    returns = [float(r["rollout/return"]) for r in updates]
    axes.plot([r["step"] for r in updates], returns, color="#9aa5b1", lw=1.2, label="training return")
    middle = [r[score] for r in evaluations]
    ends = [(r[f"{score}_low"], r[f"{score}_high"]) for r in evaluations]
    spread = [  # none where there is no interval; and a mean of equal values may lie beyond its own by rounding
        [0.0 if low is None else max(0.0, m - low) for m, (low, _) in zip(middle, ends, strict=True)],
        [0.0 if high is None else max(0.0, high - m) for m, (_, high) in zip(middle, ends, strict=True)],
    ]
    steps = [r["step"] for r in evaluations]
    axes.errorbar(steps, middle, yerr=spread, fmt="o-", color="#0b7285", capsize=3, label=f"{score}{where}, 95 %")
    axes.set(xlabel="update", ylabel=score)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(fill(title, 72, break_on_hyphens=False), parse_math=False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=140)
    replace_bytes(run / "curve.png", image.getvalue())
    return run / "curve.png"
