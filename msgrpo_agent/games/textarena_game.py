"""TextArena (`pip install -e '.[textarena]'`): `ta:TicTacToe-v0`, `ta:Sokoban-v0-train`, … by its own ids.

Rules, texts, rewards and ends are TextArena's own; its `-train` ids show the state in place of the whole
conversation. Moves of the games in MOVES are listed, and the legal ones of a state are those that TextArena takes on
a copy; every other game takes a player's own words. No answer, and one that TextArena does not take, is what it calls
an invalid move: a warning first, and the end where the next answer is invalid, too. Rewards come at the end.

TextArena draws from Python's and numpy's global generators. Each game here has a state of both for itself, which
stands in their place while TextArena computes, one game at a time.
"""

from __future__ import annotations

import copy
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import nltk
import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY

from msgrpo.errors import UsageError, nearest, users_code
from msgrpo.game import MOVES as WAYS
from msgrpo.game import AnyText, Game, Scenario, stream
from msgrpo.text import printable

LIMIT = 200  # steps, where a game may last longer
MOST_PLAYERS = 15
MOST_EXAMPLES = 40
PROBED = 8  # starts that are looked at
SILENT = "..."  # what a player who chooses from examples says where the text shows none
BRACKETS = re.compile(r"\[([^\[\]\n]{1,40})\]")

# The moves of an environment whose moves have names that can be listed, by the part of its id before `-v0`.
MOVES: dict[str, Callable[[Any], tuple[str, ...]]] = {
    "2048": lambda env: WAYS,
    "Bandit": lambda env: tuple(env.buttons),
    "Blackjack": lambda env: ("hit", "stand"),
    "Chopsticks": lambda env: (
        *(f"attack {mine} {theirs}" for mine in (0, 1) for theirs in (0, 1)),
        *(f"split {left} {right}" for left in range(5) for right in range(5)),
    ),
    "ConnectFour": lambda env: numbers(env.num_cols),
    "FifteenPuzzle": lambda env: WAYS,
    "FrozenLake": lambda env: WAYS,
    "GuessTheNumber": lambda env: numbers(env.max_number + 1, env.min_number),
    "IteratedMatchingPennies": lambda env: ("heads", "tails"),
    "IteratedRockPaperScissors": lambda env: ("rock", "paper", "scissors"),
    "KuhnPoker": lambda env: ("check", "bet", "call", "fold"),
    "LightsOut": lambda env: places(env.size, env.size),
    "Minesweeper": lambda env: places(env.rows, env.cols),
    "PegJump": lambda env: tuple(f"{a} {b}" for a in range(1, 16) for b in range(1, 16) if a != b),
    "PigDice": lambda env: ("roll", "hold"),
    "Secretary": lambda env: ("accept", "continue"),
    "Sokoban": lambda env: WAYS,
    "ThreePlayerTicTacToe": lambda env: numbers(25),
    "TicTacToe": lambda env: numbers(9),
    "TowerOfHanoi": lambda env: tuple(f"{a} {b}" for a in "ABC" for b in "ABC" if a != b),
    "WildTicTacToe": lambda env: tuple(f"{mark} {cell}" for mark in "XO" for cell in range(9)),
}
RULES = (
    "{env_id} of TextArena, {players}. The state says its rules and what has happened. {how} An answer without a "
    "move, and one that the game does not take, is an invalid move: the first one is a warning, and the next one "
    "right after it ends the game. Points come when the game ends. There are at most {limit} steps; a game that has "
    "not ended by then gives none."
)
ASKS_A_MODEL = ("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions")  # at OpenRouter, as judge or game master
READS_WORDS = (
    "Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee", "WordChains", "WordLadder", "WordSearch",
    "Wordle",
)  # fmt: skip

_global_generators = threading.RLock()


def numbers(end: int, start: int = 0) -> tuple[str, ...]:
    return tuple(map(str, range(start, end)))


def places(rows: int, columns: int) -> tuple[str, ...]:
    return tuple(f"{row} {column}" for row in range(rows) for column in range(columns))


@dataclass(frozen=True)
class Kind:
    """What all games of an id have in common."""

    env_id: str
    players: tuple[str, ...]
    actions: tuple[str, ...]
    step_limit: int


class ArenaGame(Game):
    """One play; `env` is TextArena's environment with its wrappers."""

    def __init__(self, kind: Kind, start_seed: int, chance_seed: int) -> None:
        self.kind, self.players, self.actions = kind, kind.players, kind.actions
        super().__init__(kind.step_limit)
        self._texts: dict[str, str] = {}
        self._generators = fresh_generators(start_seed)
        with self._own_generators():
            self.env = make(kind.env_id)
            self.env.reset(num_players=len(self.players), seed=start_seed)
        self._draw_luck(chance_seed)
        self._look()

    def _draw_luck(self, chance_seed: int) -> None:
        self._generators = fresh_generators(int(stream(chance_seed, "textarena-luck").integers(2**31)))

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Python's and numpy's global generators are this game's own within the block, and as they were after it."""
        with _global_generators:
            others = random.getstate(), np.random.get_state()
            set_generators(self._generators)
            try:
                yield
            finally:
                self._generators = random.getstate(), np.random.get_state()
                set_generators(others)

    def _look(self) -> None:
        """Take down what each player sees and who is to move; TextArena shows a message once."""
        state = self.env.state
        moving = state.current_player_id
        with self._own_generators():
            for number, player in enumerate(self.players):
                state.current_player_id = number
                try:
                    text = self.env.get_observation()[1]
                except (LookupError, ValueError):  # no board was shown to this player yet
                    if number == moving:
                        raise
                    text = "nothing is seen yet"
                self._texts[player] = printable(text).strip()
        state.current_player_id = moving
        self._moving = self.players[moving]
        self._legal: tuple[str, ...] = ()  # not known yet

    def _tried(self) -> tuple[str, ...]:
        """The listed moves that TextArena takes, each tried on a copy; all of them where it takes none."""
        before = self._generators
        with self._own_generators():
            taken = () if self.env.state.done else tuple(action for action in self.actions if self._takes(action))
        self._generators = before
        return taken or self.actions

    def _takes(self, action: str) -> bool:
        bare = layers(self.env)[-1]
        number = bare.state.current_player_id
        twin = copy.deepcopy(bare, kept_messages(bare))
        twin.step(f"[{action}]")
        return twin.state.error_count == 0 and not twin.state.game_info[number]["invalid_move"]

    def __deepcopy__(self, memo: dict[int, object]) -> ArenaGame:
        twin = copy.copy(self)
        twin.returns, twin._texts = dict(self.returns), dict(self._texts)
        twin.env = copy.deepcopy(self.env, kept_messages(self.env))
        return twin

    @property
    def to_move(self) -> tuple[str, ...]:
        return (self._moving,)

    def legal(self, player: str) -> tuple[str, ...]:
        if player != self._moving:
            return self.actions
        if not self._legal:
            names = self.env.state.role_mapping
            self._legal = self._tried() if self.actions else examples(self._texts[player], names)
        return self._legal

    def observe(self, player: str) -> str:
        return f"Step {min(self.steps + 1, self.step_limit)} of {self.step_limit}.\n{self._texts[player]}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        action = actions[self._moving] or ""
        with self._own_generators():
            self._over = bool(self.env.step(f"[{action}]" if self.actions and action else action)[0])
        self._look()
        rewards = self.env.state.rewards or {} if self._over else {}
        return {player: rewards.get(number, 0.0) for number, player in enumerate(self.players)}

    @property
    def ending(self) -> str:
        if not self._over:
            return super().ending
        return printable(str(self.env.state.game_info[0].get("reason") or super().ending))


Generators = tuple[Any, Any]  # the states of Python's and of numpy's


def fresh_generators(seed: int) -> Generators:
    return random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()


def set_generators(states: Generators) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def make(env_id: str) -> Any:
    return textarena.make(env_id)


def layers(env: Any) -> list[Any]:
    """An environment and what it wraps, the innermost last."""
    return [env, *layers(env.env)] if isinstance(env, textarena.Wrapper) else [env]


def kept_messages(env: Any) -> dict[int, Any]:
    """What `deepcopy` needs to know to copy lists of messages and not the messages, which never change."""
    *wrappers, bare = layers(env)
    by_player = [bare.state.observations]
    by_player += [vars(wrapper)["full_observations"] for wrapper in wrappers if "full_observations" in vars(wrapper)]
    lists = {id(heard): {number: list(messages) for number, messages in heard.items()} for heard in by_player}
    return {id(bare.state.logs): list(bare.state.logs)} | lists


def examples(text: str, names: Mapping[int, str]) -> AnyText:
    """What stands in brackets in a text, as TextArena writes moves; not who speaks, which stands so as well."""
    moves = dict.fromkeys(move for move in BRACKETS.findall(text) if move not in names.values())
    return AnyText([f"[{move}]" for move in moves][:MOST_EXAMPLES] or [SILENT])


def first_state(env_id: str) -> tuple[Any, int]:
    """(the environment after a reset, its fewest players). Raises what TextArena does where it cannot be played."""
    failed: Exception | None = None
    for players in range(1, MOST_PLAYERS + 1):
        env = make(env_id)
        try:
            env.reset(num_players=players, seed=0)
        except Exception as error:  # it says in many ways that it wants more players
            failed = error
            continue
        fits = {textarena.SinglePlayerState: players == 1, textarena.TwoPlayerState: players == 2}
        if fits.get(type(env.state), players > 1):
            return env, players
    assert failed is not None
    raise failed


def why_not(env_id: str) -> str | None:
    """Why an id that TextArena has is not played here, where that is known before it is made."""
    family = env_id.partition("-v0")[0]
    if env_id.endswith("-raw"):
        return "its state is no text"
    if family in ASKS_A_MODEL:
        return "it asks a model at openrouter.ai, so no game could be played again"
    if family in READS_WORDS and not (has("corpora/words") and has("taggers/averaged_perceptron_tagger_eng")):
        return "it reads NLTK's word lists, which are not on this machine"
    return None


def has(resource: str) -> bool:
    try:
        nltk.data.find(resource)
    except LookupError:
        return False
    return True


def arena_scenario(env_id: str) -> Scenario:
    """The scenario of a game of TextArena. Raises UsageError for an unknown one, or one that cannot be played."""
    if env_id not in ENV_REGISTRY:
        raise UsageError(f"TextArena has no game {env_id!r}", fix=nearest(env_id, ENV_REGISTRY))
    reason = why_not(env_id)
    if reason is not None:
        words = "python -m nltk.downloader words averaged_perceptron_tagger_eng" if "NLTK" in reason else None
        raise UsageError(f"TextArena's {env_id} is not played: {reason}", fix=words)
    with users_code(f"TextArena's {env_id} cannot be played"):
        kind, reset_draws = kind_of(env_id)

        def new(start_seed: int, chance_seed: int) -> ArenaGame:
            return ArenaGame(kind, start_seed, chance_seed)

        rules = RULES.format(
            env_id=env_id,
            players="one player" if len(kind.players) == 1 else f"{len(kind.players)} players, in turn",
            limit=kind.step_limit,
            how="A move is named without brackets." if kind.actions else "Answer with what the text asks for.",
        )
        scenario = Scenario(
            f"ta:{env_id}",
            f"ta-{env_id}",
            rules,
            kind.step_limit,
            f"[TextArena] {env_id}",
            new,
            kind.players,
            kind.actions,
        )
        differ = len({scenario.start_key(seed) for seed in range(PROBED)}) > 1
    # where players are dealt something, or a secret is drawn that nobody sees at first, no start can be held out
    dealt = (differ and len(kind.players) > 1) or (reset_draws and not differ)
    return replace(scenario, one_start=not differ and not reset_draws, hidden=dealt)


def kind_of(env_id: str) -> tuple[Kind, bool]:
    """(what games of an id have in common, whether their start is drawn)."""
    with _global_generators:
        others = random.getstate(), np.random.get_state()
        try:
            env, players = first_state(env_id)
            reset_draws = random.getstate() != random.Random(0).getstate()
        finally:
            set_generators(others)
    for name, module in list(sys.modules.items()):
        if name.startswith("textarena.envs."):
            vars(module)["print"] = silent  # a game's own prints would drive the terminal
    seen = env.get_observation()[1]
    if not isinstance(seen, str):
        raise UsageError(f"TextArena's {env_id} is not played: its state is no text")
    most = env.state.max_turns
    limit = LIMIT if most is None else min(LIMIT, most * (1 + env.state.error_allowance))
    listed = MOVES.get(env_id.partition("-v0")[0])
    names = ("player",) if players == 1 else tuple(f"player{number}" for number in range(players))
    return Kind(env_id, names, listed(env) if listed else AnyText(), limit), reset_draws


def silent(*said: Any, **how: Any) -> None:
    """In place of print."""
