"""The environment of an OpenEnv server as a game: `openenv:http://host:8000`.

    openenv:http://host:8000?text=board&steps=40&sessions=8&scenario=snake

`text` names the field of an observation that a player reads, `steps` the limit, `sessions` how many games are played
at the same time at most; all other fields of the query go to `reset`. There is one player; actions, texts, rewards
and ends are the server's. At first contact the server is asked for its schema, and a few steps are played: does a
seed give the same game again, how many games go side by side, can one be brought to the state of another?
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from msgrpo.errors import GameFaultError, UsageError, nearest
from msgrpo.game import AnyText, Game, Outcome, Remote, Scenario
from msgrpo.games.openenv_wire import FULL, HOW, KEYS, RefusedError, Server, Session
from msgrpo.text import printable

STEPS, SESSIONS = 100, 16
MOST_STEPS, MOST_SESSIONS = 10_000, 256
MOST_LISTED = 150  # actions, and legal ones of a state
LONGEST_NAME = 200  # characters of a listed action
LONGEST_RULES = 4000  # characters of a server's own words, and of a schema
LONGEST_TEXT = 50_000  # characters of what a player sees
TRIED = 3  # steps of a game that is played twice at first contact
NOT_TAKEN = "VALIDATION_ERROR"  # the protocol's code for an action that the environment does not know
NOT_OURS = ("metadata",)  # a field of every action
LEGAL = "legal_actions"


@dataclass(frozen=True)
class Address:
    """What a name says after `openenv:`."""

    url: str
    text: str | None
    steps: int
    sessions: int
    reset: Mapping[str, Any]


def address_of(rest: str) -> Address:
    """Raises UsageError for what is no address, and for one with a password in it, which tables would show."""
    try:
        parts = urlsplit(rest)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        whole = False
    if not whole or printable(rest) != rest or any(sign.isspace() for sign in rest):
        raise UsageError(f"{rest!r} is no address of an OpenEnv server", fix="openenv:http://host:8000")
    if "@" in parts.netloc:
        raise UsageError("the address holds a user or a password", fix=f"export {KEYS}=host:8000=KEY")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    steps = whole_number("steps", query.pop("steps", str(STEPS)), MOST_STEPS)
    sessions = whole_number("sessions", query.pop("sessions", str(SESSIONS)), MOST_SESSIONS)
    text = query.pop("text", None)
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return Address(url, text, steps, sessions, {name: value_of(value) for name, value in query.items()})


def whole_number(name: str, value: str, most: int) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= most:
        raise UsageError(f"{name}={value} is no number from 1 to {most}")
    return int(value)


def value_of(text: str) -> Any:
    """A value of the query as JSON where it is some, else as text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True)
class Form:
    """How an action is written, after the schema of actions.

    `field` is the one field that an action fills in, of the JSON type `kind`; without it an action is a JSON object.
    `listed` are its values where the schema lists them.
    """

    field: str | None
    kind: str = "object"
    listed: tuple[str, ...] = ()
    example: str = "..."
    schema: str = ""

    def message(self, action: str) -> dict[str, Any] | None:
        """What the server is sent; None where the text is no such action."""
        if self.field is not None and self.kind == "string":
            return {self.field: action}
        try:
            value = json.loads(action.lower() if self.kind == "boolean" else action)
        except (ValueError, RecursionError):
            return None
        if self.field is None:
            return value if isinstance(value, dict) else None
        kinds = {"integer": int, "number": (int, float), "boolean": bool}[self.kind]
        fits = isinstance(value, kinds) and isinstance(value, bool) == (self.kind == "boolean")  # type: ignore[arg-type]
        return {self.field: value} if fits else None


def form_of(schema: Mapping[str, Any]) -> Form:
    """Raises GameFaultError for what is no schema of an action."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        raise GameFaultError("its schema names no fields of an action")
    own = {name: spec for name, spec in properties.items() if name not in NOT_OURS}
    fields = {name: resolved(spec, schema) for name, spec in own.items()}
    needed = schema.get("required")
    listed = needed if isinstance(needed, list) else []
    required = [name for name in listed if isinstance(name, str) and name in fields]
    shown = printable(json.dumps(own, ensure_ascii=False))[:LONGEST_RULES]
    chosen = required if len(required) == 1 else ["action"] if "action" in fields and not required else list(fields)
    if len(chosen) == 1:
        kind, values = kind_and_values(fields[chosen[0]])
        if kind is not None:
            example = {"string": "...", "integer": "0", "number": "0", "boolean": "true"}[kind]
            return Form(chosen[0], kind, values, values[0] if values else example, shown)
    blank = {name: {"integer": 0, "number": 0, "boolean": True}.get(str(fields[name].get("type")), "...")
             for name in required}  # fmt: skip
    return Form(None, example=json.dumps(blank), schema=shown)


def resolved(spec: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A field's schema with its reference looked up, and of `anything or null` the anything."""
    for _ in range(4):
        if not isinstance(spec, dict):
            return {}
        options = spec.get("anyOf") or spec.get("oneOf") or spec.get("allOf")
        reference = spec.get("$ref")
        if isinstance(reference, str):
            known = schema.get("$defs")
            spec = known.get(reference.rpartition("/")[2]) if isinstance(known, dict) else None
        elif isinstance(options, list):
            real = [option for option in options if not (isinstance(option, dict) and option.get("type") == "null")]
            spec = real[0] if len(real) == 1 else None
        else:
            return spec
    return {}


def kind_and_values(spec: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The JSON type of a field, None for one that no single value fills, and its values where they are listed."""
    values = spec.get("enum") or ([spec["const"]] if "const" in spec else None)
    kind = spec.get("type")
    if isinstance(values, list) and values:
        kind = {str: "string", int: "integer", float: "number", bool: "boolean"}.get(type(values[0]))
        if kind is None or {type(value) for value in values} != {type(values[0])}:
            return None, ()
        return kind, names_of(values) or ()
    if kind == "boolean":
        return kind, ("true", "false")
    if kind == "integer":
        low, beyond = spec.get("minimum", 0), spec.get("exclusiveMaximum")
        high = spec.get("maximum", beyond - 1 if isinstance(beyond, int) else -1)
        few = isinstance(low, int) and isinstance(high, int) and 0 < high - low < MOST_LISTED
        return kind, tuple(map(str, range(low, high + 1))) if few else ()
    return (kind, ()) if kind in ("string", "number") else (None, ())


def names_of(values: Any) -> tuple[str, ...] | None:
    """Values as names of actions; None where they are none: too many, empty, twice, or not to be printed."""
    if not isinstance(values, list) or not 0 < len(values) <= MOST_LISTED:
        return None
    names = [value if isinstance(value, str) else json.dumps(value) for value in values]
    fit = all(0 < len(name) <= LONGEST_NAME and name == printable(name.strip()) and "<" not in name for name in names)
    return tuple(names) if fit and len(set(names)) == len(names) else None


@dataclass(frozen=True)
class Environment:
    """What all games of a server have in common."""

    address: Address
    server: Server = field(repr=False)
    form: Form
    text: str | None  # the field that a player reads; None: all of them
    by_state: bool  # whether each observation lists its legal actions
    own_luck: bool  # whether the luck has a seed of its own, as with msgrpo's server
    actions: tuple[str, ...]
    copies: bool = False

    def reset(self, start_seed: int, chance_seed: int) -> dict[str, Any]:
        luck = {"chance_seed": chance_seed} if self.own_luck else {}
        return {**self.address.reset, "seed": start_seed, **luck}


class RemoteGame(Game):
    """One game, in a session of its own on the server."""

    def __init__(self, environment: Environment, start_seed: int, chance_seed: int) -> None:
        self.environment, self.actions = environment, environment.actions
        super().__init__(environment.address.steps)
        session, answer = environment.server.begin(**environment.reset(start_seed, chance_seed))
        self._join(session)
        self._take(answer)
        if self._over:
            raise self._fault("says that the game is over at its start")

    def _join(self, session: Session) -> None:
        self._session, self._note = session, ""
        weakref.finalize(self, session.close).atexit = False

    def _fault(self, what: str, rule: str = "runs") -> GameFaultError:
        self._session.close()
        return GameFaultError(f"{self.environment.address.url} {what}", rule=rule)

    def _take(self, answer: Mapping[str, Any]) -> None:
        """Take an observation over. Raises GameFaultError where it is not what the schema said."""
        seen, over = answer.get("observation"), answer.get("done", False)
        if not isinstance(seen, dict) or not isinstance(over, bool):
            raise self._fault(f"gives no observation: {str(answer)[:80]}", rule="text")
        name = self.environment.text
        if name is not None and name not in seen:
            raise self._fault(f"gives an observation without {name!r}", rule="text")
        shown = seen if name is None else seen[name]
        text = shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        if len(text) > LONGEST_TEXT:
            raise self._fault(f"gives {len(text):,} characters; {LONGEST_TEXT:,} are the most", rule="text")
        self._text, self._over, self._legal = printable(text), over, self.actions
        if self.environment.by_state and not over:
            legal = names_of(seen.get(LEGAL))
            if legal is None or not (not self.actions or set(legal) <= set(self.actions)):
                raise self._fault(f"gives {LEGAL} that are none: {str(seen.get(LEGAL))[:80]}", rule="actions")
            self._legal = legal

    def legal(self, player: str) -> tuple[str, ...]:
        return AnyText([self.environment.form.example]) if isinstance(self.actions, AnyText) else self._legal

    def observe(self, player: str) -> str:
        return f"Step {min(self.steps + 1, self.step_limit)} of {self.step_limit}.\n{self._text}{self._note}"

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        action, self._note = actions["player"], ""
        message = None if action is None else self.environment.form.message(action)
        if message is None:
            if action is not None:
                self._note = "\nYour last action was none that the rules describe."
            return {"player": 0.0}
        try:
            answer = self._session.ask("step", message)
        except RefusedError as refused:
            if refused.code != NOT_TAKEN:
                self._session.close()
                raise
            self._note = "\nYour last action was not taken: it does not fit the environment's schema."
            return {"player": 0.0}
        self._take(answer)
        if self._over or self.steps + 1 >= self.step_limit:
            self._session.close()
        reward = answer.get("reward")
        return {"player": 0.0 if reward is None else reward}

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteGame:
        """Raises GameFaultError where the server cannot bring a game to the state of another one."""
        if not self.environment.copies:
            raise GameFaultError("a game on a server cannot be copied", rule="copies")
        twin = RemoteGame.__new__(RemoteGame)
        twin.__dict__.update(self.__dict__)
        twin.returns = dict(self.returns)
        if self.outcome is Outcome.PLAYING:
            state = self._session.ask("state")
            session, _ = self.environment.server.begin(**self.environment.address.reset, injected_state=state)
            note = self._note
            twin._join(session)
            twin._note = note
        return twin


def openenv_scenario(rest: str) -> Scenario:
    """The scenario of an OpenEnv server. Raises UsageError where none answers, or what answers is no game."""
    address = address_of(rest)
    server = Server(address.url)
    try:
        environment, rules = contact(server, address)
        remote = look(environment)
    except GameFaultError as fault:
        raise UsageError(fault.message, fix=HOW) from fault
    played = replace(environment, copies=remote.copies)

    def new(start_seed: int, chance_seed: int) -> RemoteGame:
        return RemoteGame(played, start_seed, chance_seed)

    again = "a seed gives the same game again" if remote.repeats else "a seed does not give the same game again"
    source = f"[OpenEnv] {address.url}; {again}; games at once: {remote.sessions}"
    return Scenario(
        f"openenv:{rest}",
        f"openenv-{rest}",
        rules,
        address.steps,
        source,
        new,
        actions=environment.actions,
        luck_in_start=False,
        remote=remote,
    )


def contact(server: Server, address: Address) -> tuple[Environment, str]:
    """(what the server's games have in common, their rules), from its schema and a first observation."""
    schemas = server.get("/schema")
    action, observed = (schemas.get(name) for name in ("action", "observation"))
    if not isinstance(action, dict) or not isinstance(observed, dict):
        raise server.fault("gives no schema of actions and observations")
    form = form_of(action)
    session, answer = server.begin(**address.reset, seed=0)
    session.close()
    seen = answer.get("observation")
    if not isinstance(seen, dict):
        raise server.fault(f"gives no observation at a reset: {str(answer)[:80]}")
    text = text_field(address.text, observed, seen)
    legal = names_of(seen.get(LEGAL)) if form.field is not None else None
    if len(form.listed) == 1:
        raise server.fault(f"has one action, {form.listed[0]!r}: there is nothing to choose")
    state = schemas.get("state")
    luck = isinstance(state, dict) and "chance_seed" in (state.get("properties") or {})
    actions = form.listed or (() if legal else AnyText())
    environment = Environment(address, server, form, text, legal is not None, luck, actions)
    return environment, rules_of(server, environment, seen)


def text_field(wanted: str | None, schema: Mapping[str, Any], seen: Mapping[str, Any]) -> str | None:
    """The field of an observation that a player reads: the one that was asked for, the only text, or `text`.

    Raises UsageError for one that the observation does not have.
    """
    if wanted is not None:
        if wanted not in seen:
            raise UsageError(f"an observation has no field {wanted!r}", fix=nearest(wanted, map(printable, seen)))
        return wanted
    properties = schema.get("properties")
    fields = properties if isinstance(properties, dict) else {}
    texts = [name for name in fields if name in seen and resolved(fields[name], schema).get("type") == "string"]
    return texts[0] if len(texts) == 1 else "text" if "text" in texts else None


def rules_of(server: Server, environment: Environment, seen: Mapping[str, Any]) -> str:
    """The environment's own words, how an action is written, and what holds for every game here."""
    try:
        description = server.get("/metadata").get("description")
    except GameFaultError:  # a server need not have it
        description = None
    own = seen.get("rules") or description
    parts = [own[:LONGEST_RULES]] if isinstance(own, str) and own else []
    if isinstance(environment.actions, AnyText):
        how = "a JSON object" if environment.form.field is None else f"the value of {environment.form.field!r}"
        parts.append(f"An action is {how}; the fields of an action: {environment.form.schema}")
    parts.append(
        f"There are at most {environment.address.steps} steps. An answer without a legal action uses up a step."
    )
    return printable("\n".join(parts))


def look(environment: Environment) -> Remote:
    """Find out what the server can do, by playing a few steps."""
    repeats = trial(environment) == trial(environment)
    return Remote(side_by_side(environment), repeats, repeats and takes_states(environment))


def trial(environment: Environment) -> list[Any]:
    """What is seen and paid in the first steps of a game with seed 0."""
    game = RemoteGame(environment, 0, 0)
    steps: list[Any] = []
    while not game._over and len(steps) < TRIED:
        steps.append(
            (game.observe("player"), game.legal("player"), game._advance({"player": game.legal("player")[0]}))
        )
    game._session.close()
    return [*steps, game.observe("player"), game._over]


def side_by_side(environment: Environment) -> int:
    """How many games the server plays at the same time, as far as it was asked for."""
    sessions: list[Session] = []
    try:
        for _ in range(environment.address.sessions):
            sessions.append(environment.server.begin(0.0 if sessions else None, **environment.reset(0, 0))[0])
    except RefusedError as refused:
        if refused.code != FULL:
            raise
    finally:
        for session in sessions:
            session.close()
    return max(1, len(sessions))


def takes_states(environment: Environment) -> bool:
    """Whether `reset(injected_state=…)` brings a game to a state that is not its start."""
    game = RemoteGame(environment, 0, 0)
    start, message = game._text, environment.form.message(game.legal("player")[0])
    try:
        if message is None:
            return False
        game._take(game._session.ask("step", message))
        state = game._session.ask("state")
        session, answer = environment.server.begin(0.0, **environment.address.reset, injected_state=state)
        session.close()
        there, game._text = game._text, ""
        game._take(answer)
        return there == game._text != start
    except GameFaultError:
        return False
    finally:
        game._session.close()
