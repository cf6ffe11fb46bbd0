"""The DQN baseline: stable-baselines3 on the scenario's planes, over the whole distribution of training starts.

`model.zip` and `dqn.json` in the run's folder are the agent `dqn:FOLDER`; `checkpoints/` holds what resuming
needs (with the replay buffer), `tensorboard/` the curves. Held-out starts are never seen here.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from msgrpo.errors import RunError, UsageError, of_the_machine
from msgrpo.files import check_regular, is_part, replace_bytes, replace_json, replacing_folder
from msgrpo.game import Scenario
from msgrpo.games import get_scenario
from msgrpo.gym_env import ScenarioEnv, layers, planes_shape
from msgrpo.models.dqn import CARD, WEIGHTS, policy_arguments, read_card
from msgrpo.run_log import LOCK, alone
from msgrpo.train.run_folder import refused

CHECKPOINTS, REPLAY, BOARD = "checkpoints", "replay.npz", "tensorboard"
BEFORE_A_CHECKPOINT = (LOCK, CHECKPOINTS, BOARD)  # what a run leaves that ended before its first
HELD = ("observations", "next_observations", "actions", "rewards", "dones")  # of the replay buffer
Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuning:
    """Ours: rl-zoo has no entry for grid worlds. `steps` are environment steps over all `environments`.

    One gradient step follows each step of all environments. The exploration rate falls from 1 to
    `exploration_final` over `exploration_fraction` of the run.
    """

    steps: int = 200_000
    environments: int = 8
    learning_rate: float = 5e-4
    gamma: float = 0.99
    buffer: int = 200_000
    batch: int = 256
    learning_starts: int = 5_000
    target_update: int = 2_000  # environment steps
    exploration_fraction: float = 0.4
    exploration_final: float = 0.02
    convolutions: bool = False  # before the two hidden layers; without, they see the flat planes
    hidden: tuple[int, int] = (256, 256)


def tuning_for(scenario: Scenario) -> Tuning:
    """Small lakes need no convolutions; on Snake's larger board what matters lies around the head."""
    if scenario.family == "snake":
        return Tuning(steps=1_000_000, batch=128, gamma=0.95, learning_rate=3e-4, convolutions=True)
    return Tuning()


def train(
    scenario_id: str,
    out: Path,
    *,
    steps: int | None = None,
    seed: int = 0,
    tuning: Tuning | None = None,
    every: int = 50_000,
    say: Say = print,
) -> None:
    """Train up to `steps` environment steps in all; a folder with a checkpoint goes on from it.

    A resumed run continues weights, optimizer and replay buffer, not the random numbers: it is as good as an
    uninterrupted one, and not bit for bit the same. Raises RunError where the folder holds another run.
    """
    scenario = get_scenario(scenario_id)
    if len(scenario.players) > 1:
        raise UsageError(f"{scenario_id} has several players; a DQN plays alone")
    tuning = tuning or tuning_for(scenario)
    goal = steps or tuning.steps
    card = {
        "scenario": scenario.id,
        "glyphs": list(layers(scenario)),
        "shape": list(planes_shape(scenario)),
        "seed": seed,
        "tuning": asdict(tuning) | {"hidden": list(tuning.hidden)},
    }
    with refused(f"the run {out}"):
        _check_folder(out)
        with alone(out):
            _check_folder(out)  # another run may have begun here before this one had the lock
            _go_on(scenario, out, card, tuning, goal, every, say)


def _check_folder(out: Path) -> None:
    """Refuse what is no folder, and one that holds something else: its checkpoints would be removed."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", fix="choose another --out")
    if not out.exists() or newest_checkpoint(out) is not None:
        return
    if any(entry.name not in BEFORE_A_CHECKPOINT and not is_part(entry) for entry in out.iterdir()):
        raise UsageError(f"--out {out} is not empty and holds no run of train-dqn", fix="choose another --out")


def _go_on(
    scenario: Scenario, out: Path, card: dict[str, Any], tuning: Tuning, goal: int, every: int, say: Say
) -> None:
    """Train from the newest checkpoint, if there is one, to `goal` environment steps."""
    newest = newest_checkpoint(out)
    if newest is not None:
        _check_same(out, newest, card)
    model = _new(_environments(scenario, tuning), tuning, out, card["seed"])
    if newest is not None:
        _load(model, newest)
        model.set_random_seed(card["seed"] + model.num_timesteps)  # else it would meet the first starts once more
        if model.num_timesteps >= goal:
            _publish(newest, out)  # a run that was killed after its last checkpoint may lack it
            say(f"{out} is trained for {model.num_timesteps:,} steps already")
            return
    saver = _Saver(out, card, every, goal, say)
    try:
        model.learn(goal - model.num_timesteps, callback=saver, reset_num_timesteps=False, tb_log_name="dqn")
    finally:  # an interruption, too, leaves a checkpoint
        if saver.started:
            saver.save()


def newest_checkpoint(out: Path) -> Path | None:
    """The complete checkpoint with the most steps; unfinished ones have another name."""
    folders = [path for path in (out / CHECKPOINTS).glob("*") if path.name.isdigit()]
    return max(folders, key=lambda path: int(path.name), default=None)


def _publish(checkpoint: Path, out: Path) -> None:
    """Copy a checkpoint's agent into the run's folder."""
    for name in (WEIGHTS, CARD):
        replace_bytes(out / name, (checkpoint / name).read_bytes())


def _check_same(out: Path, checkpoint: Path, card: dict[str, Any]) -> None:
    kept = read_card(checkpoint)
    different = [name for name in card if card[name] != kept[name]]
    if different:
        differences = "; ".join(f"{name} was {kept[name]}, now {card[name]}" for name in different)
        raise RunError(f"{out} holds another run: {differences}", fix="give another --out")


def _environments(scenario: Scenario, tuning: Tuning) -> VecMonitor:
    return VecMonitor(
        DummyVecEnv([lambda: ScenarioEnv(scenario.id, split="train") for _ in range(tuning.environments)])
    )


def _new(environments: VecMonitor, tuning: Tuning, out: Path, seed: int) -> DQN:
    return DQN(
        "MlpPolicy",
        environments,
        learning_rate=tuning.learning_rate,
        gamma=tuning.gamma,
        buffer_size=tuning.buffer,
        batch_size=tuning.batch,
        learning_starts=tuning.learning_starts,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=tuning.target_update,
        exploration_fraction=tuning.exploration_fraction,
        exploration_final_eps=tuning.exploration_final,
        # the step limit is part of the task and the step is in the planes: nothing comes after the last one
        replay_buffer_kwargs={"handle_timeout_termination": False},
        policy_kwargs=policy_arguments(asdict(tuning)),
        tensorboard_log=str(out / BOARD),
        seed=seed,
        device="cpu",
    )


def _load(model: DQN, checkpoint: Path) -> None:
    """Give a new model what a checkpoint holds: weights, optimizer, replay buffer, counters; nothing is unpickled."""
    try:
        model.set_parameters(checkpoint / WEIGHTS, device="cpu")
        buffer = model.replay_buffer
        check_regular(checkpoint / REPLAY)
        with np.load(checkpoint / REPLAY) as saved:
            for name in HELD:
                getattr(buffer, name)[: len(saved[name])] = saved[name]
            buffer.pos, full, model.num_timesteps, model._n_updates, model._n_calls = map(int, saved["counters"])
            buffer.full = bool(full)
    except Exception as error:  # a damaged zip raises nearly anything
        if of_the_machine(error):
            raise
        reason = str(error) or type(error).__name__
        raise RunError(
            f"the checkpoint {checkpoint} is damaged: {reason}", fix="start again in another --out"
        ) from error


def _save_replay(model: DQN, file: Path) -> None:
    """What the replay buffer has taken up, and the counters that a resumed run goes on with."""
    buffer = model.replay_buffer
    taken = buffer.buffer_size if buffer.full else buffer.pos
    counters = [buffer.pos, int(buffer.full), model.num_timesteps, model._n_updates, model._n_calls]
    np.savez(file, counters=np.array(counters), **{name: getattr(buffer, name)[:taken] for name in HELD})


class _Saver(BaseCallback):  # type: ignore[misc]  # stable-baselines3 is not checked
    """A checkpoint every so many steps, complete or not there at all, and the agent beside it."""

    def __init__(self, out: Path, card: dict[str, Any], every: int, goal: int, say: Say) -> None:
        super().__init__()
        self.out, self.card, self.every, self.goal, self.say = out, card, every, goal, say
        self.began = time.monotonic()
        self.started = False

    def _on_training_start(self) -> None:
        self.started = True
        self.first = self.saved = self.num_timesteps

    def _on_step(self) -> bool:
        if self.num_timesteps - self.saved >= self.every:
            self.save()
        return True

    def save(self) -> None:
        """Write the checkpoint; older ones go, and what a killed run left of one."""
        steps = self.model.num_timesteps
        place = self.out / CHECKPOINTS / str(steps)
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            with replacing_folder(place) as part:
                self.model.save(part / WEIGHTS)
                _save_replay(self.model, part / REPLAY)
                replace_json(part / CARD, self.card | {"steps": steps})
        _publish(place, self.out)
        for other in (self.out / CHECKPOINTS).iterdir():
            if other != place:
                shutil.rmtree(other)
        self.saved = steps
        self.say(self._line(steps))

    def _line(self, steps: int) -> str:
        recent = [episode["r"] for episode in self.model.ep_info_buffer or []]
        rate = (steps - self.first) / max(time.monotonic() - self.began, 1e-9)
        mean = f" · mean return {sum(recent) / len(recent):+.3f} (exploring)" if recent else ""
        return f"{steps:,} of {self.goal:,} steps{mean} · {rate:,.0f} steps/s"
