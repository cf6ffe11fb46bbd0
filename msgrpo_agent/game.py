"""What a game has to offer: the contract of a text-mediated stochastic game, which a player only sees as text.

The paper calls it the TSMG (S, A, Ω, O, P, R). S are the states, A the actions, Ω the texts; O: S → Ω is what a
player sees of a state (`observe`), P how likely each next state is and R the rewards (both `_advance`).

A game is single-use: there is no reset, `Scenario.new` gives a fresh one. It knows no model, no tokenizer
and no prompt. Positions in every text are (x, y) with (0, 0) at the bottom left, as in FastSnake.
"""

from __future__ import annotations

import copy
import hashlib
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import Any, Literal, get_args

import numpy as np

from msgrpo.errors import LONGEST_FAULT, GameError, GameFaultError, UsageError, nearest
from msgrpo.limits import games_code, passing_faults
from msgrpo.text import printable

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
SALT = "msgrpo-2-5 "  # with it Gymnasium's two maps and the lakes without a hole are boards of training
PROBED, FEW = 128, 32  # a scenario whose first PROBED seeds draw at most FEW different starts has few starts
MOST_POINTS = 1e12  # of one reward: sums and squares of larger ones are no numbers any more
MISTAKE, BLUNDER = 0.1, 0.3  # points of the return that a move loses
MOVES = ("up", "down", "left", "right")
# What the fields of a Scenario are; those in OPTIONAL may be None.
KINDS: dict[str, Any] = {
    **dict.fromkeys(("id", "family", "rules", "source", "plain"), str),
    **dict.fromkeys(("players", "actions"), tuple),
    **dict.fromkeys(("one_start", "goal", "luck_in_start", "hidden"), bool),
    **dict.fromkeys(("make", "reference", "describe", "judge"), Callable),
    "step_limit": int,
}
OPTIONAL = ("reference", "describe", "judge", "plain")
LONGEST_ACTION = 4096  # characters of an action of the player's own words
# What a cell is to the one who looks, which a screen turns into a sign and a colour; `won` and `lost` say where
# a player stood when the game ended so.
Role = Literal[
    "own", "own-body", "other", "other-body", "good", "bad", "wall", "hole", "goal", "floor", "ice", "won", "lost",
    "thing",
]  # fmt: skip


class AnyText(tuple[str, ...]):
    """The actions of a game that takes any text: every text is one of them, and those that are listed are examples.

    A game that takes the player's own words has `actions = AnyText()`, and examples in what `legal` returns, which
    players that choose from a list choose from.
    """

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and len(text.strip()) > 0 and len(text) <= LONGEST_ACTION


class Outcome(StrEnum):
    """Gymnasium's distinction: a game ends by its own rules (terminated) or by the step limit (truncated)."""

    PLAYING = "playing"
    TERMINATED = "terminated"
    TRUNCATED = "truncated"


Place = tuple[int, int]  # (row, column) on a board, row 0 on top


@dataclass(frozen=True)
class Board:
    """A plain view for a screen: rows of one-character cells, top row first, and what each character means.

    `roles` say what a character is to a player; those without one are floor, and a `thing` is neither good nor bad by
    itself. A screen that draws bodies is told by `chains` which cells hang together, head first, and by `facing`
    where a head looks (up, down, left, right). `colours` are those that things have in the game (red, green, blue,
    purple, yellow, grey, white, black). `across` and `down` name the columns and the rows where the game's actions
    use such names; without them both are counted from 0 at the bottom left. `caption` is a sentence that belongs
    above the board: a mission, what is carried.
    """

    cells: tuple[tuple[str, ...], ...]
    legend: Mapping[str, str]
    roles: Mapping[str, Role] = field(default_factory=dict)
    chains: tuple[tuple[Place, ...], ...] = ()
    facing: Mapping[Place, str] = field(default_factory=dict)
    colours: Mapping[Place, str] = field(default_factory=dict)
    across: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    caption: str = ""

    def __post_init__(self) -> None:
        """Raises GameFaultError for cells that are not one character each, and for words that no screen can show."""
        odd = next((cell for row in self.cells for cell in row if len(cell) != 1 or not cell.isprintable()), None)
        if odd is not None:
            raise GameFaultError(f"a cell of the board is {odd!r}, not one character", rule="board")
        for word in (*self.legend.values(), *self.across, *self.down, self.caption):
            if not isinstance(word, str) or printable(word) != word:
                raise GameFaultError(f"the board says {word!r}, which is no text that can be printed", rule="board")

    def text(self) -> str:
        """The board with the names of its rows on the left and of its columns below, one space between cells."""
        rows = [f"{name} {' '.join(row)}" for name, row in zip(self.row_names, self.cells, strict=True)]
        return "\n".join([*rows, "  " + " ".join(self.column_names)])

    def named(self, place: Place) -> str:
        """What stands in a place, in words: `green key`, with its colour where the legend does not say it."""
        glyph, colour = self.cells[place[0]][place[1]], self.colours.get(place, "")
        meaning = self.legend.get(glyph, glyph)
        return f"{colour} {meaning}" if colour and meaning != glyph and colour not in meaning.split() else meaning

    @property
    def row_names(self) -> tuple[str, ...]:
        """The name of each row, the top one first."""
        return self.down or tuple(str(y) for y in reversed(range(len(self.cells))))

    @property
    def column_names(self) -> tuple[str, ...]:
        return self.across or tuple(str(x) for x in range(len(self.cells[0])))


@dataclass(frozen=True)
class Judgement:
    """What each action is worth in a state, to one player.

    `values` are Q(s, ·) of the legal actions and of ⊥ (None), in points of the return; `errors` the standard error
    of each one's distance from the best, empty where the values are exact.
    """

    values: Mapping[str | None, float]
    errors: Mapping[str | None, float] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return not self.errors

    @property
    def value(self) -> float:
        """V(s) = max Q(s, a)."""
        return max(self.values.values())

    @property
    def best(self) -> list[str]:
        return [action for action, q in self.values.items() if action is not None and q >= self.value - 1e-9]

    def regret(self, action: str | None) -> float:
        """What is lost by `action`, and nothing where the loss is within two standard errors."""
        lost = self.value - self.values[action]
        return lost if lost > max(2 * self.errors.get(action, 0.0), 1e-9) else 0.0

    def sign(self, action: str | None) -> str:
        """As in chess: `?` a mistake, `??` a blunder, nothing for a move that costs little."""
        lost = self.regret(action)
        return "??" if lost >= BLUNDER else "?" if lost >= MISTAKE else ""


class Game(ABC):
    """One play of a scenario.

    `step` takes one action for each player who is to move; `None` is ⊥, no legal action found: the step counts,
    nothing is chosen in its place. Subclasses implement `observe` and `_advance`, and set `_over` when a rule ends
    the game; where not all players move at once, or not all actions are legal at all times, `to_move` and `legal`
    too; for a screen, `board` and `ending`. Random numbers come from `stream(seed, purpose)`, never from a global
    generator.
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

    def board(self) -> Board | None:
        """The current state as cells, for a screen; None for a game without a board, whose text is shown."""
        return None

    @property
    def to_move(self) -> tuple[str, ...]:
        """The players whose actions the next step takes: all at once, unless a game says otherwise."""
        return self.players

    def legal(self, player: str) -> tuple[str, ...]:
        """The actions that `player` may take now; an observation names them where they are not all."""
        return self.actions

    def own_actions(self, player: str) -> tuple[str, ...]:
        """All actions that `player` may ever take, in an order that does not change; empty where none are listed."""
        return self.actions

    def other_names(self, player: str) -> Mapping[str, str]:
        """Other names that a person may type for a legal action, name -> action: `e2e4` for chess's e4."""
        return {}

    def side(self, player: str) -> str:
        """What a person calls a player: White, x; the player's own name where the game knows no other."""
        return player

    @property
    def ending(self) -> str:
        """How the game ended, in a few words for a person; empty while it goes on."""
        if self.outcome is Outcome.PLAYING:
            return ""
        if self.success is not None:
            return "goal reached" if self.success else "goal missed"
        return "all steps played" if self.outcome is Outcome.TRUNCATED else "game over"

    @abstractmethod
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        """One transition of P; the reward R of each player."""

    def step(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        """Play one move of all who are to move, at the same time, and return the reward of every player.

        Raises GameError after the end, for a missing or unknown player, and for an illegal action.
        """
        if self.outcome is not Outcome.PLAYING:
            raise GameError(f"the game is over ({self.outcome}) after {self.steps} steps; start a new one")
        if set(actions) != set(self.to_move):
            raise GameError(f"step needs one action for each of {self.to_move}, not {sorted(actions)}")
        for player, action in actions.items():
            if action is not None and action not in self.legal(player):
                legal = ", ".join(self.legal(player))[:LONGEST_FAULT]
                raise GameError(f"{repr(action)[:200]} of {player} is no action now; legal: {legal}")
        before = dict(self.returns)
        rewards = self._paid(self._advance(dict(actions)))  # whoever has chosen them may keep them
        if self.returns != before:
            raise GameFaultError("its returns were changed: they are the sum of what _advance pays", rule="returns")
        self.steps += 1
        for player, reward in rewards.items():
            self.returns[player] += reward
        return rewards

    def _paid(self, rewards: Any) -> dict[str, float]:
        """The rewards as plain numbers, whatever library they come from.

        Raises GameFaultError unless they are one finite number for every player.
        """
        if not isinstance(rewards, Mapping) or set(rewards) != set(self.players):
            seen = sorted(map(str, rewards)) if isinstance(rewards, Mapping) else repr(rewards)[:80]
            raise GameFaultError(
                f"the rewards are for {seen}, not for each of {', '.join(self.players)}", rule="rewards"
            )
        try:
            by_player = {player: float(rewards[player]) for player in self.players}
        except (TypeError, ValueError, OverflowError) as error:
            raise GameFaultError(f"a reward is no number: {str(error)[:200]}", rule="rewards") from error
        if any(isinstance(reward, (str, bytes)) for reward in rewards.values()):
            raise GameFaultError(f"a reward is no number: {str(dict(rewards))[:200]}", rule="rewards")
        if not all(map(math.isfinite, by_player.values())):
            raise GameFaultError(f"a reward is not finite: {by_player}", rule="rewards")
        if any(abs(reward) > MOST_POINTS for reward in by_player.values()):
            raise GameFaultError(f"a reward is more than {MOST_POINTS:g} points: {by_player}", rule="rewards")
        return by_player

    def copy(self) -> Game:
        """An independent game in the same state with the same luck ahead."""
        return copy.deepcopy(self)

    def with_luck(self, chance_seed: int) -> Game:
        """An independent game in the same state, with the luck of `chance_seed` ahead.

        Raises GameError for a game that does not implement `_draw_luck`.
        """
        twin = self.copy()
        twin._draw_luck(chance_seed)
        return twin

    def _draw_luck(self, chance_seed: int) -> None:
        """Replace every generator of luck by that of a fresh game with this chance seed."""
        raise GameError(
            f"{type(self).__name__} cannot draw new luck in mid-game", fix="define its _draw_luck(chance_seed)"
        )


Judge = Callable[[Any, str], Judgement]  # of (game, player)


@dataclass(frozen=True)
class Remote:
    """What the server of a scenario can do, whose games are played there and not in this process.

    `sessions` are the games that it plays at the same time; `repeats` says that a seed and the same actions give the
    same game again, `copies` that a game can be brought to the state of another one.
    """

    sessions: int
    repeats: bool
    copies: bool


@dataclass(frozen=True)
class Scenario:
    """A named, fixed setting of a game."""

    id: str
    family: str  # which game it is: frozen-lake, snake
    rules: str
    step_limit: int
    source: str  # of its numbers
    # Of (start_seed, chance_seed): two seeds, because a group shares its *start* and not its luck.
    make: Callable[[int, int], Game] = field(repr=False)
    players: tuple[str, ...] = Game.players
    # Empty where they are too many to list: each state names its legal ones. AnyText(): players use their own words.
    actions: tuple[str, ...] = Game.actions
    one_start: bool = False  # every start is the same
    goal: bool = False  # success pays, failure does not
    luck_in_start: bool = False  # what a player sees first depends on the luck as well; see `holds_out`
    hidden: bool = False  # players see different things (hands of cards); see `holds_out`
    # Of (game, player): the best actions that are known, for the agent `optimal`.
    reference: Callable[[Any, str], Sequence[str]] | None = field(default=None, repr=False)
    # Of (game, player): something true about the state, for a model to learn from (`msgrpo teach`).
    describe: Callable[[Any, str], str] | None = field(default=None, repr=False)
    judge: Judge | None = field(default=None, repr=False)  # what every action is worth (`judge.py`)
    plain: str | None = None  # the scenario of which this one is a retelling (`games/retold.py`)
    remote: Remote | None = None  # where games are played on a server: what that can do

    def __post_init__(self) -> None:
        """Raises UsageError for a field of another type, and for a name that no screen can show."""
        for name, kind in KINDS.items():
            given = getattr(self, name)
            fits = isinstance(given, kind) and (kind is bool or not isinstance(given, bool))
            if not fits and not (given is None and name in OPTIONAL):
                raise UsageError(
                    f"{name} of the Scenario {self.id!r} is {reprlib.repr(given)}, a {type(given).__name__}",
                    fix=f"it must be a {'function' if kind is Callable else kind.__name__}",
                )
        if self.step_limit < 1 or not self.players:
            raise UsageError(
                f"the Scenario {self.id!r} has the players {self.players} and the step limit {self.step_limit}",
                fix="it must have one player and one step, or more",
            )
        odd = [
            label
            for label in (*self.players, *self.actions)
            if not isinstance(label, str) or printable(label) != label
        ]
        if odd:
            raise UsageError(
                f"{odd[0]!r} is no name of a player or an action that can be printed, in the Scenario {self.id!r}"
            )

    def new(self, start_seed: int, chance_seed: int) -> Game:
        """A fresh game. Raises GameFaultError, with file and line, where its own code fails or makes none."""
        with games_code(self.id):
            game: object = self.make(start_seed, chance_seed)
            if not isinstance(game, Game):
                raise GameFaultError(f"make() gave {reprlib.repr(game)}, no msgrpo.Game", rule="start")
            if not hasattr(game, "returns"):
                raise GameFaultError("its __init__ did not call super().__init__(step_limit)", rule="start")
            return game

    @property
    def holds_out(self) -> bool:
        """Whether training, validation and test have different starts.

        Not where there is one start. And not where a start is a deal: split by what the first player holds, training
        would know a king only, and every result would be of cards that were never seen.
        """
        return not (self.one_start or self.luck_in_start or self.hidden)

    def start_key(self, start_seed: int) -> str:
        """A hash of the board that a seed draws: the same for all scenarios of a family that draw the same one.

        Without a board it is that of the text that the first player sees; of games on a server it is that of the
        seed, so that to divide the starts is to ask nobody.
        """
        if self.remote is not None:
            return hashlib.sha256(f"{SALT}{self.family}\n{start_seed}".encode()).hexdigest()
        game = self.new(start_seed, 0)
        with games_code(self.id):
            board = shown_board(game)
            seen = game.observe(self.players[0]) if board is None else board.text()
        # a game from outside may show what UTF-8 cannot hold
        return hashlib.sha256(f"{SALT}{self.family}\n{seen}".encode(errors="backslashreplace")).hexdigest()

    @cached_property
    def rules_hash(self) -> str:
        """A hash of the rules for records: results under different rules are not mixed."""
        parts = (self.rules, self.step_limit, self.players, self.actions, self.one_start, self.goal)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def starts(self, split: Split, first_seed: int = 0) -> Iterator[int]:
        """Start seeds from `first_seed` on whose *board* belongs to `split`.

        Random draws coincide often (of 300 random 4x4 lakes 217 are distinct), and scenarios of a family share their
        boards; so training, validation and test are kept apart by the board's hash, for the whole family. Where
        there are few starts, chance could leave a split empty; there every fifth in the order of their hashes is for
        test and the next one for validation (of two starts, one for both). Where nothing is held out, all splits have
        all starts. A start that cannot be looked at is one to train on, so that it ends no training.

        Raises UsageError for an unknown split.
        """
        if split not in SPLITS:
            raise UsageError(f"no split is named {split!r}", fix=nearest(split, SPLITS))
        return (seed for seed in count(first_seed) if self._in_split(seed, split))

    def _in_split(self, start_seed: int, split: Split) -> bool:
        if not self.holds_out:
            return True
        number = len(self._few_starts)
        try:
            key = self.start_key(start_seed)
        except GameFaultError as fault:
            if split != "train" or fault.fatal:
                raise
            return True  # its games fail too, and are counted where they are played
        if not number:
            return split_of(key) == split
        place = self._few_starts.get(key, 2)  # a start that no probe drew is trained on
        if number <= 2:
            return number == 1 or (place == 0) == (split != "train")
        return {0: "test", 1: "val"}.get(place % 5, "train") == split

    @cached_property
    def _few_starts(self) -> dict[str, int]:
        """The places of all starts in the order of their hashes, where there are at most FEW, or where the hashes
        leave a split without a start, so that looking for one would never end; else nothing. The first start must be
        there, others may be such that cannot be looked at.
        """
        drawn = {self.start_key(0)}
        for seed in range(1, PROBED):
            with passing_faults():
                drawn.add(self.start_key(seed))
        keys = sorted(drawn)
        few = len(keys) <= FEW or len({split_of(key) for key in keys}) < len(SPLITS)
        return {key: place for place, key in enumerate(keys)} if few else {}


def shown_board(game: Game) -> Board | None:
    """The board that the game shows, where it has one. Raises GameFaultError if it is not a Board."""
    board: object = game.board()
    if board is not None and not isinstance(board, Board):
        raise GameFaultError(f"board() gave {reprlib.repr(board)}, no msgrpo.game.Board", rule="board")
    return board


def check_kind(scenario: Scenario) -> None:
    """Raise UsageError for what is no scenario, as a caller from Python may give it."""
    if not isinstance(scenario, Scenario):
        raise UsageError(f"{str(scenario)[:80]!r} is no scenario", fix="msgrpo.get_scenario(NAME) gives one")


def split_of(key: str) -> Split:
    """The split of a board by its hash: 13 in 20 train, 3 validate, 4 test."""
    share = int(key[:8], 16) % 20
    return "test" if share < 4 else "val" if share < 7 else "train"


def stream(seed: int, purpose: str) -> np.random.Generator:
    """A separate random generator for one purpose, so that what one consumes never shifts another."""
    key = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")
    return np.random.default_rng([seed, key])
