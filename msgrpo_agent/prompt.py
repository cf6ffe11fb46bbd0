"""T: the prompt of one turn, built from the current observation, and from earlier turns where a template says so.

What never changes within an episode (instructions, rules, examples) comes first and the state last, so that all
turns of a scenario share one prefix, which engines compute once.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msgrpo.errors import UsageError, first_fault, nearest
from msgrpo.game import AnyText, Scenario
from msgrpo.text import Clean

ASK = "You are playing a text game. Look at the state{how}"
REST = "with the action in tags, like <action>{example}</action>.\nRules: {rules}\nActions: {actions}\nState: "
INSTRUCTIONS = ASK.replace("{how}", ", think briefly, then choose one action. End your answer ") + REST
# How a model is asked, by name: `brief` is what nano was built for and what everything is compared with.
PRESETS: dict[str, str] = {
    "brief": INSTRUCTIONS,
    "none": ASK.replace("{how}", " and choose one action. Do not explain; answer ") + REST,
    "free": ASK.replace(
        "{how}", ", reason step by step for as long as you need, then choose one action. End your answer "
    )
    + REST,
}
FIELDS = ("rules", "actions", "example", "state")
MOST_LISTED = 40  # actions; where there are more, those that are legal stand with the state
MOST_HISTORY = 1000
LONGEST_SHOWN = 80  # characters of a wrong --prompt that a message repeats


class Past(NamedTuple):
    """An earlier turn in a prompt: what the player saw, and what was chosen (None: no legal action)."""

    state: str
    action: str | None


class Example(BaseModel):
    """A state and a good answer to it, for few-shot prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: str
    answer: str


@dataclass(frozen=True)
class Prompt:
    """`prefix` is the same in every turn of a scenario; `state` is the observation and what is around it."""

    prefix: str
    state: str
    system: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """One user message, which chat templates without a system role take too; before it the system's, if any."""
        asked = [{"role": "user", "content": self.prefix + self.state}]
        return [{"role": "system", "content": self.system}, *asked] if self.system else asked


@lru_cache(maxsize=256)
def _filled(instructions: str, rules: str, actions: str, example: str) -> tuple[str, str]:
    """The instructions of a scenario, before the state and after it: the same for every turn."""
    values = {"rules": rules, "actions": actions, "example": example}
    before, _, after = instructions.partition("{state}")
    fill = partial(re.sub, r"\{(rules|actions|example)\}", lambda match: values[match[1]])
    return fill(before), fill(after)


class PromptTemplate(BaseModel):
    """`instructions` may use {rules}, {actions}, {example} and {state}; without {state} the state follows at the end.

    `examples` stand before the state, as do the last `history` turns, each introduced by the words that introduce the
    state (`State: `). `name` is what tables call the template.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Clean = "brief"
    instructions: Clean = INSTRUCTIONS
    system: Clean = ""
    history: int = Field(0, ge=0, le=MOST_HISTORY)
    examples: tuple[Example, ...] = ()

    def render(self, scenario: Scenario, observation: str, past: Sequence[Past] = ()) -> Prompt:
        """The prompt of a turn; `past` are the player's turns before it, the last one last."""
        actions = scenario.actions if len(scenario.actions) <= MOST_LISTED else ()
        own_words = isinstance(scenario.actions, AnyText)
        unlisted = "your own words" if own_words else "those that the state names as legal"
        example = actions[0] if actions else "…"
        before, after = _filled(self.instructions, scenario.rules, ", ".join(actions) or unlisted, example)
        label = before.rpartition("\n")[2]
        shown = "".join(f"{example.state}\n{example.answer}\n{label}" for example in self.examples)
        history = [
            f"{turn.state}\nYou chose {turn.action or 'no legal action'}.\n{label}" for turn in self.kept(past)
        ]
        return Prompt(before + shown, "".join(history) + observation + after, self.system)

    def kept(self, past: Sequence[Past]) -> Sequence[Past]:
        """The last `history` turns."""
        return past[len(past) - self.history :] if 0 < self.history < len(past) else past if self.history else ()

    @property
    def hash(self) -> str:
        """A hash of the template for records: results with different hashes are not comparable."""
        rest = self.model_dump(exclude={"name", "instructions"}, exclude_defaults=True)
        content = self.instructions + (json.dumps(rest, sort_keys=True) if rest else "")
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def settings(self) -> dict[str, Any]:
        """The template for a record: its hash, and unless it is the default one all of its fields."""
        whole = {} if self == PromptTemplate() else {"prompt": self.model_dump(exclude_defaults=True)}
        return {"template": self.hash, **whole}


def recorded_template(settings: dict[str, Any]) -> PromptTemplate | None:
    """The template that a record's settings name; None if the record lacks it and it is not the default one."""
    try:
        template = PromptTemplate.model_validate(settings.get("prompt", {}))
    except ValidationError:
        return None
    return template if template.hash == settings.get("template") else None


def make_template(name: str) -> PromptTemplate:
    """A preset by its name, or a file: TOML with the template's fields, or any other text, which is the instructions.

    Raises UsageError for an unknown name, a file that cannot be read, and a field in braces that there is not.
    """
    if name in PRESETS:
        return PromptTemplate(name=name, instructions=PRESETS[name])
    file = Path(name)
    try:
        there = file.is_file()
    except OSError:  # the prompt itself, too long for a file's name
        there = False
    if not there:
        shown = name if len(name) < LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
        raise UsageError(f"--prompt {shown!r} is neither a preset nor a file", fix=nearest(name, PRESETS))
    try:
        text = file.read_text(encoding="utf-8")
        fields = tomllib.loads(text) if file.suffix == ".toml" else {"instructions": text}
        template = PromptTemplate.model_validate({"name": file.stem} | fields)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"--prompt {name} cannot be read: {error}") from error
    except ValidationError as error:
        known = "its fields: " + ", ".join(PromptTemplate.model_fields)
        raise UsageError(f"--prompt {name}: {first_fault(error, 'the template')}", fix=known) from error
    for placeholder in re.findall(r"\{([a-z_]+)\}", template.instructions):
        if placeholder not in FIELDS:
            reason = f"--prompt {name}: there is no field {{{placeholder}}}"
            raise UsageError(reason, fix=nearest(placeholder, FIELDS))
    if template.instructions.count("{state}") > 1:
        raise UsageError(f"--prompt {name} has {{state}} twice", fix="leave one of them")
    return template
