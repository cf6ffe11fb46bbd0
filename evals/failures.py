"""Which failures end an evaluation, or one game of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from msgrpo.episode import GAME_FAULT, Episode
from msgrpo.errors import EndpointError, GameFaultError
from msgrpo.evals.record import failure_of

T = TypeVar("T")

# An episode that failed this often by its own fault is given up; each start of the command makes one attempt.
ATTEMPTS = 3
FEWEST_FAILURES, FAILURE_SHARE = 10, 0.25  # more failed episodes than both stop the run, or a game at fault


@dataclass
class Failures:
    """Counts what has ended. A game whose own code fails too often is given up, and `faults` gets why; one that took
    too long too often is `hung`, for all agents. Too many other failures end the run with an EndpointError, and so do
    `max_failures` of any kind where that is given.
    """

    agent: str
    max_failures: int | None
    faults: list[GameFaultError]
    hung: set[str]
    ended: Counter[str] = field(default_factory=Counter)  # by the scenario
    failed: Counter[str] = field(default_factory=Counter)  # by the scenario whose game is at fault; "" for the others
    given_up: set[str] = field(default_factory=set)  # scenarios

    def until_given_up(self, scenario: str, jobs: Iterator[T]) -> Iterator[T]:
        """The jobs of a scenario, as long as it is played and its starts can be looked at."""
        try:
            yield from takewhile(lambda job: scenario not in self.given_up | self.hung, jobs)
        except GameFaultError as fault:
            self.faults.append(fault)

    def count(self, episode: Episode, failures: int) -> None:
        """An episode has ended, which has failed so often, this time included."""
        if failures > 1 and self.max_failures is None:
            return  # it failed so before, when the others did not: played again it says nothing of them
        self.ended[episode.scenario] += 1
        if episode.error is None:
            return
        game = episode.scenario if episode.error == GAME_FAULT and self.max_failures is None else ""
        self._count_failed(game, failure_of(episode))

    def count_given_up(self, scenario: str) -> None:
        """An episode is not played: it failed at each of its attempts, and says nothing of the others."""
        if self.max_failures is not None:
            self.ended[scenario] += 1
            self._count_failed("", f"{ATTEMPTS} failures, at earlier starts")

    def _count_failed(self, game: str, failure: str) -> None:
        self.failed[game] += 1
        most, failed, ended = self.max_failures, self.failed[game], self.ended[game] if game else self.ended.total()
        if game in self.given_up or failed <= (max(FEWEST_FAILURES, FAILURE_SHARE * ended) if most is None else most):
            return
        where = f" of {game}" if game else ""
        said = f"{self.agent}: {failed} of {ended} episodes{where} failed, the last with {failure}"
        again = "start the same command again: finished episodes stay, and those that failed are played again"
        if not game:
            fix = f"see what is wrong with the endpoint or the game, then {again}"
            raise EndpointError(said, kind="too_many_failures", fatal=True, fix=fix)
        self.give_up(game, GameFaultError(said, fix=f"see what is wrong with the game, then {again}"))

    def give_up(self, scenario: str, fault: GameFaultError) -> None:
        """Play this game no further, and the others all the same."""
        if scenario not in self.given_up:
            self.given_up.add(scenario)
            self.faults.append(fault)
        if fault.fatal:
            self.hung.add(scenario)
