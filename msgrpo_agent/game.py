"""The TSMG contract: a stochastic game (S, A, Ω, O, P, R) that a player only sees as text.

A game is single-use: there is no reset, `Scenario.new` gives a fresh one. It knows no model, no tokenizer
and no prompt. Positions in every text are (x, y) with (0, 0) at the bottom left, as in FastSnake.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import Literal, get_args

import numpy as np

from msgrpo_agent.errors import GameError, UsageError, nearest

Split = Literal["train", "eval"]
EVAL_SHARE = 4  # one start in four, by the hash of the start itself, is held out of every training
PROBED, FEW = 128, 32  # a scenario whose first PROBED seeds draw at most FEW different starts has few starts
MOVES = ("up", "down", "left", "right")


class Outcome(StrEnum):
    """Gymnasium's distinction: a game ends by its own rules (terminated) or by the step limit (truncated)."""

    PLAYING = "playing"
    TERMINATED = "terminated"
    TRUNCATED = "truncated"


@dataclass(frozen=True)
class Board:
    """A plain view for a screen: rows of one-character cells, top row first, and what each character means."""

    cells: tuple[tuple[str, ...], ...]
    legend: Mapping[str, str]

    def text(self) -> str:
        """The board with axis labels, y on the left and x below, one space between cells."""
        height = len(self.cells)
        rows = [f"{height - 1 - i} {' '.join(row)}" for i, row in enumerate(self.cells)]
        return "\n".join([*rows, "  " + " ".join(str(x) for x in range(len(self.cells[0])))])


class Game(ABC):
    """One play of a scenario.

    `step` takes one action for each player; `None` is ⊥, no legal action found: the step counts, nothing is
    chosen in its place. Subclasses implement `observe`, `_advance`, `board`, and set `_over` when a rule ends
    the game. Random numbers come from `stream(seed, purpose)`, never from a global generator.
    """

    players: tuple[str, ...] = ("player",)
    actions: tuple[str, ...] = MOVES

    def __init__(self, step_limit: int) -> None:
        self.step_limit = step_limit
        self.steps = 0
        self.returns = dict.fromkeys(self.players, 0.0)
        self._over = False

    @property
    def outcome(self) -> Outcome:
        if self._over:
            return Outcome.TERMINATED
        return Outcome.TRUNCATED if self.steps >= self.step_limit else Outcome.PLAYING

    @property
    def success(self) -> bool | None:
        """Whether the goal was reached; None where the game has no goal but its return."""
        return None

    @abstractmethod
    def observe(self, player: str) -> str:
        """O: S → Ω, what `player` sees of the current state, as text."""

    @abstractmethod
    def board(self) -> Board:
        """The current state as cells, for a screen."""

    @abstractmethod
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        """One transition of P; the reward R of each player."""

    def step(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        """Play one simultaneous move of all players and return each one's reward.

        Raises GameError after the end, for a missing or unknown player, and for an illegal action.
        """
        if self.outcome is not Outcome.PLAYING:
            raise GameError(f"the game is over ({self.outcome}) after {self.steps} steps; start a new one")
        if set(actions) != set(self.players):
            raise GameError(f"step needs one action for each of {self.players}, not {sorted(actions)}")
        for player, action in actions.items():
            if action is not None and action not in self.actions:
                raise GameError(f"{action!r} of {player} is no action; legal: {', '.join(self.actions)}")
        rewards = self._advance(actions)
        self.steps += 1
        for player, reward in rewards.items():
            self.returns[player] += reward
        return rewards

    def copy(self) -> Game:
        """An independent game in the same state with the same luck ahead."""
        return copy.deepcopy(self)


@dataclass(frozen=True)
class Scenario:
    """A named, fixed setting of a game, and the source of its numbers.

    `make(start_seed, chance_seed)`: two seeds, because a group shares its *start* and not its luck.
    `family` says which game it is (`frozen-lake`, `snake`); `players` and `actions` are those of its games;
    `one_start` says that every start is the same, `goal` that a game has a goal: success pays, failure does not.
    """

    id: str
    family: str
    rules: str
    step_limit: int
    source: str
    make: Callable[[int, int], Game] = field(repr=False)
    players: tuple[str, ...] = Game.players
    actions: tuple[str, ...] = Game.actions
    one_start: bool = False
    goal: bool = False

    def new(self, start_seed: int, chance_seed: int) -> Game:
        return self.make(start_seed, chance_seed)

    def start_key(self, start_seed: int) -> str:
        """A hash of the start itself: two seeds that draw the same start have the same key."""
        game = self.new(start_seed, 0)
        return hashlib.sha256(game.observe(game.players[0]).encode()).hexdigest()

    def starts(self, split: Split, first_seed: int = 0) -> Iterator[int]:
        """Start seeds from `first_seed` on whose *start* belongs to `split`.

        Random draws coincide often (of 300 random 4x4 lakes 217 are distinct), so training and evaluation are
        kept apart by the start, not by the seed: one start in EVAL_SHARE, by its hash, is for evaluation. Where
        there are few starts, chance could leave a split empty; there every EVAL_SHARE-th start in the order of
        their hashes is held out. A scenario with one start has nothing to hold out: both splits have it.

        Raises UsageError for an unknown split.
        """
        if split not in get_args(Split):
            raise UsageError(f"no split is named {split!r}", fix=nearest(split, get_args(Split)))
        return (seed for seed in count(first_seed) if self._in_split(seed, split))

    def _in_split(self, start_seed: int, split: Split) -> bool:
        if self.one_start:
            return True
        key = self.start_key(start_seed)
        if self._few_starts:
            held_out = key in self._few_starts[::EVAL_SHARE]
            return len(self._few_starts) == 1 or held_out == (split == "eval")
        return (int(key[:8], 16) % EVAL_SHARE == 0) == (split == "eval")

    @cached_property
    def _few_starts(self) -> tuple[str, ...]:
        """The hashes of all starts, sorted, where there are at most FEW; nothing where there are more."""
        found = {self.start_key(seed) for seed in range(PROBED)}
        return tuple(sorted(found)) if len(found) <= FEW else ()


def stream(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for one purpose: what one consumes never shifts another."""
    key = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")
    return np.random.default_rng([seed, key])
