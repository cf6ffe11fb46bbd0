"""One way to name an agent everywhere: `nano`, `nano:SCENARIO` (an adapter that comes with it), `random`, `optimal`,
`adapter:DIR`, `base:DIR` (a base model as it is), `dqn:DIR`, `endpoint:URL#model`.

Packages that an agent needs are imported when it is made.
"""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgrpo.agent import Agent, LanguageAgent, LanguageModel, Sampling, check_agent
from msgrpo.errors import UsageError, check_given, nearest
from msgrpo.extras import needs
from msgrpo.files import expanded
from msgrpo.models.asked import taught_as, trained_as
from msgrpo.models.paths import shipped_adapters
from msgrpo.prompt import USUAL, Asked, PromptTemplate
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.text import printable

PLAIN = ("random", "optimal", "human", "nano")
MODELS = ("nano", "adapter", "base", "endpoint")  # kinds of language models, before the colon
KINDS = (*MODELS, "dqn")
GRAMMAR = (
    "random, optimal, human, nano, nano:SCENARIO, adapter:DIR, base:DIR, dqn:DIR, endpoint:http://host:8000/v1#model"
)
DEFAULT_SAMPLING = Sampling()


def is_language_model(spec: str) -> bool:
    """Whether it names a language model, whose turns have a prompt and an answer."""
    kind, sign, rest = spec.partition(":")
    return spec == "nano" or (bool(sign and rest) and kind in MODELS)


UNSEEN = "\u115f\u1160\u2800"  # letters and signs by their category, and blank in every font
# Letters of other alphabets that look like those that names of agents are made of.
ALIKE = str.maketrans(
    "\u0430\u0251\u03b1\u0441\u0501\u0435\u04bb\u0570\u0456\u0131\u03b9\u0458\u04cf\u043c\u043f\u0578\u03b7"
    "\u043d\u043e\u03bf\u0585\u0440\u03c1\u051b\u0455\u0442\u03c4\u057d\u03c5\u0445\u03c7\u0443\u03b3\u03bd\u03bc\u03ba\u043a\u0432\u03b2",
    "aaacdehhiiijlmnnnhoooppqsttuuxxyyvmkkbb",
)


def as_read(text: str) -> str:
    """A name as a reader takes it: without capitals, accents, blanks too many and characters that nobody sees, and
    with our letters for those of other alphabets that look the same.
    """
    plain = unicodedata.normalize("NFKD", text)
    seen = (one for one in plain if unicodedata.category(one) not in ("Cf", "Mn", "Me") and one not in UNSEEN)
    return " ".join("".join(seen).split()).casefold().translate(ALIKE)


def names_an_agent(text: str) -> bool:
    """Whether it is an agent's spec, or reads like one, so that nothing else may be called so."""
    kind, sign, _ = as_read(text).partition(":")
    return kind in KINDS if sign else kind in PLAIN


def imitates(spec: str) -> bool:
    """Whether a recorded spec only reads like one of ours: `Random ` is no agent, and stands in a table like one."""
    kind, sign, _ = spec.partition(":")
    return kind not in (KINDS if sign else PLAIN) and names_an_agent(spec)


def check_agents(agents: Iterable[Agent]) -> None:
    """Raise UsageError for an agent that cannot play or be recorded, or whose spec reads like another agent's."""
    for agent in agents:
        check_agent(agent)
        if imitates(agent.spec):
            raise UsageError(f"{agent.spec!r} reads like another agent's name", fix='give it another, like "mine"')


def is_anothers(name: str, spec: str, others: Iterable[str]) -> bool:
    """Whether a reader of a table takes an agent's name for another agent: one of ours, or one of the `others`."""
    alike = (as_read(other) for other in others if other != spec)
    return as_read(name) != as_read(spec) and (names_an_agent(name) or as_read(name) in alike)


def checked_names(names: Mapping[str, str], specs: Collection[str]) -> dict[str, str]:
    """What tables shall call the agents of these specs, on one line each. Raises UsageError for what they cannot."""
    check_given("names", names, Mapping, fix='names={"adapter:runs/a": "mine"}')
    called = dict[str, str]()
    for spec, name in names.items():
        if spec not in specs:
            raise UsageError(f"no agent here is {spec!r}, to be called {name!r}", fix=nearest(spec, specs))
        if not isinstance(name, str) or not name.strip():
            raise UsageError(f"{name!r} is no name for {spec}", fix=f"--name {shlex.quote(f'{spec}=mine')}")
        called[spec] = " ".join(printable(name).split())
        if is_anothers(called[spec], spec, specs):
            raise UsageError(
                f"{spec} cannot be called {called[spec]!r}: whoever reads a table takes that for another agent",
                fix=f"--name {shlex.quote(f'{spec}=mine')}",
            )
    if len({called.get(spec, spec) for spec in specs}) < len(specs):
        raise UsageError(f"two agents would have one name: {', '.join(called.values())}", fix="give each its own")
    return called


def shipped(scenario: str) -> Path:
    """The adapter of nano that was trained on this scenario. Raises UsageError where there is none."""
    there = shipped_adapters()
    if scenario not in there:
        known = f"one of {', '.join(f'nano:{name}' for name in there)}; or " if there else ""
        raise UsageError(
            f"nano comes with no adapter for {scenario!r}",
            fix=f"{known}train one: msgrpo train {shlex.quote(scenario)} --out DIR",
        )
    return there[scenario]


def learned_as(spec: str) -> Asked:
    """How a model of this machine was asked while it learned; as usual where nothing says so. Raises ModelError where
    what says it is damaged.
    """
    kind, _, rest = spec.partition(":")
    if kind == "base" and rest:
        return taught_as(rest) or USUAL
    if kind in ("adapter", "nano") and rest:
        return trained_as(shipped(rest) if kind == "nano" else expanded(rest))
    return USUAL


def cut_short(specs: Iterable[str], max_tokens: int) -> list[str]:
    """A sentence on each agent that learned with longer answers than it may give here, as far as its files say so."""
    learned = {spec: learned_as(spec) for spec in specs}
    return [
        f"{printable(spec)} learned with answers of up to {asked.max_tokens} tokens, and here they are cut off at "
        f"{max_tokens}; --max-tokens {asked.max_tokens} allows as many."
        for spec, asked in learned.items()
        if "max_tokens" in asked.model_fields_set and asked.max_tokens > max_tokens
    ]


def make_agent(
    spec: str,
    sampling: Sampling = DEFAULT_SAMPLING,
    *,
    show_probabilities: bool = False,
    endpoint: Mapping[str, Any] | None = None,
    template: PromptTemplate | None = None,
    chat: Mapping[str, Any] | None = None,
) -> Agent:
    """The agent that `spec` names; `endpoint` are further arguments of EndpointModel (headers, body, rate, …).

    `template` is how a language model is asked, and `chat` are the arguments of its chat template, which an endpoint
    gets as `chat_template_kwargs`; without them an adapter is asked as it was in its training and a taught base as it
    was taught, anything else as usual.

    Raises UsageError for a wrong spec or argument, MissingExtraError for missing packages.
    """
    check_given("the name of an agent", spec, str)
    check_given("sampling", sampling, Sampling, fix="msgrpo.agent.Sampling(temperature=0)")
    check_given("template", USUAL.prompt if template is None else template, PromptTemplate)
    for what, given in (("endpoint", endpoint), ("chat", chat)):
        check_given(what, {} if given is None else given, Mapping)
    kind, _, rest = spec.partition(":")
    if spec == "random":
        return RandomAgent()
    if spec == "optimal":
        return OptimalAgent()
    if spec == "human":
        raise UsageError("a person plays in the terminal app only", fix="msgrpo play SCENARIO --agent human")
    if spec == "nano" or (kind in ("adapter", "nano", "base") and rest):
        model, prompt = _of_this_machine(spec, template, chat)
        return LanguageAgent(spec, model, sampling, prompt, show_probabilities)
    if kind == "endpoint":
        served = _served(spec, endpoint or {}, chat)
        return LanguageAgent(spec, served, sampling, template or USUAL.prompt, show_probabilities)
    if kind == "dqn" and rest:
        with needs(f"the agent {spec!r}", "dqn"):
            from msgrpo.models.dqn import DQNAgent
        return DQNAgent(spec, expanded(rest))
    fix = f"grammar: {GRAMMAR}" if ":" in spec else f"{nearest(spec, PLAIN)}; one of {GRAMMAR}"
    raise UsageError(f"no agent is named {spec!r}", fix=fix)


def _of_this_machine(
    spec: str, template: PromptTemplate | None, chat: Mapping[str, Any] | None
) -> tuple[LanguageModel, PromptTemplate]:
    """The model that is loaded here, and how it is asked."""
    kind, _, rest = spec.partition(":")
    folder = shipped(rest) if kind == "nano" and rest else expanded(rest)
    with needs(f"the agent {spec!r}", "train"):
        from msgrpo.models import loading
    if spec == "nano":
        return loading.nano(), template or USUAL.prompt
    asked = learned_as(spec).but(template, chat)
    model = loading.based(rest, asked.chat) if kind == "base" else loading.adapted(folder, asked.chat)
    return model, asked.prompt


def _served(spec: str, endpoint: Mapping[str, Any], chat: Mapping[str, Any] | None) -> LanguageModel:
    """The model of `endpoint:URL#model`."""
    _, _, rest = spec.partition(":")
    if "#" not in rest:
        raise UsageError(
            f"{spec!r} does not name the model that {rest or 'the endpoint'} shall answer with",
            fix=f"write it after a #, like endpoint:{rest or 'http://host:8000/v1'}#model",
        )
    from msgrpo.models.endpoint import EndpointModel

    url, _, name = rest.rpartition("#")
    asked = {} if chat is None else {"body": {"chat_template_kwargs": dict(chat)} | (endpoint.get("body") or {})}
    return EndpointModel(url, name, **{**endpoint, **asked})
