"""Rollouts of one update: groups of episodes that share a start and not their luck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from msgrpo_agent.agent import LanguageAgent, LanguageModel, Sampling
from msgrpo_agent.episode import Episode, Turn
from msgrpo_agent.game import Game, Scenario
from msgrpo_agent.rewards import Shaping
from msgrpo_agent.rollout import derive_seed, play_episode
from train.config import TrainConfig
from train.credit import Step
from train.msgrpo import composite_returns, group_advantages
from train.ranks import ALONE, Ranks

OnEnded = Callable[[int, int, int], None]  # episodes that have ended, episodes in all, tokens generated so far


def silent(done: int, planned: int, tokens: int) -> None:
    """Nobody is told how many episodes have ended."""


@dataclass(frozen=True)
class Group:
    """G trajectories from one state, `origin`: for each, the turns of one player; and what they are worth.

    In a game of several players the policy plays all of them, and each player's trajectories are a group.
    """

    origin: Game
    turns: list[list[Turn]]
    returns_G: Tensor
    advantages_G: Tensor

    @classmethod
    def of(cls, origin: Game, episodes: Sequence[Episode], player: str) -> Group:
        turns = [episode.turns_of(player) for episode in episodes]
        returns = composite_returns(
            [[turn.reward for turn in one] for one in turns], [[turn.shaping for turn in one] for one in turns]
        )
        return cls(origin, turns, returns, group_advantages(returns))

    def trajectories(self) -> list[list[Step]]:
        """The turns as far as credit goes."""
        return [[Step(turn.state, turn.action, turn.reward + turn.shaping) for turn in one] for one in self.turns]

    @property
    def is_flat(self) -> bool:
        """All returns equal: no episode was better than another, so there is nothing to learn from."""
        return not bool(self.advantages_G.any())


Play = tuple[Scenario, int, int, int]  # what is played, and the seeds of its start, its luck and its sampling
Start = tuple[Scenario, int]


async def play_episodes(
    agent: LanguageAgent, plays: Sequence[Play], shaping: Shaping, ended: OnEnded = silent
) -> list[Episode]:
    """All episodes at once, each player of each the same agent. `ended` gets the count."""

    def one(play: Play) -> Coroutine[Any, Any, Episode]:
        scenario, start, chance, sampling = play
        agents = dict.fromkeys(scenario.players, agent)
        return play_episode(
            scenario, agents, start_seed=start, chance_seed=chance, sampling_seed=sampling, shaping=shaping
        )

    return await together(agent, [one(play) for play in plays], ended)


async def together(
    agent: LanguageAgent, playing: Sequence[Coroutine[Any, Any, Episode]], ended: OnEnded
) -> list[Episode]:
    """Wait for all, telling `ended` of each; then the agent is closed."""
    done, tokens = 0, 0

    async def counted(coroutine: Coroutine[Any, Any, Episode]) -> Episode:
        nonlocal done, tokens
        episode = await coroutine
        done += 1
        tokens += sum(turn.completion_tokens for turn in episode.turns)
        ended(done, len(playing), tokens)
        return episode

    try:
        return await asyncio.gather(*map(counted, playing))
    finally:
        await agent.close()


async def play_groups(
    model: LanguageModel,
    config: TrainConfig,
    step: int,
    starts: Sequence[Start],
    sampling: Sampling,
    ranks: Ranks = ALONE,
    ended: OnEnded = silent,
) -> list[Episode]:
    """Play this rank's share of G episodes from each start.

    Every seed is a function of (run seed, update, group, episode): a resumed run draws what the
    uninterrupted one would have drawn.
    """
    plays = [
        (
            scenario,
            start,
            derive_seed("chance", config.seed, step, g, j),
            derive_seed("sampling", config.seed, step, g, j),
        )
        for g, (scenario, start) in enumerate(starts)
        for j in range(config.group_size)
    ]
    agent = LanguageAgent("policy", model, sampling)
    return await play_episodes(agent, ranks.share(plays), Shaping(config.format_penalty), ended)


def grouped(episodes: Sequence[Episode], size: int, starts: Sequence[Start]) -> list[Group]:
    """Compare the `size` episodes of each start within their group."""
    return [
        Group.of(scenario.new(start, 0), episodes[g * size : (g + 1) * size], player)
        for g, (scenario, start) in enumerate(starts)
        for player in scenario.players
    ]
