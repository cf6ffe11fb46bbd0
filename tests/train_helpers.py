"""What tests of training share."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from msgrpo.agent import Completion
from msgrpo.episode import Episode
from msgrpo.train.config import TrainConfig
from msgrpo.train.display import Quiet
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.groups import Sample
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rollouts import Players, Playing, RolloutSource
from msgrpo.train.update import Picked


class Told(Quiet):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def taught(
    prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...], logprobs: tuple[float, ...], advantage: float
) -> Sample:
    """A turn by its numbers alone."""
    return Sample(Completion("", "stop", prompt_ids=prompt_ids, token_ids=answer_ids, logprobs=logprobs), advantage)


def learner(seed: int = 0, policy: Any = None) -> Learner:
    """A learner with a generator of its own."""
    return Learner(policy, ALONE, torch.Generator().manual_seed(seed))


def samples_in(picked: list[Picked], config: TrainConfig, tokenizer: Any = None) -> list[Sample]:
    """The turns that an update would see."""
    return [sample for one in picked for sample in one.samples(config, tokenizer)]


def first_playing(config: TrainConfig, policy: Policy) -> Playing:
    """The first update's rollouts, not played yet."""
    players = Players.of(config, ALONE)
    model = HfEngine(policy, config.scenarios[0], config).load(0)
    starts, _ = RolloutSource(players).next_starts(0)
    return Playing(players, 0, model, config.sampling, starts)


def played(config: TrainConfig, policy: Policy) -> tuple[Playing, list[Episode]]:
    """The first update's rollouts."""
    playing = first_playing(config, policy)
    return playing, asyncio.run(playing.play())
