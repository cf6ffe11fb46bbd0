"""Rollouts of a run: groups of episodes that share a start and not their luck, and when they are played.

With `ahead=k` rollouts of the next k updates go on by the version that is newest now, while the update makes the next
version. Nothing is discarded, and nothing is staler than k versions; the ratio against the engine's log-probabilities
corrects for it (`loss`). The starts and every seed are the same as without. In this process the trainer would wait
for the same cores, so there the rollouts come one after another and no time is saved: it shows what staleness does.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from msgrpo.agent import Agent, LanguageAgent, LanguageModel, Sampling, answer_in_turn
from msgrpo.episode import GAME_FAULT, Episode, Turn, derive_seed, lost_by, new_episode, play_episode, play_on
from msgrpo.errors import GameFaultError, RunError
from msgrpo.game import Game, Scenario, stream
from msgrpo.limits import games_code
from msgrpo.loops import InThread, run_async
from msgrpo.run_log import POLICY, own_seats
from msgrpo.specs import make_agent
from msgrpo.train.config import TrainConfig
from msgrpo.train.groups import Group, groups_of
from msgrpo.train.ranks import ALONE, Ranks
from msgrpo.train.rivals.contract import Further
from msgrpo.train.sinks import Reporter

Ended = Callable[[int, int, int], None]  # episodes that have ended, episodes in all, tokens generated so far
Start = tuple[Scenario, int]
Begin = Callable[[], Coroutine[Any, Any, Episode]]
MOST_LOST = 0.25  # of the episodes that a run plays at once: more without a result end it


class LostError(RunError):
    """Too many episodes have no result for a run to go on."""


def silent(done: int, planned: int, tokens: int) -> None:
    """An `Ended` that tells nobody."""


def counter(report: Reporter, what: str) -> Ended:
    """A callback that says how many episodes of `what` have been played, and how fast."""
    began = time.monotonic()
    report.doing(f"{what}: no episode has ended yet")  # the first may take minutes

    def ended(done: int, planned: int, tokens: int) -> None:
        rate = tokens / max(time.monotonic() - began, 1e-3)
        report.doing(f"{what}: {done} of {planned} episodes played, {rate:,.0f} tokens/s")

    return ended


@dataclass(frozen=True)
class Play:
    """One episode to play: its seeds, and the seats that the policy has (the others are the opponent's)."""

    scenario: Scenario
    start: int
    chance: int
    sampling: int
    seats: tuple[str, ...]


@dataclass(frozen=True)
class Players:
    """Who plays in a run: the policy, its opponent where there is one, and the processes that share the episodes."""

    config: TrainConfig
    ranks: Ranks = ALONE
    opponent: Agent | None = None

    @classmethod
    def of(cls, config: TrainConfig, ranks: Ranks) -> Players:
        """With the agent that `opponent` names; `base` is what the policy began as, and is asked as the policy is."""
        if config.opponent is None:
            return cls(config, ranks)
        if config.opponent != "base":
            return cls(config, ranks, make_agent(config.opponent, config.sampling))
        base = "nano" if config.base == "nano" else f"base:{config.base}"
        return cls(config, ranks, make_agent(base, config.sampling, template=config.prompt, chat=config.chat))

    def seats(self, scenario: Scenario, number: int) -> tuple[str, ...]:
        """The policy's seats in the start of this number: all, or against an opponent each seat in its turn."""
        players = scenario.players
        return players if self.opponent is None else (players[number % len(players)],)

    def seated(self, scenario: Scenario, seats: Sequence[str], agent: LanguageAgent) -> dict[str, Agent]:
        """Who plays what: the policy its seats, the opponent the others; without one the policy plays all."""
        return {
            player: agent if self.opponent is None or player in seats else self.opponent
            for player in scenario.players
        }

    def policy(self, model: LanguageModel, sampling: Sampling) -> LanguageAgent:
        """What is trained, as an agent. An opponent in the same process answers in turn with it: how fast the one
        and the other are must not decide which turns are a batch.
        """
        if isinstance(self.opponent, LanguageAgent):
            answer_in_turn([model, self.opponent.model])
        return LanguageAgent(POLICY, model, sampling, self.config.prompt)

    async def play(
        self,
        model: LanguageModel,
        sampling: Sampling,
        plays: Sequence[Play],
        format_penalty: float,
        ended: Ended = silent,
    ) -> list[Episode]:
        """This rank's share of the episodes, all at once."""
        agent = self.policy(model, sampling)

        def begin(play: Play) -> Coroutine[Any, Any, Episode]:
            return play_episode(
                play.scenario,
                self.seated(play.scenario, play.seats, agent),
                start_seed=play.start,
                chance_seed=play.chance,
                sampling_seed=play.sampling,
                format_penalty=format_penalty,
            )

        return await together(agent, [partial(begin, play) for play in self.ranks.share(plays)], ended)


async def together(agent: LanguageAgent, begins: Sequence[Begin], ended: Ended) -> list[Episode]:
    """Start all episodes and wait for them, telling `ended` of each; then the agent is closed."""
    done, tokens = 0, 0

    async def counted(begin: Begin) -> Episode:
        nonlocal done, tokens
        episode = await begin()
        done += 1
        tokens += sum(turn.completion_tokens for turn in episode.turns)
        ended(done, len(begins), tokens)
        return episode

    try:
        return await asyncio.gather(*map(counted, begins))
    finally:
        await agent.close()


# By (first, count): so many starts from there on, and where those after them begin.
Draw = Callable[[int, int], tuple[list[Start], int]]


@dataclass(frozen=True)
class Playing:
    """One update's rollouts: who plays, from which starts, by which model.

    Every seed is a function of (run seed, update, group, episode): a resumed run draws what the uninterrupted one
    would have drawn.
    """

    players: Players
    step: int
    model: LanguageModel
    sampling: Sampling
    starts: Sequence[Start]
    ended: Ended = silent
    first: int = 0  # the number of the first start within the update
    draw: Draw | None = None
    next_start: int = 0  # where the starts after these begin
    memory: dict[str, Tensor] = field(default_factory=dict)  # what choices keep from update to update

    @property
    def config(self) -> TrainConfig:
        return self.players.config

    @property
    def seats(self) -> list[tuple[str, ...]]:
        """The policy's seats in each group; the turns of the seats go on from update to update."""
        first = self.step * self.config.groups + self.first
        return [self.players.seats(scenario, first + g) for g, (scenario, _) in enumerate(self.starts)]

    async def play(self) -> list[Episode]:
        """This rank's share of G episodes from each start."""
        seed = self.config.seed
        plays = [
            Play(
                scenario,
                start,
                derive_seed("chance", seed, self.step, g, j),
                derive_seed("sampling", seed, self.step, g, j),
                seats,
            )
            for g, ((scenario, start), seats) in enumerate(zip(self.starts, self.seats, strict=True), self.first)
            for j in range(self.config.group_size)
        ]
        return await self.players.play(self.model, self.sampling, plays, self.config.format_penalty, self.ended)

    def fresh(self, count: int) -> Playing:
        """The same with so many further starts, which the split has next."""
        assert self.draw is not None
        starts, after = self.draw(self.next_start, count)
        return replace(self, starts=starts, first=self.first + len(self.starts), next_start=after)

    def played(self) -> list[Episode]:
        """G episodes from each start, of all ranks."""
        return self.players.ranks.gather(run_async(self.play()))

    async def go_on(
        self,
        agent: LanguageAgent,
        scenario: Scenario,
        game: Callable[[], Game],
        seats: Sequence[str],
        start: int,
        parts: Sequence[object],
    ) -> Episode:
        """Play a copy of a game to its end, with new luck; its seeds are derived from `parts`."""
        chance, sampling = derive_seed("chance", *parts), derive_seed("sampling", *parts)
        agents = self.players.seated(scenario, seats, agent)
        episode = new_episode(scenario, agents, start, chance, sampling)
        try:
            begun = game()
            with games_code(scenario.id):
                copy = begun.with_luck(chance)
        except GameFaultError as fault:
            lost_by(episode, fault)
        else:
            await play_on(copy, episode, scenario, agents, self.config.format_penalty)
        return episode

    def gathered(self, begins: Sequence[Callable[[LanguageAgent], Coroutine[Any, Any, Episode]]]) -> list[Episode]:
        """Play this rank's share of these episodes, and return those of all ranks."""
        agent = self.players.policy(self.model, self.sampling)
        own = [partial(begin, agent) for begin in self.players.ranks.share(begins)]
        return self.players.ranks.gather(run_async(together(agent, own, self.ended)))

    def by_start(
        self, episodes: Sequence[Episode]
    ) -> Iterator[tuple[Scenario, int, tuple[str, ...], Sequence[Episode]]]:
        """Of each start: its scenario, its seed, the policy's seats, and its G episodes."""
        size = self.config.group_size
        for g, ((scenario, start), seats) in enumerate(zip(self.starts, self.seats, strict=True)):
            yield scenario, start, seats, episodes[g * size : (g + 1) * size]

    def groups(self, episodes: Sequence[Episode]) -> list[Group]:
        """Compare the episodes of each start within their group, each of the policy's seats by itself."""
        return [
            group
            for place, (scenario, _, seats, of_start) in enumerate(self.by_start(episodes), self.first)
            for group in groups_of(scenario, of_start, seats, place)
        ]

    def flat(self, episodes: Sequence[Episode]) -> list[bool]:
        """Of each start, whether its episodes say nothing: in no group was one better than another."""
        telling = {group.place - self.first for group in self.groups(episodes) if not group.is_flat}
        return [place not in telling for place in range(len(self.starts))]


def own_turns(episodes: Sequence[Episode]) -> list[Turn]:
    """The policy's turns."""
    return [turn for episode in episodes for turn in episode.turns if turn.player in own_seats(episode)]


def entropy(episodes: Sequence[Episode]) -> float | None:
    """−mean log p of all tokens that the policy sampled, in nats, by the engine's own log-probabilities; None where
    it sampled none.
    """
    logprobs = [p for turn in own_turns(episodes) if turn.completion for p in turn.completion.logprobs]
    return -sum(logprobs) / len(logprobs) if logprobs else None


def with_result(episodes: Sequence[Episode]) -> list[Episode]:
    """Those that neither a game's own fault nor a server's failure ended."""
    return [episode for episode in episodes if episode.error is None]


def check_lost(episodes: Sequence[Episode]) -> None:
    """Raise LostError, with the last fault, where more than a quarter has no result: a few cost only themselves."""
    lost = [episode for episode in episodes if episode.error is not None]
    if len(lost) > MOST_LOST * len(episodes):
        last = lost[-1]
        check = f"find the game's fault with: msgrpo games check {shlex.quote(last.scenario)}"
        raise LostError(
            f"{len(lost)} of {len(episodes)} episodes have no result, the last: {last.error}: {last.error_message}",
            fix=check if last.error == GAME_FAULT else "the last checkpoint is kept",
        )


@dataclass(frozen=True)
class Rollouts:
    """What one update learns from."""

    groups: list[Group]
    episodes: list[Episode]  # G from each start
    all_episodes: list[Episode]  # with those that `explore` has added
    lost: list[Episode]  # that have no result, because the game itself failed
    next_start: int  # where the next update's starts begin
    staleness: int  # updates between the version that played and the one that learns
    played_s: float  # how long they were played
    waited_s: float  # how long the trainer waited for them


Played = tuple[list[Episode], float]  # one rank's episodes, and how long they took


@dataclass(frozen=True)
class _Begun:
    """An update's rollouts, played already or being played; those of several updates may be played together."""

    playing: Playing
    version: int
    played: list[Played] | InThread[list[Played]]
    place: int = 0  # among what is played together


class RolloutSource:
    """Gives each update its rollouts; with `ahead`, begins those of later updates at the same moment."""

    def __init__(self, players: Players, memory: dict[str, Tensor] | None = None) -> None:
        self._players, self._config, self._memory = players, players.config, {} if memory is None else memory
        # Read once: each is made from a text of the settings.
        self._scenarios, self._shares = players.config.scenarios, players.config.shares
        self._ahead, self._here = players.config.ahead, players.config.plays_here
        self._coming: deque[_Begun] = deque()

    def next(self, step: int, first_start: int, model: LanguageModel, sampling: Sampling, ended: Ended) -> Rollouts:
        """The rollouts of update `step`, whose starts begin at `first_start`; `model` is version `step`."""
        began = time.perf_counter()
        if not self._coming:
            playing = self._playing(first_start, step, model, sampling, ended)
            self._coming.append(_Begun(playing, step, run_async(_in_turn([playing]))))
        begun = self._coming[0]  # a stop while this waits for it leaves it to `close`
        played = begun.played.result() if isinstance(begun.played, InThread) else begun.played
        own, seconds = played[begun.place]
        self._coming.popleft()
        episodes = self._players.ranks.gather(own)
        check_lost(episodes)  # before more is played where it would be lost too
        further = Further([], [])
        if self._config.explore is not None:
            further = self._config.explore.further(begun.playing, episodes)
        waited = time.perf_counter() - began
        every = [*episodes, *further.episodes]
        check_lost(every)
        self._begin(begun.playing.next_start, step, model, sampling)
        return Rollouts(
            groups=[*begun.playing.groups(episodes), *further.groups],
            episodes=with_result(episodes),
            all_episodes=with_result(every),
            lost=[episode for episode in every if episode.error is not None],
            next_start=max(begun.playing.next_start, further.next_start),
            staleness=step - begun.version,
            played_s=seconds,
            waited_s=waited,
        )

    def close(self) -> None:
        """Give up what is being played."""
        for begun in self._coming:
            if isinstance(begun.played, InThread):
                begun.played.give_up()

    def _begin(self, first_start: int, version: int, model: LanguageModel, sampling: Sampling) -> None:
        """Begin what `ahead` lets be played by this version: at first of several updates, then of one at a time."""
        last = min(version + self._ahead, self._config.steps - 1)
        if self._coming:
            first_start = self._coming[-1].playing.next_start
        playings: list[Playing] = []
        for step in range(version + 1 + len(self._coming), last + 1):
            playings.append(self._playing(first_start, step, model, sampling, silent))
            first_start = playings[-1].next_start
        if playings:
            played = run_async(_in_turn(playings)) if self._here else InThread(_in_turn(playings))
            self._coming += [_Begun(playing, version, played, place) for place, playing in enumerate(playings)]

    def _playing(
        self, first_start: int, step: int, model: LanguageModel, sampling: Sampling, ended: Ended
    ) -> Playing:
        starts, after = self.next_starts(first_start)
        return Playing(
            self._players,
            step,
            model,
            sampling,
            starts,
            ended,
            draw=self.next_starts,
            next_start=after,
            memory=self._memory,
        )

    def next_starts(self, first_start: int, count: int | None = None) -> tuple[list[Start], int]:
        """The next training starts, a fresh one for each group, and where to go on; each run seed begins elsewhere.

        Of a mixture each start's scenario is drawn by its share.
        """
        offset = self._config.seed * 1_000_003
        starts = [self._starts(scenario, offset + first_start) for scenario in self._scenarios]
        size = self._config.groups if count is None else count
        drawn = stream(offset + first_start, "mixture").choice(len(starts), size=size, p=self._shares)
        chosen = [(self._scenarios[i], next(starts[i])) for i in drawn]
        return chosen, max(start for _, start in chosen) + 1 - offset

    def _starts(self, scenario: Scenario, first_seed: int) -> Iterator[int]:
        """A scenario's training starts from there on, without those that `explore` passes over."""
        starts, explore = scenario.starts("train", first_seed=first_seed), self._config.explore
        return starts if explore is None else explore.worthwhile(scenario, starts, self._memory)


async def _in_turn(playings: Sequence[Playing]) -> list[Played]:
    """Play the updates' rollouts one after another: they share the model, which each closes in the end."""
    played = []
    for playing in playings:
        began = time.perf_counter()
        played.append((await playing.play(), time.perf_counter() - began))
    return played
