"""Any Gymnasium environment with discrete actions as a game, given a function that puts into words what is seen.

    scenario = gym_scenario("my-corridor", "MyCorridor-v0", ("left", "right"), seen, rules="…", step_limit=30)

`seen(env, observation)` is the text that a player reads. The start comes from `reset(seed=start_seed)`; then the
environment's own generator is replaced by one that is drawn from the chance seed, which separates luck from start.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from gymnasium.utils import EzPickle
from numpy.random import PCG64, Generator

from msgrpo.errors import UsageError, nearest
from msgrpo.game import Game, Scenario

Seen = Callable[[Any, Any], str]
Make = Callable[[], Any]


class GymGame(Game):
    """One play of an environment. On ⊥ the environment is not stepped; the step counts.

    Environments whose copies lose their state (`EzPickle` builds a new one) are copied by playing their actions
    again.
    """

    def __init__(
        self, make: Make, seen: Seen, actions: tuple[str, ...], step_limit: int, start_seed: int, chance_seed: int
    ) -> None:
        self.actions = actions
        super().__init__(step_limit)
        self._make, self._seen, self._start = make, seen, start_seed
        self.env = make()
        self.observation, _ = self.env.reset(seed=start_seed)
        self._history: list[tuple[str, int]] = []  # what was done to it: luck drawn, actions taken
        self._reward = 0.0
        self._draw_luck(chance_seed)

    def _draw_luck(self, chance_seed: int) -> None:
        self._history.append(("luck", chance_seed))
        self.env.np_random = Generator(PCG64(chance_seed))

    def __deepcopy__(self, memo: dict[int, object]) -> GymGame:
        twin = copy.copy(self)
        twin.returns, twin._history = dict(self.returns), list(self._history)
        twin.observation = copy.deepcopy(self.observation)
        if isinstance(self.env, EzPickle):
            twin.env = self._make()
            twin.env.reset(seed=self._start)
            for what, number in self._history:
                if what == "luck":
                    twin.env.np_random = Generator(PCG64(number))
                else:
                    twin.env.step(number)
        else:
            twin.env = copy.deepcopy(self.env)
        return twin

    def observe(self, player: str) -> str:
        step = min(self.steps + 1, self.step_limit)
        return f"Step {step} of {self.step_limit}. {self._seen(self.env, self.observation)}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        action = actions["player"]
        if action is None:
            return {"player": 0.0}
        number = self.actions.index(action)
        self._history.append(("action", number))
        self.observation, reward, terminated, truncated, _ = self.env.step(number)
        self._reward, self._over = float(reward), bool(terminated or truncated)
        return {"player": self._reward}


class GoalGymGame(GymGame):
    """An environment in which a positive reward ends the episode: that is its goal."""

    @property
    def success(self) -> bool:
        return self._over and self._reward > 0


def environment(env_id: str, **kwargs: Any) -> Make:
    """A function that makes the bare environment. Raises UsageError for an id that is not registered."""
    if env_id not in gymnasium.registry:
        raise UsageError(f"no Gymnasium environment is named {env_id!r}", fix=nearest(env_id, gymnasium.registry))

    def make() -> Any:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs).unwrapped

    return make


def gym_scenario(
    id: str,
    env_id: str,
    actions: tuple[str, ...],
    seen: Seen,
    *,
    rules: str,
    step_limit: int,
    goal: bool = False,
    **kwargs: Any,
) -> Scenario:
    """A scenario of a registered environment with discrete actions, in the order of their numbers.

    `kwargs` are the environment's own. Raises UsageError for an unknown id or another kind of action.
    """
    make_env = environment(env_id, **kwargs)
    space = make_env().action_space
    if not isinstance(space, gymnasium.spaces.Discrete) or int(space.n) != len(actions) or int(space.start):
        raise UsageError(f"{env_id} has the actions {space}, not {len(actions)} numbered ones")
    kind = GoalGymGame if goal else GymGame

    def make(start_seed: int, chance_seed: int) -> Game:
        return kind(make_env, seen, actions, step_limit, start_seed % 2**31, chance_seed)

    return Scenario(id, env_id, rules, step_limit, f"[Gymnasium] {env_id}", make, actions=actions, goal=goal)
