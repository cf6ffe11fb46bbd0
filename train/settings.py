"""Every setting of a run, its choices, and what they take in parentheses: `msgrpo train --settings`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.table import Table
from rich.text import Text

from msgrpo.prompt import PromptTemplate
from msgrpo.train.backends import BACKENDS, ROLLOUTS
from msgrpo.train.config import NUMBERED, TrainConfig
from msgrpo.train.rivals import RIVALS, rival


@dataclass(frozen=True)
class Part:
    """One of what a setting takes in parentheses. `default` is None where a value has to be given."""

    name: str
    default: str | None
    about: str


@dataclass(frozen=True)
class Option:
    """One of a setting's choices."""

    name: str
    about: str
    takes: list[Part]

    @property
    def written(self) -> str:
        """`name(key=default, …)`."""
        parts = [f"{part.name}={'…' if part.default is None else part.default}" for part in self.takes]
        return f"{self.name}({', '.join(parts)})" if parts else self.name


@dataclass(frozen=True)
class Setting:
    """`value` is what a run would have."""

    name: str
    value: str
    about: str
    options: list[Option]


def settings_of(config: TrainConfig) -> list[Setting]:
    """In the order of `TrainConfig`."""
    return [
        Setting(name, _value(getattr(config, name)), field.description or "", _options(name))
        for name, field in TrainConfig.model_fields.items()
    ]


def settings_table(config: TrainConfig) -> Table:
    """A line for each setting, choice, and name in parentheses; text is never read as markup."""
    table = Table("setting", "here", "", box=None, pad_edge=False)
    for setting in settings_of(config):
        table.add_row(Text(setting.name, "bold"), Text(setting.value), Text(setting.about))
        for option in setting.options:
            table.add_row("", Text(f"  {option.written}", "dim"), Text(option.about, "dim"))
        for name, about in _explained(setting.options):
            table.add_row("", Text(f"    {name}", "dim italic"), Text(about, "dim italic"))
    return table


def _explained(options: Sequence[Option]) -> list[tuple[str, str]]:
    """What the names in parentheses mean, each once; one that means several things, with the choices that take it."""
    takers: dict[tuple[str, str], list[str]] = {}
    for option in options:
        for part in option.takes:
            takers.setdefault((part.name, part.about), []).append(option.name)
    meanings = Counter(name for name, _ in takers)
    return [
        (name if meanings[name] == 1 else f"{name} ({', '.join(of)})", about) for (name, about), of in takers.items()
    ]


def _value(value: object) -> str:
    return value.written if isinstance(value, PromptTemplate) else _text(value)


def _options(name: str) -> list[Option]:
    if name in RIVALS:
        return [_option(choice, rival(name, choice)) for choice in RIVALS[name]]
    kinds: Mapping[str, Mapping[str, type[BaseModel]]] = {"rollouts": ROLLOUTS, "backend": BACKENDS}
    if name in NUMBERED:
        number, *parts = _parts(NUMBERED[name])
        return [Option(str(number.default), number.about, parts)]
    return [_option(choice, kind) for choice, kind in kinds.get(name, {}).items()]


def _option(name: str, kind: type[BaseModel]) -> Option:
    about = (kind.__doc__ or "").strip().split("\n")[0]
    return Option(name, about, _parts(kind))


def _parts(kind: type[BaseModel]) -> list[Part]:
    return [
        Part(
            name,
            None if field.default is PydanticUndefined else _text(field.default),
            field.description or "",
        )
        for name, field in kind.model_fields.items()
    ]


def _text(value: object) -> str:
    """As it is written on the command line."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
