"""The pace of rollouts: those of the next update are played when it begins, or while this one is computed.

With `ahead=1` two things go on at once, a rollout by the version that is newest now and the update that makes the
next version. Nothing is discarded, and nothing is staler than one version; the clipped ratio against the engine's
log-probabilities corrects for it. The starts and every seed are the same as without.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

from msgrpo.agent import Agent, LanguageModel, Sampling
from msgrpo.episode import Episode
from msgrpo.game import stream
from msgrpo.train.branch import branch_groups, forks, play_forks
from msgrpo.train.checkpoint import Progress
from msgrpo.train.collect import Group, OnEnded, Start, grouped, play_groups, silent, whole
from msgrpo.train.config import TrainConfig
from msgrpo.train.ranks import Ranks


@dataclass(frozen=True)
class Rollouts:
    """What one update learns from."""

    groups: list[Group]
    episodes: list[Episode]
    branched: list[Episode]  # that went on from the middle of one of the others
    lost: list[Episode]  # that have no result, because the game itself failed
    next_start: int  # where the next update's starts begin
    staleness: int  # updates between the version that played and the one that learns
    played_s: float
    waited_s: float  # of which the trainer had nothing else to do


@dataclass(frozen=True)
class _Played:
    starts: list[Start]
    next_start: int
    version: int
    episodes: list[Episode]
    seconds: float


class Pace:
    """Gives each update its rollouts; with `ahead`, begins those of the next one at the same moment."""

    def __init__(self, config: TrainConfig, ranks: Ranks, opponent: Agent | None = None) -> None:
        self._config, self._ranks, self._opponent = config, ranks, opponent
        self._coming: _InThread | None = None

    def next(self, progress: Progress, model: LanguageModel, sampling: Sampling, ended: OnEnded) -> Rollouts:
        """The rollouts of update `progress.step`; `model` has the version of the same number."""
        began, step = time.perf_counter(), progress.step
        if self._coming is None:
            mine = asyncio.run(self._play(progress.next_start, step, step, model, sampling, ended))
        else:
            mine = self._coming.result()  # a stop while it waits here leaves it to `close`
            self._coming = None
        episodes = self._ranks.gather(mine.episodes)
        found, branched = [], []
        if self._config.branch:
            found = forks(episodes, self._config, step, mine.starts)
            going_on = play_forks(model, self._config, step, found, sampling, self._ranks, ended, self._opponent)
            branched = self._ranks.gather(asyncio.run(going_on))
        waited = time.perf_counter() - began
        played = [*episodes, *branched]
        lost = [episode for episode in played if episode.error is not None]
        whole(played)
        if self._config.ahead and step + 1 < self._config.steps:
            self._coming = _InThread(self._play(mine.next_start, step + 1, step, model, sampling, silent))
        groups = grouped(episodes, self._config, step, mine.starts)
        groups += branch_groups(branched, self._config.branch, found)
        return Rollouts(
            groups,
            whole(episodes),
            [episode for episode in branched if episode.error is None],
            lost,
            mine.next_start,
            step - mine.version,
            mine.seconds,
            waited,
        )

    def close(self) -> None:
        """Give up what is being played."""
        if self._coming is not None:
            self._coming.give_up()

    async def _play(
        self, first: int, step: int, version: int, model: LanguageModel, sampling: Sampling, ended: OnEnded
    ) -> _Played:
        began = time.perf_counter()
        starts, after = next_starts(self._config, first)
        episodes = await play_groups(model, self._config, step, starts, sampling, self._ranks, ended, self._opponent)
        return _Played(starts, after, version, episodes, time.perf_counter() - began)


class _InThread:
    """A coroutine that runs beside the trainer, in a thread with a loop of its own."""

    def __init__(self, coroutine: Coroutine[Any, Any, _Played]) -> None:
        self._found: Future[_Played] = Future()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(coroutine)
        self._thread = Thread(target=self._run, name="msgrpo-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.set_result(self._loop.run_until_complete(self._task))
        except BaseException as error:  # raised where the result is asked for
            self._found.set_exception(error)
        finally:
            self._loop.close()

    def result(self) -> _Played:
        return self._found.result()

    def give_up(self) -> None:
        if not self._found.done():
            with suppress(RuntimeError):  # it ended just now, and its loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


def next_starts(config: TrainConfig, first: int) -> tuple[list[Start], int]:
    """The next training starts, a fresh one for each group, and where to go on; each run seed begins elsewhere.

    Of a mixture each start's scenario is drawn by its share.
    """
    offset = config.seed * 1_000_003
    starts = [scenario.starts("train", first_seed=offset + first) for scenario in config.scenarios]
    drawn = stream(offset + first, "mixture").choice(len(starts), size=config.groups, p=config.shares)
    chosen = [(config.scenarios[i], next(starts[i])) for i in drawn]
    return chosen, max(start for _, start in chosen) + 1 - offset
