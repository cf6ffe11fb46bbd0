"""train(): play groups, compare, keep, update, and now and then evaluate on the validation starts.

This is `mini.py` with what a long run needs: checkpoints and resume (`state.py`), a clean stop (`stopping.py`), other
engines and processes (`engines/`, `ranks.py`), evaluations and metrics, and the rivals of the method (`rivals/`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msgrpo import run_log
from msgrpo.agent import LanguageModel
from msgrpo.episode import derive_seed, few_collections
from msgrpo.errors import check_given
from msgrpo.limits import games_code
from msgrpo.text import counted
from msgrpo.train.checkpoint import Progress, State, check_optimizer
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines import open_engine
from msgrpo.train.engines.contract import Engine, canary_prompts
from msgrpo.train.evaluate import Evaluations, check_starts, finish
from msgrpo.train.film import Film
from msgrpo.train.groups import Sample
from msgrpo.train.memory import enough_memory
from msgrpo.train.metrics import describe, left_out
from msgrpo.train.peers import SILENT_S
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import Ranks, open_ranks
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rollouts import Players, Rollouts, RolloutSource, counter, entropy
from msgrpo.train.run_folder import check_folder, how_to_go_on, open_folder, write_transcripts, writing
from msgrpo.train.sinks import Reporter, Sinks, check_logs
from msgrpo.train.state import RunState, Weights, on_cpu, restore
from msgrpo.train.stopping import StopAsked, StopRequested, stop_requests
from msgrpo.train.update import Done, Picked, check_mismatch, pick, samples_of, update
from msgrpo.train.watched import watched

if TYPE_CHECKING:
    from msgrpo.train.engines.fleet import Fleet

CUT_OFF_S = 3 * SILENT_S  # by when a process that is cut off from the others has noticed it and ended


def train(
    config: TrainConfig,
    out: Path | str,
    *,
    resume: bool = False,
    report: Reporter,
    logs: Sequence[str] = (),
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Run MS-GRPO and return the summary that `summary.json` holds; {} in every process but the first.

    `out` gets the PEFT adapter, config, metrics, curve, transcripts and checkpoints; `logs` names further sinks;
    `cluster` is what the run has on one (`cluster.py`).
    Raises UsageError when it holds another run, RunError when another process trains there, the loss is not finite,
    the disk is full, or no engine plays the policy's weights; KeyboardInterrupt after a checkpoint when asked to
    stop.
    """
    check_given("config", config, TrainConfig, fix="make_config(given=…) makes one")
    out, cluster = Path(out), cluster or Cluster()
    check_logs(logs)
    with writing(out, cluster.address, logs), enough_memory(), few_collections(), open_ranks() as ranks:
        if ranks.first:
            check_folder(out, config, resume, cluster.address, logs)
        check_choices(config)  # what cannot be ends the run before anything is written or loaded
        config = ranks.broadcast(config)
        report.doing(f"loading {config.base}")
        weights = open_weights(config, out, ranks, report)
        trainer = Trainer(config, weights, Players.of(config, ranks), report)
        alone = run_log.alone(out, CUT_OFF_S if cluster.again else 0.0) if ranks.first else nullcontext()
        with alone, ranks.exchanging() if config.shard else nullcontext():
            if ranks.first:  # while the base was loaded, another run may have begun here and ended
                check_folder(out, config, resume, cluster.address, logs)
            return _train(trainer, out, logs, cluster)


def check_choices(config: TrainConfig) -> None:
    """Raise UsageError for a choice that cannot be loaded, and GameError for a game that cannot begin, be evaluated
    or, where a choice needs it, be copied with new luck.
    """
    for choice in config.choices:
        choice.prepare()
    for scenario in config.scenarios:
        canary_prompts(scenario)
        if any(choice.copies_games for choice in config.choices):
            game = scenario.new(0, 0)
            with games_code(scenario.id):
                game.with_luck(0)
    check_starts(config)


def _train(trainer: Trainer, out: Path, logs: Sequence[str], cluster: Cluster) -> dict[str, Any]:
    """Evaluate, play and learn until all updates are done, somebody asks the run to stop, or an error ends it.

    An update has ended, and counts, with `run.advance`: its weights play, and engine and trainer agree on them. What
    ends the run before that leaves it as the update before had left it, and `run.save` keeps that.
    """
    config, weights, ranks, report = trainer.config, trainer.weights, trainer.ranks, trainer.report
    run = RunState(out, weights, restore(out, config, weights, report, ranks))
    with closing(weights.engine(out, cluster.fleet)) as engine:
        model = engine.load(run.step)
        evaluations = Evaluations(out, trainer.players, run.step)  # refuses before anything changes
        sinks = open_folder(out, config, run.step, report, logs) if ranks.first else Sinks(report, [], [])
        if ranks.first:
            run.rewrite_adapter()
        first, film = run.step, Film(out, trainer.players)
        stopping = stop_requests(report.stopping, cluster.stopping)
        with closing(sinks), closing(RolloutSource(trainer.players, weights.memory)) as source, stopping as stop:
            try:
                while not stop.agreed(ranks):
                    step = run.step
                    if evaluations.due(step):
                        with stop.abandonable():
                            row = evaluations.at(step, model, report)
                        sinks.evaluation(step, row)
                    if film.due(step):
                        with stop.abandonable():
                            film.play(step, model, report)
                    if step == config.steps:
                        break
                    with stop.abandonable():
                        made = trainer.update(source, engine, run.progress, model)
                    model = made.model
                    sinks.update(step + 1, made.figures)
                    check_mismatch(made.figures)  # after its row is written: `msgrpo doctor` shows it
                    run.advance(made.rollouts, made.seconds)
                    if step == first:
                        report.note(evaluations.forecast(run.step, made.pace(config)))
                    if ranks.first:
                        _keep(out, trainer, run, made)
            except StopRequested:
                pass  # handled below, as a stop between two updates is
            except Exception:  # of servers, of the disk, of games, of a choice of one's own
                if ranks.first:
                    run.save()
                    if cluster.stopping is None:  # on a cluster the ranks begin again
                        report.note(f"kept: {counted(run.saved, 'update')}; {how_to_go_on(out, logs=logs)}")
                raise
            if stop.asked is not None:
                if ranks.first:
                    run.save()
                raise KeyboardInterrupt
        more = weights.finished(out)
    return finish(out, config, run.progress, evaluations, more) if ranks.first else {}


def _keep(out: Path, trainer: Trainer, run: RunState, made: Made) -> None:
    """What an update that has ended leaves in the run's folder: files to look at, and where due a checkpoint."""
    if made.rollouts.lost:
        trainer.report.note(f"update {run.step}: {left_out(made.rollouts.lost)}")
    run_log.write_update(out, watched(run.step, made.rollouts, made.picked))
    if run.step % trainer.config.checkpoint_every == 0 or run.step == trainer.config.steps:
        write_transcripts(out, made.rollouts.episodes)  # first: what a checkpoint holds is not done again
        run.save()


@dataclass(frozen=True)
class Cluster:
    """What a run has on a cluster: its servers, and who says that it shall stop."""

    fleet: Fleet | None = None
    stopping: StopAsked | None = None
    again: bool = False  # it has begun before, and who trained then may be cut off and not have noticed it yet
    address: str | None = None  # of the cluster, as a person named it


@dataclass(frozen=True)
class Made:
    """An update: what it learned from, the new version of the policy as it plays, and the figures of its row."""

    rollouts: Rollouts
    picked: Sequence[Picked]
    model: LanguageModel
    seconds: float
    figures: dict[str, float]

    def pace(self, config: TrainConfig) -> float:
        """How long each later update will take, where this was the first.

        With `ahead` it waited for its own rollouts and, played here, for those of `ahead` more; later ones need one
        each, played before they learn or, by servers, beside it.
        """
        play_s, learn_s = self.rollouts.played_s, self.figures["time/update"]
        if not config.ahead:
            return self.seconds
        return play_s + learn_s if config.plays_here else max(play_s, learn_s)


@dataclass
class Trainer:
    """What plays and learns: the policy's weights, and the settings of the run."""

    config: TrainConfig
    weights: Weights
    players: Players
    report: Reporter

    @property
    def ranks(self) -> Ranks:
        return self.players.ranks

    def now(self, step: int) -> str:
        """Which update is being made, for the display."""
        return f"update {step + 1} of {self.config.steps}"

    def update(self, source: RolloutSource, engine: Engine, done: Progress, model: LanguageModel) -> Made:
        """The update after those that are `done`: play by `model`, learn, and load the version that comes of it."""
        began = time.perf_counter()
        sampling = self.config.sampling.model_copy(update={"temperature": self.weights.temperature})  # adapted
        ended = counter(self.report, self.now(done.step))
        rollouts = source.next(done.step, done.next_start, model, sampling, ended)
        picked, stats = self.learn(rollouts, done.step)
        model = engine.load(done.step + 1)
        seconds = time.perf_counter() - began
        figures = describe(rollouts) | stats | {"time/total": done.seconds + seconds}
        return Made(rollouts, picked, model, seconds, figures)

    def learn(self, rollouts: Rollouts, step: int) -> tuple[list[Picked], dict[str, float]]:
        """Select the episodes that teach, update on their turns, and say how long each part took."""
        config, weights, ranks = self.config, self.weights, self.ranks
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(derive_seed("update", config.seed, step))
        learner = Learner(weights.policy, ranks, generator, weights.memory, self.report.note)
        groups = rollouts.groups
        if config.gate is not None:  # of several ranks the first decides: a gate need not be a pure function
            passing = ranks.broadcast(config.gate.passing(groups) if ranks.first else [])
            groups = [groups[place] for place in passing]
        self.report.doing(f"{self.now(step)}: crediting {counted(len(groups), 'group')}")
        picked = pick(groups, config, learner)
        samples, figures = samples_of(picked, config, learner)
        learning = f"{self.now(step)}: learning from {counted(len(samples), 'turn')}"
        self.report.doing(learning)

        def done(minibatches: int) -> None:
            self.report.doing(f"{learning}, {minibatches} of {config.minibatches} steps")

        stats = weights.update(samples, learner.generator, step, done)
        stats |= figures | {
            "rollout/temperature": weights.temperature,
            "rollout/staleness": float(rollouts.staleness),
            "time/rollout": rollouts.played_s,
            "time/wait": rollouts.waited_s,
            "time/update": time.perf_counter() - began,
        }
        if rollouts.groups:
            stats["rollout/gated_groups"] = 1 - len(groups) / len(rollouts.groups)
        if config.explore is not None and (spread := entropy(rollouts.all_episodes)) is not None:
            weights.temperature = config.explore.temperature(weights.temperature, spread, config.temperature)
        return picked, stats


class LocalWeights:
    """The policy and AdamW in this process, or in each of its ranks."""

    def __init__(self, config: TrainConfig, ranks: Ranks, report: Reporter) -> None:
        self.policy = Policy(config)
        self._config, self._ranks, self._report = config, ranks, report
        self.memory: dict[str, torch.Tensor] = {}
        self._optimizer = torch.optim.AdamW(self.policy.parameters, lr=config.learning_rate, weight_decay=0.0)

    @property
    def temperature(self) -> float:
        return self.policy.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.policy.temperature = value

    def engine(self, out: Path, fleet: Fleet | None) -> Engine:
        return open_engine(self._config, self.policy, out, self._ranks, self._report, fleet)

    def update(
        self, samples: Sequence[Sample], generator: torch.Generator, step: int, done: Done
    ) -> dict[str, float]:
        return update(self.policy, self._optimizer, samples, self._config, generator, step, self._ranks, done)

    def copy(self, progress: Progress) -> State:
        return State(progress, self.policy.adapter_state(), on_cpu(self._optimizer.state_dict()))

    def kept(self, state: State) -> State:
        return state

    def restore(self, state: State) -> None:
        self.policy.load_adapter_state(state.adapter)
        check_optimizer(state.optimizer, self._optimizer)
        self._optimizer.load_state_dict(state.optimizer)

    def write(self, out: Path, state: State) -> None:
        self.policy.save_adapter(out, state.adapter)

    def finished(self, out: Path) -> dict[str, Any]:
        return {}


def open_weights(config: TrainConfig, out: Path, ranks: Ranks, report: Reporter) -> Weights:
    """The policy's weights as they begin, where `config.backend` says that they are."""
    if config.service is None:
        return LocalWeights(config, ranks, report)
    from msgrpo.train.tinker.weights import TinkerWeights

    return TinkerWeights(config, out, ranks, report)
