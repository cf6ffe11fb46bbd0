"""The recorded comparison that comes with the package: nano before and after training, on the same starts.

`benchmarks/showcase.py` records it. It is read like any other record and simulated again before it is shown.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from msgrpo.episode import Episode
from msgrpo.tui.session import points

FILE = Path(__file__).parent / "showcase.jsonl.gz"
GAMES = ("frozen-lake", "snake")
BEFORE, AFTER = "nano", "nano:{game}"


@dataclass(frozen=True)
class Pair:
    """One start, played before and after training."""

    before: Episode
    after: Episode

    @property
    def scenario(self) -> str:
        return self.before.scenario

    @property
    def better(self) -> bool:
        """Whether training shows on this start."""
        return self.after.score > self.before.score


class Showcase:
    """The starts of all games, and the one that is shown: first one on which the difference is seen."""

    def __init__(self, file: Path = FILE) -> None:
        lines = gzip.decompress(file.read_bytes()).splitlines()
        episodes = [Episode.model_validate_json(line) for line in lines]
        self.pairs = [Pair(*two) for two in zip(episodes[::2], episodes[1::2], strict=True)]
        self.place = next((i for i, pair in enumerate(self.pairs) if pair.better), 0)

    @property
    def pair(self) -> Pair:
        return self.pairs[self.place]

    def move(self, by: int) -> None:
        self.place = (self.place + by) % len(self.pairs)

    def next_game(self) -> None:
        """To the first telling start of the next game."""
        games = self.games
        wanted = games[(games.index(self.pair.scenario) + 1) % len(games)]
        of_game = [i for i, pair in enumerate(self.pairs) if pair.scenario == wanted]
        self.place = next((i for i in of_game if self.pairs[i].better), of_game[0])

    @cached_property
    def games(self) -> list[str]:
        return list(dict.fromkeys(pair.scenario for pair in self.pairs))

    def of_game(self) -> Iterator[Pair]:
        """The starts of the game that is shown."""
        return (pair for pair in self.pairs if pair.scenario == self.pair.scenario)

    def sentence(self) -> str:
        """What one sees, and the result over all starts of the game."""
        pairs = list(self.of_game())
        results = []
        for played in ([pair.before for pair in pairs], [pair.after for pair in pairs]):
            if pairs[0].before.success is not None:
                results.append(f"{sum(bool(episode.success) for episode in played)} reach the goal")
            else:
                results.append(
                    f"{points(round(sum(episode.score for episode in played) / len(played), 2))} points a game"
                )
        return (
            "A language model of one million parameters before and after training with MS-GRPO: "
            "the same start, the same luck.\n"
            f"Of {len(pairs)} starts that it has not seen in training: before {results[0]}, after {results[1]}."
        )

    def title(self) -> str:
        here = 1 + list(self.of_game()).index(self.pair)
        return f"what training did · {self.pair.scenario} · start {here} of {len(list(self.of_game()))} · recorded"
