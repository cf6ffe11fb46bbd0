"""What tests of training share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from msgrpo.agent import Completion
from msgrpo.episode import Episode
from msgrpo.game import Game, Scenario, stream
from msgrpo.games import get_scenario
from msgrpo.models.generation import Row
from msgrpo.models.local import LocalModel
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.groups import Sample
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.contract import Learner
from msgrpo.train.rollouts import Players, Playing, RolloutSource
from msgrpo.train.update import Picked, _accumulate

TINY = [
    "minibatches=2",
    "groups=2",
    "group_size=4",
    "select=aaw(keep=2)",
    "evaluation=6(every=2)",
    "checkpoint_every=1",
    "seed=9",  # with which each of the four updates has turns to learn from
]
NO_FILM = "evaluation=6(every=2, film=0)"
WEIGHTS = "adapter_model.safetensors"


def tiny(**given: Any) -> TrainConfig:
    """The settings of a run of four updates, as small as they can be."""
    return make_config(settings=[*TINY, NO_FILM], given={"steps": 4, **given})


def engine_of(policy: Policy, config: TrainConfig | None = None) -> HfEngine:
    return HfEngine(policy, get_scenario("frozen-lake"), config or tiny())


def moved_policy(config: TrainConfig) -> Policy:
    """A policy all of whose weights have a gradient: LoRA's first ones give none to one of its two factors."""
    made, generator = Policy(config), torch.Generator().manual_seed(1)
    for weight in made.parameters:
        weight.data = torch.randn(weight.shape, generator=generator) * 0.02
    return made


def gradient(policy: Policy, samples: Sequence[Sample], config: TrainConfig) -> tuple[Tensor, dict[str, float]]:
    """Of the loss of these samples as one minibatch, flat; and the sums that are measured with it."""
    policy.model.zero_grad()
    totals, _ = _accumulate(policy, samples, ALONE, config)
    return torch.cat([weight.grad.flatten() for weight in policy.parameters if weight.grad is not None]), totals


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
    return [lesson.sample for one in picked for lesson in one.lessons(config, tokenizer)]


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


class InAnyOrder(Game):
    """Who moves is drawn for each step, so that one may move several times in a row."""

    actions = ("up", "down")
    players = ("a", "b")

    def __init__(self, start_seed: int, chance_seed: int) -> None:
        super().__init__(step_limit=6)
        self.order = [self.players[int(who)] for who in stream(chance_seed, "order").integers(2, size=7)]

    @property
    def to_move(self) -> tuple[str, ...]:
        return (self.order[self.steps],)

    def observe(self, player: str) -> str:
        return f"Step {self.steps}."

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return dict.fromkeys(self.players, 0.0)


def in_any_order() -> Scenario:
    return Scenario(
        "in-any-order",
        "in-any-order",
        "Walk.",
        6,
        "[test]",
        InAnyOrder,
        actions=InAnyOrder.actions,
        players=InAnyOrder.players,
        hidden=True,
    )


@contextmanager
def recorded_batches(slow: LocalModel) -> Iterator[list[int]]:
    """The sizes of the batches that are answered from now on; `slow` takes its time."""
    batches: list[int] = []
    real = LocalModel.answer_rows

    def answer_rows(model: LocalModel, rows: list[Row], *given: Any) -> None:
        batches.append(len(rows))
        time.sleep(0.05 if model is slow else 0)
        real(model, rows, *given)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalModel, "answer_rows", answer_rows)
        yield batches
