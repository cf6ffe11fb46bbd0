"""train(): play groups, compare, keep, update, and now and then evaluate on starts that training never sees."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch.nn.utils import clip_grad_norm_

from evals.stats import bootstrap_mean, mcnemar_exact, paired_difference, wilson
from evals.suites import episode_seeds
from msgrpo_agent.agent import LanguageAgent
from msgrpo_agent.episode import Episode
from msgrpo_agent.errors import RunError, UsageError
from msgrpo_agent.game import Scenario
from msgrpo_agent.games import get_scenario
from msgrpo_agent.rewards import Shaping
from msgrpo_agent.rollout import derive_seed
from train import checkpoint
from train.batch import Sample, micro_batches, minibatches, select
from train.checkpoint import Progress
from train.collect import Group, collect, play
from train.config import TrainConfig
from train.metrics import Metrics, draw_curve, read
from train.msgrpo import policy_loss
from train.policy import Policy

HIDDEN = ("kind", "step", "score", "values")  # of an evaluation's row, in the summary
WARM_UP = 5  # updates over which the learning rate rises to its value


class Reporter(Protocol):
    """Where a run says how it goes (a progress display, plain lines, nothing)."""

    def note(self, text: str) -> None: ...

    def update(self, step: int, values: dict[str, float]) -> None: ...

    def evaluation(self, step: int, values: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """One score an episode, on the held-out starts: success where the scenario has a goal, else the return."""

    score: str
    values: list[float]
    invalid: float

    def summary(self) -> dict[str, float]:
        n, mean = len(self.values), sum(self.values) / len(self.values)
        low, high = (
            wilson(round(sum(self.values)), n) if self.score == "success" else bootstrap_mean(self.values, seed=0)
        )
        return {self.score: mean, f"{self.score}_low": low, f"{self.score}_high": high, "invalid": self.invalid}


def train(config: TrainConfig, out: Path, *, resume: bool = False, report: Reporter) -> dict[str, Any]:
    """Run MS-GRPO and return the summary that `summary.json` holds.

    `out` gets the PEFT adapter, config, metrics, curve, transcripts and checkpoints. Raises UsageError when it
    holds another run, RunError when the loss is not finite or the disk is full; KeyboardInterrupt after a
    checkpoint when asked to stop.
    """
    with writing(out):
        check_folder(out, config, resume)
        return _train(config, out, report)


def _train(config: TrainConfig, out: Path, report: Reporter) -> dict[str, Any]:
    scenario = get_scenario(config.scenario)
    policy = Policy(config)
    optimizer = torch.optim.AdamW(policy.parameters, lr=config.learning_rate, weight_decay=0.0)
    progress = restore(out, policy, optimizer, report)
    if progress.step > config.steps:
        raise UsageError(
            f"--out {out} has {progress.step} updates already, more than the {config.steps} asked for",
            fix=f"--steps {progress.step}, or more",
        )
    policy.check_engine(scenario)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint.replace_text(out / "config.json", config.model_dump_json(indent=2) + "\n")
    metrics = Metrics(out, progress.step)
    evaluations = Evaluations(out, scenario, config, policy, metrics, report)
    with stop_requests() as stopped:
        while progress.step < config.steps and not stopped.is_set():
            evaluations.at(progress.step)
            began = time.perf_counter()
            starts = next_starts(scenario, config, progress)
            groups, episodes = collect(policy.engine, scenario, config, progress.step, starts)
            played = time.perf_counter()
            generator = torch.Generator().manual_seed(derive_seed("update", config.seed, progress.step))
            samples = select(groups, config, generator)
            stats = update(policy, optimizer, samples, config, generator, progress.step)
            policy.refresh_engine()
            policy.check_engine(scenario)
            now = time.perf_counter()
            progress.step += 1
            progress.seconds += now - began
            progress.flat_groups += sum(group.is_flat for group in groups)
            values = {**describe(groups, episodes), **stats, "rollout_s": played - began, "update_s": now - played}
            metrics.write("train", progress.step, {**values, "seconds": progress.seconds})
            report.update(progress.step, values)
            if progress.step % config.checkpoint_every == 0 or progress.step == config.steps or stopped.is_set():
                save(out, progress, policy, optimizer)
                write_transcripts(out, episodes[:: config.group_size][:4])
    if progress.step < config.steps:
        raise KeyboardInterrupt
    evaluations.at(progress.step)
    metrics.close()
    return finish(out, config, progress, evaluations)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: TrainConfig,
    generator: torch.Generator,
    step: int,
) -> dict[str, float]:
    """Passes over the kept turns: for each minibatch, accumulate the gradient of `policy_loss` and step once."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    totals: dict[str, float] = {"loss": 0.0, "kl": 0.0, "clip_share": 0.0, "ratio": 0.0, "grad_norm": 0.0}
    steps = 0
    for _ in range(config.epochs if samples else 0):
        for part in minibatches(samples, config.minibatches, generator):
            optimizer.zero_grad()
            for name, value in _accumulate(policy, part, config).items():
                totals[name] += value
            totals["grad_norm"] += float(clip_grad_norm_(policy.parameters, config.max_grad_norm))
            if not math.isfinite(totals["loss"] + totals["grad_norm"]):
                raise RunError(
                    f"the loss is not finite in update {step + 1}: {totals['loss']}, gradient {totals['grad_norm']}",
                    fix="the last checkpoint is kept; try a smaller --set learning_rate=…",
                )
            optimizer.step()
            steps += 1
    return {name: value / max(steps, 1) for name, value in totals.items()} | {"kept_turns": float(len(samples))}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Up over the first updates, constant to the middle of the run, then down in a line to a twentieth.

    A run that is resumed with more steps goes on by the schedule of the longer run.
    """
    return config.learning_rate * min(1.0, (step + 1) / WARM_UP, max(0.05, 2 * (1 - step / config.steps)))


def _accumulate(policy: Policy, part: Sequence[Sample], config: TrainConfig) -> dict[str, float]:
    """Backward through one minibatch in micro-batches; the sum of their weighted losses is the minibatch's."""
    device = policy.model.device
    tokens = sum(len(sample.answer_ids) for sample in part)
    totals: dict[str, float] = {"loss": 0.0, "kl": 0.0, "clip_share": 0.0, "ratio": 0.0}
    for micro in micro_batches(part, config.micro_batch_tokens, device):
        in_micro = sum(len(answer) for _, answer in micro.pairs)
        weight = in_micro / tokens if config.aggregate == "token" else len(micro.pairs) / len(part)
        reference = policy.reference_logprobs(micro.prefix, micro.pairs) if config.kl_coef else None
        logprobs, mask = policy.logprobs(micro.prefix, micro.pairs)
        loss, stats = policy_loss(
            logprobs,
            micro.old_logprobs_NT,
            logprobs.detach() if reference is None else reference,
            micro.advantages_N,
            mask,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            aggregate=config.aggregate,
        )
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        totals["loss"] += float(loss.detach()) * weight
        for name, value in stats.items():
            totals[name] += float(value) * in_micro / tokens
    return totals


def next_starts(scenario: Scenario, config: TrainConfig, progress: Progress) -> list[int]:
    """The next training starts, a fresh one for each group; each run seed begins somewhere else."""
    offset = config.seed * 1_000_003
    starts = scenario.starts("train", first_seed=offset + progress.next_start)
    chosen = [next(starts) for _ in range(config.groups)]
    progress.next_start = chosen[-1] + 1 - offset
    return chosen


def describe(groups: Sequence[Group], episodes: Sequence[Episode]) -> dict[str, float]:
    """What the update's rollouts looked like, before any selection."""
    turns = [turn for episode in episodes for turn in episode.turns]
    returns = [value for episode in episodes for value in episode.returns.values()]
    successes = [float(episode.success) for episode in episodes if episode.success is not None]
    values = {
        "return": sum(returns) / len(returns),
        "invalid": sum(turn.failure is not None for turn in turns) / len(turns),
        "truncated": sum(turn.finish_reason == "length" for turn in turns) / len(turns),
        "turns": float(len(turns)),
        "tokens": float(sum(turn.completion_tokens for turn in turns)),
        "flat_groups": sum(group.is_flat for group in groups) / len(groups),
    }
    return values | ({"success": sum(successes) / len(successes)} if successes else {})


def evaluate(policy: Policy, scenario: Scenario, config: TrainConfig) -> Evaluation:
    """Play the fixed held-out starts with the training's own sampling; no shaping."""
    agent = LanguageAgent("policy", policy.engine, config.sampling)
    episodes = play(agent, scenario, episode_seeds(scenario, config.eval_episodes), Shaping())
    turns = [turn for episode in episodes for turn in episode.turns]
    values = [
        float(episode.success)
        if episode.success is not None
        else sum(episode.returns.values()) / len(episode.returns)
        for episode in episodes
    ]
    invalid = sum(turn.failure is not None for turn in turns) / len(turns)
    return Evaluation("success" if scenario.goal else "return", values, invalid)


class Evaluations:
    """Before, every `eval_every` updates, and after: each is written once, also when a run is resumed."""

    def __init__(
        self, out: Path, scenario: Scenario, config: TrainConfig, policy: Policy, metrics: Metrics, report: Reporter
    ) -> None:
        self.done = {row["step"]: row for row in read(out) if row["kind"] == "eval"}
        if metrics.resumed and 0 not in self.done:
            raise RunError(f"{metrics.file} lacks the evaluation before training", fix="start again in another --out")
        self._scenario, self._config, self._policy = scenario, config, policy
        self._metrics, self._report = metrics, report

    def at(self, step: int) -> None:
        due = step % self._config.eval_every == 0 or step == self._config.steps
        if not due or step in self.done:
            return
        began = time.perf_counter()
        found = evaluate(self._policy, self._scenario, self._config)
        values = found.summary()
        row = {"score": found.score, **values, "eval_s": time.perf_counter() - began, "values": found.values}
        self.done[step] = row
        self._metrics.write("eval", step, row)
        self._report.evaluation(step, values)


def finish(out: Path, config: TrainConfig, progress: Progress, evaluations: Evaluations) -> dict[str, Any]:
    """Compare the first and the last evaluation, draw the curve, write `summary.json`."""
    before, after = evaluations.done[0], evaluations.done[progress.step]
    score = before["score"]
    change = paired_difference(after["values"], before["values"], seed=0)
    summary = {
        "scenario": config.scenario,
        "base": config.base,
        "seed": config.seed,
        "steps": progress.step,
        "score": score,
        "episodes": config.eval_episodes,
        "before": {key: value for key, value in before.items() if key not in HIDDEN},
        "after": {key: value for key, value in after.items() if key not in HIDDEN},
        "change": {"mean": change.mean, "low": change.low, "high": change.high},
        "training_seconds": round(progress.seconds, 1),
        "flat_groups": progress.flat_groups,
    }
    if score == "success":
        summary["mcnemar_p"] = mcnemar_exact([v > 0 for v in after["values"]], [v > 0 for v in before["values"]])
    draw_curve(out, f"{config.base} on {config.scenario}, seed {config.seed}", score)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def check_folder(out: Path, config: TrainConfig, resume: bool) -> None:
    """Refuse to touch a folder that holds another run, or anything that is no run."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", fix="choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return
    file = out / "config.json"
    if not file.is_file():
        raise UsageError(f"--out {out} is not empty and holds no run", fix="choose another --out")
    if not resume:
        raise UsageError(f"--out {out} holds a run already", fix="go on with --resume, or choose another --out")
    try:
        held = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file} is damaged: {error}", fix="choose another --out") from error
    wanted = json.loads(config.model_dump_json())
    differing = [key for key in wanted if key != "steps" and held.get(key) != wanted[key]]
    if differing:
        said = ", ".join(f"{key} {held.get(key)!r} there, {wanted[key]!r} asked" for key in differing)
        raise UsageError(f"--out {out} holds a run with other settings: {said}", fix="choose another --out")


def restore(out: Path, policy: Policy, optimizer: torch.optim.Optimizer, report: Reporter) -> Progress:
    """Go on from the newest whole checkpoint, or from the beginning."""
    state, damaged = checkpoint.load_latest(out)
    for folder in damaged:
        report.note(f"the checkpoint {folder} is damaged and was passed over")
    if state is None:
        return Progress()
    policy.load_adapter_state(state["adapter"])
    optimizer.load_state_dict(state["optimizer"])
    report.note(f"going on after update {state['progress']['step']}")
    return Progress(**state["progress"])


def save(out: Path, progress: Progress, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """The checkpoint, and the adapter of the same update beside it."""
    checkpoint.save(out, progress, policy.adapter_state(), optimizer.state_dict())
    policy.save_adapter(out)


def write_transcripts(out: Path, episodes: Sequence[Episode]) -> None:
    """A few episodes of the last update, to read."""
    (out / "transcripts.jsonl").write_text("".join(episode.model_dump_json() + "\n" for episode in episodes))


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """What the disk refuses, in whatever file of the run, is one clear error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the run {out} cannot be read or written: {error}",
            fix="mend that (is the disk full?), then go on with the same command and --resume",
        ) from error


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks the run to stop after this update; the second stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
