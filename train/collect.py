"""Rollouts of one update: groups of episodes that share a start and not their luck."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from msgrpo.agent import Agent, LanguageAgent, LanguageModel, Sampling
from msgrpo.episode import Episode, Turn
from msgrpo.errors import RunError
from msgrpo.game import Game, Scenario
from msgrpo.rewards import Shaping
from msgrpo.rollout import GAME_FAULT, derive_seed, play_episode
from msgrpo.specs import make_agent
from msgrpo.train.config import TrainConfig
from msgrpo.train.credit import Step
from msgrpo.train.msgrpo import composite_returns, group_advantages
from msgrpo.train.ranks import ALONE, Ranks

OnEnded = Callable[[int, int, int], None]  # episodes that have ended, episodes in all, tokens generated so far


def silent(done: int, planned: int, tokens: int) -> None:
    """Nobody is told how many episodes have ended."""


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

    @property
    def is_flat(self) -> bool:
        """All returns equal: no episode was better than another, so there is nothing to learn from."""
        return not bool(self.advantages_G.any())


def _asked(turn: Turn) -> Hashable:
    """What the policy was asked: with a history in the prompt the state alone would not tell two moments apart."""
    return turn.completion.prompt_ids if turn.completion is not None else turn.state


@dataclass(frozen=True)
class Play:
    """One episode to play: its seeds, and the seats that the policy has (the others are the opponent's)."""

    scenario: Scenario
    start: int
    chance: int
    sampling: int
    seats: tuple[str, ...]


Start = tuple[Scenario, int]
MOST_LOST = 0.25  # of the episodes that a run plays at once: more without a result end it
POLICY = "policy"  # what the trained agent is called in an episode


async def play_episodes(
    agent: LanguageAgent,
    plays: Sequence[Play],
    shaping: Shaping,
    ended: OnEnded = silent,
    opponent: Agent | None = None,
) -> list[Episode]:
    """All episodes at once. `ended` gets the count."""

    def one(play: Play) -> Coroutine[Any, Any, Episode]:
        return play_episode(
            play.scenario,
            seated(play.scenario, play.seats, agent, opponent),
            start_seed=play.start,
            chance_seed=play.chance,
            sampling_seed=play.sampling,
            shaping=shaping,
        )

    return await together(agent, [partial(one, play) for play in plays], ended)


def seated(
    scenario: Scenario, seats: Sequence[str], agent: LanguageAgent, opponent: Agent | None
) -> dict[str, Agent]:
    """Who plays what: the policy its seats, the opponent the others; without one the policy plays all."""
    return {player: agent if opponent is None or player in seats else opponent for player in scenario.players}


def seats_of(scenario: Scenario, config: TrainConfig, number: int) -> tuple[str, ...]:
    """The policy's seats in the start of this number: all, or against an opponent each seat in its turn."""
    players = scenario.players
    return players if config.opponent is None else (players[number % len(players)],)


def seats_in(starts: Sequence[Start], config: TrainConfig, step: int) -> list[tuple[str, ...]]:
    """The policy's seats in each group of update `step`; the turns of the seats go on from update to update."""
    return [seats_of(scenario, config, step * config.groups + g) for g, (scenario, _) in enumerate(starts)]


def own_seats(episode: Episode) -> list[str]:
    """The seats that the policy had; all where no opponent was named."""
    return [player for player, spec in episode.agents.items() if spec == POLICY] or list(episode.agents)


def own_turns(episodes: Sequence[Episode]) -> list[Turn]:
    """The policy's turns."""
    return [turn for episode in episodes for turn in episode.turns if turn.player in own_seats(episode)]


def opponent_of(config: TrainConfig) -> Agent | None:
    """The agent that `config.opponent` names; `base` is what the policy began as, and is asked as the policy is."""
    if config.opponent is None:
        return None
    if config.opponent != "base":
        return make_agent(config.opponent, config.sampling)
    base = "nano" if config.base == "nano" else f"base:{config.base}"
    return make_agent(base, config.sampling, template=config.prompt, chat=config.chat)


async def together(
    agent: LanguageAgent, playing: Sequence[Callable[[], Coroutine[Any, Any, Episode]]], ended: OnEnded
) -> list[Episode]:
    """Start all and wait for them, telling `ended` of each; then the agent is closed."""
    done, tokens = 0, 0

    async def counted(begin: Callable[[], Coroutine[Any, Any, Episode]]) -> Episode:
        nonlocal done, tokens
        episode = await begin()
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
    opponent: Agent | None = None,
) -> list[Episode]:
    """Play this rank's share of G episodes from each start.

    Every seed is a function of (run seed, update, group, episode): a resumed run draws what the
    uninterrupted one would have drawn.
    """
    plays = [
        Play(
            scenario,
            start,
            derive_seed("chance", config.seed, step, g, j),
            derive_seed("sampling", config.seed, step, g, j),
            seats,
        )
        for g, ((scenario, start), seats) in enumerate(zip(starts, seats_in(starts, config, step), strict=True))
        for j in range(config.group_size)
    ]
    agent = LanguageAgent(POLICY, model, sampling, config.prompt)
    return await play_episodes(agent, ranks.share(plays), Shaping(config.format_penalty), ended, opponent)


def beginning(scenario: Scenario) -> Callable[[Episode], Game]:
    """The state in which an episode began; made once for all that share it."""

    @cache
    def new(start_seed: int, chance_seed: int) -> Game:
        return scenario.new(start_seed, chance_seed)

    return lambda episode: new(episode.start_seed, episode.chance_seed if scenario.luck_in_start else 0)


def whole(episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that have a result.

    A game's own fault costs its episode. Raises RunError, with the last fault, where it has cost more than a quarter.
    """
    lost = [episode for episode in episodes if episode.error is not None]
    if len(lost) > MOST_LOST * len(episodes):
        last = lost[-1]
        check = f"find the game's fault with: msgrpo games check {shlex.quote(last.scenario)}"
        raise RunError(
            f"{len(lost)} of {len(episodes)} episodes have no result, the last: {last.error}: {last.error_message}",
            fix=check if last.error == GAME_FAULT else "the last checkpoint is kept",
        )
    return [episode for episode in episodes if episode.error is None]


def grouped(episodes: Sequence[Episode], config: TrainConfig, step: int, starts: Sequence[Start]) -> list[Group]:
    """Compare the episodes of each start within their group, each of the policy's seats by itself."""
    size = config.group_size
    found = (
        Group.of(beginning(scenario), episodes[g * size : (g + 1) * size], player, g)
        for g, ((scenario, start), seats) in enumerate(zip(starts, seats_in(starts, config, step), strict=True))
        for player in seats
    )
    return [group for group in found if group is not None]
