"""explore=skip(chance=0.5): starts whose groups were flat the last times are played less often.

GRESO (arXiv 2506.02177): a start whose group was flat the last z times that it was played is passed over with the
probability

    1 − max(chance^z, LEAST)

before anything is played, so it costs no answers; the next start of the split takes its place. Two starts are the
same where their boards are. Where no start ever comes again, as on a server, it changes nothing. A start whose
episodes are all lost says nothing of itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from pydantic import Field
from torch import Tensor

from msgrpo.episode import Episode, derive_seed
from msgrpo.errors import GameFaultError
from msgrpo.game import Scenario, stream
from msgrpo.train.rivals.contract import Explore, Further, Playing

LEAST = 0.05  # probability with which any start is still played: the policy changes, and nothing is given up for good


class Skip(Explore):
    """Starts whose groups were flat the last times are played less often."""

    name = "skip"
    chance: float = Field(0.5, gt=0, lt=1, description="of playing a start whose last group was flat; of z, chance^z")

    def worthwhile(self, scenario: Scenario, starts: Iterator[int], memory: dict[str, Tensor]) -> Iterator[int]:
        streaks = _streaks(memory)
        for start in starts:
            played = max(self.chance ** streaks.get(key_of(scenario, start), 0), LEAST)
            if stream(start, "skip").random() < played:
                yield start

    def further(self, playing: Playing, episodes: Sequence[Episode]) -> Further:
        """Nothing more is played; what each start's group taught is kept for the next updates."""
        streaks = _streaks(playing.memory)
        flat = playing.flat(episodes)
        for is_flat, (scenario, start, _, of_start) in zip(flat, playing.by_start(episodes), strict=True):
            if all(episode.error is not None for episode in of_start):
                continue
            key = key_of(scenario, start)
            streaks[key] = streaks.get(key, 0) + 1 if is_flat else 0
        playing.memory[self.name] = torch.tensor(list(streaks.items()), dtype=torch.int64)
        return Further([], [])


def _streaks(memory: dict[str, Tensor]) -> dict[int, int]:
    """How often in a row the group of each start was flat, by the start's key."""
    kept = memory.get(Skip.name)
    return {} if kept is None else dict(kept.tolist())


def key_of(scenario: Scenario, start: int) -> int:
    """A number for the board of this start; for its seed where it cannot be looked at, or only by asking a server."""
    try:
        board: object = scenario.start_key(start)
    except GameFaultError as fault:
        if fault.fatal:
            raise
        board = start
    return derive_seed("start", scenario.id, board)
