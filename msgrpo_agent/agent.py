"""Who plays: the protocol of everything that can, and the language agent: a model, its sampling, a prompt, a parser.

The paper calls it the language-agent policy (Lθ, G, T, ψ): Lθ is a language model, G its generation settings, T a
prompt template, and ψ: text → A ∪ {⊥} a parser, which finds one of the game's actions A in an answer, or says that
there is none (⊥, in code `None`).

An agent answers one turn at a time: `await agent.act(view)`. Whoever plays many episodes runs them concurrently;
an agent that is faster in batches collects the turns that wait (see `models/local.py`).
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from msgrpo.errors import UsageError
from msgrpo.game import Game, Scenario
from msgrpo.limits import games_code
from msgrpo.prompt import Past, Prompt, PromptTemplate
from msgrpo.text import ANSWER_TOKENS, printable

LONGEST_SPEC = 4096  # characters of an agent's name
LONGEST_TEXT = 200_000  # characters of an answer that are kept: of a longer one the end, which holds the action
_TAG = re.compile(r"</?action>", re.IGNORECASE | re.ASCII)
START_OF_REASONING, END_OF_REASONING = "<think>", "</think>"
OnText = Callable[[str], None]
FinishReason = Literal["stop", "length", "content_filter"]


class Sampling(BaseModel):
    """G, the generation settings. Temperature 0 is greedy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(ANSWER_TOKENS, ge=1)


def recorded_sampling(settings: Mapping[str, Any]) -> Sampling | None:
    """The sampling settings that a record names; None where it names none, or those of another program."""
    try:
        return Sampling.model_validate(settings.get("sampling"))
    except ValidationError:
        return None


@dataclass(frozen=True)
class View:
    """One player's turn. A language agent reads `observation` only; `game` is for players that search.

    It is the game that is being played, since a copy for every turn would cost a fifth of a random player's speed and
    more: an agent tries moves on `game.copy()`.
    """

    scenario: Scenario
    player: str
    observation: str
    game: Game
    seed: int  # of this turn's sampling: the same turn of a resumed run draws the same answer
    past: Sequence[Past] = ()  # the player's turns before this one, for templates that tell of them

    def legal(self) -> tuple[str, ...]:
        """What the player may do now. Raises GameFaultError where the game's own code fails, or takes too long."""
        with games_code(self.scenario.id):
            return self.game.legal(self.player)


@dataclass(frozen=True)
class Completion:
    """What Lθ returned for one prompt. Token ids and log-probabilities are there where the engine gives them."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float = 0.0
    reasoning: str | None = None
    action_probabilities: dict[str, float] | None = None
    retries: int = 0
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of the sampled tokens, at the sampling temperature
    model: str | None = None  # which weights answered, where the engine says so

    def __post_init__(self) -> None:
        """Raises UsageError for a text that is none."""
        if not isinstance(self.text, str):
            raise UsageError(f"the text of a Completion is {reprlib.repr(self.text)}, no str")


class ParseFailure(StrEnum):
    """Why a text holds no legal action (⊥)."""

    EMPTY = "empty"  # nothing but white space
    NO_TAG = "no_tag"  # no closed <action>…</action>
    ILLEGAL = "illegal"  # a tag, but what it holds is no action of the game
    NOT_NOW = "not_now"  # an action of the game that is not legal in this state


@dataclass(frozen=True)
class Decision:
    """What an agent answered: an action, or ⊥ (None) and why."""

    action: str | None
    failure: ParseFailure | None = None
    prompt: Prompt | None = None
    completion: Completion | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for what no record can hold: an agent of somebody's own gives it."""
        given = ("action", str), ("failure", ParseFailure), ("prompt", Prompt), ("completion", Completion)
        for name, kind in given:
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UsageError(
                    f"the {name} of a Decision is {reprlib.repr(value)}, no {kind.__name__}",
                    fix="Decision(action) with the action's name, or Decision(None) for no legal action",
                )
        if self.action is not None and self.failure is not None:
            raise UsageError(f"a Decision for {reprlib.repr(self.action)} has a failure, too: {self.failure}")


class LanguageModel(Protocol):
    """Lθ. `complete` raises EndpointError when there is no answer; `actions` asks for their probabilities."""

    name: str

    @property
    def extra_settings(self) -> Mapping[str, Any]:
        """Settings beside sampling that change the answers (weights, request body), for the record."""
        ...

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Completion: ...

    async def close(self) -> None: ...


@runtime_checkable
class InRounds(Protocol):
    """A model of this process (`models/local.py`): what waits together in one of its queues is answered together."""

    queues: dict[Any, Any]


def answer_in_turn(models: Iterable[LanguageModel]) -> None:
    """Let those that run here answer in rounds: how fast each is must not decide which turns are a batch."""
    here = [model for model in models if isinstance(model, InRounds)]
    for model in here[1:]:
        model.queues = here[0].queues


class Agent(Protocol):
    """Anything that plays: a language agent, a reference, a DQN, a person."""

    spec: str

    def settings(self) -> dict[str, Any]:
        """The settings that a record keeps, so that results can be compared: model, sampling, prompt template."""
        ...

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision: ...

    async def close(self) -> None: ...


def check_agent(agent: Agent) -> None:
    """Raise UsageError for what cannot play or be recorded: called before anything is played or written."""
    if isinstance(agent, str):
        raise UsageError(f"{agent!r} is the name of an agent, not an agent", fix=f"msgrpo.make_agent({agent!r})")
    if isinstance(agent, type):
        raise UsageError(f"{agent.__name__} is a class, not an agent", fix=f"make one: {agent.__name__}()")
    kind = type(agent).__name__
    missing = [name for name in ("spec", "settings", "act", "close") if not hasattr(agent, name)]
    if missing:
        raise UsageError(f"the agent {kind} has no {' and no '.join(missing)}", fix=_MEMBERS)
    spec: object = agent.spec
    if not isinstance(spec, str) or not spec.strip() or len(spec) > LONGEST_SPEC or printable(spec) != spec:
        raise UsageError(
            f"the spec of the agent {kind} is {reprlib.repr(spec)}",
            fix=f"give it a name that can be printed, of at most {LONGEST_SPEC} characters",
        )
    settings: object = agent.settings()
    try:
        if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
            raise TypeError("this is no dict whose keys are text")
        from_json(json.dumps([[[settings]]], allow_nan=False))  # within an episode; too deep, and nobody reads it
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"settings of the agent {spec} gave {reprlib.repr(settings)}, which no record can hold: {error}",
            fix="return a dict of text, finite numbers, True, False, None, and lists and dicts of these",
        ) from error


_MEMBERS = "an agent has a spec, settings(), async act(view, *, on_text=None) and async close(): docs/evaluation.md"


@dataclass
class LanguageAgent:
    """A language-agent policy: L = `model`, G = `sampling`, T = `template`, ψ = `parse_action`."""

    spec: str
    model: LanguageModel
    sampling: Sampling = field(default_factory=Sampling)
    template: PromptTemplate = field(default_factory=PromptTemplate)
    show_probabilities: bool = False

    def settings(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "sampling": self.sampling.model_dump(),
            **self.template.settings,
            **self.model.extra_settings,
        }

    def prompt(self, view: View) -> Prompt:
        """What the model reads this turn."""
        return self.template.render(view.scenario, view.observation, view.past)

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        prompt = self.prompt(view)
        legal = view.legal()
        actions = legal if self.show_probabilities else ()
        shown = None if on_text is None else (lambda text: on_text(cleaned(text)))
        raw = await self.model.complete(prompt, self.sampling, view.seed, actions=actions, on_text=shown)
        if not isinstance(raw, Completion):  # of a model of one's own
            raise UsageError(
                f"the answer of {self.model.name} is {reprlib.repr(raw)}, no Completion",
                fix='msgrpo.agent.Completion(text, "stop")',
            )
        text, reasoning = cleaned(raw.text), None if raw.reasoning is None else cleaned(raw.reasoning)
        changed = (text, reasoning) != (raw.text, raw.reasoning)
        completion = replace(raw, text=text, reasoning=reasoning) if changed else raw
        parsed = parse_action(completion.text, view.scenario.actions, legal)
        return Decision(parsed.action, parsed.failure, prompt, completion)

    async def close(self) -> None:
        await self.model.close()


def answers_in_rounds(agent: Agent) -> bool:
    """Whether which of its turns are answered together depends on when each is asked."""
    return isinstance(agent, LanguageAgent) and isinstance(agent.model, InRounds)


def cleaned(text: str) -> str:
    """A model's answer as screens, records and the parser get it: printable, and of bounded length.

    Where the part that is cut off left reasoning open, what is kept begins with the tag that says so.
    """
    if len(text) <= LONGEST_TEXT:
        return printable(text)
    start = START_OF_REASONING if in_reasoning(text[:-LONGEST_TEXT]) else ""
    return printable(start + text[len(start) - LONGEST_TEXT :])


@dataclass(frozen=True)
class Parsed:
    """`action` is None exactly when `failure` is not."""

    action: str | None
    failure: ParseFailure | None


def parse_action(text: str, actions: Sequence[str], legal: Sequence[str] | None = None) -> Parsed:
    """ψ: the action in the last closed `<action>…</action>` outside of reasoning, or why there is none, of any text.

    Case and surrounding space do not matter.

    The last one counts, because a model that reasons aloud may quote the tag before it decides. A tag that is not
    closed is no answer: in `<action>up</action> then <action>left` the action is `up`. Reasoning is what stands
    before the last `</think>`, and what stands after a `<think>` that is never closed: a model that was cut off
    while it thought has not answered. `legal` are the actions of this state, where they are not all. Time is linear
    in the length of the text.
    """
    if not text[slice(*_answer_span(text))].strip():
        return Parsed(None, ParseFailure.EMPTY)
    span = action_span(text)
    if span is None:
        return Parsed(None, ParseFailure.NO_TAG)
    tag_text = text[slice(*span)].strip()
    known, named = actions or legal or (), tag_text.casefold()
    # where names differ only in case (chess), the case counts; where it does not tell, a legal one is meant
    meant = [tag_text] if tag_text in known else [action for action in known if action.casefold() == named]
    allowed = [action for action in meant if legal is None or action in legal]
    if allowed:
        return Parsed(allowed[0], None)
    return Parsed(None, ParseFailure.NOT_NOW if meant else ParseFailure.ILLEGAL)


def _answer_span(text: str) -> tuple[int, int]:
    """(start, end) of the text without its reasoning."""
    closed = text.rfind(END_OF_REASONING)
    start = 0 if closed < 0 else closed + len(END_OF_REASONING)
    unclosed = text.find(START_OF_REASONING, start)
    return start, len(text) if unclosed < 0 else unclosed


def in_reasoning(text: str) -> bool:
    """Whether a text ends within reasoning that it has not closed."""
    return _answer_span(text)[1] < len(text)


def action_span(text: str) -> tuple[int, int] | None:
    """(start, end) of what the last closed action tag outside of reasoning holds; None without one."""
    start: int | None = None
    span: tuple[int, int] | None = None
    for tag in _TAG.finditer(text, *_answer_span(text)):
        if not tag.group().startswith("</"):
            start = tag.end()
        elif start is not None:
            span, start = (start, tag.start()), None
    return span


def thought(text: str) -> str:
    """The text of an answer before its last action tag, for a screen."""
    span = action_span(text)
    return printable(text[: span[0] - len("<action>")] if span else text).strip()
