"""Groups of episodes that share their start, and how they become tensors: which an update sees, and in what parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from msgrpo.agent import Completion
from msgrpo.episode import Episode, Turn
from msgrpo.game import Game
from msgrpo.models.shared_prefix import common_prefix_length
from msgrpo.train.config import TrainConfig
from msgrpo.train.msgrpo import composite_returns, group_advantages
from msgrpo.train.rivals.contract import Advantages, Learner, Step


@dataclass(frozen=True)
class Group:
    """G trajectories from one state: for each, the turns of one player; and what they are worth.

    Episodes in which the player had no turn (the other lost before) are not among them: nothing in them was this
    player's doing; nor are those that the game's own fault ended. `origin(j)` is the state in which trajectory j
    began: where luck lies in the start (a deal), each has one of its own. `place` is the start's number in the
    update: groups of one start may share their episodes.

    In a game of several players the policy plays all of them, and each player's trajectories are a group: in a
    zero-sum game the mean over both seats is always 0 and says nothing.
    """

    origin: Callable[[int], Game]
    turns: list[list[Turn]]
    returns_G: Tensor
    advantages_G: Tensor
    place: int = 0

    @classmethod
    def of(
        cls, origin: Callable[[Episode], Game], episodes: Sequence[Episode], player: str, place: int
    ) -> Group | None:
        """None where fewer than two episodes can be compared."""
        whole = [one for one in episodes if one.error is None and one.turns_of(player)]
        if len(whole) < 2:
            return None
        turns = [episode.turns_of(player) for episode in whole]
        returns = composite_returns(
            [[turn.paid for turn in one] for one in turns], [[turn.shaping for turn in one] for one in turns]
        )
        return cls(lambda j: origin(whole[j]), turns, returns, group_advantages(returns), place)

    def trajectories(self) -> list[list[Step]]:
        """The turns as far as credit goes."""
        return [[Step(_asked(turn), turn.action, turn.paid + turn.shaping) for turn in one] for one in self.turns]

    def of_episodes(self, scale: str) -> list[float]:
        """A_j = (C_j − mean C) / std C of each episode; with scale=update in units of reward, C_j − mean C."""
        advantages = self.advantages_G
        if scale == "update":
            advantages = advantages * self.returns_G.std(correction=0)
        return advantages.tolist()

    @property
    def is_flat(self) -> bool:
        """All returns equal: no episode was better than another, so there is nothing to learn from."""
        return not bool(self.advantages_G.any())


def _asked(turn: Turn) -> Hashable:
    """What the policy was asked: with a history in the prompt the state alone would not tell two moments apart."""
    return turn.completion.prompt_ids if turn.completion is not None else turn.state


@dataclass(frozen=True)
class Sample:
    """One turn of a kept episode: the engine's own completion, its advantage, and how much of it each token has.

    `weights` is empty where all tokens have the whole of it [P].
    """

    completion: Completion
    advantage: float
    weights: tuple[float, ...] = ()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.completion.prompt_ids

    @property
    def answer_ids(self) -> tuple[int, ...]:
        return self.completion.token_ids

    @property
    def old_logprobs(self) -> tuple[float, ...]:
        return self.completion.logprobs

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class MicroBatch:
    """N turns that go through the model together: the shared prefix once, then each one's own tokens."""

    prefix: list[int]
    pairs: list[tuple[list[int], list[int]]]
    old_logprobs_NT: Tensor
    advantages_NT: Tensor


@dataclass(frozen=True)
class Picked:
    """A group that has something to teach: the credit of every turn, [j][t], and which episodes the update sees."""

    group: Group
    credits: Advantages
    kept: list[int]

    def samples(self, config: TrainConfig, tokenizer: Any) -> Iterator[Sample]:
        """Every turn of every kept episode, with its credit."""
        for j in self.kept:
            for turn, advantage in zip(self.group.turns[j], self.credits[j], strict=True):
                assert turn.completion is not None
                weights: tuple[float, ...] = ()
                if config.credit.words != 1:
                    weights = config.credit.token_weights(turn.completion, tokenizer)
                yield Sample(turn.completion, advantage, weights)


def pick(groups: Sequence[Group], config: TrainConfig, learner: Learner) -> list[Picked]:
    """The groups that have something to teach, and which of their episodes the update sees."""
    picked = []
    for group, credits in zip(groups, advantages(groups, config, learner), strict=True):
        if any(any(of_episode) for of_episode in credits):
            picked.append(Picked(group, credits, config.select.kept(group, learner.generator)))
    return picked


def advantages(groups: Sequence[Group], config: TrainConfig, learner: Learner) -> list[Advantages]:
    """The advantage of every turn of an update's groups, [group][j][t], by the run's credit and objectives."""
    credits = config.credit.of_groups(groups, learner)
    if config.credit.scale == "update":
        credits = scaled_by_update(credits)
    if config.objectives is not None:
        credits = [config.objectives.combined(one, group) for one, group in zip(credits, groups, strict=True)]
    return credits


def scaled_by_update(groups: Sequence[Advantages]) -> list[Advantages]:
    """Divide every credit, [group][j][t] in units of reward, by the root of the mean square over all turns.

    Zeros stay zeros; a group whose credits are small beside the others' keeps them small.
    """
    flat = torch.tensor([value for group in groups for one in group for value in one], dtype=torch.float64)
    root = float(flat.square().mean().sqrt()) if len(flat) else 0.0
    return [[[value / root for value in one] for one in group] for group in groups] if root else list(groups)


def minibatches(samples: Sequence[Sample], count: int, generator: torch.Generator) -> Iterator[list[Sample]]:
    """A random partition into at most `count` parts of nearly equal size.

    Turns with the same prompt stand side by side: their actions are compared in one step, and the prompt is
    computed once.
    """
    prompts = list(dict.fromkeys(sample.prompt_ids for sample in samples))
    place = dict(zip(prompts, torch.randperm(len(prompts), generator=generator).tolist(), strict=True))
    ordered = sorted(samples, key=lambda sample: place[sample.prompt_ids])
    bounds = [len(ordered) * part // count for part in range(count + 1)]
    for low, high in pairwise(bounds):
        if low < high:
            yield ordered[low:high]


def micro_batches(samples: Sequence[Sample], max_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """Split by length, so that little is padding, into parts of about `max_tokens` tokens.

    Counted is what each turn has of its own, filled up to the longest; the prefix that all prompts share is not.
    """
    ordered = sorted(samples, key=lambda sample: sample.tokens)
    shared = common_prefix_length([list(sample.prompt_ids) for sample in ordered])
    part: list[Sample] = []
    for sample in ordered:
        if part and (len(part) + 1) * (sample.tokens - shared) > max_tokens:
            yield _pack(part, shared, device)
            part = []
        part.append(sample)
    yield _pack(part, shared, device)


def _pack(part: Sequence[Sample], shared: int, device: torch.device) -> MicroBatch:
    longest = max(len(sample.answer_ids) for sample in part)
    old, advantages = torch.zeros(len(part), longest), torch.zeros(len(part), longest)
    for i, sample in enumerate(part):
        own = slice(longest - len(sample.answer_ids), longest)
        old[i, own] = torch.tensor(sample.old_logprobs)
        advantages[i, own] = sample.advantage * torch.tensor(sample.weights or [1.0] * len(sample.answer_ids))
    return MicroBatch(
        list(part[0].prompt_ids[:shared]),
        [(list(sample.prompt_ids[shared:]), list(sample.answer_ids)) for sample in part],
        old.to(device),
        advantages.to(device),
    )
