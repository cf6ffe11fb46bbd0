"""The prompt of one turn, from the policy's prompt template (T of the paper, `agent.py`), and its token ids.

`PromptTemplate` builds the text from the current observation, and from earlier turns where it says so; `ChatFormat`
makes it into token ids by the model's own chat template.

What never changes within an episode (instructions, rules, examples) comes first and the state last, so that all
turns of a scenario share one prefix, which engines compute once.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from msgrpo.errors import LONGEST_REASON, ModelError, TookTooLongError, UsageError, first_fault, nearest
from msgrpo.files import expanded, is_file
from msgrpo.game import AnyText, Scenario
from msgrpo.limits import memory_within, within
from msgrpo.text import ANSWER_TOKENS, Clean

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
# Of chat templates:
RENDER_S = 10.0  # seconds of one prompt: they take milliseconds
RENDER_BYTES = 2**31  # of memory: they take kilobytes
MOST_ADDED = 200_000  # characters that one may add to a prompt
PROVED_ON = 4  # prompts on which a short way is compared with the long one
FOR_TEMPLATES = {"tools", "documents"}  # the parameters of `apply_chat_template` that they read
MOST_HEADS = 64  # beginnings of prompts whose tokens are kept
_MARK = "\u241fcontent\u241f"


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

    def __post_init__(self) -> None:
        """Raises UsageError for what is no text: an agent of somebody's own gives it."""
        for name, value in vars(self).items():
            if not isinstance(value, str):
                raise UsageError(f"the {name} of a Prompt is {reprlib.repr(value)}, no str")

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
    def written(self) -> str:
        """What `--prompt` takes for it: a preset's name, or its fields as JSON."""
        if PRESETS.get(self.name) == self.instructions and self == make_template(self.name):
            return self.name
        return json.dumps({"name": self.name} | self.model_dump(exclude_defaults=True))

    @property
    def settings(self) -> dict[str, Any]:
        """The template for a record: its hash, and unless it is the default one all of its fields."""
        whole = {} if self == PromptTemplate() else {"prompt": self.model_dump(exclude_defaults=True)}
        return {"template": self.hash, **whole}


class Asked(BaseModel):
    """How a model is asked: its prompt, the arguments of its chat template, and how long its answers were when it
    learned. Files that say so hold more."""

    model_config = ConfigDict(frozen=True)

    prompt: PromptTemplate
    chat: dict[str, Any] = {}
    max_tokens: int = Field(ANSWER_TOKENS, ge=1)

    @field_validator("chat", mode="before")
    @classmethod
    def _read_none(cls, value: Any) -> Any:
        return {} if value is None else value

    def but(self, prompt: PromptTemplate | None, chat: Mapping[str, Any] | None) -> Asked:
        """The same with what a person gives."""
        chosen = self.chat if chat is None else dict(chat)
        return Asked(prompt=prompt or self.prompt, chat=chosen, max_tokens=self.max_tokens)

    @property
    def said(self) -> str:
        """In words."""
        arguments = f" and the chat template's arguments {json.dumps(self.chat)}" if self.chat else ""
        return f"the prompt {self.prompt.name!r}{arguments}"

    @property
    def options(self) -> list[str]:
        """On the command line; none where it is asked as usual."""
        prompt = [] if self.prompt.hash == PromptTemplate().hash else ["--prompt", self.prompt.written]
        return [*prompt, *(["--chat", json.dumps(self.chat)] if self.chat else [])]

    @property
    def length(self) -> list[str]:
        """The option of `msgrpo eval` and `play` without which they would cut its answers off; mostly none."""
        return ["--max-tokens", str(self.max_tokens)] if self.max_tokens > ANSWER_TOKENS else []


USUAL = Asked(prompt=PromptTemplate())


def recorded_template(settings: dict[str, Any]) -> PromptTemplate | None:
    """The template that a record's settings name; None if the record lacks it and it is not the default one."""
    try:
        template = PromptTemplate.model_validate(settings.get("prompt", {}))
    except ValidationError:
        return None
    return template if template.hash == settings.get("template") else None


def json_object(option: str, text: str, example: str) -> dict[str, Any]:
    """The JSON object that an option holds. Raises UsageError for anything else."""
    fix = f"{option} '{example}'"
    try:
        value = json.loads(text, parse_constant=_no_json)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} is no JSON: {error}", fix=fix) from error
    if not isinstance(value, dict):
        raise UsageError(f"{option} {text} is no JSON object", fix=fix)
    return value


def _no_json(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def is_json(name: str) -> bool:
    """Whether a prompt is given by its fields, and names no file."""
    return re.match(r'\s*\{\s*"', name) is not None


def make_template(name: str) -> PromptTemplate:
    """A preset by its name, or a file: TOML with the template's fields, or any other text, which is the instructions.
    Or the fields themselves as JSON, as `written` gives them.

    Raises UsageError for an unknown name, a file that cannot be read, and a field in braces that there is not.
    """
    if name in PRESETS:
        return PromptTemplate(name=name, instructions=PRESETS[name])
    shown = name if len(name) < LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
    if is_json(name):
        said, fields = f"--prompt {shown}", {"name": "given"} | json_object("--prompt", name, '{"history": 2}')
    else:
        said, fields = f"--prompt {name}", _fields(name, shown)
    try:
        template = PromptTemplate.model_validate(fields)
    except ValidationError as error:
        known = "its fields: " + ", ".join(PromptTemplate.model_fields)
        raise UsageError(f"{said}: {first_fault(error, 'the template')}", fix=known) from error
    for placeholder in re.findall(r"\{([a-z_]+)\}", template.instructions):
        if placeholder not in FIELDS:
            raise UsageError(f"{said}: there is no field {{{placeholder}}}", fix=nearest(placeholder, FIELDS))
    if template.instructions.count("{state}") > 1:
        raise UsageError(f"{said} has {{state}} twice", fix="leave one of them")
    return template


def _fields(name: str, shown: str) -> dict[str, Any]:
    """What a prompt's file says; it is called after the file."""
    if not is_file(name):  # it may be the prompt itself, too long for a file's name
        raise UsageError(f"--prompt {shown!r} is neither a preset nor a file", fix=nearest(shown, PRESETS))
    file = expanded(name)
    try:
        text = file.read_text(encoding="utf-8")
        return {"name": file.stem} | (tomllib.loads(text) if file.suffix == ".toml" else {"instructions": text})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"--prompt {file} cannot be read: {error}") from error


class Given(TypedDict):
    """What a person says of how a model is asked, as `make_agent` and `teach` take it; None for nothing."""

    template: PromptTemplate | None
    chat: dict[str, Any] | None


def as_given(prompt: str | None, chat: str | None) -> Given:
    """What the options `--prompt` and `--chat` say."""
    return Given(
        template=None if prompt is None else make_template(prompt),
        chat=None if chat is None else json_object("--chat", chat, '{"enable_thinking": false}'),
    )


@dataclass
class _Frame:
    """What the template writes before and after a text, and on how many prompts that is still to prove."""

    before: str
    after: str
    to_prove: int = PROVED_ON
    holds: bool = True


@dataclass
class _Head:
    """The lines with which prompts of one prefix begin, their token ids, and on how many they are still to prove."""

    text: str
    ids: list[int]
    to_prove: int = PROVED_ON


def _own_parameters(tokenizer: Any) -> set[str]:
    """The parameters of `apply_chat_template` that no template reads; one of them is another template."""
    named = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    return {one.name for one in named if one.kind is not one.VAR_KEYWORD} - FOR_TEMPLATES


class ChatFormat:
    """The chat template, rendered once around a mark in whose place each prompt's text is put.

    That is right for most templates and wrong for those that trim the text, or look at it. So the first prompts are
    rendered both ways; at the first difference every prompt goes through the template itself. Each system message has
    its own rendering, and its own proof. `arguments` are the template's own (Qwen3: `enable_thinking`).

    Most of a prompt is its prefix, so the prefix is made into tokens once, up to the start of its last line, where
    tokenizers of chat models begin a new token. That, too, is proved on the first prompts of each prefix, and is
    given up for a prefix where the ids differ.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        if ours := sorted(self.arguments.keys() & _own_parameters(tokenizer)):
            raise self._unusable(f"{', '.join(ours)} would change how it is used, not what it is told")
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template",
                fix="use an instruction-tuned model",
            )
        if large := re.search(r"\d{7,}|\*\*", str(tokenizer.chat_template)):
            raise self._unusable(
                f"it holds {large[0][:20]!r}, which no template needs and memory may not have room for"
            )
        self._frames: dict[str, _Frame] = {}
        self._frame("")
        self._backend = getattr(tokenizer, "backend_tokenizer", None)  # called by itself it costs half
        self._heads: dict[str, _Head] = {}

    def ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of each prompt, with the template's opening of the answer at the end."""
        texts = [self._text(prompt) for prompt in prompts]
        heads = [self._head_for(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        rests = self._encoded([text[len(head.text) :] for text, head in zip(texts, heads, strict=True)])
        rows = [head.ids + rest for head, rest in zip(heads, rests, strict=True)]
        for i, head in enumerate(heads):
            if head.to_prove:
                head.to_prove -= 1
                (whole,) = self._encoded([texts[i]])
                if whole != rows[i]:
                    head.text, head.ids, head.to_prove = "", [], 0
                    return self.ids(prompts)
        return rows

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        if self._backend is None:
            encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            return encoded
        self._backend.no_truncation()
        self._backend.no_padding()
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _head_for(self, prompt: Prompt, text: str) -> _Head:
        """The lines that the prompt has in common with the others of its prefix, if it has.

        The last line of the prefix goes on with the state, so it is not among them.
        """
        lines = prompt.prefix[: prompt.prefix.rfind("\n") + 1]
        begun = self._frame(prompt.system).before + lines
        goes_on = prompt.prefix[len(lines) : len(lines) + 1]
        if not lines or not goes_on.strip() or not text.startswith(begun):
            return _Head("", [], 0)
        if begun not in self._heads:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            self._heads[begun] = _Head(begun, self._encoded([begun])[0])
        return self._heads[begun]

    def _text(self, prompt: Prompt) -> str:
        frame = self._frame(prompt.system)
        if not frame.holds:
            return self._rendered(prompt)
        text = frame.before + prompt.prefix + prompt.state + frame.after
        if frame.to_prove:
            frame.to_prove -= 1
            whole = self._rendered(prompt)
            frame.holds = text == whole
            return whole
        return text

    def _frame(self, system: str) -> _Frame:
        if system not in self._frames:
            if len(self._frames) >= MOST_HEADS:
                self._frames.clear()
            before, _, after = self._rendered(Prompt("", _MARK, system)).partition(_MARK)
            self._frames[system] = _Frame(before, after)
        return self._frames[system]

    def _rendered(self, prompt: Prompt) -> str:
        """The template's text of a prompt. A template is somebody's program, so its time and its text are bounded."""
        asked = prompt.prefix + prompt.state
        try:
            with (
                within(RENDER_S, f"the chat template of {self.tokenizer.name_or_path!r}"),
                memory_within(RENDER_BYTES),
            ):
                text = self.tokenizer.apply_chat_template(
                    prompt.messages, tokenize=False, add_generation_prompt=True, **self.arguments
                )
        except TookTooLongError:
            raise self._unusable(f"it has not ended after {RENDER_S:g} s") from None
        except MemoryError:
            raise self._unusable(f"it asked for more than {RENDER_BYTES >> 30} GiB of memory") from None
        except Exception as error:  # whatever a program raises
            raise self._unusable(f"{str(error) or type(error).__name__}"[:LONGEST_REASON]) from error
        if not isinstance(text, str) or len(text) > len(asked) + len(prompt.system) + MOST_ADDED:
            raise self._unusable(f"it makes {len(text):,} characters of {len(asked):,}")
        if prompt.state.strip() not in text:
            raise self._unusable("it leaves the prompt out, or changes it")
        return text

    def _unusable(self, why: str) -> ModelError:
        fix = (
            f"its arguments are {self.arguments}: change them with --chat JSON, of msgrpo train --set chat=JSON"
            if self.arguments
            else None
        )
        return ModelError(f"the chat template of {self.tokenizer.name_or_path!r} cannot be used: {why}", fix=fix)
