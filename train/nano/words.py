"""nano's words: what it is taught to say about a position, whether such words are true, and what they are worth.

A thought names nano's own cell, each neighbour with its coordinates and what lies there, and where the goal or the
nearest good thing is. One that looks ahead goes on: on dry ice with a path to the goal, on slippery ice with the
chance of each direction to reach it in time, in Snake with the next two cells on the way to something good.

    at (0,3) up edge down (0,2) free left edge right (1,3) hole. goal (3,0) right down. path (0,2) (0,1) … (3,0).

`Words` reads a thought that a model wrote, `truth` holds it against the game, and `follow` acts on it as well as can
be: what `follow` reaches with a model's own words is the ceiling of any training that only teaches it to act on them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from msgrpo.errors import UsageError
from msgrpo.game import Game, Scenario
from msgrpo.games.frozen_lake import GYM_ACTION, FrozenLake
from msgrpo.games.search import optimal_values
from msgrpo.games.snake import DELTA, Cell, Snake, ahead

LONGEST_PATH = 12  # cells: what fits into an answer
CLOSE = 5  # percent: a chance that is this near the exact one is true
DEADLY = ("hole", "edge", "wall", "body")


class Sight:
    """What there is to see from one cell of a game, for one player; `(x, y)` counts from the bottom left."""

    def __init__(self, game: Game, player: str, at: Cell | None = None) -> None:
        self.game, self.player = game, player
        if isinstance(game, FrozenLake):
            self.at = at or self._of_row(*game.cell)
            self.outside, self.width = "edge", len(game.desc)
            kinds = {"H": "hole", "G": "goal"}
            self.things = {
                self._of_row(r, c): kinds[letter]
                for r, row in enumerate(game.desc)
                for c, letter in enumerate(row)
                if letter in kinds
            }
            self.values = {"goal": 1.0}
        elif isinstance(game, Snake):
            self.at = at or game.bodies[player][0]
            self.outside, self.width = "wall", game.setting.size
            self.things = {cell: "body" for body in game.bodies.values() for cell in body}
            self.things |= {cell: kind.name for kind in game.setting.items for cell in game.items[kind.name]}
            self.values = {kind.name: float(kind.value) for kind in game.setting.items}
        else:
            raise UsageError(f"nano has no words for {type(game).__name__}")  # has_words says so before

    def _of_row(self, row: int, column: int) -> Cell:
        assert isinstance(self.game, FrozenLake)
        return column, len(self.game.desc) - 1 - row

    def inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.width and 0 <= cell[1] < self.width

    def seen(self, cell: Cell) -> str:
        """hole, goal, body, an item's name, free, edge or wall."""
        return self.things.get(cell, "free") if self.inside(cell) else self.outside

    @cached_property
    def good(self) -> list[Cell]:
        """Where something lies that is worth more than nothing."""
        return [cell for cell, name in self.things.items() if self.values.get(name, 0) > 0]

    @cached_property
    def nearest(self) -> tuple[str, Cell] | None:
        """The goal, or the nearest thing worth more than nothing."""
        cell = min(set(self.good) - {self.at}, key=lambda cell: (gap(self.at, cell), cell), default=None)
        return None if cell is None else (self.things[cell], cell)

    @property
    def blocked(self) -> set[Cell]:
        bad = {cell for cell, name in self.things.items() if name in DEADLY or self.values.get(name, 0) < 0}
        return bad - {self.at}

    @cached_property
    def ways(self) -> dict[Cell, Cell]:
        """For each cell that can be reached around what is deadly or costs something: the cell before it (breadth
        first, so its chain of cells before is a shortest way)."""
        steps, queue, blocked = {self.at: self.at}, deque([self.at]), self.blocked
        while queue:
            cell = queue.popleft()
            for action in DELTA:
                following = ahead(cell, action)
                if following not in steps and self.inside(following) and following not in blocked:
                    steps[following] = cell
                    queue.append(following)
        return steps

    def way_to(self, target: Cell) -> list[Cell]:
        """The cells of a shortest way, without the first."""
        cells = [target]
        while cells[-1] != self.at:
            cells.append(self.ways[cells[-1]])
        return cells[-2::-1]

    def path(self) -> list[Cell]:
        """A shortest way to the goal or, in Snake, the first two cells of one to something good; empty without."""
        good = set(self.good) - {self.at}
        target = next((cell for cell in self.ways if cell in good), None)  # they stand in the order of their distance
        longest = LONGEST_PATH if isinstance(self.game, FrozenLake) else 2
        return self.way_to(target)[:longest] if target else []

    def chances(self) -> dict[str, int]:
        """On slippery ice: how many times in a hundred the best play reaches the goal in time, by first action."""
        assert isinstance(self.game, FrozenLake)
        game, left = self.game, self.game.step_limit - self.game.steps
        state = (self.width - 1 - self.at[1]) * self.width + self.at[0]
        q = optimal_values(game.desc, game.slippery, left)[0][left, state]
        return {action: round(100 * float(q[GYM_ACTION[action]])) for action in DELTA}

    @property
    def slippery(self) -> bool:
        return isinstance(self.game, FrozenLake) and self.game.slippery


def look(game: Game, player: str, *, further: bool = False, at: Cell | None = None) -> str:
    """A true thought, from the player's own cell or from another; `further`: it looks ahead as well."""
    sight = Sight(game, player, at)
    words = [f"at {_place(sight.at)}"]
    for action in DELTA:
        cell = ahead(sight.at, action)
        words.append(
            f"{action} {_place(cell)} {sight.seen(cell)}" if sight.inside(cell) else f"{action} {sight.outside}"
        )
    thought = " ".join(words) + "."
    if sight.nearest is None:
        thought += " nothing good."
    else:
        name, cell = sight.nearest
        thought += f" {name} {_place(cell)}{towards(sight.at, cell)}."
    return thought + further_words(sight) if further else thought


def further_words(sight: Sight) -> str:
    if sight.slippery:
        return " chances " + " ".join(f"{action} {chance}" for action, chance in sight.chances().items()) + "."
    return " path " + (" ".join(map(_place, sight.path())) or "none") + "."


def _place(cell: Cell) -> str:
    return f"({cell[0]},{cell[1]})"


def gap(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def towards(source: Cell, target: Cell) -> str:
    dx, dy = target[0] - source[0], target[1] - source[1]
    horizontal = " right" if dx > 0 else " left" if dx < 0 else ""
    vertical = " up" if dy > 0 else " down" if dy < 0 else ""
    return horizontal + vertical


_CELL = r"\((\d),(\d)\)"
_THOUGHT = re.compile(
    rf"at {_CELL} (?P<beside>[^.]*)\. (?:nothing good|(?P<name>[a-z]+) (?P<target>\(\d,\d\))(?P<way>(?: [a-z]+)*))\."
    r"(?: path (?P<path>[^.]*)\.)?(?: chances (?P<chances>[^.]*)\.)?"
)
_BESIDE = re.compile(r"(up|down|left|right)(?: (\(\d,\d\)))? ([a-z]+)")
_CHANCE = re.compile(r"(up|down|left|right) (\d{1,3})(?!\d)")


@dataclass(frozen=True)
class Words:
    """A thought, read. `beside` says what lies in each direction; the rest is None where nothing was said."""

    at: Cell
    beside: Mapping[str, tuple[Cell | None, str]]
    target: tuple[str, Cell, str] | None  # name, cell and the directions that lead there
    path: tuple[Cell, ...] | None  # empty where it says that there is none
    chances: Mapping[str, int] | None

    @classmethod
    def read(cls, answer: str) -> Words | None:
        """The thought before the action; None where it has another form."""
        form = _THOUGHT.match(answer.strip())
        if form is None:
            return None
        beside = {a: (_cell(place) if place else None, seen) for a, place, seen in _BESIDE.findall(form["beside"])}
        name = form["name"]
        target = (name, _cell(form["target"]), form["way"].strip()) if name else None
        path = None if form["path"] is None else tuple(_cells(form["path"]))
        chances = None if form["chances"] is None else {a: int(n) for a, n in _CHANCE.findall(form["chances"])}
        if set(beside) != set(DELTA) or (chances is not None and set(chances) != set(DELTA)):
            return None
        return cls((int(form[1]), int(form[2])), beside, target, path, chances)

    @property
    def looks_ahead(self) -> bool:
        return self.path is not None or self.chances is not None


def _cell(text: str) -> Cell:
    return int(text[1]), int(text[3])


def _cells(text: str) -> Iterator[Cell]:
    return (_cell(place) for place in re.findall(r"\(\d,\d\)", text))


def has_words(scenario: Scenario) -> bool:
    """Whether nano's form of thought can be held against the scenario's games."""
    return isinstance(scenario.new(0, 0), FrozenLake | Snake)


@dataclass(frozen=True)
class Truth:
    """Which parts of a thought are true; None for what it does not say."""

    directions: bool
    target: bool
    ahead: bool | None

    @property
    def whole(self) -> bool:
        return self.directions and self.target and self.ahead is not False


def truth(words: Words | None, game: Game, player: str) -> Truth:
    """Hold a thought against the game. A thought that cannot be read is not true."""
    if words is None:
        return Truth(False, False, None)
    sight = Sight(game, player)
    directions = words.at == sight.at
    for action, (cell, seen) in words.beside.items():
        there = ahead(sight.at, action)
        directions &= seen == sight.seen(there) and cell == (there if sight.inside(there) else None)
    if words.target is None:
        target = sight.nearest is None
    else:
        name, cell, way = words.target
        good = sight.values.get(name, 0) > 0 and sight.things.get(cell) == name
        target = good and way == towards(sight.at, cell).strip()
    further = None
    if words.chances is not None:
        exact = sight.chances() if sight.slippery else {}
        further = bool(exact) and all(abs(words.chances[a] - exact[a]) <= CLOSE for a in DELTA)
    elif words.path is not None:
        further = _leads(words.path, sight)
    return Truth(directions, target, further)


def _leads(path: tuple[Cell, ...], sight: Sight) -> bool:
    """Each cell beside the one before and safe; it ends at something good, or as much nearer to it as it is long.

    No path is true where there is none.
    """
    if not path:
        return not sight.path()
    before = (sight.at, *path)
    if any(gap(a, b) != 1 for a, b in zip(before, path, strict=False)) or set(path) & sight.blocked:
        return False
    targets = sight.good
    if isinstance(sight.game, FrozenLake) and path[-1] not in targets and len(path) < LONGEST_PATH:
        return False  # it stops on the way
    after = Sight(sight.game, sight.player, path[-1])
    return any(
        path[-1] == target
        or (
            (target in sight.ways and target in after.ways)
            and len(after.way_to(target)) == len(sight.way_to(target)) - len(path)
        )
        for target in targets
    )


def follow(words: Words | None, values: Mapping[str, float], slippery: bool, generator: np.random.Generator) -> str:
    """One of the actions that follow from the words, by chance; of all actions where there are no words."""
    return str(generator.choice(list(DELTA) if words is None else following(words, values, slippery)))


def following(words: Words, values: Mapping[str, float], slippery: bool) -> list[str]:
    """The best actions for somebody who knows nothing but the words.

    A path's first cell, or the direction with the highest chance. Else what is good beside, never what is said to be
    deadly or to cost something; on slippery ice the fewest of the three cells that one may slide to; then the way
    that leads to the target.
    """
    if words.chances is not None:
        best = max(words.chances.values())
        return [action for action, chance in words.chances.items() if chance == best]
    if words.path:
        step = [a for a in DELTA if ahead(words.at, a) == words.path[0]]
        if step and words.beside[step[0]][1] not in DEADLY:
            return step
    way = words.target[2].split() if words.target else []

    def worth(action: str) -> tuple[float, float, float]:
        seen = words.beside[action][1]
        stays = seen == "edge"  # on the lake one stays; a wall or a body kills
        if slippery:
            slides = [action, *(("left", "right") if action in ("up", "down") else ("up", "down"))]
            safe = -float(sum(words.beside[slide][1] == "hole" for slide in slides))
        else:
            safe = -float(seen in DEADLY and not stays)
        return safe, values.get(seen, 0.0), float(action in way) - float(stays)

    best_worth = max(map(worth, DELTA))
    return [action for action in DELTA if worth(action) == best_worth]
