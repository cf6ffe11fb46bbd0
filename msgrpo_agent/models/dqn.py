"""A trained DQN as an agent: it reads the board's planes, never the text."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from pydantic_core import from_json
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.dqn.policies import DQNPolicy
from torch import Tensor, nn

from msgrpo.agent import Decision, OnText, ParseFailure, View
from msgrpo.errors import ModelError, UsageError, first_line, of_the_machine
from msgrpo.game import Scenario
from msgrpo.gym_env import layers, legal_action, planes, planes_shape

CARD, WEIGHTS = "dqn.json", "model.zip"


class BoardNet(BaseFeaturesExtractor):  # type: ignore[misc]  # stable-baselines3 is not checked
    """Two 3x3 convolutions that keep the board's size, then one linear layer: (N, C, H, W) → (N, features)."""

    def __init__(self, observation_space: Any, channels: int = 32, features: int = 256) -> None:
        super().__init__(observation_space, features)
        planes, height, width = observation_space.shape
        self.net = nn.Sequential(
            nn.Conv2d(planes, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(channels * height * width, features),
            nn.ReLU(),
        )

    def forward(self, observations: Tensor) -> Tensor:
        features: Tensor = self.net(observations.to(torch.float32))
        return features


class DQNAgent:
    """Greedy play of the network in `folder` (`msgrpo train-dqn`), on boards like those it was trained on."""

    why_not = "it plays what it was trained on"  # said where it cannot play

    def __init__(self, spec: str, folder: Path) -> None:
        self.spec = spec
        self.card = read_card(folder)
        self.glyphs = tuple(self.card["glyphs"])
        self.shape: tuple[int, int, int] = tuple(self.card["shape"])
        try:
            self.network = _network(folder / WEIGHTS, self.shape, self.card["tuning"])
        except Exception as error:  # a damaged or foreign zip raises nearly anything in stable-baselines3
            if of_the_machine(error):
                raise ModelError(f"{folder / WEIGHTS} cannot be read: {first_line(error)}") from error
            raise ModelError(
                f"{folder / WEIGHTS} is no DQN: {error}", fix="train it again in a new folder"
            ) from error
        self.digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()[:12]

    def settings(self) -> dict[str, Any]:
        return {
            "model": "dqn",
            "trained_on": self.card["scenario"],
            "steps": self.card["steps"],
            "weights": self.digest,
        }

    def can_play(self, scenario: Scenario) -> bool:
        """Whether the boards of `scenario` have the same planes."""
        if len(scenario.players) > 1:
            return False
        return (layers(scenario), planes_shape(scenario)) == (self.glyphs, self.shape)

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        if not self.can_play(view.scenario):
            raise UsageError(
                f"{self.spec} was trained on {self.card['scenario']}, the boards of {view.scenario.id} differ",
                fix=f"msgrpo train-dqn {shlex.quote(view.scenario.id)} --out DIR",
            )
        chosen, _ = self.network.predict(planes(view.game, self.glyphs, self.shape), deterministic=True)
        action = legal_action(view.game, view.player, int(chosen))
        return Decision(action, None if action else ParseFailure.NOT_NOW)

    async def close(self) -> None:
        """Nothing to close."""


def _network(file: Path, shape: tuple[int, int, int], tuning: dict[str, Any]) -> DQNPolicy:
    """The Q-network with a run's weights.

    Tensors are read and nothing else: stable-baselines3's own loading would unpickle what a zip from anywhere holds.
    """
    _, weights, _ = load_from_zip_file(file, load_data=False, device="cpu")
    state = weights["policy"]
    actions = len(state[[name for name in state if name.startswith("q_net.q_net.")][-1]])
    policy = DQNPolicy(
        spaces.Box(0, 1, shape, np.uint8), spaces.Discrete(actions), lambda _: 0.0, **policy_arguments(tuning)
    )
    policy.load_state_dict(state)
    policy.set_training_mode(False)
    return policy


def policy_arguments(tuning: dict[str, Any]) -> dict[str, Any]:
    """What stable-baselines3 builds the Q-network of a run's tuning from."""
    hidden = [int(width) for width in tuning["hidden"]]
    return {"net_arch": hidden} | ({"features_extractor_class": BoardNet} if tuning["convolutions"] else {})


def read_card(folder: Path) -> dict[str, Any]:
    """What a DQN was trained on: scenario, glyphs, shape, steps, tuning."""
    for name in (CARD, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} is no trained DQN: {name} is missing",
                fix=f"train one: msgrpo train-dqn frozen-lake --out {shlex.quote(str(folder))}",
            )
    try:
        card: dict[str, Any] = from_json((folder / CARD).read_bytes())
        needed = {name: card[name] for name in ("scenario", "glyphs", "shape", "steps", "seed", "tuning")}
        if not all(isinstance(glyph, str) for glyph in needed["glyphs"]):
            raise TypeError("glyphs are texts")
        planes, height, width = map(int, needed["shape"])
        layers = [int(layer) for layer in needed["tuning"]["hidden"]]
        if not 0 < planes * height * width <= 1_000_000 or not all(0 < layer <= 8192 for layer in layers):
            raise ValueError("no board, and no network, has such a size")
        return needed
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder / CARD} is damaged: {type(error).__name__} {first_line(error)}", fix="copy the run again"
        ) from error
