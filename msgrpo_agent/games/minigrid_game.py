"""MiniGrid and BabyAI (`pip install -e '.[minigrid]'`): `gym:BabyAI-GoToObj-v0` and every other registered id.

The environment is theirs; the text is ours. The agent looks up from the middle of the lowest row of a 7x7 view, so
all places are told as steps forward and to a side. BabyAI recomputes its own step limit at `reset` unless one is
passed; ours is passed. The reference player is BabyAI's bot where the level has instructions, else a breadth-first
search for the goal over places and directions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
import minigrid  # noqa: F401 (registers its levels)
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX
from minigrid.envs.babyai.core import roomgrid_level
from minigrid.utils.baby_ai_bot import BabyAIBot

from msgrpo.errors import UsageError
from msgrpo.game import Board, Role, Scenario
from msgrpo.games.gymnasium_game import GoalGymGame, environment

roomgrid_level.print = lambda *text: None  # it prints what it rejects, and a terminal app makes games in threads

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
LIMIT = 64  # steps, where a level asks for more
VIEW = 7
MISSION = "Mission:"
LETTERS = {
    "unseen": "?",
    "empty": ".",
    "wall": "#",
    "floor": ".",
    "door": "D",
    "key": "K",
    "ball": "B",
    "box": "X",
    "goal": "G",
    "lava": "L",
    "agent": "A",
}
LEGEND = {
    "?": "not seen",
    ".": "empty",
    "#": "wall",
    "D": "door",
    "K": "key",
    "B": "ball",
    "X": "box",
    "G": "goal",
    "L": "lava",
    "A": "you, looking up",
}
ROLES: dict[str, Role] = {"#": "wall", "G": "goal", "L": "bad", "A": "own", **dict.fromkeys("DKBX", "thing")}
STATES = {number: name for name, number in STATE_TO_IDX.items()}
BROKEN = ("PutNextS5N2Carrying", "PutNextS6N3Carrying", "PutNextS7N4Carrying", "KeyInBox")  # by others' experience
RULES = (
    "A grid world. You stand in a room and look in one direction; you see what lies before you and to your sides. "
    "left and right turn you by a quarter; forward goes one step, if nothing is in the way; pickup takes what lies "
    "right before you; drop puts it down there; toggle opens or closes a door or a box right before you; done does "
    "nothing. Do what the mission says: it pays 1 - 0.9 * steps used / {limit}, and the game ends. There are {limit} "
    "steps. An answer without a legal action uses up a step."
)


class MiniGridGame(GoalGymGame):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        if actions["player"] is None:
            self.env.step_count += 1  # its reward counts the steps
        return super()._advance(actions)

    def board(self) -> Board:
        view = view_of(self.observation)
        rows = [[LETTERS[name] for name, _, _ in row] for row in view]
        rows[-1][VIEW // 2] = "A"
        colours = {
            (y, x): colour
            for y, row in enumerate(view)
            for x, (_, colour, _) in enumerate(row)
            if ROLES.get(rows[y][x]) == "thing"
        }
        caption = f"{MISSION} {self.observation['mission']}. You carry {carried(self.env)}."
        return Board(tuple(map(tuple, rows)), LEGEND, ROLES, colours=colours, caption=caption)

    @property
    def ending(self) -> str:
        if self.success:
            return "mission done"
        return "failed" if self._over else super().ending.replace("goal missed", "out of steps")


def minigrid_scenario(env_id: str, *, step_limit: int | None) -> Scenario:
    """The scenario of a registered MiniGrid or BabyAI level.

    Raises UsageError for another id, and for a level that needs a package which is not there.
    """
    if any(f"-{name}-" in env_id for name in BROKEN):
        raise UsageError(f"{env_id} is known to be broken: it cannot be solved from some of its starts")
    kwargs: dict[str, Any] = {"max_steps": step_limit} if step_limit else {}
    make_level = environment(env_id, **kwargs)
    if not str(gymnasium.registry[env_id].entry_point).startswith("minigrid."):  # known before it is made
        raise UsageError(
            f"{env_id} is no MiniGrid level",
            fix="a game of your own for any Gymnasium environment: msgrpo.games.gymnasium_game.gym_scenario",
        )
    try:
        env = make_level()
        env.reset(seed=0)  # BabyAI says how many steps a level has when it has drawn one
    except gymnasium.error.DependencyNotInstalled as error:
        raise UsageError(f"{env_id} lacks a package: {error}") from error
    limit = step_limit or min(env.max_steps, LIMIT)
    make_env = environment(env_id, max_steps=limit)

    def make(start_seed: int, chance_seed: int) -> MiniGridGame:
        return MiniGridGame(make_env, seen, ACTIONS, limit, start_seed % 2**31, chance_seed)

    rules, source = RULES.format(limit=limit), f"[MiniGrid] {env_id}"
    scenario = Scenario(
        f"gym:{env_id}",
        env_id,
        rules,
        limit,
        source,
        make,
        actions=ACTIONS,
        goal=True,
        reference=best,
        describe=describe,
    )
    return replace(scenario, one_start=len({scenario.start_key(seed) for seed in range(8)}) == 1)


def view_of(observation: Any) -> list[list[tuple[str, str, str]]]:
    """(object, colour, state) of each cell of the view, the farthest row first."""
    image = observation["image"]
    return [
        [
            (IDX_TO_OBJECT[int(kind)], IDX_TO_COLOR[int(colour)], STATES.get(int(state), ""))
            for kind, colour, state in image[:, y]
        ]
        for y in range(VIEW)
    ]


def named(cell: tuple[str, str, str]) -> str:
    kind, colour, state = cell
    if kind == "door":
        return f"{state} {colour} door"
    return kind if kind in ("wall", "goal", "lava") else f"{colour} {kind}"


def things(observation: Any) -> list[tuple[str, int, int]]:
    """(name, steps forward, steps to the right) of everything that is seen, the nearest first."""
    rows = view_of(observation)
    seen = [
        (named(cell), VIEW - 1 - y, x - VIEW // 2)
        for y, row in enumerate(rows)
        for x, cell in enumerate(row)
        if cell[0] not in ("unseen", "empty", "wall", "floor", "agent") and (y, x) != (VIEW - 1, VIEW // 2)
    ]
    return sorted(seen, key=lambda thing: (thing[1] + abs(thing[2]), thing))


def place(forward: int, right: int) -> str:
    parts = [f"{forward} forward"] if forward else []
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return " and ".join(parts)


def seen(env: Any, observation: Any) -> str:
    """What a player reads: the mission, what is seen and where, what is carried, and the view in letters."""
    listed = ", ".join(f"{name} {place(forward, right)}" for name, forward, right in things(observation)) or "nothing"
    rows = [" ".join(LETTERS[name] for name, _, _ in row) for row in view_of(observation)]
    rows[-1] = rows[-1][: VIEW - 1] + "A" + rows[-1][VIEW:]
    ahead = view_of(observation)[-2][VIEW // 2]
    before = "nothing" if ahead[0] in ("empty", "floor") else named(ahead)
    return (
        f"{MISSION} {observation['mission']}. You see: {listed}. Right before you: {before}. "
        f"You carry {carried(env)}.\n" + "\n".join(rows)
    )


def carried(env: Any) -> str:
    return f"{env.carrying.color} {env.carrying.type}" if env.carrying else "nothing"


def describe(game: MiniGridGame, player: str) -> str:
    """Something true about the state: where the nearest thing lies that the mission names, and what is ahead."""
    mission = str(game.observation["mission"])
    words = set(mission.split())
    wanted = [thing for thing in things(game.observation) if set(thing[0].split()[-2:]) <= words | {"square"}]
    ahead = view_of(game.observation)[-2][VIEW // 2]
    before = "nothing" if ahead[0] in ("empty", "floor") else named(ahead)
    if not wanted:
        return f"not seen. before {before}."
    name, forward, right = wanted[0]
    return f"{name} {place(forward, right)}. before {before}."


def best(game: MiniGridGame, player: str) -> list[str]:
    """BabyAI's bot, or for a level without instructions the first step of a shortest way to the goal."""
    twin = game.copy()
    assert isinstance(twin, MiniGridGame)
    if hasattr(twin.env, "instrs"):
        return [ACTIONS[int(BabyAIBot(twin.env).replan())]]
    return [_towards_goal(twin.env) or "done"]


def _towards_goal(env: Any) -> str | None:
    """Breadth first over places and directions, around walls and lava."""
    steps = ((1, 0), (0, 1), (-1, 0), (0, -1))
    begin = (int(env.agent_pos[0]), int(env.agent_pos[1]), int(env.agent_dir))
    queue: deque[tuple[tuple[int, int, int], str | None]] = deque([(begin, None)])
    known = {begin}
    while queue:
        (x, y, facing), first = queue.popleft()
        here = env.grid.get(x, y)
        if here is not None and here.type == "goal":
            return first
        dx, dy = steps[facing]
        cell = env.grid.get(x + dx, y + dy)
        ways = [("left", (x, y, (facing - 1) % 4)), ("right", (x, y, (facing + 1) % 4))]
        if cell is None or (cell.can_overlap() and cell.type != "lava"):
            ways.append(("forward", (x + dx, y + dy, facing)))
        for action, state in ways:
            if state not in known:
                known.add(state)
                queue.append((state, first or action))
    return None
