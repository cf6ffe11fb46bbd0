"""Rollouts of one update: groups of episodes that share a start and not their luck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from msgrpo_agent.agent import LanguageAgent, LanguageModel
from msgrpo_agent.episode import Episode, Turn
from msgrpo_agent.game import Scenario
from msgrpo_agent.rewards import Shaping
from msgrpo_agent.rollout import derive_seed, play_episode
from train.config import TrainConfig
from train.msgrpo import composite_returns, group_advantages
from train.ranks import ALONE, Ranks

OnEnded = Callable[[int, int, int], None]  # episodes that have ended, episodes in all, tokens generated so far


def silent(done: int, planned: int, tokens: int) -> None:
    """Nobody is told how many episodes have ended."""


@dataclass(frozen=True)
class Group:
    """G trajectories from one start: for each, the turns of one player; and what they are worth.

    In a game of several players the policy plays all of them, and each player's trajectories are a group.
    """

    start_seed: int
    turns: list[list[Turn]]
    returns_G: Tensor
    advantages_G: Tensor

    @property
    def is_flat(self) -> bool:
        """All returns equal: no episode was better than another, so there is nothing to learn from."""
        return not bool(self.advantages_G.any())


async def play_episodes(
    agent: LanguageAgent,
    scenario: Scenario,
    seeds: Sequence[tuple[int, int, int]],
    shaping: Shaping,
    ended: OnEnded = silent,
) -> list[Episode]:
    """All episodes at once; `seeds` are (start, chance, sampling). `ended` gets the count."""
    agents, done, tokens = dict.fromkeys(scenario.players, agent), 0, 0

    async def one(start: int, chance: int, sampling: int) -> Episode:
        nonlocal done, tokens
        episode = await play_episode(
            scenario, agents, start_seed=start, chance_seed=chance, sampling_seed=sampling, shaping=shaping
        )
        done += 1
        tokens += sum(turn.completion_tokens for turn in episode.turns)
        ended(done, len(seeds), tokens)
        return episode

    try:
        return await asyncio.gather(*(one(*of_episode) for of_episode in seeds))
    finally:
        await agent.close()


async def play_groups(
    model: LanguageModel,
    scenario: Scenario,
    config: TrainConfig,
    step: int,
    starts: Sequence[int],
    ranks: Ranks = ALONE,
    ended: OnEnded = silent,
) -> list[Episode]:
    """Play this rank's share of G episodes from each start.

    Every seed is a function of (run seed, update, group, episode): a resumed run draws what the
    uninterrupted one would have drawn.
    """
    agent = LanguageAgent("policy", model, config.sampling)
    seeds = [
        (start, derive_seed("chance", config.seed, step, g, j), derive_seed("sampling", config.seed, step, g, j))
        for g, start in enumerate(starts)
        for j in range(config.group_size)
    ]
    return await play_episodes(agent, scenario, ranks.share(seeds), Shaping(config.format_penalty), ended)


def grouped(
    episodes: Sequence[Episode], scenario: Scenario, config: TrainConfig, starts: Sequence[int]
) -> list[Group]:
    """Compare the episodes of each start within their group."""
    groups = []
    for g, start in enumerate(starts):
        of_start = episodes[g * config.group_size : (g + 1) * config.group_size]
        for player in scenario.players:
            turns = [episode.turns_of(player) for episode in of_start]
            returns = composite_returns(
                [[turn.reward for turn in one] for one in turns], [[turn.shaping for turn in one] for one in turns]
            )
            groups.append(Group(start, turns, returns, group_advantages(returns)))
    return groups
