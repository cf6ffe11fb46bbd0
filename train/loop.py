"""train(): play groups, compare, keep, update, and now and then evaluate on starts that training never sees."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from msgrpo_agent.episode import Episode
from msgrpo_agent.errors import RunError, UsageError
from msgrpo_agent.game import Scenario
from msgrpo_agent.games import get_scenario
from msgrpo_agent.rollout import derive_seed
from train import checkpoint
from train.batch import select
from train.checkpoint import Progress
from train.collect import Group, collect
from train.config import TrainConfig
from train.display import Reporter, counter
from train.evaluate import Evaluations, finish
from train.metrics import Metrics
from train.policy import Policy
from train.run_folder import CONFIG, check_folder, write_transcripts, writing
from train.update import update


def train(config: TrainConfig, out: Path, *, resume: bool = False, report: Reporter) -> dict[str, Any]:
    """Run MS-GRPO and return the summary that `summary.json` holds.

    `out` gets the PEFT adapter, config, metrics, curve, transcripts and checkpoints. Raises UsageError when it
    holds another run, RunError when the loss is not finite or the disk is full; KeyboardInterrupt after a
    checkpoint when asked to stop.
    """
    with writing(out), enough_memory():
        check_folder(out, config, resume)
        return _train(config, out, report)


def _train(config: TrainConfig, out: Path, report: Reporter) -> dict[str, Any]:
    scenario = get_scenario(config.scenario)
    report.doing(f"loading {config.base}")
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
    checkpoint.replace_text(out / CONFIG, config.model_dump_json(indent=2) + "\n")
    metrics = Metrics(out, progress.step)
    evaluations = Evaluations(out, scenario, config, policy, metrics, report)
    with stop_requests(report) as stopped:
        while progress.step < config.steps and not stopped.is_set():
            evaluations.at(progress.step)
            if stopped.is_set():
                if progress.step:
                    save(out, progress, policy, optimizer)
                break
            began = time.perf_counter()
            starts = next_starts(scenario, config, progress)
            now = f"update {progress.step + 1} of {config.steps}"
            ended = counter(report, now)
            groups, episodes = collect(policy.engine, scenario, config, progress.step, starts, ended)
            played = time.perf_counter()
            report.doing(f"{now}: learning from {sum(len(episode.turns) for episode in episodes)} turns")
            generator = torch.Generator().manual_seed(derive_seed("update", config.seed, progress.step))
            samples = select(groups, config, generator)
            stats = update(policy, optimizer, samples, config, generator, progress.step)
            policy.refresh_engine()
            policy.check_engine(scenario)
            updated = time.perf_counter()
            progress.step += 1
            progress.seconds += updated - began
            progress.flat_groups += sum(group.is_flat for group in groups)
            values = {
                **describe(groups, episodes),
                **stats,
                "rollout_s": played - began,
                "update_s": updated - played,
            }
            metrics.write("train", progress.step, {**values, "seconds": progress.seconds})
            report.update(progress.step, values)
            if progress.step % config.checkpoint_every == 0 or progress.step == config.steps or stopped.is_set():
                save(out, progress, policy, optimizer)
                write_transcripts(out, episodes)
    if progress.step < config.steps:
        raise KeyboardInterrupt
    evaluations.at(progress.step)
    metrics.close()
    return finish(out, config, progress, evaluations)


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


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn memory that is not there, on a GPU or on the CPU, into one clear error with the settings to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise RunError(
            f"there is not enough memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            fix="lower --set micro_batch_tokens=…, max_tokens or group_size, or --set gradient_checkpointing=true; "
            "in a new --out, since these are settings of the run",
        ) from error


@contextmanager
def stop_requests(report: Reporter) -> Iterator[threading.Event]:
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
        report.stopping()

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
