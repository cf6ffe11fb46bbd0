"""Any single-player scenario as a Gymnasium environment, for agents that read boards instead of text.

import gymnasium, msgrpo.gym_env
env = gymnasium.make("msgrpo/snake-v0", split="test")
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from msgrpo.errors import UsageError
from msgrpo.game import Board, Game, Outcome, Scenario, Split, shown_board
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.limits import games_code

EMPTY = {"_", "."}
SEEDS = 2**31  # start and luck are drawn from [0, SEEDS)

Planes = NDArray[np.uint8]


def board_of(game: Game) -> Board:
    """The game's board. Raises UsageError for a game without one: a text has no planes."""
    board = shown_board(game)
    if board is None:
        raise UsageError(f"{type(game).__name__} has no board, which this environment shows as planes")
    return board


def layers(scenario: Scenario) -> tuple[str, ...]:
    """The glyphs that have a plane of their own, in a fixed order: everything but the empty cell."""
    return tuple(sorted(glyph for glyph in board_of(scenario.new(0, 0)).legend if glyph not in EMPTY))


def planes_shape(scenario: Scenario) -> tuple[int, int, int]:
    """(planes, height, width): one plane for each glyph, then as many as a cell for every step needs."""
    cells = board_of(scenario.new(0, 0)).cells
    height, width = len(cells), len(cells[0])
    return len(layers(scenario)) + -(-scenario.step_limit // (height * width)), height, width


def planes(game: Game, glyphs: tuple[str, ...], shape: tuple[int, int, int]) -> Planes:
    """One-hot planes of the board, top row first, and of the step.

    The step limit belongs to the task, so the state is Markov only with the step in it: step k lights the k-th
    cell of the last planes (the last step's cell after the end).
    """
    stack = np.zeros(shape, dtype=np.uint8)
    board = np.array(board_of(game).cells)
    for plane, glyph in enumerate(glyphs):
        stack[plane] = board == glyph
    clock = stack[len(glyphs) :].reshape(-1)
    clock[min(game.steps, game.step_limit - 1)] = 1
    return stack


def legal_action(game: Game, player: str, number: int) -> str | None:
    """The game's action of this number; ⊥ (None) where it is not legal now."""
    action = game.actions[number]
    return action if action in game.legal(player) else None


def _seed(options: dict[str, Any], name: str) -> int | None:
    """A seed that somebody gives to `reset`; None for one that is to be drawn."""
    seed = options.get(name)
    if seed is not None and not (isinstance(seed, Integral) and int(seed) >= 0):
        raise UsageError(f"{name} is {seed!r}, no whole number from 0 on")
    return None if seed is None else int(seed)


class ScenarioEnv(gymnasium.Env):  # type: ignore[misc]  # Gymnasium is not checked
    """One episode a reset, each from another start of `split`.

    Actions are the indices of `scenario.actions`; one that is not legal in the state is ⊥. `reset` takes
    `options={"start_seed": …, "chance_seed": …}` for a certain episode. `info` holds both seeds and, in games with a
    goal, `success`.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (Gymnasium's own form)

    def __init__(self, scenario_id: str, split: Split = "train", render_mode: str | None = None) -> None:
        self.scenario = get_scenario(scenario_id)
        if len(self.scenario.players) > 1:
            raise UsageError(f"{scenario_id} has several players, a Gymnasium environment has one")
        if not self.scenario.actions:
            raise UsageError(f"{scenario_id} lists no actions, which a Gymnasium environment has numbers for")
        self.scenario.starts(split)  # names an unknown split before the first reset
        self.split = split
        self.render_mode = render_mode
        self.glyphs = layers(self.scenario)
        self.shape = planes_shape(self.scenario)
        self.player = self.scenario.players[0]
        self.actions = self.scenario.actions
        self.observation_space = spaces.Box(0, 1, self.shape, np.uint8)
        self.action_space = spaces.Discrete(len(self.actions))
        self.game: Game | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Planes, dict[str, Any]]:
        super().reset(seed=seed)
        start, chance = (_seed(options or {}, name) for name in ("start_seed", "chance_seed"))
        if start is None:
            start = next(self.scenario.starts(self.split, int(self.np_random.integers(SEEDS))))
        if chance is None:
            chance = int(self.np_random.integers(SEEDS))
        self.seeds = {"start_seed": start, "chance_seed": chance}
        self.game = self.scenario.new(start, chance)
        return planes(self.game, self.glyphs, self.shape), self._info(self.game)

    def step(self, action: np.int64) -> tuple[Planes, float, bool, bool, dict[str, Any]]:
        if self.game is None:
            raise UsageError("step before reset")
        if not self.action_space.contains(action):
            raise UsageError(
                f"{action!r} is no action of {self.scenario.id}",
                fix=f"a whole number from 0 to {len(self.actions) - 1}: {', '.join(self.actions)}",
            )
        with games_code(self.scenario.id):
            reward = self.game.step({self.player: legal_action(self.game, self.player, int(action))})[self.player]
        outcome = self.game.outcome
        observation = planes(self.game, self.glyphs, self.shape)
        return (
            observation,
            reward,
            outcome is Outcome.TERMINATED,
            outcome is Outcome.TRUNCATED,
            self._info(self.game),
        )

    def render(self) -> str | None:
        if self.game is None or self.render_mode != "ansi":
            return None
        return board_of(self.game).text()

    def _info(self, game: Game) -> dict[str, Any]:
        return self.seeds | ({} if game.success is None else {"success": game.success})


def env_id(scenario: Scenario) -> str:
    return f"msgrpo/{scenario.id}-v0"


def register_envs() -> None:
    """Register every single-player scenario with Gymnasium; again is harmless."""
    for scenario in SCENARIOS.values():
        if len(scenario.players) == 1 and env_id(scenario) not in gymnasium.registry:
            gymnasium.register(
                env_id(scenario),
                entry_point="msgrpo.gym_env:ScenarioEnv",
                kwargs={"scenario_id": scenario.id},
            )


register_envs()
