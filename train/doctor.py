"""`msgrpo doctor RUN`: why a run does not learn (`diagnosis.py`), and beside it how a healthy run of its kind went.

It reads the run's settings, its rows and one of its answers; it loads no model and plays no game.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from msgrpo import run_log
from msgrpo.errors import LONGEST_REASON, ModelError, RecordError, UsageError
from msgrpo.evals.stats import Difference
from msgrpo.models.paths import parameters_of
from msgrpo.text import interval_text, printable
from msgrpo.train.diagnosis import Finding, History, Row, diagnose
from msgrpo.train.run_folder import resume_command

HEALTHY = "healthy.json"
ALIKE = 4  # times larger or smaller a base may be than that of the healthy run beside it
LONGEST_ANSWER = 300  # characters of an answer that are shown

Curve = list[tuple[int, float]]  # (update, score)


@dataclass(frozen=True)
class Healthy:
    """A run that learned, to look at beside another one."""

    scenario: str
    base: str
    parameters: int
    score: str
    settings: str  # those that differ from the defaults, as the command line takes them
    curve: Curve

    def at(self, step: int) -> float | None:
        """Its score after so many updates, on the line between two evaluations; None after its end."""
        for (before, low), (after, high) in zip(self.curve, self.curve[1:], strict=False):
            if before <= step <= after:
                return low + (high - low) * (step - before) / (after - before)
        return None


@dataclass(frozen=True)
class Examination:
    """What there is to say about a run."""

    run: str
    base: str
    scenario: str
    updates: int
    planned: int
    goes_on: bool | None
    score: str | None
    curve: Curve
    change: Difference | None
    fallen: Difference | None  # from the best evaluation to the last, where it is more than chance
    findings: list[Finding]
    failures: dict[str, int]  # answers without a legal action by their reason, of those that were kept
    answer: str | None  # one of them
    healthy: Healthy | None

    @property
    def verdict(self) -> str:
        """What became of the score, in a sentence."""
        if self.change is None:
            return "there are no two evaluations to compare yet"
        way = f"{self.change.mean:+.3f}, 95 % interval {interval_text(self.change.low, self.change.high)}"
        if self.fallen is not None:
            return f"the score has fallen from its best evaluation by {-self.fallen.mean:.3f}; since the start {way}"
        if self.change.low > 0:
            return f"the score has risen: {way}"
        if self.change.high < 0:
            return f"the score has fallen: {way}"
        return f"the score has not changed beyond chance: {way}"

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def examine(run: Path) -> Examination:
    """Look at a run's folder. Raises UsageError where it holds no run, RunError where its rows are damaged."""
    settings = run_log.settings(run)
    history = History(settings, run_log.read_rows(run))
    if not history.rows:
        begins = "it goes on: its first evaluation is to come" if run_log.goes_on(run) else resume_command(run)
        raise UsageError(f"{run} has no update and no evaluation yet", fix=begins)
    failures, answer = _failures(run)
    return Examination(
        run=str(run),
        base=str(settings.get("base")),
        scenario=str(settings.get("scenario")),
        updates=len(history.updates),
        planned=int(settings["steps"]),
        goes_on=run_log.goes_on(run),
        score=_score(history.evaluations),
        curve=_curve(history.evaluations),
        change=history.change,
        fallen=_fallen(history),
        findings=diagnose(history),
        failures=failures,
        answer=answer,
        healthy=beside(history.game, str(settings.get("base"))),
    )


def beside(game: str, base: str) -> Healthy | None:
    """The healthy run of this scenario whose base is nearest in size; None where there is none of its kind."""
    try:
        size = parameters_of(base)
    except ModelError:
        return None
    if size is None:
        return None
    alike = [one for one in healthy_runs() if one.scenario == game and 1 / ALIKE <= one.parameters / size <= ALIKE]
    return min(alike, key=lambda one: abs(one.parameters - size), default=None)


def healthy_runs() -> list[Healthy]:
    """Those that come with the package; `benchmarks/healthy.py` makes the file."""
    runs = json.loads(files("msgrpo.train").joinpath(HEALTHY).read_text())
    return [Healthy(**one | {"curve": [(int(step), float(score)) for step, score in one["curve"]]}) for one in runs]


def _score(evaluations: Sequence[Row]) -> str | None:
    return printable(str(evaluations[0].get("score")))[:LONGEST_REASON] if evaluations else None


def _curve(evaluations: Sequence[Row]) -> Curve:
    scores = [(row["step"], row.get(str(row.get("score")))) for row in evaluations]
    return [(step, float(score)) for step, score in scores if isinstance(score, (int, float))]


def _fallen(history: History) -> Difference | None:
    """The change from the best evaluation to the last, where it is a loss beyond chance."""
    scores = [score for _, score in _curve(history.evaluations)]
    if len(scores) < 3 or len(scores) != len(history.evaluations):
        return None
    change = history.since(scores.index(max(scores)))
    return change if change is not None and change.high < 0 else None


def _failures(run: Path) -> tuple[dict[str, int], str | None]:
    """Why answers of the newest kept update held no legal action, and one of them."""
    steps = run_log.steps(run)
    try:
        samples = run_log.read_update(run, steps[-1]).samples if steps else []
    except RecordError:
        return {}, None
    turns = [turn for sample in samples for turn in sample.episode.turns_of(sample.player)]
    failed = [turn for turn in turns if turn.failure is not None]
    shown = next((turn.answer for turn in failed if turn.answer), None)
    return dict(Counter(str(turn.failure) for turn in failed)), None if shown is None else shown[-LONGEST_ANSWER:]


def table(examination: Examination) -> list[list[str]]:
    """The run's evaluations, below the names of the columns; where there is a healthy run, what that had after as
    many updates.
    """
    rows = [["update", "this run"], *([str(step), f"{score:.3f}"] for step, score in examination.curve)]
    if examination.healthy is not None:
        scores = [examination.healthy.at(step) for step, _ in examination.curve]
        others = ["a healthy run", *("" if score is None else f"{score:.3f}" for score in scores)]
        rows = [[*row, other] for row, other in zip(rows, others, strict=True)]
    return rows
