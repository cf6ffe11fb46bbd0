"""Why a run does not learn: one function a cause, from the rows that a run writes.

While it trains, `Adviser` says what is seen after the first update and at every evaluation; `msgrpo doctor RUN` asks
the same functions afterwards (`doctor.py`). The bounds are between what healthy runs and sick ones show
(`benchmarks/doctor.py`). Nothing here loads torch: a run can be looked at on another machine.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os.path import relpath
from statistics import median
from typing import Any

from pydantic import ValidationError

from msgrpo.evals.stats import Difference, paired_difference
from msgrpo.mixture import names_of
from msgrpo.models.paths import NANO
from msgrpo.prompt import Asked

Row = Mapping[str, Any]
RECENT = 5  # updates whose mean is what a run does now
FIRST = 3  # updates whose mean is what it did in the beginning
SETTLED = 10  # updates after which half of the answers should have a legal action
NEARLY_ALL, MANY, SOME = 0.9, 0.5, 0.3
HARDLY_ANY = 0.02
# Medians of three updates in a row above which the learning rate is too high; healthy runs of nano reach 0.007, 0.11
# and 0.2, one of a 0.5B 0.048, 0 and 0.94.
FAST_CLIP, FAST_KL, FAST_GRADIENT = 0.05, 0.5, 1.0
HALF_PRECISION = 0.01  # a bound of engine and trainer from here on is that of bfloat16
USUAL_TOKENS = 48  # of an answer, as a run allows them unless told otherwise
WARM = 1.5  # a temperature above which answers fall apart
COLLAPSED = 0.1  # of what it was in the beginning
NO_INFORMATION = 0.02  # nats


@dataclass(frozen=True)
class Finding:
    """A cause, what shows it, and what to change."""

    cause: str
    evidence: str
    change: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}. {self.change}"


@dataclass(frozen=True)
class History:
    """What a run has written so far: its settings, and a row for each update and evaluation."""

    settings: Mapping[str, Any]
    rows: Sequence[Row]

    @cached_property
    def updates(self) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == "train"]

    @cached_property
    def evaluations(self) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == "eval"]

    def values(self, name: str) -> list[float]:
        """A metric of every update that has it."""
        measured = [row.get(name) for row in self.updates]
        return [float(v) for v in measured if isinstance(v, (int, float)) and math.isfinite(v)]

    def now(self, name: str) -> float | None:
        """A metric's mean over the last updates; None where it was not measured."""
        return _mean(self.values(name)[-RECENT:])

    def first(self, name: str) -> float | None:
        """A metric's mean over the first updates; None where it was not measured."""
        return _mean(self.values(name)[:FIRST])

    def peak(self, name: str) -> float | None:
        """A metric's largest median of three updates in a row: one update that stands out is no trend."""
        values = self.values(name)
        return max((median(values[i : i + 3]) for i in range(len(values) - 2)), default=None)

    @cached_property
    def change(self) -> Difference | None:
        """The last evaluation minus the first, on the same starts; None before there are two."""
        return self.since(0)

    def since(self, place: int) -> Difference | None:
        """The last evaluation minus the one at `place`."""
        if len(self.evaluations) < 2:
            return None
        then, now = (self.evaluations[i].get("values") for i in (place, -1))
        if not isinstance(then, list) or not isinstance(now, list):
            return None
        pairs = [(a, b) for a, b in zip(now, then, strict=False) if _number(a) and _number(b)]
        return paired_difference(*zip(*pairs, strict=True), seed=0) if len(pairs) > 1 else None

    @property
    def learns(self) -> bool:
        """Whether the run's score has risen beyond chance, or it hardly ever fails: flat groups are no fault then."""
        risen = self.change is not None and self.change.low > 0
        return risen or (self.now("rollout/success") or 0.0) > NEARLY_ALL

    @property
    def game(self) -> str:
        return names_of(str(self.settings.get("scenario", "")))[0]

    @property
    def teach(self) -> str:
        """The command that teaches this base the form of an answer, asked as in this run."""
        base = str(self.settings.get("base", NANO))
        named = "" if base == NANO else f" --base {shlex.quote(base)}"
        try:
            options = Asked.model_validate({"prompt": {}} | dict(self.settings)).options
        except ValidationError:
            options = []
        asked = "".join(f" {shlex.quote(option)}" for option in options)
        out = shlex.quote(f"{base.rstrip('/')}-2" if relpath(base).startswith("runs/taught") else "runs/taught")
        return f"msgrpo teach {shlex.quote(self.game)}{named}{asked} --out {out}, then --base {out}"

    def setting(self, name: str) -> float:
        value = self.settings.get(name)
        return float(value) if isinstance(value, (int, float)) else math.nan


Cause = Callable[[History], Finding | None]


def engine_mismatch(run: History) -> Finding | None:
    """The engine plays with other weights, or another computation, than those that learn."""
    names = ("engine/mismatch_mean", "engine/mismatch_bound")
    fresh = [row for row in run.updates if row.get("rollout/staleness") == 0]
    measured = [
        (float(row[names[0]]), float(row[names[1]])) for row in fresh if all(_number(row.get(n)) for n in names)
    ]
    mean, bound = max(measured, default=(0.0, 1.0))
    if mean < bound * (0.5 if bound >= HALF_PRECISION else 0.05):
        return None
    return Finding(
        "engine mismatch",
        f"engine and trainer differ by {mean:.2g} nats a token on fresh rollouts; a run stops at {bound:.2g}, two "
        f"programs with the same weights differ by {'1e-6' if bound < HALF_PRECISION else 'some hundredths'}",
        "Give the servers this base in the trainer's dtype, without quantisation (--set dtype=…), or play in this "
        "process: --rollouts hf",
    )


def fast_learning(run: History) -> Finding | None:
    """Steps are so large that the policy leaves what was compared."""
    clip, kl = run.peak("update/clip_share") or 0.0, run.peak("update/kl")
    gradient = run.peak("update/grad_norm") or 0.0
    if clip <= FAST_CLIP and (kl or 0.0) <= FAST_KL and gradient <= FAST_GRADIENT:
        return None
    divergence = "" if kl is None else f", KL was {kl:.2g}"  # a run without the penalty does not measure it
    rate = run.setting("learning_rate")
    return Finding(
        "learning rate too high",
        f"at their highest {clip:.0%} of the tokens were clipped{divergence} and the gradient's norm was "
        f"{gradient:.2g}",
        f"Begin anew with --set learning_rate={rate / 10:.2g} (it was {rate:.2g}), or fewer steps an update: "
        "--set minibatches=1",
    )


def truncation(run: History) -> Finding | None:
    """Answers are cut off before their action comes."""
    cut = run.now("rollout/truncated") or 0.0
    if cut <= SOME:
        return None
    return Finding(
        "truncation",
        f"{cut:.0%} of the answers were cut off at max_tokens={run.setting('max_tokens'):.0f}, and "
        f"{run.now('rollout/invalid') or 0.0:.0%} held no legal action",
        _cooler(run)
        or f"With --set max_tokens={max(4 * run.setting('max_tokens'), USUAL_TOKENS):.0f} they could end",
    )


def no_legal_action(run: History) -> Finding | None:
    """The base does not know the form of an answer."""
    invalid = run.now("rollout/invalid") or 0.0
    if invalid <= (MANY if len(run.updates) >= SETTLED else NEARLY_ALL) or truncation(run) is not None:
        return None
    return Finding(
        "no legal action",
        f"{invalid:.0%} of the answers held no legal action, so there is nothing to compare",
        _cooler(run) or f"Teach the base the form first: {run.teach}",
    )


def gate(run: History) -> Finding | None:
    """The gate leaves nothing to learn from."""
    rejected = run.now("rollout/gated_groups") or 0.0
    if rejected <= NEARLY_ALL:
        return None
    return Finding(
        "gate",
        f"the gate {run.settings.get('gate')} rejected {rejected:.0%} of the groups, and those teach nothing",
        "Train without --set gate, or teach the base first what the gate looks for",
    )


def teacher_fails(run: History) -> Finding | None:
    """The teacher says nothing of most turns."""
    failed, turns = run.now("teacher/failed") or 0.0, run.now("teacher/turns") or 0.0
    if failed <= MANY * turns:
        return None
    teacher = str(run.settings.get("teacher"))
    return Finding(
        "teacher fails",
        f"teacher={teacher} had nothing to say of {failed:.0f} of {turns:.0f} turns an update",
        f"Teach the base the form of thought that it reads: {run.teach}"
        if teacher.startswith("own-words")
        else f"Find the fault of reference player, judge or game: msgrpo games check {shlex.quote(run.game)}",
    )


def too_easy(run: History) -> Finding | None:
    """Nothing is left to learn."""
    success, flat = run.first("rollout/success"), run.first("rollout/flat_groups") or 0.0
    if success is None or success <= NEARLY_ALL or flat <= MANY:
        return None
    return Finding(
        "starts too easy",
        f"{success:.0%} of the episodes reached the goal from the first updates on, and {flat:.0%} of the groups "
        "were flat",
        f"Choose a harder scenario than {run.game} (msgrpo games), or start from an untrained base",
    )


def template_collapse(run: History) -> Finding | None:
    """The policy plays the same in every state."""
    now, first = run.now("rollout/state_information"), run.first("rollout/state_information")
    variety = run.now("rollout/action_entropy")
    if now is None or first is None or variety is None or run.learns or len(run.updates) < RECENT:
        return None
    if now > NO_INFORMATION or now > SOME * first:
        return None
    kind = "nearly always the same action" if variety < SOME else "whatever the state, the same mixture of actions"
    return Finding(
        "template collapse",
        f"the actions do not depend on the state: their mutual information went from {first:.2g} to {now:.2g} nats; "
        f"{kind} (entropy {variety:.2g})",
        "Begin anew from a checkpoint before that with a smaller learning rate, more KL (--set 'loss=clip(kl=0.1)'), "
        "and without objectives that do not depend on the state",
    )


def entropy_collapse(run: History) -> Finding | None:
    """The policy hardly varies any more, and not because it plays well."""
    now, first = run.now("rollout/entropy"), run.first("rollout/entropy")
    if now is None or first is None or run.learns or len(run.updates) < RECENT or now >= COLLAPSED * first:
        return None
    return Finding(
        "entropy collapse",
        f"the entropy of the answers fell from {first:.2g} to {now:.2g} nats a token, so all episodes of a group are "
        "alike",
        "Begin anew with more KL (--set 'loss=clip(kl=0.1)'), a smaller learning rate, or rollouts whose temperature "
        "keeps the entropy up (--set 'explore=entropy(target=0.1)')",
    )


def too_hard(run: History) -> Finding | None:
    """No episode ever succeeds."""
    success, flat = run.now("rollout/success"), run.now("rollout/flat_groups") or 0.0
    if success is None or success > HARDLY_ANY or flat <= NEARLY_ALL or not _plays(run):
        return None
    return Finding(
        "starts too hard",
        f"{success:.0%} of the episodes reached the goal, so {flat:.0%} of the groups are flat",
        f"Begin with an easier scenario than {run.game}, or teach the base to play: {run.teach}",
    )


def flat_groups(run: History) -> Finding | None:
    """All episodes of a group have the same return."""
    flat = run.now("rollout/flat_groups") or 0.0
    if flat <= NEARLY_ALL or run.learns or not _plays(run) or too_hard(run) is not None:
        return None
    return Finding(
        "flat groups",
        f"{flat:.0%} of the groups are flat: all their episodes have the same return, so nothing is learnt",
        "More episodes a group (--set group_size=…), a warmer policy (--set temperature=…), easier starts, or "
        "rewards on the way would give them something to differ in",
    )


# Those that explain others come first.
CAUSES: Sequence[Cause] = (
    engine_mismatch, fast_learning, truncation, no_legal_action, gate, teacher_fails, too_easy, template_collapse,
    entropy_collapse, too_hard, flat_groups,
)  # fmt: skip


def diagnose(run: History) -> list[Finding]:
    """What ails the run, the cause of the others first; empty where nothing does."""
    return [finding for finding in (cause(run) for cause in CAUSES) if finding is not None] if run.updates else []


@dataclass
class Adviser:
    """A sink that says each cause once: after the first update, and at every evaluation."""

    settings: Mapping[str, Any]
    rows: list[Row]
    note: Callable[[str], None]
    named: set[str] = field(default_factory=set)

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        self.rows.append({"kind": "train", "step": step, **values})
        if step == 1:
            self._advise()

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        self.rows.append({"kind": "eval", "step": step, **values})
        self._advise()

    def _advise(self) -> None:
        for finding in diagnose(History(self.settings, self.rows))[:1]:
            if finding.cause not in self.named:
                self.named.add(finding.cause)
                self.note(str(finding))

    def close(self) -> None:
        """Nothing was opened."""


def _cooler(run: History) -> str | None:
    """What to do where answers are as they are because they were sampled too warm."""
    warm = run.setting("temperature")
    return f"They were sampled at temperature {warm:g}: begin with --set temperature=1" if warm > WARM else None


def _plays(run: History) -> bool:
    """Whether its answers are moves: else what follows from that is no cause of its own."""
    return no_legal_action(run) is None and truncation(run) is None


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
