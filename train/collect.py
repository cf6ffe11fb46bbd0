"""Rollouts of one update: groups of episodes that share a start and not their luck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from msgrpo_agent.agent import LanguageAgent
from msgrpo_agent.episode import Episode, Turn
from msgrpo_agent.game import Scenario
from msgrpo_agent.models.local import LocalModel
from msgrpo_agent.rewards import Shaping
from msgrpo_agent.rollout import derive_seed, play_episode
from train.config import TrainConfig
from train.msgrpo import composite_returns, group_advantages

OnEnded = Callable[[int, int], None]  # (episodes that have ended, episodes in all)


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


def play_episodes(
    agent: LanguageAgent,
    scenario: Scenario,
    seeds: Sequence[tuple[int, int, int]],
    shaping: Shaping,
    ended: OnEnded = lambda done, planned: None,
) -> list[Episode]:
    """All episodes at once, in lock-step batches; `seeds` are (start, chance, sampling). `ended` gets the count."""
    agents, done = dict.fromkeys(scenario.players, agent), 0

    async def one(start: int, chance: int, sampling: int) -> Episode:
        nonlocal done
        episode = await play_episode(
            scenario, agents, start_seed=start, chance_seed=chance, sampling_seed=sampling, shaping=shaping
        )
        done += 1
        ended(done, len(seeds))
        return episode

    async def everything() -> list[Episode]:
        return await asyncio.gather(*(one(*of_episode) for of_episode in seeds))

    return asyncio.run(everything())


def collect(
    engine: LocalModel,
    scenario: Scenario,
    config: TrainConfig,
    step: int,
    starts: list[int],
    ended: OnEnded = lambda done, planned: None,
) -> tuple[list[Group], list[Episode]]:
    """Play G episodes from each start and compare them within their group.

    Every seed is a function of (run seed, update, group, episode): a resumed run draws what the
    uninterrupted one would have drawn.
    """
    agent = LanguageAgent("policy", engine, config.sampling)
    seeds = [
        (start, derive_seed("chance", config.seed, step, g, j), derive_seed("sampling", config.seed, step, g, j))
        for g, start in enumerate(starts)
        for j in range(config.group_size)
    ]
    episodes = play_episodes(agent, scenario, seeds, Shaping(config.format_penalty), ended)
    groups = []
    for g, start in enumerate(starts):
        of_start = episodes[g * config.group_size : (g + 1) * config.group_size]
        for player in scenario.players:
            turns = [episode.turns_of(player) for episode in of_start]
            returns = composite_returns(
                [[turn.reward for turn in one] for one in turns], [[turn.shaping for turn in one] for one in turns]
            )
            groups.append(Group(start, turns, returns, group_advantages(returns)))
    return groups, episodes
