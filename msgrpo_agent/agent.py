"""The LAP (Lθ, G, T, ψ) and the protocol of everything that can play.

An agent answers one turn at a time: `await agent.act(view)`. Whoever plays many episodes runs them concurrently;
an agent that is faster in batches collects the turns that wait (see `models/local.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from msgrpo.game import Game, Scenario
from msgrpo.limits import games_code
from msgrpo.parse import START_OF_REASONING, ParseFailure, in_reasoning, parse_action
from msgrpo.prompt import Past, Prompt, PromptTemplate
from msgrpo.text import printable

LONGEST_TEXT = 200_000  # characters of an answer that are kept: of a longer one the end, which holds the action
OnText = Callable[[str], None]
FinishReason = Literal["stop", "length", "content_filter"]


class Sampling(BaseModel):
    """G, the generation settings. Temperature 0 is greedy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(256, ge=1)


@dataclass(frozen=True)
class View:
    """One player's turn. A language agent reads `observation` only; `game` is for players that search."""

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


@dataclass(frozen=True)
class Decision:
    """What an agent answered: an action, or ⊥ (None) and why."""

    action: str | None
    failure: ParseFailure | None = None
    prompt: Prompt | None = None
    completion: Completion | None = None


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


class Agent(Protocol):
    """Anything that plays: a language agent, a reference, a DQN, a person."""

    spec: str

    def settings(self) -> dict[str, Any]:
        """The settings that a record keeps, so that results can be compared: model, sampling, prompt template."""
        ...

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision: ...

    async def close(self) -> None: ...


def cleaned(text: str) -> str:
    """A model's answer as screens, records and the parser get it: printable, and of bounded length.

    Where the part that is cut off left reasoning open, what is kept begins with the tag that says so.
    """
    if len(text) <= LONGEST_TEXT:
        return printable(text)
    start = START_OF_REASONING if in_reasoning(text[:-LONGEST_TEXT]) else ""
    return printable(start + text[len(start) - LONGEST_TEXT :])


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
        text, reasoning = cleaned(raw.text), None if raw.reasoning is None else cleaned(raw.reasoning)
        changed = (text, reasoning) != (raw.text, raw.reasoning)
        completion = replace(raw, text=text, reasoning=reasoning) if changed else raw
        parsed = parse_action(completion.text, view.scenario.actions, legal)
        return Decision(parsed.action, parsed.failure, prompt, completion)

    async def close(self) -> None:
        await self.model.close()
