"""The film of a run: the same few starts with the same luck and sampling seeds, played again while it learns.

These episodes are batches of their own, so that no update, and no digit of an adapter, depends on them. A batch of
three takes nearly as long as one of thirty. So not every update has a scene: one is played as soon as all of them
together stay below `film_share` of the time so far. The first and the last version always play.
"""

from __future__ import annotations

import time
from pathlib import Path

from msgrpo import run_log
from msgrpo.agent import LanguageModel
from msgrpo.errors import RecordError
from msgrpo.run_log import Scene
from msgrpo.text import counted
from msgrpo.train.evaluate import validation_episodes
from msgrpo.train.rollouts import Players
from msgrpo.train.sinks import Reporter


class Film:
    """Plays the starts of the film, now and then."""

    def __init__(self, out: Path, players: Players) -> None:
        self._out, self._players = out, players
        self._began = time.perf_counter()
        self._spent_s, self._longest_s = 0.0, _took_before(out)

    def due(self, step: int) -> bool:
        """Whether the version of this number is to be filmed: the same answer on every rank."""
        config, ranks = self._players.config, self._players.ranks
        return bool(config.evaluation.film) and ranks.broadcast(ranks.first and self._wanted(step))

    def _wanted(self, step: int) -> bool:
        config = self._players.config
        if step in run_log.scenes(self._out):
            return False
        share = config.evaluation.film_share
        within = self._spent_s + self._longest_s <= share * (time.perf_counter() - self._began)
        return step in (0, config.steps) or within

    def play(self, step: int, model: LanguageModel, report: Reporter) -> None:
        """Play the starts and keep the episodes; a game's own fault leaves its episode out."""
        starts = self._players.config.evaluation.film
        report.doing(f"filming {counted(starts, 'start')} after {counted(step, 'update')}")
        began = time.perf_counter()
        episodes = validation_episodes(model, self._players, starts)
        took = time.perf_counter() - began
        self._spent_s, self._longest_s = self._spent_s + took, max(self._longest_s, took)
        if self._players.ranks.first:
            played = [episode for episode in episodes if episode.error is None]
            run_log.write_scene(self._out, Scene(step=step, episodes=played))


def _took_before(out: Path) -> float:
    """The seconds of the newest scene of a run that goes on; 0 where there is none: how long it took is not known."""
    try:
        episodes = [
            episode for step in run_log.scenes(out)[-1:] for episode in run_log.read_scene(out, step).episodes
        ]
    except RecordError:
        return 0.0
    return max((sum(turn.latency_s for turn in episode.turns) for episode in episodes), default=0.0)
