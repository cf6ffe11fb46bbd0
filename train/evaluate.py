"""A run's own evaluations: the same validation starts every time, and in the end what has changed on them."""

from __future__ import annotations

import resource
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from msgrpo.agent import LanguageModel
from msgrpo.episode import Episode
from msgrpo.errors import GameFaultError, RunError
from msgrpo.evals.stats import bootstrap_mean, mcnemar_exact, paired_difference, wilson
from msgrpo.evals.suites import SUITE_VERSION, episode_seeds
from msgrpo.files import replace_json
from msgrpo.loops import run_async
from msgrpo.run_log import METRICS, SUMMARY, read_rows
from msgrpo.text import counted
from msgrpo.train.checkpoint import Progress
from msgrpo.train.config import TrainConfig
from msgrpo.train.curve import draw_curve
from msgrpo.train.rollouts import Ended, Play, Players, check_lost, counter, own_turns, silent, with_result
from msgrpo.train.sinks import Reporter

HIDDEN = ("kind", "step", "score", "values")  # of an evaluation's row, in the summary


@dataclass(frozen=True)
class Evaluation:
    """One score an episode, on the validation starts: success where the scenario has a goal, else the return.

    None stands for an episode that has no result, because the game itself failed.
    """

    score: str
    values: list[float | None]
    invalid: float

    def summary(self) -> dict[str, float]:
        known = [value for value in self.values if value is not None]
        n, mean = len(known), sum(known) / len(known)
        low, high = wilson(round(sum(known)), n) if self.score == "success" else bootstrap_mean(known, seed=0)
        return {self.score: mean, f"{self.score}_low": low, f"{self.score}_high": high, "invalid": self.invalid}


def peak_memory() -> int:
    """The most bytes that this process has held: of the GPU's memory where it uses one, else of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check_starts(config: TrainConfig) -> None:
    """Raise GameFaultError where the validation starts cannot be told from the others: all evaluations play the same,
    so none can be passed over, as training passes over its own.
    """
    scenario, evaluation = config.scenarios[0], config.evaluation
    try:
        episode_seeds(scenario, max(evaluation.starts, evaluation.film), "val")
    except GameFaultError as fault:
        raise GameFaultError(
            f"the validation starts cannot be drawn, since a start cannot be looked at: {fault.message}",
            fix="mend the game there; a start that fails later, in play, ends no training",
        ) from fault


def validation_episodes(model: LanguageModel, players: Players, n: int, ended: Ended = silent) -> list[Episode]:
    """The first `n` validation starts of the run's first scenario, with the training's own sampling; no shaping."""
    scenario = players.config.scenarios[0]
    plays = [
        Play(scenario, *seeds, players.seats(scenario, i))
        for i, seeds in enumerate(episode_seeds(scenario, n, "val"))
    ]
    playing = players.play(model, players.config.sampling, plays, 0.0, ended)
    return players.ranks.gather(run_async(playing))


def evaluate(model: LanguageModel, players: Players, ended: Ended = silent) -> Evaluation:
    """Play the run's fixed validation starts."""
    config, scenario = players.config, players.config.scenarios[0]
    episodes = validation_episodes(model, players, config.evaluation.starts, ended)
    check_lost(episodes)
    turns = own_turns(with_result(episodes))
    values: list[float | None] = [
        # against an opponent the return of the policy's seat: the mean over both seats would be 0
        None
        if one.error is not None
        else one.score
        if config.opponent is None
        else one.returns[players.seats(scenario, i)[0]]
        for i, one in enumerate(episodes)
    ]
    invalid = sum(turn.failure is not None for turn in turns) / max(len(turns), 1)
    return Evaluation("success" if scenario.goal and config.opponent is None else "return", values, invalid)


class Evaluations:
    """Before, now and then, and after: each is written once, also when a run is resumed."""

    def __init__(self, out: Path, players: Players, from_step: int) -> None:
        ranks = players.ranks
        rows = read_rows(out) if ranks.first else []
        self.done = {row["step"]: row for row in rows if row["kind"] == "eval" and row["step"] <= from_step}
        if ranks.first and from_step and 0 not in self.done:
            raise RunError(
                f"{out / METRICS} lacks the evaluation before training", fix="start again in another --out"
            )
        if not all(_is_evaluation(row) for row in self.done.values()):
            raise RunError(f"{out / METRICS} holds a damaged evaluation", fix="start again in another --out")
        versions = {row.get("suite_version") for row in self.done.values()} - {SUITE_VERSION}
        if versions:
            raise RunError(
                f"{out} was begun with the starts of suite version {versions.pop()}, this is {SUITE_VERSION}",
                fix="start again in another --out",
            )
        self._players = players

    def due(self, step: int) -> bool:
        config = self._players.config
        asked = step % config.evaluation.every == 0 or step == config.steps
        return self._players.ranks.broadcast(asked and step not in self.done)

    def forecast(self, step: int, seconds: float) -> str:
        """How long the rest of the run will take, if each update takes `seconds` and evaluations as long as
        before.
        """
        last, every = self._players.config.steps, self._players.config.evaluation.every
        left, due = last - step, -(-last // every) - (step - 1) // every  # the one after this update is to come
        whole = left * seconds + due * max((row["eval_s"] for row in self.done.values()), default=0.0)
        duration = f"{whole / 60:.0f} minutes" if whole >= 120 else f"{whole:.0f} s"
        rest = " and ".join(counted(n, what) for n, what in ((left, "more update"), (due, "evaluation")) if n)
        return (
            f"the first update took {seconds:.1f} s and {peak_memory() / 2**30:.1f} GiB of memory; "
            f"{rest} will take about {duration} (longer where better play lasts longer)"
        )

    def at(self, step: int, model: LanguageModel, report: Reporter) -> dict[str, Any]:
        """Evaluate and return the row: score, mean and interval, seconds, and every episode's value."""
        began = time.perf_counter()
        ended = counter(report, f"evaluation after {counted(step, 'update')}")
        evaluation = evaluate(model, self._players, ended)
        row = {
            "score": evaluation.score,
            "suite_version": SUITE_VERSION,  # another one has other starts
            **evaluation.summary(),
            "eval_s": time.perf_counter() - began,
            "values": evaluation.values,
        }
        self.done[step] = {"step": step, **row}
        return row


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether a row that a file holds has what the summary is made of."""
    score, values = str(row.get("score")), row.get("values")
    numbers = [row.get(name) for name in (score, "eval_s")]
    known = [value for value in values if value is not None] if isinstance(values, list) else [""]
    ends = f"{score}_low" in row and f"{score}_high" in row
    return ends and "invalid" in row and all(isinstance(number, int | float) for number in (*numbers, *known))


def finish(
    out: Path, config: TrainConfig, progress: Progress, evaluations: Evaluations, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare the first and the last evaluation, draw the curve, write `summary.json`, with `more` in it."""
    before, after = evaluations.done[0], evaluations.done[progress.step]
    score = before["score"]
    both = zip(after["values"], before["values"], strict=True)
    pairs = [(now, then) for now, then in both if now is not None and then is not None]
    if not pairs:
        raise RunError(
            "no validation start has a result both before and after training",
            fix=f"find the game's fault with: msgrpo games check {shlex.quote(config.scenarios[0].id)}",
        )
    now, then = zip(*pairs, strict=True)
    change = paired_difference(now, then, seed=0)
    summary = {
        "scenario": config.scenario,
        "evaluated_on": config.scenarios[0].id,
        "base": config.base,
        "seed": config.seed,
        "steps": progress.step,
        "score": score,
        "episodes": config.evaluation.starts,
        "before": {key: value for key, value in before.items() if key not in HIDDEN},
        "after": {key: value for key, value in after.items() if key not in HIDDEN},
        "change": {"mean": change.mean, "low": change.low, "high": change.high},
        "training_seconds": round(progress.seconds, 1),
        "flat_groups": progress.flat_groups,
    }
    if score == "success":
        summary["mcnemar_p"] = mcnemar_exact([v > 0 for v in now], [v > 0 for v in then])
    summary |= more
    title = f"{config.base} on {config.scenario}, seed {config.seed}"
    draw_curve(out, title, score, f" on {config.scenarios[0].id}" if len(config.scenarios) > 1 else "")
    replace_json(out / SUMMARY, summary)  # last: it says that all is there
    return summary
