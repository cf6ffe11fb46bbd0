"""Snake with simultaneous moves, after FastSnake.

Taken over from FastSnake: 10x10, snakes start with length 1 on random free cells, items respawn at once on a
random free cell, eating grows, the random enemy avoids walls and its own body, (0,0) at the bottom left.
Different here, on purpose: a tail cell that is about to leave is free to enter; a dead enemy disappears and the
game goes on; death costs the scenario's reward once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from msgrpo.game import Board, Game, Outcome, Place, Role, stream

Cell = tuple[int, int]
BODY_GLYPHS = "oxvz"  # of snake 1, 2, …; a head is its snake's number
DELTA: dict[str, Cell] = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}


@dataclass(frozen=True)
class Item:
    """Something to eat: `count` of them lie on the board at any time, each worth `value` points."""

    name: str
    plural: str
    glyph: str
    count: int
    value: int


@dataclass(frozen=True)
class SnakeSetting:
    items: tuple[Item, ...]
    players: int = 1
    enemies: int = 1
    size: int = 10
    step_limit: int = 20
    death: float = -1.0


@dataclass(frozen=True)
class Fall:
    """How a snake died, for a person, and the cells that it lay on, head first."""

    cause: str
    body: tuple[Cell, ...]


class Snake(Game):
    """`bodies[name]` lists a snake's cells, head first; a dead snake has none. `falls[player]` says how a player
    died, and where its body lay then.

    On ⊥ a snake keeps its heading (at first: up). A move off the board, into a body, or two heads onto one cell
    kills. Items are eaten only by snakes that survive the step.
    """

    def __init__(self, setting: SnakeSetting, start_seed: int, chance_seed: int) -> None:
        self.players = player_names(setting)
        super().__init__(setting.step_limit)
        self.setting = setting
        self.enemies = tuple(f"enemy{i + 1}" for i in range(setting.enemies))
        self.headings = dict.fromkeys((*self.players, *self.enemies), "up")
        self.bodies: dict[str, list[Cell]] = {}
        self.falls: dict[str, Fall] = {}
        self.items: dict[str, list[Cell]] = {item.name: [] for item in setting.items}
        start = stream(start_seed, "snake-start")
        for name in self.headings:
            self.bodies[name] = [self._free_cell(start)]
        for item in setting.items:
            for _ in range(item.count):
                self.items[item.name].append(self._free_cell(start))
        self._draw_luck(chance_seed)

    def _draw_luck(self, chance_seed: int) -> None:
        self._chance_seed = chance_seed
        self._luck: dict[str, np.random.Generator] = {}  # purpose -> its generator, made when it is first needed

    def _lucky(self, purpose: str) -> np.random.Generator:
        if purpose not in self._luck:
            self._luck[purpose] = stream(self._chance_seed, purpose)
        return self._luck[purpose]

    def __deepcopy__(self, memo: dict[int, object]) -> Snake:
        twin = self._without_luck()
        twin._luck = copy.deepcopy(self._luck)
        return twin

    def with_luck(self, chance_seed: int) -> Snake:
        """An independent game in the same state, with the luck of `chance_seed` ahead.

        Generators that would be replaced at once are not copied: a judge makes forty such games for a move.
        """
        twin = self._without_luck()
        twin._draw_luck(chance_seed)
        return twin

    def _without_luck(self) -> Snake:
        """A copy that shares nothing that changes but the generators, which are replaced before it is played."""
        twin = copy.copy(self)
        twin.returns, twin.headings, twin.falls = dict(self.returns), dict(self.headings), dict(self.falls)
        twin.bodies = {name: list(cells) for name, cells in self.bodies.items()}
        twin.items = {name: list(cells) for name, cells in self.items.items()}
        return twin

    def inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.setting.size and 0 <= cell[1] < self.setting.size

    def alive(self, name: str) -> bool:
        return bool(self.bodies[name])

    def item_at(self, cell: Cell) -> Item | None:
        return next((item for item in self.setting.items if cell in self.items[item.name]), None)

    def _free_cell(self, generator: np.random.Generator) -> Cell:
        taken = {cell for cells in (*self.bodies.values(), *self.items.values()) for cell in cells}
        size = self.setting.size
        free = [(x, y) for y in range(size) for x in range(size) if (x, y) not in taken]
        return free[int(generator.integers(len(free)))]

    def _enemy_action(self, name: str) -> str:
        """FastSnake's random player: any move that stays on the board and off its own body."""
        body = self.bodies[name]
        stays = body[:-1] if len(body) > 2 else body
        safe = [a for a in DELTA if self.inside(c := ahead(body[0], a)) and c not in stays]
        return str(self._lucky(f"moves-{name}").choice(safe or list(DELTA)))

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        moving = [name for name in self.headings if self.alive(name)]
        for name in moving:
            chosen = self._enemy_action(name) if name in self.enemies else actions[name]
            self.headings[name] = chosen or self.headings[name]
        heads = {name: ahead(self.bodies[name][0], self.headings[name]) for name in moving}
        eats = {name: self.item_at(heads[name]) for name in moving}
        dead = self._collisions(heads, eats)
        rewards = dict.fromkeys(self.players, 0.0)
        for name in moving:
            if name in dead:
                if name in self.players:
                    self.falls[name] = Fall(dead[name], tuple(self.bodies[name]))
                self.bodies[name] = []
            else:
                grown = self.bodies[name] if eats[name] else self.bodies[name][:-1]
                self.bodies[name] = [heads[name], *grown]
            if name in rewards:
                item = eats[name]
                rewards[name] = self.setting.death if name in dead else float(item.value if item else 0)
        self._replace_eaten([(eats[name], heads[name]) for name in moving if name not in dead])
        self._over = any(not self.alive(player) for player in self.players)
        return rewards

    def _collisions(self, heads: Mapping[str, Cell], eats: Mapping[str, Item | None]) -> dict[str, str]:
        """Who dies if all heads move at once, and of what: the wall, a body cell that stays, or another head."""
        stays = {c: name for name in heads for c in (self.bodies[name] if eats[name] else self.bodies[name][:-1])}
        dead = {}
        for name, cell in heads.items():
            met = [
                other
                for other in heads
                if other != name
                and (heads[other] == cell or (cell == self.bodies[other][0] and heads[other] == self.bodies[name][0]))
            ]
            if not self.inside(cell):
                dead[name] = f"hit the wall at {_places([cell])}"
            elif met:
                dead[name] = f"met {self._called(met[0])} head on at {_places([cell])}"
            elif cell in stays:
                whom = "itself" if stays[cell] == name else self._called(stays[cell])
                dead[name] = f"bit {whom} at {_places([cell])}"
        return dead

    def _called(self, name: str) -> str:
        """A snake as a person is told of it."""
        return "the enemy" if (name,) == self.enemies else name

    def _replace_eaten(self, eaten: list[tuple[Item | None, Cell]]) -> None:
        for item, cell in eaten:
            if item is not None:
                cells = self.items[item.name]
                cells.remove(cell)
                cells.append(self._free_cell(self._lucky(f"respawn-{item.name}")))

    def board(self) -> Board:
        size = self.setting.size
        grid = {(x, y): "." for x in range(size) for y in range(size)}
        legend, roles = {".": "empty"}, dict[str, Role]()
        for item in self.setting.items:
            roles[item.glyph] = "good" if item.value > 0 else "bad"
            grid |= dict.fromkeys(self.items[item.name], item.glyph)
            legend[item.glyph] = f"{item.name} ({item.value:+d})"
        for i, name in enumerate(self.headings, start=1):
            body = self.falls[name].body if name in self.falls else self.bodies[name]
            grid |= dict.fromkeys(body[1:], BODY_GLYPHS[i - 1])
            grid |= dict.fromkeys(body[:1], str(i))
            legend |= {str(i): f"head of snake {i}", BODY_GLYPHS[i - 1]: f"body of snake {i}"}
            roles[str(i)] = "own" if i == 1 else "other"
            roles[BODY_GLYPHS[i - 1]] = "own-body" if i == 1 else "other-body"
            if name in self.falls:
                roles[str(i)] = "lost"
        for i, name in enumerate(self.headings, start=1):
            if name in self.falls:
                grid[self.falls[name].body[0]] = str(i)
        rows = [tuple(grid[x, y] for x in range(size)) for y in reversed(range(size))]
        return Board(tuple(rows), legend, roles, self._chains(), self._facing())

    def _bodies_seen(self) -> dict[str, list[Place]]:
        """Every body that a board shows, as (row, column), row 0 on top."""
        shown = self.bodies | {name: list(fall.body) for name, fall in self.falls.items()}
        return {name: [(self.setting.size - 1 - y, x) for x, y in body] for name, body in shown.items()}

    def _chains(self) -> tuple[tuple[Place, ...], ...]:
        return tuple(tuple(body) for body in self._bodies_seen().values() if body)

    def _facing(self) -> dict[Place, str]:
        return {body[0]: self.headings[name] for name, body in self._bodies_seen().items() if body}

    @property
    def ending(self) -> str:
        if self.outcome is Outcome.TERMINATED:
            return ", ".join(f"{player} {fall.cause}" for player, fall in self.falls.items())
        return "all steps played" if self.outcome is Outcome.TRUNCATED else ""

    def observe(self, player: str) -> str:
        lines = [f"Step {self.steps + 1} of {self.step_limit}."]
        for item in self.setting.items:
            lines.append(f"{item.plural.capitalize()} {_places(self.items[item.name])}.")
        number = {name: i for i, name in enumerate(self.headings, start=1)}
        lines.append(f"You are snake {number[player]}: {self._describe(player)}.")
        for other in self.headings:
            if other != player:
                lines.append(f"Enemy snake {number[other]}: {self._describe(other)}.")
        return "\n".join([*lines, self.board().text()])

    def _describe(self, name: str) -> str:
        body = self.bodies[name]
        return f"head {_places(body[:1])} body {_places(body[1:])}" if body else "dead"


def player_names(setting: SnakeSetting) -> tuple[str, ...]:
    return tuple(f"snake{i + 1}" for i in range(setting.players))


def ahead(cell: Cell, action: str) -> Cell:
    """The next cell from `cell` in the direction of `action`."""
    dx, dy = DELTA[action]
    return cell[0] + dx, cell[1] + dy


def _places(cells: list[Cell]) -> str:
    return " ".join(f"({x},{y})" for x, y in cells) or "none"


def rules(setting: SnakeSetting) -> str:
    worth = " ".join(
        f"{item.plural.capitalize()} ({item.glyph}) are worth {item.value:+d} point each." for item in setting.items
    )
    snakes = setting.players + setting.enemies
    company = "You are alone." if snakes == 1 else "All snakes move at the same time. Two heads on one cell both die."
    glyphs = " ".join(f"{i + 1} is the head of snake {i + 1}, {BODY_GLYPHS[i]} its body." for i in range(snakes))
    last = setting.size - 1
    return (
        f"Snake on a {setting.size}x{setting.size} board. Positions are (x,y); (0,0) is at the bottom left, "
        f"({last},{last}) at the top right; up is y+1. On the board . is empty. {glyphs} {worth} "
        f"What is eaten appears again elsewhere, and the snake grows by one cell. {company} "
        f"Moving off the board or into a body, your own included, kills: "
        f"{setting.death:+g} point, and the game ends. A tail cell that moves away is free. "
        f"There are {setting.step_limit} steps. An answer without a legal action keeps your direction."
    )
