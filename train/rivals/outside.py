"""Choices from a file of yours: credit=my_file.py:my_credit, or module:function of what is installed.

    credit   (group) -> [j][t], one number for every turn of the group's episodes
    select   (group, generator) -> the indices of the episodes that the update sees
    gate     (group) -> whether the group counts

`group` is a `msgrpo.train.groups.Group`: `turns`, `returns_G`, `advantages_G`, `trajectories()`. The function is
imported when the run begins, and asked by the first process of a run alone: it need not be a pure function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from msgrpo.errors import UsageError, users_code
from msgrpo.game import MOST_POINTS
from msgrpo.limits import unmoved
from msgrpo.outside_code import module_at
from msgrpo.train.groups import Group, PerTurn
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

    takes: ClassVar[tuple[str, ...]] = ("group",)
    spec: str

    def prepare(self) -> None:
        """Load the function. Raises UsageError if there is none, or none that can be called with what it will get."""
        function, fix = load(self.spec), f"define it as def name({', '.join(self.takes)})"
        if inspect.iscoroutinefunction(function):
            raise UsageError(f"{self.name} {self.spec!r} is an async function{self._place}", fix=fix)
        try:
            inspect.signature(function).bind(*self.takes)
        except TypeError as error:
            raise UsageError(f"{self.name} {self.spec!r} cannot be called: {error}{self._place}", fix=fix) from error
        except ValueError:  # a function that is not written in Python may have no signature
            return

    def __str__(self) -> str:
        return self.spec

    def ask(self, group: Group, *given: Any) -> Any:
        """What the function says of a group, which it sees a copy of."""
        fix = f"see what a {self.name} takes: docs/algorithm.md"
        with users_code(f"{self.name} {self.spec!r} failed", fix=fix), unmoved():
            answer = load(self.spec)(group.copy(), *given)
            return list(answer) if isinstance(answer, Iterator) else answer

    def refused(self, answer: Any, wanted: str, asked_of: str = "") -> UsageError:
        """The error for an answer that cannot be used, with the place of the function that gave it."""
        said = f"{self.name} {self.spec!r} returned {_short(answer)}{asked_of}{self._place}"
        return UsageError(said, fix=f"a {self.name} returns {wanted}")

    @property
    def _place(self) -> str:
        """Where the function is defined, as far as it is written in Python."""
        code = getattr(load(self.spec), "__code__", None)
        return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


class OutsideCredit(Function, Credit):
    name = "credit"

    def of_groups(self, groups: Sequence[Group], learner: Learner) -> list[PerTurn]:
        return learner.ranks.broadcast([self._of(group) for group in groups] if learner.ranks.first else [])

    def _of(self, group: Group) -> PerTurn:
        lengths = [len(turns) for turns in group.turns]
        answer = self.ask(group)
        wanted = f"one finite number for every turn of every episode, [j][t], at most {MOST_POINTS:g} from 0"
        try:
            credits = [[float(value) for value in of_episode] for of_episode in answer]
        except Exception as error:  # whatever library the answer is from
            raise self.refused(answer, wanted) from error
        if [len(of_episode) for of_episode in credits] != lengths or not all(map(_is_credit, _flat(credits))):
            raise self.refused(credits, wanted, f" for episodes of {lengths} turns")
        return credits


class OutsideSelect(Function, Select):
    name = "select"
    takes = ("group", "generator")

    def kept(self, group: Group, learner: Learner) -> list[int]:
        indices = self._of(group, learner.generator) if learner.ranks.first else []
        indices, state = learner.ranks.broadcast((indices, learner.generator.get_state()))
        learner.generator.set_state(state)  # the function may have drawn from it, on the first rank alone
        return indices

    def _of(self, group: Group, generator: torch.Generator) -> list[int]:
        answer, wanted = self.ask(group, generator), "at least one index from 0 to G − 1, none twice"
        try:
            indices = [_index(value) for value in answer]
        except Exception as error:
            raise self.refused(answer, wanted) from error
        if not indices or not set(indices) <= set(range(len(group.turns))) or len(set(indices)) < len(indices):
            raise self.refused(indices, wanted, f" for {len(group.turns)} episodes")
        return indices


class OutsideGate(Function, Gate):
    name = "gate"

    def passing(self, groups: Sequence[Group]) -> list[int]:
        return [place for place, group in enumerate(groups) if self._passes(group)]

    def _passes(self, group: Group) -> bool:
        verdict = self.ask(group)
        if not isinstance(verdict, bool | np.bool_):
            raise self.refused(verdict, "True or False")
        return bool(verdict)


OUTSIDE: dict[str, type[Function]] = {"credit": OutsideCredit, "select": OutsideSelect, "gate": OutsideGate}


def _flat(credits: PerTurn) -> Iterable[float]:
    return (value for of_episode in credits for value in of_episode)


def _is_credit(value: float) -> bool:
    """Whether a loss can be computed with it: NaN is no credit, and of larger ones the gradient is infinite."""
    return abs(value) <= MOST_POINTS


def _index(value: Any) -> int:
    """A whole number, of NumPy or torch too. Raises TypeError for any other, and for a truth value: a mask."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise TypeError(f"{plain!r} is no index")
    return plain


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else text[:79] + "…"
