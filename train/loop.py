"""train(): play groups, compare, keep, update, and now and then evaluate on the validation starts."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from msgrpo import run_log
from msgrpo.agent import Agent
from msgrpo.episode import Episode
from msgrpo.errors import RunError, UsageError
from msgrpo.files import is_part, replace_text
from msgrpo.models.paths import ADAPTER_WEIGHTS
from msgrpo.rollout import derive_seed
from msgrpo.run_log import CONFIG
from msgrpo.train import checkpoint
from msgrpo.train.advice import advice
from msgrpo.train.batch import Picked, pick
from msgrpo.train.checkpoint import Progress, State
from msgrpo.train.collect import opponent_of, own_seats, own_turns
from msgrpo.train.config import TrainConfig
from msgrpo.train.critic import critic_values
from msgrpo.train.display import counter
from msgrpo.train.engines import open_engine
from msgrpo.train.evaluate import Evaluations, finish
from msgrpo.train.gates import accepted, gate_named
from msgrpo.train.nano.words import looking_ahead
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import Ranks, open_ranks
from msgrpo.train.rollouts import Pace, Rollouts
from msgrpo.train.run_folder import check_folder, write_transcripts, writing
from msgrpo.train.sinks import Reporter, Sinks, open_sinks
from msgrpo.train.stopping import StopRequested, stop_requests
from msgrpo.train.temperature import entropy, following
from msgrpo.train.token_weights import token_weights
from msgrpo.train.update import check_mismatch, update
from msgrpo.train.watched import watched


def train(
    config: TrainConfig, out: Path, *, resume: bool = False, report: Reporter, logs: Sequence[str] = ()
) -> dict[str, Any]:
    """Run MS-GRPO and return the summary that `summary.json` holds; {} in every process but the first.

    `out` gets the PEFT adapter, config, metrics, curve, transcripts and checkpoints; `logs` names further sinks.
    Raises UsageError when it holds another run, RunError when another process trains there, the loss is not finite,
    the disk is full, or no engine plays the policy's weights; KeyboardInterrupt after a checkpoint when asked to
    stop.
    """
    with writing(out), enough_memory(), open_ranks() as ranks:
        if ranks.first:
            check_folder(out, config, resume)
        gate_named(config.gate)  # a wrong name ends the run before anything is written or loaded
        config = ranks.agree(config)
        report.doing(f"loading {config.base}")
        policy, opponent = Policy(config), opponent_of(config)
        with run_log.alone(out) if ranks.first else nullcontext():
            return _train(policy, opponent, config, out, report, logs, ranks)


def _train(
    policy: Policy,
    opponent: Agent | None,
    config: TrainConfig,
    out: Path,
    report: Reporter,
    logs: Sequence[str],
    ranks: Ranks,
) -> dict[str, Any]:
    scenario = config.scenarios[0]
    optimizer = torch.optim.AdamW(policy.parameters, lr=config.learning_rate, weight_decay=0.0)
    run = Run(out, policy, optimizer, restore(out, config, policy, optimizer, report, ranks))
    with closing(open_engine(config, scenario, policy, out, ranks, report)) as engine:
        model = engine.load(run.step)
        evaluations = Evaluations(out, scenario, config, run.step, ranks, opponent)  # refuses before anything changes
        sinks = begin(out, config, run.step, report, logs) if ranks.first else Sinks(report, [], [])
        if ranks.first:
            run.mend()
        with closing(sinks), closing(Pace(config, ranks, opponent)) as pace, stop_requests(report) as stop:
            told = False
            while stop.asked is None:
                try:
                    if evaluations.due(run.step):
                        with stop.abandonable():
                            row = evaluations.at(run.step, model, report)
                        sinks.evaluation(run.step, row)
                    if run.step == config.steps:
                        break
                    with stop.abandonable():
                        now = f"update {run.step + 1} of {config.steps}"
                        began = time.perf_counter()
                        sampling = config.sampling.model_copy(update={"temperature": policy.temperature})
                        rollouts = pace.next(run.progress, model, sampling, counter(report, now))
                        picked, stats = learn(policy, optimizer, rollouts, config, run.step, ranks, report)
                        stats["rollout/temperature"] = policy.temperature
                        policy.temperature = following(policy.temperature, entropy(rollouts), config)
                        model = engine.load(run.step + 1)
                except StopRequested:
                    break
                seconds = time.perf_counter() - began
                run.advance(rollouts, seconds)
                if rollouts.lost:
                    report.note(f"update {run.step}: {_lost(rollouts.lost)}")
                if not told:
                    report.note(evaluations.forecast(run.step, seconds))
                played = describe(rollouts)
                if not told and (hint := advice(played | stats, config)):
                    report.note(hint)
                told = True
                sinks.update(run.step, played | stats | {"time/total": run.progress.seconds})
                if ranks.first:
                    played_by = [*rollouts.episodes, *rollouts.branched]
                    run_log.write_update(out, watched(run.step, rollouts.groups, picked, played_by))
                if ranks.first and (run.step % config.checkpoint_every == 0 or run.step == config.steps):
                    run.save()
                    write_transcripts(out, rollouts.episodes)
            if stop.asked is not None:
                if ranks.first:
                    run.save()
                raise KeyboardInterrupt
    return finish(out, config, run.progress, evaluations) if ranks.first else {}


class Run:
    """Where a run stands after its last whole update: what a checkpoint holds, and what a stopped update goes back
    to.

    An update may be given up at any moment: its own state is a copy, taken when the update before it had ended.
    """

    def __init__(self, out: Path, policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        self._out, self._policy, self._optimizer = out, policy, optimizer
        self.progress = progress
        self._saved = progress.step
        self._state = self._copy()

    @property
    def step(self) -> int:
        """Updates done, which is also the number of the policy's version."""
        return self.progress.step

    def advance(self, rollouts: Rollouts, seconds: float) -> None:
        """An update has ended."""
        self.progress = replace(
            self.progress,
            step=self.step + 1,
            next_start=rollouts.next_start,
            seconds=self.progress.seconds + seconds,
            flat_groups=self.progress.flat_groups + sum(group.is_flat for group in rollouts.groups),
            temperature=self._policy.temperature,
        )
        self._state = self._copy()

    def save(self) -> None:
        """The checkpoint, and the adapter of the same update beside it; once for each update."""
        if self.step == self._saved:
            return
        checkpoint.save(self._out, self._state)
        self._policy.save_adapter(self._out, self._state.adapter)
        self._saved = self.step

    def mend(self) -> None:
        """Write the adapter of the checkpoint that the run goes on from: a stop between the two left an older one."""
        if self.step:
            self._policy.save_adapter(self._out, self._state.adapter)

    def _copy(self) -> State:
        return State(self.progress, self._policy.adapter_state(), _on_cpu(self._optimizer.state_dict()))


def _on_cpu(held: Any) -> Any:
    """A copy of nested state with its tensors in the CPU's memory."""
    if isinstance(held, torch.Tensor):
        return held.detach().to("cpu", copy=True)
    if isinstance(held, dict):
        return {key: _on_cpu(value) for key, value in held.items()}
    return [_on_cpu(value) for value in held] if isinstance(held, list) else copy.deepcopy(held)


def begin(out: Path, config: TrainConfig, step: int, report: Reporter, logs: Sequence[str]) -> Sinks:
    """The run's folder with its settings, and its sinks."""
    out.mkdir(parents=True, exist_ok=True)
    for left in filter(is_part, out.iterdir()):  # by a killed run; this one holds the folder
        left.unlink(missing_ok=True)
    run_log.forget_after(out, step)
    replace_text(out / CONFIG, config.model_dump_json(indent=2) + "\n")
    return open_sinks(out, config, step, report, logs)


def learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Rollouts,
    config: TrainConfig,
    step: int,
    ranks: Ranks,
    report: Reporter,
) -> tuple[list[Picked], dict[str, float]]:
    """Select the episodes that teach, update on their turns, and say how long each part took."""
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(derive_seed("update", config.seed, step))
    passed = ranks.agree(accepted(rollouts.groups, config.gate) if ranks.first else [])
    groups = [rollouts.groups[place] for place in passed]
    values = critic_values(policy, groups, config.gamma, ranks) if config.credit == "critic" and groups else None
    picked = pick(groups, config, generator, values)
    samples = [sample for one in picked for sample in one.samples()]
    if config.words_weight != 1:
        samples = [
            replace(one, weights=token_weights(one.completion, policy.tokenizer, config.words_weight))
            for one in samples
        ]
    now = f"update {step + 1} of {config.steps}: learning from {len(samples)} turns"
    report.doing(now)
    planned = config.epochs * config.minibatches

    def done(minibatches: int) -> None:
        report.doing(f"{now}, {minibatches} of {planned} steps")

    stats = update(policy, optimizer, samples, config, generator, step, ranks, done)
    check_mismatch(stats, rollouts.staleness, policy.model.dtype)
    return picked, stats | {
        "rollout/gated_groups": 1 - len(groups) / max(len(rollouts.groups), 1),
        "rollout/staleness": float(rollouts.staleness),
        "time/rollout": rollouts.played_s,
        "time/wait": rollouts.waited_s,
        "time/update": time.perf_counter() - began,
    }


def _lost(episodes: Sequence[Episode]) -> str:
    """How many episodes the game's own faults have cost, and the last of them."""
    last = episodes[-1]
    return f"{len(episodes)} episodes without a result are left out; the last: {last.error}: {last.error_message}"


def describe(rollouts: Rollouts) -> dict[str, float]:
    """What the update's rollouts looked like, before any selection."""
    turns = own_turns([*rollouts.episodes, *rollouts.branched])
    returns = [episode.returns[player] for episode in rollouts.episodes for player in own_seats(episode)]
    successes = [float(episode.success) for episode in rollouts.episodes if episode.success is not None]
    values = {
        "rollout/return": sum(returns) / len(returns),
        "rollout/invalid": sum(turn.failure is not None for turn in turns) / max(len(turns), 1),
        "rollout/truncated": sum(turn.finish_reason == "length" for turn in turns) / max(len(turns), 1),
        "rollout/turns": float(len(turns)),
        "rollout/entropy": entropy(rollouts),
        "rollout/tokens": float(sum(turn.completion_tokens for turn in turns)),
        "rollout/lost": len(rollouts.lost) / (len(rollouts.lost) + len(rollouts.episodes) + len(rollouts.branched)),
        "rollout/flat_groups": sum(group.is_flat for group in rollouts.groups) / max(len(rollouts.groups), 1),
    }
    ahead = looking_ahead(turns)
    values |= {} if ahead is None else {"rollout/looks_ahead": ahead}
    return values | ({"rollout/success": sum(successes) / len(successes)} if successes else {})


def restore(
    out: Path,
    config: TrainConfig,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    report: Reporter,
    ranks: Ranks,
) -> Progress:
    """Go on from the newest whole checkpoint, or from the beginning; every rank from what the first one read."""
    state = None
    if ranks.first:
        state, damaged = checkpoint.load_latest(out)
        for folder in damaged:
            report.note(f"the checkpoint {folder} is damaged and was passed over")
        if state is None and (damaged or (out / ADAPTER_WEIGHTS).exists()):
            raise RunError(
                f"{out} holds a trained adapter and no checkpoint that can be gone on from: going on would begin at "
                "0 and overwrite it",
                fix=f"keep {out} and begin anew in another --out",
            )
    state = ranks.agree(state)
    if state is None:
        return Progress()
    progress = state.progress
    policy.temperature = progress.temperature or config.temperature
    if progress.step > config.steps:
        raise UsageError(
            f"--out {out} has {progress.step} updates already, more than the {config.steps} asked for",
            fix=f"--steps {progress.step}, or more",
        )
    policy.load_adapter_state(state.adapter)
    try:
        optimizer.load_state_dict(state.optimizer)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"the newest checkpoint of {out} holds the optimizer of another run: {error}",
            fix=f"keep {out} and begin anew in another --out",
        ) from error
    report.note(f"going on after update {progress.step}")
    return progress


# How a RuntimeError says that memory is missing: the CPU's allocator, CUDA's, and libraries with one of their own.
NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn memory that is not there, on a GPU or on the CPU, into one clear error with the settings to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(words in str(error) for words in NO_MEMORY):
            raise
        raise RunError(
            f"there is not enough memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            fix="lower --set micro_batch_tokens=…, max_tokens or group_size, or --set gradient_checkpointing=true; "
            "in a new --out, since these are settings of the run",
        ) from error
