"""What the games' reference players know: the exact optimum of Frozen Lake, and a search player for Snake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from msgrpo.game import Judgement
from msgrpo.games.frozen_lake import GYM_ACTION, FrozenLake, _environment
from msgrpo.games.snake import DELTA, Cell, Snake, SnakeSetting, ahead


@lru_cache(maxsize=4096)
def optimal_values(
    desc: tuple[str, ...], slippery: bool, horizon: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Q(k, s, a): the highest probability of reaching the goal within k steps, taking `a` first; and M(k, s, a),
    how late that is: the smallest Σ_t t · P(the goal is reached at step t) among the policies that reach Q.

    Q(0, s, a) = 0 and Q(k, s, a) = Σ_s' P(s'|s,a) (r + [s' not terminal] max_a' Q(k−1, s', a')), over the
    transition table of Gymnasium's own environment. Each further step delays all success that lies behind it by
    one, so M(k, s, a) = Q(k, s, a) + Σ_s' P(s'|s,a) [s' not terminal] min M(k−1, s', a'), the minimum over the a'
    with the highest Q(k−1, s', ·). Both have the shape (horizon + 1, states, 4). Deterministic maps and every step
    limit included: Q is the exact ceiling of any agent's expected success.
    """
    table = _environment(desc, slippery).P
    states = len(desc) * len(desc[0])
    transition = np.zeros((states, 4, states))
    reward = np.zeros((states, 4))
    for s in range(states):
        for a in range(4):
            for p, successor, r, terminal in table[s][a]:
                reward[s, a] += p * r
                if not terminal:
                    transition[s, a, successor] += p
    q, delay = np.zeros((2, horizon + 1, states, 4))
    for k in range(1, horizon + 1):
        q[k] = reward + transition @ q[k - 1].max(axis=1)
        delay[k] = q[k] + transition @ np.where(_highest(q[k - 1]), delay[k - 1], np.inf).min(axis=1)
    return q, delay


def _highest(q: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which actions (the last axis) have the highest value, up to rounding."""
    return np.asarray(q >= q.max(axis=-1, keepdims=True) - 1e-12)


def optimal_success(game: FrozenLake) -> float:
    """The exact success probability of the best policy from here within the steps that are left."""
    left = game.step_limit - game.steps
    return float(optimal_values(game.desc, game.slippery, left)[0][left, game.state].max())


def judge_lake(game: FrozenLake, player: str) -> Judgement:
    """The exact probability of success after each action; ⊥ stays where it is and uses up the step."""
    left = game.step_limit - game.steps
    q = optimal_values(game.desc, game.slippery, left)[0]
    values: dict[str | None, float] = {action: float(q[left, game.state, i]) for action, i in GYM_ACTION.items()}
    return Judgement(values | {None: float(q[left - 1, game.state].max())})


def optimal_lake_actions(game: FrozenLake) -> list[str]:
    """The actions with the highest success probability within the steps that are left and, among these, the
    fewest expected steps."""
    left = game.step_limit - game.steps
    q, delay = (table[left, game.state] for table in optimal_values(game.desc, game.slippery, left))
    best = _highest(q)
    return [a for a, i in GYM_ACTION.items() if best[i] and delay[i] <= delay[best].min() + 1e-9]


def layers(size: int, source: Cell, blocked: Iterable[Cell]) -> list[int]:
    """The cells that can be reached around `blocked` in 0, 1, 2, … steps, each layer as a set of bits.

    The bit of the cell (x, y) is `bit(size, (x, y))`; a layer moves by one step on all its cells at once.
    """
    whole, not_left, not_right = _columns(size)
    layer = bit(size, source)
    seen = layer
    for cell in blocked:
        seen |= bit(size, cell)
    reached = []
    while layer:
        reached.append(layer)
        around = (layer & not_right) << 1 | (layer & not_left) >> 1 | layer << size | layer >> size
        layer = around & whole & ~seen
        seen |= layer
    return reached


def steps_to(reached: Sequence[int], there: int) -> int | None:
    """In which layer the cell is; None where it cannot be reached."""
    for steps, layer in enumerate(reached):
        if layer & there:
            return steps
    return None


def bit(size: int, cell: Cell) -> int:
    return 1 << (cell[1] * size + cell[0])


@cache
def _columns(size: int) -> tuple[int, int, int]:
    """All cells of a board, those not in its leftmost column, and those not in its rightmost, as bits."""
    cells = [(x, y) for x in range(size) for y in range(size)]
    whole = sum(bit(size, cell) for cell in cells)
    left, right = (sum(bit(size, cell) for cell in cells if cell[0] == x) for x in (0, size - 1))
    return whole, whole ^ left, whole ^ right


def snake_scores(game: Snake, player: str) -> dict[str, float]:
    """A one-step look ahead for each action: what is eaten now, what can be reached soon, and what may kill.

    score = value eaten + Σ over good items of value · 0.6^distance − 1.5 · P(another head comes to the cell)
    − 1 if the space behind the move is smaller than the body; −∞ (here −9) for a move that surely kills.
    A heuristic, strong at 20 steps and not proven optimal.
    """
    bodies = tuple((name, tuple(body)) for name, body in game.bodies.items())
    items = tuple(tuple(game.items[item.name]) for item in game.setting.items)
    return dict(_snake_scores(game.setting, bodies, items, player))


@lru_cache(maxsize=8192)  # the futures that a judge plays are mostly in states in which others have been
def _snake_scores(
    setting: SnakeSetting,
    bodies: tuple[tuple[str, tuple[Cell, ...]], ...],
    items: tuple[tuple[Cell, ...], ...],
    player: str,
) -> Mapping[str, float]:
    """The scores of a state; `items` are the cells of each kind of the setting."""
    body, size = dict(bodies)[player], setting.size
    others = [b for name, b in bodies if name != player and b]
    kinds = tuple(zip(setting.items, items, strict=True))
    blocked = {c for b in [body, *others] for c in b[:-1]}
    reach_of_others = [{ahead(b[0], a) for a in DELTA} for b in others]
    scores = {}
    for action in DELTA:
        cell = ahead(body[0], action)
        item = next((kind for kind, cells in kinds if cell in cells), None)
        inside = 0 <= cell[0] < size and 0 <= cell[1] < size
        if not inside or cell in blocked or (item and cell == body[-1]):
            scores[action] = -9.0
            continue
        reached = layers(size, cell, [*blocked, body[0]])
        score = float(item.value if item else 0)
        for kind, cells in kinds:
            if kind.value > 0:
                far = [steps_to(reached, bit(size, c)) for c in cells if c != cell]
                score += sum([kind.value * 0.6**steps for steps in far if steps is not None])
        score -= 1.5 * sum(cell in reach for reach in reach_of_others) / 3
        space = sum(map(int.bit_count, reached))
        scores[action] = score - (1.0 if space < len(body) + 1 else 0.0)
    return scores


def best_snake_actions(game: Snake, player: str) -> list[str]:
    scores = snake_scores(game, player)
    best = max(scores.values())
    return [action for action, score in scores.items() if score >= best - 1e-9]
