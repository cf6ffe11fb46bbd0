"""Frozen Lake on Gymnasium's own environment; only the text is ours.

Gymnasium's `ansi` rendering marks the player by a colour escape alone, so `observe` writes P player, O hole,
G goal, _ frozen, with coordinates, as Verlog does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from msgrpo.game import Board, Game, Outcome, Role

GYM_ACTION = {"left": 0, "down": 1, "right": 2, "up": 3}
GLYPH = {"S": "_", "F": "_", "H": "O", "G": "G"}
LEGEND = {"P": "you", "_": "frozen", "O": "hole", "G": "goal"}
ROLES: dict[str, Role] = {"P": "own", "_": "ice", "O": "hole", "G": "goal"}


@lru_cache(maxsize=1024)
def _environment(desc: tuple[str, ...], slippery: bool) -> FrozenLakeEnv:
    """The transition table of a map takes a millisecond to build, and a group shares its map."""
    return FrozenLakeEnv(desc=list(desc), is_slippery=slippery)


@lru_cache(maxsize=8192)
def random_map(size: int, p_frozen: float, start_seed: int) -> tuple[str, ...]:
    """Gymnasium's generator: start top left, goal bottom right, redrawn until a path exists."""
    return tuple(generate_random_map(size=size, p=p_frozen, seed=start_seed))


class FrozenLake(Game):
    """+1 at the goal, else 0. On ⊥ the player stays and the step's random number is used up.

    Gymnasium draws one number a step; drawing it on ⊥ too makes the slips a function of the step alone, so
    that two agents with the same chance seed meet the same slips.
    """

    def __init__(self, desc: tuple[str, ...], slippery: bool, step_limit: int, chance_seed: int) -> None:
        super().__init__(step_limit)
        self.desc = desc
        self.slippery = slippery
        self.chance_seed = chance_seed
        self._env: FrozenLakeEnv | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> FrozenLake:
        twin = copy.copy(self)
        twin.returns = dict(self.returns)
        if self._env is not None:
            twin._env = copy.copy(self._env)  # the transition table is shared, the generator is not
            twin._env.np_random = copy.deepcopy(self._env.np_random)
        return twin

    @property
    def env(self) -> FrozenLakeEnv:
        """Gymnasium's environment, made when it is first needed: many starts are only looked at."""
        if self._env is None:
            self._env = copy.copy(_environment(self.desc, self.slippery))
            self._env.reset(seed=self.chance_seed)
        return self._env

    @property
    def state(self) -> int:
        """Gymnasium's number of the player's cell, counted row by row from the top left."""
        return "".join(self.desc).index("S") if self._env is None else int(self._env.s)

    @property
    def cell(self) -> tuple[int, int]:
        """(row, column) of the player, row 0 on top."""
        return divmod(self.state, len(self.desc[0]))

    @property
    def success(self) -> bool:
        row, column = self.cell
        return self.desc[row][column] == "G"

    @property
    def ending(self) -> str:
        if self.outcome is Outcome.PLAYING:
            return ""
        if self.success:
            return "goal reached"
        row, column = self.cell
        place = f"({column},{len(self.desc) - 1 - row})"
        return f"fell in the hole at {place}" if self._over else f"out of steps at {place}"

    def _draw_luck(self, chance_seed: int) -> None:
        state, self.chance_seed, self._env = self.state, chance_seed, None
        self.env.s = state

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        action = actions["player"]
        if action is None:
            self.env.np_random.random()
            return {"player": 0.0}
        _, reward, terminated, _, _ = self.env.step(GYM_ACTION[action])
        self._over = bool(terminated)
        return {"player": float(reward)}

    def board(self) -> Board:
        rows = [[GLYPH[letter] for letter in row] for row in self.desc]
        row, column = self.cell
        rows[row][column] = "P"
        roles: dict[str, Role] = ROLES | ({"P": "won" if self.success else "lost"} if self._over else {})
        return Board(tuple(map(tuple, rows)), LEGEND, roles)

    def observe(self, player: str) -> str:
        height = len(self.desc)

        def places(letter: str) -> str:
            cells = [
                f"({x},{height - 1 - row})"
                for row, line in enumerate(self.desc)
                for x, seen in enumerate(line)
                if seen == letter
            ]
            return " ".join(cells) or "none"

        row, column = self.cell
        return (
            f"Step {self.steps + 1} of {self.step_limit}. You ({column},{height - 1 - row}). "
            f"Goal {places('G')}. Holes {places('H')}.\n{self.board().text()}"
        )


def random_lake(
    size: int, p_frozen: float, slippery: bool, step_limit: int, start_seed: int, chance_seed: int
) -> FrozenLake:
    return FrozenLake(random_map(size, p_frozen, start_seed), slippery, step_limit, chance_seed)


def lake_on_map(
    desc: tuple[str, ...], slippery: bool, step_limit: int, start_seed: int, chance_seed: int
) -> FrozenLake:
    """The one start of a given map, whatever the start seed."""
    return FrozenLake(desc, slippery, step_limit, chance_seed)


def rules(slippery: bool, step_limit: int) -> str:
    moves = (
        "The ice is slippery: with probability 1/3 each you move the way you choose, or to one side of it, "
        "or to the other side; never backwards."
        if slippery
        else "The ice is not slippery: you move the way you choose."
    )
    return (
        "Frozen Lake. Walk over the ice to the goal. P is you, _ frozen, O a hole, G the goal. "
        "Positions are (x,y); (0,0) is at the bottom left. "
        f"{moves} At an edge you stay where you are. A hole ends the game with 0 points, "
        f"the goal ends it with 1 point. There are {step_limit} steps. "
        "An answer without a legal action uses up a step."
    )
