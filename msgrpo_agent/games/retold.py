"""The same games in other words: what a player reads is changed, what happens is not.

    snake~stones    get_scenario finds it; TELLINGS lists what stands after the ~

A retelling changes rules, observations and the names of actions. Start, luck, rewards and board (for a screen) are
the plain game's, so players that look at the game and not at its words play exactly as before: the reference players
prove that a retelling is fair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from msgrpo.errors import UsageError, nearest
from msgrpo.game import Board, Game, Judgement, Outcome, Scenario, stream

SIGN = "~"
SENTENCES = re.compile(r"(?<=\.) (?=[A-Z0-9])")
PLACE = re.compile(r"\((\d+),(\d+)\)")
COMPASS = {"up": "north", "down": "south", "left": "west", "right": "east"}
WORDS = {"apple": "stone", "banana": "shell", "hole": "pit", "goal": "exit", "ice": "glass"}
BESIDE = (
    "The room smells of rain.",
    "A clock on the wall shows ten past four.",
    "Somebody hums a tune next door.",
)
HARM = re.compile(r"-\d+ point|kills|with 0 points")


@dataclass(frozen=True)
class Telling:
    """How a game is told: `said` changes the rules, `seen` an observation, `actions` names each action anew."""

    what: str
    said: Callable[[str, Game], str] = lambda text, game: text
    seen: Callable[[str, Game], str] = lambda text, game: text
    actions: Mapping[str, str] = field(default_factory=dict)


def _words(text: str, names: Mapping[str, str]) -> str:
    """Whole words replaced, in the case that they have; a plural s stays."""

    def other(match: re.Match[str]) -> str:
        name = names[match[1].lower()]
        return (name.capitalize() if match[1][0].isupper() else name) + match[2]

    return re.sub(rf"\b({'|'.join(names)})(s?)\b", other, text, flags=re.IGNORECASE)


def _shuffled(text: str, game: Game) -> str:
    """The sentences of the rules in another order, the same for every game of the scenario."""
    sentences = SENTENCES.split(text)
    order = stream(len(sentences), "retold-order").permutation(len(sentences))
    return " ".join(sentences[i] for i in order)


def _late(text: str, game: Game) -> str:
    """What costs something is said last."""
    sentences = SENTENCES.split(text)
    return " ".join(sorted(sentences, key=lambda sentence: bool(HARM.search(sentence))))


def _noisy_rules(text: str, game: Game) -> str:
    sentences = SENTENCES.split(text)
    for place, sentence in zip((1, len(sentences) // 2 + 1, len(sentences) + 2), BESIDE, strict=True):
        sentences.insert(place, sentence)
    return " ".join(sentences)


def _noisy_state(text: str, game: Game) -> str:
    return f"{BESIDE[game.steps % len(BESIDE)]} {text}"


def _glyphs(game: Game) -> dict[str, str]:
    """A new letter for each that something other than the floor has on the board."""
    board = game.board()
    old = (
        [glyph for glyph in board.legend if board.roles.get(glyph, "floor") not in ("floor", "ice")] if board else []
    )
    new = [letter for letter in "QXZKVWYJ" if letter not in old]
    return dict(zip([glyph for glyph in old if not glyph.isdigit()], new, strict=False))


def _glyphs_in_rules(text: str, game: Game) -> str:
    """Where the rules explain a letter: `P is you, O a hole, x its body, apples (A)`."""
    for old, new in _glyphs(game).items():
        text = re.sub(rf"(?<![\w]){re.escape(old)}(?= (?:is|its|a hole|the goal)\b|\))", new, text)
    return text


def _rows(text: str) -> tuple[str, list[str]]:
    """(what stands above the board, the lines of the board with its axis); no lines where there is no board."""
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if re.fullmatch(r"\d+( \S)+", line)), len(lines))
    return "\n".join(lines[:start]), lines[start:]


def _glyphs_in_state(text: str, game: Game) -> str:
    above, lines = _rows(text)
    names = _glyphs(game)
    rows = [[label, *(names.get(cell, cell) for cell in cells)] for label, *cells in map(str.split, lines[:-1])]
    return "\n".join([above, *map(" ".join, rows), *lines[-1:]])


def _size(game: Game) -> tuple[int, int]:
    board = game.board()
    return (len(board.cells[0]), len(board.cells)) if board else (0, 0)


def _mirrored_state(text: str, game: Game) -> str:
    """Left is right: each x counts from the other side, in coordinates and on the board."""
    above, lines = _rows(text)
    width, _ = _size(game)
    above = PLACE.sub(lambda match: f"({width - 1 - int(match[1])},{match[2]})", above)
    rows = [" ".join([label, *reversed(cells)]) for label, *cells in map(str.split, lines[:-1])]
    return "\n".join([above, *rows, *lines[-1:]])


def _from_top_state(text: str, game: Game) -> str:
    """y counts from the top, in coordinates and beside the board."""
    above, lines = _rows(text)
    _, height = _size(game)
    above = PLACE.sub(lambda match: f"({match[1]},{height - 1 - int(match[2])})", above)
    rows = [" ".join([str(height - 1 - int(label)), *cells]) for label, *cells in map(str.split, lines[:-1])]
    return "\n".join([above, *rows, *lines[-1:]])


def _from_top_rules(text: str, game: Game) -> str:
    swapped = re.sub(
        r"\b(bottom|top) (left|right)", lambda m: f"{'top' if m[1] == 'bottom' else 'bottom'} {m[2]}", text
    )
    return swapped.replace("up is y+1", "up is y-1")


TELLINGS: dict[str, Telling] = {
    "actions": Telling(
        "the actions have other names",
        lambda text, game: re.sub(r"\bup is y", f"{COMPASS['up']} is y", text),
        actions=COMPASS,
    ),
    "symbols": Telling("the board has other letters", _glyphs_in_rules, _glyphs_in_state),
    "shuffled": Telling("the rules stand in another order", _shuffled),
    "mirrored": Telling(
        "left and right change places", seen=_mirrored_state, actions={"left": "right", "right": "left"}
    ),
    "from-top": Telling("y counts from the top", _from_top_rules, _from_top_state),
    "stones": Telling(
        "things have other names (apples are stones)",
        lambda text, game: _words(text, WORDS),
        lambda text, game: _words(text, WORDS),
    ),
    "late": Telling("what costs something is said last", _late),
    "noise": Telling("irrelevant sentences stand between", _noisy_rules, _noisy_state),
}


class Retold(Game):
    """A game that is told otherwise; `plain` is the game itself, with the actions' plain names."""

    def __init__(self, plain: Game, telling: Telling) -> None:
        self.plain = plain
        self._telling = telling
        self._inner = {telling.actions.get(action, action): action for action in plain.actions}
        self.players, self.actions = plain.players, tuple(self._inner)
        super().__init__(plain.step_limit)

    @property
    def outcome(self) -> Outcome:
        return self.plain.outcome

    @property
    def success(self) -> bool | None:
        return self.plain.success

    @property
    def ending(self) -> str:
        return self.plain.ending

    @property
    def to_move(self) -> tuple[str, ...]:
        return self.plain.to_move

    def legal(self, player: str) -> tuple[str, ...]:
        return tuple(self.outer(action) for action in self.plain.legal(player))

    def side(self, player: str) -> str:
        return self.plain.side(player)

    def outer(self, action: str) -> str:
        return self._telling.actions.get(action, action)

    def board(self) -> Board | None:
        return self.plain.board()

    def observe(self, player: str) -> str:
        return self._telling.seen(self.plain.observe(player), self.plain)

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return self.plain.step({player: self._inner[a] if a is not None else None for player, a in actions.items()})

    def _draw_luck(self, chance_seed: int) -> None:
        self.plain._draw_luck(chance_seed)


@cache
def retold(scenario: Scenario, name: str) -> Scenario:
    """`scenario` as TELLINGS[name] tells it. Raises UsageError where there is no such telling, or it does not fit."""
    if name not in TELLINGS:
        raise UsageError(f"no telling is named {name!r}", fix=nearest(name, TELLINGS))
    if scenario.plain is not None:
        raise UsageError(f"{scenario.id}{SIGN}{name}: a game is told in one way at a time")
    telling, first = TELLINGS[name], scenario.new(0, 0)
    if not _rows(first.observe(scenario.players[0]))[1]:
        raise UsageError(
            f"{scenario.id} cannot be retold: its text has no board with an axis, so nothing would say what is where",
            fix="a game of ours: msgrpo games",
        )
    if not set(telling.actions) <= set(scenario.actions):
        raise UsageError(f"{SIGN}{name} renames {', '.join(telling.actions)}; {scenario.id} has other actions")
    outer = {telling.actions.get(action, action): action for action in scenario.actions}

    def reference(game: Retold, player: str) -> list[str]:
        assert scenario.reference is not None
        return [game.outer(action) for action in scenario.reference(game.plain, player)]

    def judge(game: Retold, player: str) -> Judgement:
        assert scenario.judge is not None
        judgement = scenario.judge(game.plain, player)

        def named(values: Mapping[str | None, float]) -> dict[str | None, float]:
            return {None if action is None else game.outer(action): value for action, value in values.items()}

        return Judgement(named(judgement.values), named(judgement.errors))

    return replace(
        scenario,
        id=f"{scenario.id}{SIGN}{name}",
        rules=telling.said(scenario.rules, first),
        make=lambda start_seed, chance_seed: Retold(scenario.new(start_seed, chance_seed), telling),
        actions=tuple(outer),
        reference=reference if scenario.reference else None,
        judge=judge if scenario.judge else None,
        describe=None,
        plain=scenario.id,
    )
