"""Rubric gates: a function that accepts or rejects whole groups before an update compares their episodes.

A rubric as a gate and not as a reward (DRO: "rubrics as gates") cannot be traded against the return: what it rejects
teaches nothing, however well it scored. `--set gate=module:function` names any function of a `Group` that
returns whether the group counts; it is imported from what is installed or on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import numpy as np

from msgrpo.errors import UsageError, users_code
from msgrpo.train.collect import Group
from msgrpo.train.nano.words import Words, truth

Gate = Callable[[Group], bool]
EXAMPLE = "msgrpo.train.gates:true_words"
HOW = f"module:function, like {EXAMPLE}"


@cache
def gate_named(spec: str | None) -> Gate:
    """The function that `module:function` names; without a name all groups pass. Raises UsageError for another."""
    if spec is None:
        return everything
    module, _, name = spec.partition(":")
    with users_code(f"gate {spec!r} cannot be imported", fix=HOW):
        found = getattr(import_module(module), name)
    if not callable(found):
        raise UsageError(f"gate {spec!r} is no function", fix=HOW)
    gate: Gate = found
    return gate


def everything(group: Group) -> bool:
    """No gate."""
    return True


def true_words(group: Group) -> bool:
    """Whether more than half of the first thoughts of the group's episodes are true (nano's form of thought).

    All episodes of a group begin in the same state, so their first thoughts speak of one and the same board.
    """
    first = [turns[0] for turns in group.turns]
    true = sum(truth(Words.read(t.answer or ""), group.origin(j), t.player).whole for j, t in enumerate(first))
    return 2 * true > len(first)


def accepted(groups: Sequence[Group], spec: str | None) -> list[int]:
    """The places of the groups that the gate lets through.

    Of several ranks the first one asks for all: a gate need not be a pure function, and two verdicts about one group
    would be two updates. Raises UsageError where it fails, or returns anything but a bool.
    """
    gate = gate_named(spec)
    return [place for place, group in enumerate(groups) if _passes(gate, group, spec)]


def _passes(gate: Gate, group: Group, spec: str | None) -> bool:
    with users_code(f"gate {spec!r} failed", fix="a gate takes one msgrpo.train.collect.Group"):
        verdict = gate(group)
    if not isinstance(verdict, bool | np.bool_):
        raise UsageError(f"gate {spec!r} returned {verdict!r}", fix="a gate returns True or False")
    return bool(verdict)
