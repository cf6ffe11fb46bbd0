"""The registry of the method's choices: each is named in one setting, with what it takes in parentheses.

    credit=episode        credit="to-go(gamma=0.6)"        select="aaw(keep=8)"        credit=my_file.py:my_credit

MS-GRPO's own choices are in `paper.py`; every other file holds a rival: its equation, its source, its settings. To
add one, write a file with a class (`contract.py` has the interfaces) and name it in `RIVALS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from msgrpo.errors import nearest
from msgrpo.train.rivals.contract import Choice
from msgrpo.trust import CHOICES

RIVALS: Mapping[str, Mapping[str, str]] = {
    "credit": {
        "episode": "rivals.paper:WholeReturn",
        "to-go": "rivals.to_go:ToGo",
        "state": "rivals.state:StateReturn",
        "state-action": "rivals.state_action:StateAction",
        "lambda": "rivals.gae:Lambda",
        "critic": "rivals.critic:Critic",
        "simulated": "rivals.simulated:Simulated",
    },
    "select": {
        "aaw": "rivals.paper:AAW",
        "uniform": "rivals.uniform:Uniform",
        "spread": "rivals.spread:Spread",
        "all": "rivals.all:All",
    },
    "gate": {
        "true-words": "nano.gate:TrueWords",
        "widest": "rivals.widest:Widest",
    },
    "objectives": {
        "fixed": "rivals.objectives:Fixed",
        "variance": "rivals.objectives:Variance",
    },
    "teacher": {
        "optimal": "rivals.optimal:Optimal",
        "model": "rivals.distilled:Model",
        "own-words": "nano.own_words:OwnWords",
    },
    "explore": {
        "branch": "rivals.branch:Branch",
        "entropy": "rivals.entropy:Entropy",
        "refill": "rivals.refill:Refill",
        "skip": "rivals.skip:Skip",
    },
    "loss": {
        "clip": "rivals.paper:Clip",
        "gspo": "rivals.ratio:Gspo",
        "turn": "rivals.ratio:TurnRatio",
        "cispo": "rivals.ratio:Cispo",
        "dual": "rivals.ratio:Dual",
        "icepop": "rivals.ratio:Icepop",
        "decoupled": "rivals.decoupled:Decoupled",
    },
}


def choose(kind: str, spec: str) -> Choice:
    """The choice that `spec` names: `name`, `name(key=value, …)`, or `file.py:function`.

    Raises ValueError for a name that is not there, or settings that it does not take.
    """
    if is_outside(spec) and kind in CHOICES:
        from msgrpo.train.rivals.outside import OUTSIDE

        return OUTSIDE[kind](spec=spec.strip())
    if re.match(r"[^(=]*[.:]", spec):
        raise ValueError(_no_function(kind, spec))
    name, settings = parsed(spec)
    if name not in RIVALS[kind]:
        raise ValueError(f"no {kind} is named {name!r}: {nearest(name, RIVALS[kind])}")
    chosen = rival(kind, name)
    if chosen.name != name:  # a run's files would name another choice, and --resume would go on with that
        raise ValueError(
            f"{kind}={name}: its class {chosen.__name__} has name = {chosen.name!r}: write {name!r} there"
        )
    try:
        return chosen.model_validate(settings)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        takes = ", ".join(chosen.model_fields) or "nothing"
        if fault["type"] == "extra_forbidden":
            raise ValueError(f"{kind}={name} does not take {key}; it takes {takes}") from error
        given = f", not {fault['input']!r}" if fault["type"] != "missing" else ""
        said = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{kind}={name}: {key}: {said}{given}; it takes {takes}") from error


def _no_function(kind: str, spec: str) -> str:
    """Why `spec`, which names a file or a module, is no choice of this kind."""
    if kind in CHOICES:
        return f"{spec!r}: a function of yours is named file.py:function, and takes no settings"
    return (
        f"{spec!r}: only {', '.join(CHOICES)} take a function of yours; {kind} takes {', '.join(RIVALS[kind])}, or a "
        "class that you add to msgrpo.train.rivals"
    )


def rival(kind: str, name: str) -> type[Choice]:
    """The class of a choice that `RIVALS` lists."""
    module, _, class_name = RIVALS[kind][name].partition(":")
    chosen: type[Choice] = getattr(import_module(f"msgrpo.train.{module}"), class_name)
    return chosen


def is_outside(spec: str) -> bool:
    """Whether it names a function outside: `file.py:function` or `module:function`."""
    return re.search(r":[A-Za-z_]\w*\s*$", spec) is not None


def parsed(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of `name(key=value, …)`. Raises ValueError for another form."""
    form = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", spec, re.DOTALL)
    if form is None:
        raise ValueError(f"{spec!r} is not name or name(key=value, …)")
    settings: dict[str, Any] = {}
    for part in filter(str.strip, (form[2] or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals or key.strip() in settings:
            raise ValueError(f"{part.strip()!r} in {spec!r} is not one key=value (no value holds a comma)")
        settings[key.strip()] = value.strip()
    return form[1], settings
