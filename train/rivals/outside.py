"""Choices from a file of yours: credit=my_file.py:my_credit, or module:function of what is installed.

    credit   (group) -> [j][t], one number for every turn of the group's episodes
    select   (group, generator) -> the indices of the episodes that the update sees
    gate     (group) -> whether the group counts

`group` is a `msgrpo.train.groups.Group`: `turns`, `returns_G`, `advantages_G`, `trajectories()`. The function is
imported when the run begins, and asked by the first process of a run alone: it need not be a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from msgrpo.errors import UsageError, users_code
from msgrpo.limits import unmoved
from msgrpo.outside_code import module_at
from msgrpo.train.groups import Advantages, Group
from msgrpo.train.rivals.contract import Choice, Credit, Gate, Learner, Select

HOW = "name it as file.py:function, or module:function of what can be imported"


@cache
def load(spec: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `module:function` names. Raises UsageError if there is none."""
    place, _, name = spec.rpartition(":")
    module = module_at(place, spec, HOW)
    with users_code(f"{spec!r} cannot be loaded", fix=HOW):
        function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{spec!r}: {place} has no function {name!r}", fix=HOW)
    return function


class Function(Choice):
    """A function outside, by its name."""

    spec: str

    def prepare(self) -> None:
        load(self.spec)

    def __str__(self) -> str:
        return self.spec

    def ask(self, kind: str, group: Group, *given: Any) -> Any:
        """What the function says of a group, which it sees a copy of."""
        fix = f"see what a {kind} takes: docs/algorithm.md"
        with users_code(f"{kind} {self.spec!r} failed", fix=fix), unmoved():
            return load(self.spec)(group.copy(), *given)


class OutsideCredit(Function, Credit):
    name = "credit"

    def of_groups(self, groups: Sequence[Group], learner: Learner) -> list[Advantages]:
        return learner.ranks.broadcast([self._of(group) for group in groups] if learner.ranks.first else [])

    def _of(self, group: Group) -> Advantages:
        lengths = [len(turns) for turns in group.turns]
        answer = self.ask("credit", group)
        with users_code(f"credit {self.spec!r} returned {_short(answer)}", fix="a credit returns [j][t], numbers"):
            credits = [[float(value) for value in of_episode] for of_episode in answer]
        if [len(of_episode) for of_episode in credits] != lengths or not all(map(math.isfinite, _flat(credits))):
            raise UsageError(
                f"credit {self.spec!r} returned {_short(credits)} for episodes of {lengths} turns",
                fix="a credit returns one finite number for every turn of every episode",
            )
        return credits


class OutsideSelect(Function, Select):
    name = "select"

    def kept(self, group: Group, learner: Learner) -> list[int]:
        indices = self._of(group, learner.generator) if learner.ranks.first else []
        indices, state = learner.ranks.broadcast((indices, learner.generator.get_state()))
        learner.generator.set_state(state)  # the function may have drawn from it, on the first rank alone
        return indices

    def _of(self, group: Group, generator: torch.Generator) -> list[int]:
        answer = self.ask("select", group, generator)
        with users_code(f"select {self.spec!r} returned {_short(answer)}", fix="a select returns indices"):
            indices = [int(index) for index in answer]
        if not indices or not set(indices) <= set(range(len(group.turns))) or len(set(indices)) < len(indices):
            raise UsageError(
                f"select {self.spec!r} returned {_short(indices)} for {len(group.turns)} episodes",
                fix="a select returns at least one index from 0 to G − 1, none twice",
            )
        return indices


class OutsideGate(Function, Gate):
    name = "gate"

    def passing(self, groups: Sequence[Group]) -> list[int]:
        return [place for place, group in enumerate(groups) if self._passes(group)]

    def _passes(self, group: Group) -> bool:
        verdict = self.ask("gate", group)
        if not isinstance(verdict, bool | np.bool_):
            raise UsageError(f"gate {self.spec!r} returned {verdict!r}", fix="a gate returns True or False")
        return bool(verdict)


OUTSIDE: dict[str, type[Function]] = {"credit": OutsideCredit, "select": OutsideSelect, "gate": OutsideGate}


def _flat(credits: Advantages) -> Iterable[float]:
    return (value for of_episode in credits for value in of_episode)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:79] + "…"
