"""An episode: what happened in it, its record (one JSON line), and how it is played.

Each episode is one coroutine; any number play at once, with any agents.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import inspect
import platform
import reprlib
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msgrpo.agent import (
    LONGEST_SPEC,
    Agent,
    Completion,
    Decision,
    FinishReason,
    ParseFailure,
    View,
    check_agent,
    parse_action,
)
from msgrpo.errors import EndpointError, GameError, GameFaultError, RecordError, UsageError, first_fault
from msgrpo.game import MOST_POINTS, AnyText, Game, Outcome, Scenario, check_kind
from msgrpo.limits import check_hangs, games_code, hangs
from msgrpo.prompt import Past
from msgrpo.text import Clean, CleanData, printable

SCHEMA = 1
ENGINES = ("torch", "transformers", "peft", "aiohttp", "stable_baselines3", "minigrid", "open_spiel")  # what answers
GAME_FAULT = "game_fault"  # the kind of an episode's error
MAKES_RECORDS = "msgrpo eval --out DIR makes records"
LONGEST_STATE = 100_000  # characters of an observation
COLLECTION = (50_000, 20, 100)  # new objects before a search for cycles, and searches before a wider one
MOST_TOKENS = 2**53  # counts beyond it are no counts: JSON's numbers end there
Finite = Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)]  # sums of them are numbers, too
Name = Annotated[Clean, Field(max_length=LONGEST_SPEC)]
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
P = ParamSpec("P")
T = TypeVar("T")


class Turn(BaseModel):
    """One answer of one player and what came of it. Players that move at once have turns with the same `step`."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    step: int
    player: Clean
    state: Clean  # the observation; the prompt is the episode's `prefix` and this
    answer: Clean | None = None  # the text; None for players that are no language model
    action: Clean | None = None
    failure: ParseFailure | None = None
    reward: Finite = 0.0
    late: Finite = 0.0  # reward that came later, while only others moved
    shaping: Finite = 0.0
    regret: Annotated[Finite, Field(ge=0)] | None = None  # lost against the best action, where somebody judged it
    finish_reason: FinishReason | None = None
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    latency_s: Finite = 0.0
    retries: Count = 0
    reasoning: Clean | None = None
    action_probabilities: dict[Clean, Finite] | None = None
    model: Clean | None = None  # which weights answered: the version of a policy in training
    completion: Completion | None = Field(None, exclude=True, repr=False)  # with token ids, for training

    @property
    def paid(self) -> float:
        """The reward that followed, up to the player's next turn."""
        return self.reward + self.late


class Episode(BaseModel):
    """One play of a scenario, complete enough to be simulated again without any model.

    A field that is not known is refused, as in a turn: what a later version says by it may change a result.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: int = Field(SCHEMA, ge=SCHEMA, le=SCHEMA)
    scenario: Clean
    start_seed: int = Field(ge=0)
    chance_seed: int = Field(ge=0)
    sampling_seed: int = Field(ge=0)
    agents: dict[Clean, Name]  # player -> agent spec
    settings: dict[Clean, CleanData]  # player -> model, sampling, template hash
    prefix: dict[Clean, Clean] = {}  # player -> the fixed part of every prompt
    turns: list[Turn] = []
    outcome: Outcome = Outcome.PLAYING
    success: bool | None = None
    returns: dict[Clean, Finite] = {}
    error: Name | None = None  # kind of the failure that ended it; such an episode has no result
    error_message: Clean | None = None
    versions: dict[Clean, Clean] = {}

    @property
    def score(self) -> float:
        """Success, as 0 or 1, where the game has a goal; else the return, of several players their mean.

        Raises RecordError for an episode that failed before its first step, and so has neither.
        """
        if self.success is not None:
            return float(self.success)
        if not self.returns:
            raise RecordError(
                f"{self.scenario} from start {self.start_seed} has no score: {self.error or 'unplayed'}"
            )
        return sum(self.returns.values()) / len(self.returns)

    def turns_of(self, player: str) -> list[Turn]:
        return [turn for turn in self.turns if turn.player == player]


def read_episodes(path: Path | str) -> Iterator[Episode]:
    """Every complete line of a record. A torn last line (a killed writer) is passed over; any other fault raises."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read for ever
            raise RecordError(f"{path} is no file")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    episode = Episode.model_validate_json(line)
                except ValidationError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise RecordError(
                        f"{path}:{number} is no episode: {first_fault(error, 'the line')}",
                        fix="a later msgrpo that wrote it can read it; a damaged line is taken out with: "
                        f"sed -i {number}d {shlex.quote(str(path))}",
                    ) from error
                yield episode
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        fix = MAKES_RECORDS if missing else None
        raise RecordError(f"{path} cannot be read: {error.strerror}", fix=fix) from error


async def play_episode(
    scenario: Scenario,
    agents: Mapping[str, Agent],
    *,
    start_seed: int,
    chance_seed: int,
    sampling_seed: int,
    format_penalty: float = 0.0,
) -> Episode:
    """Play from the start to the end.

    A failure, of an endpoint or of the game's own code, is never turned into a move: the episode ends with `error`
    set and has no result. A fatal one (wrong key, unknown model) is raised, and UsageError for agents that are none
    or do not have the seats, and for seeds that no record holds.
    """
    check_kind(scenario)
    seats = ", ".join(scenario.players)
    if not isinstance(agents, Mapping):
        raise UsageError(
            f"agents is {reprlib.repr(agents)}, not a dict of the players {seats}",
            fix=f"{{{', '.join(f'{player!r}: agent' for player in scenario.players)}}}",
        )
    if not set(agents) >= set(scenario.players):
        raise UsageError(f"the players of {scenario.id} are {seats}, and agents were given for {list(agents)}")
    if not isinstance(format_penalty, Real) or not abs(format_penalty) <= MOST_POINTS:
        raise UsageError(f"format_penalty is {reprlib.repr(format_penalty)}, no number of points")
    episode = new_episode(scenario, agents, start_seed, chance_seed, sampling_seed)
    async with place_for(scenario):
        try:
            game = await computed(scenario, scenario.new, episode.start_seed, episode.chance_seed)
        except GameFaultError as fault:
            lost_by(episode, fault)
            return episode
        await play_on(game, episode, scenario, agents, format_penalty)
    return episode


async def play_on(
    game: Game,
    episode: Episode,
    scenario: Scenario,
    agents: Mapping[str, Agent],
    format_penalty: float = 0.0,
    after_step: Callable[[Episode], None] = lambda episode: None,
) -> None:
    """Play from where the game stands to its end, and write the turns into the episode.

    A failure ends the episode, with `error` set; a fatal EndpointError or GameFaultError is raised.
    """
    name = scenario.id
    before = hangs(name)
    try:
        for played in count(game.steps):
            check_hangs(name, before)
            with games_code(name):
                views = waiting(scenario, game, episode, played)
            if not views:
                break
            # An agent that answers at once must not keep others, and a Ctrl-C, from their turn.
            await asyncio.sleep(0)
            decisions = await decide(agents, views)
            check_hangs(name, before)  # another episode of this game may have hung meanwhile
            await computed(scenario, apply_turn, episode, game, views, decisions, format_penalty)
            after_step(episode)
    except EndpointError as error:
        if error.fatal:
            raise
        episode.error, episode.error_message = error.kind, error.message
    except GameFaultError as fault:
        lost_by(episode, fault)


def waiting(scenario: Scenario, game: Game, episode: Episode, played: int) -> dict[str, View]:
    """The turns that are to be taken after `played` steps; none once the game is over.

    Raises GameFaultError where the game does not say whose they are, or ends as no game may.
    """
    if outcome_of(game) is not Outcome.PLAYING:
        check_end(scenario, game)
        return {}
    if played >= scenario.step_limit:
        raise GameFaultError(f"it goes on after {played} steps; its limit is {scenario.step_limit}")
    moving = tuple(game.to_move)
    if not moving or not set(moving) <= set(episode.agents):
        raise GameFaultError(f"to_move is {moving!r}, not some of {', '.join(episode.agents)}", rule="actions")
    return {p: view_of(game, scenario, p, episode.sampling_seed, episode.turns_of(p)) for p in moving}


def new_episode(
    scenario: Scenario, agents: Mapping[str, Agent], start_seed: int, chance_seed: int, sampling_seed: int
) -> Episode:
    """An episode without turns, with the agents and settings that its record names. Raises UsageError for agents and
    seeds that it cannot name.
    """
    try:
        return Episode(
            scenario=scenario.id,
            start_seed=start_seed,
            chance_seed=chance_seed,
            sampling_seed=sampling_seed,
            agents={player: agent.spec for player, agent in agents.items()},
            settings={player: agent.settings() for player, agent in agents.items()},
            versions=versions() | {"rules": scenario.rules_hash},
        )
    except (AttributeError, TypeError, ValidationError) as error:
        for agent in agents.values():
            check_agent(agent)
        if isinstance(error, ValidationError):
            raise UsageError(f"no episode can be recorded so: {first_fault(error, 'it')}") from error
        raise


def view_of(game: Game, scenario: Scenario, player: str, sampling_seed: int, turns: Sequence[Turn] = ()) -> View:
    """A player's turn; `turns` are those that the player had before."""
    seed = derive_seed(sampling_seed, game.steps, player)
    past = [Past(turn.state, turn.action) for turn in turns]
    return View(scenario, player, observation_of(game, player), game, seed, past)


def observation_of(game: Game, player: str) -> str:
    """What a player sees, and which actions are legal now where not all are; as it can be printed.

    Raises GameFaultError where that is no text, or one that nobody could read.
    """
    seen, legal = game.observe(player), game.legal(player)
    if not isinstance(legal, (tuple, list)) or not all(isinstance(action, str) for action in legal):
        raise GameFaultError(f"legal({player!r}) gave {reprlib.repr(legal)}, no tuple of actions", rule="actions")
    if not legal and outcome_of(game) is Outcome.PLAYING and player in game.to_move:
        raise GameFaultError(f"legal({player!r}) names no action", rule="actions")
    if not isinstance(seen, str):
        raise GameFaultError(f"observe({player!r}) gave a {type(seen).__name__}, no text", rule="text")
    if len(seen) > LONGEST_STATE:
        reason = f"observe({player!r}) gave {len(seen):,} characters; {LONGEST_STATE:,} are the most"
        raise GameFaultError(reason, rule="text")
    whole = legal == game.actions or not legal or isinstance(legal, AnyText)
    return printable(seen if whole else f"{seen}\nLegal now: {', '.join(legal)}.")


async def decide(agents: Mapping[str, Agent], views: Mapping[str, View]) -> dict[str, Decision]:
    """Ask all players to move at the same time; none sees another's choice."""
    if len(views) == 1:
        ((player, view),) = views.items()
        return {player: await decision_of(agents[player], view)}
    asked = [asyncio.ensure_future(decision_of(agents[player], view)) for player, view in views.items()]
    try:
        return dict(zip(views, await asyncio.gather(*asked), strict=True))
    except (Exception, asyncio.CancelledError):  # what the others would still answer is paid for, and in no record
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        raise


async def decision_of(agent: Agent, view: View) -> Decision:
    """What an agent answers. Raises UsageError for an agent whose `act` gives no Decision: no game is at fault."""
    answer: object = agent.act(view)  # of a wrapper, which need not be asynchronous itself
    if not inspect.isawaitable(answer):
        raise UsageError(f"act of the agent {agent.spec} is not asynchronous", fix="define it with async def act")
    decision: object = await answer
    if not isinstance(decision, Decision):
        raise UsageError(
            f"act of the agent {agent.spec} gave {repr(decision)[:200]}, not a msgrpo.agent.Decision",
            fix="return Decision(action), or Decision(None) for no legal action",
        )
    return _as_said(agent, view, decision)


def _as_said(agent: Agent, view: View, decision: Decision) -> Decision:
    """The decision, with the failure that its words show where it names no action.

    Raises UsageError for what nobody could verify: words that say something else, a prompt template without words.
    """
    if "template" in agent.settings() and (decision.prompt is None or decision.completion is None):
        raise UsageError(
            f"the agent {agent.spec} has a prompt template, and decided without prompt or words",
            fix="Decision(action, failure, prompt, completion), or settings() without a template",
        )
    if decision.completion is None:
        return decision
    text = printable(decision.completion.text)
    parsed = parse_action(text, view.scenario.actions, view.legal())
    if parsed.action != decision.action:
        decided = f"the agent {agent.spec} decided for {reprlib.repr(decision.action)}"
        raise UsageError(
            f"{decided}, and its words say {parsed.action}: {reprlib.repr(text)}",
            fix="words that end with that action in tags (<action>…</action>), or a Decision without words",
        )
    return replace(decision, failure=parsed.failure)


def apply_turn(
    episode: Episode,
    game: Game,
    views: Mapping[str, View],
    decisions: Mapping[str, Decision],
    format_penalty: float,
) -> None:
    """Step the game with the decisions of all who were to move, and write one turn for each of them.

    The shaping term Φ of an answer without a legal action is minus `format_penalty`. A reward that comes to a player
    while others move is added to the last turn that this player had.
    """
    step = game.steps
    with games_code(episode.scenario):
        try:
            rewards = game.step({player: decision.action for player, decision in decisions.items()})
        except GameFaultError:
            raise
        except GameError as error:
            whose = ", ".join(dict.fromkeys(episode.agents[player] for player in decisions))
            raise GameError(f"{error.message}; decided by {whose}", fix=error.fix) from error
        after = (outcome_of(game), success_of(game), dict(game.returns))
    pay_late(episode, rewards, set(decisions))
    for player, decision in decisions.items():
        try:
            turn = Turn(
                step=step,
                player=player,
                state=views[player].observation,
                action=decision.action,
                failure=decision.failure,
                reward=rewards[player],
                shaping=-format_penalty if decision.failure is not None else 0.0,
                completion=decision.completion,
                **_answered(decision.completion),
            )
        except ValidationError as error:
            raise UsageError(
                f"the agent {episode.agents[player]} gave a Decision that no record can hold: "
                f"{first_fault(error, 'it')}"
            ) from error
        if decision.prompt is not None:
            episode.prefix[player] = printable(decision.prompt.prefix)
        episode.turns.append(turn)
    episode.outcome, episode.success, episode.returns = after


def _answered(completion: Completion | None) -> dict[str, Any]:
    """What a turn keeps of a language model's answer."""
    if completion is None:
        return {}
    return {
        "answer": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "latency_s": completion.latency_s,
        "retries": completion.retries,
        "reasoning": completion.reasoning,
        "action_probabilities": completion.action_probabilities,
        "model": completion.model,
    }


def pay_late(episode: Episode, rewards: Mapping[str, float], moved: Set[str]) -> None:
    """Add the rewards of those who have not `moved` to the last turn that each of them had."""
    for player in set(rewards) - moved:
        for turn in episode.turns_of(player)[-1:]:
            turn.late += rewards[player]


def outcome_of(game: Game) -> Outcome:
    """The game's outcome. Raises GameFaultError if it is not an Outcome."""
    if not isinstance(game.outcome, Outcome):
        raise GameFaultError(f"outcome is {str(game.outcome)[:80]!r}, not a msgrpo.game.Outcome")
    return game.outcome


def success_of(game: Game) -> bool | None:
    """Whether the goal was reached, as a plain value. Raises GameFaultError where the game gives neither."""
    success: object = game.success
    if success is None or isinstance(success, bool):
        return success
    if type(success).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(success)
    raise GameFaultError(f"success is {repr(success)[:80]}, not True, False or None", rule="goal")


def check_end(scenario: Scenario, game: Game) -> None:
    """Raises GameFaultError for an end that no reader of the record takes for a result of this scenario."""
    if not game.steps:
        raise GameFaultError(f"it is over at its start ({game.outcome})", rule="start")
    success = success_of(game)
    if (success is not None) != scenario.goal:
        raise GameFaultError(
            f"success is {success} at the end, and its scenario says goal={scenario.goal}", rule="goal"
        )


def lost_by(episode: Episode, fault: GameFaultError) -> None:
    """Write into the episode that the game's own fault ended it; raise a fatal one."""
    if fault.fatal:
        raise fault
    episode.error, episode.error_message = GAME_FAULT, fault.message


def replay(scenario: Scenario, episode: Episode, steps: int) -> Game:
    """The game of an episode as it stood after so many steps, from its seeds and actions.

    Raises GameFaultError where the game's own code fails, or refuses an action.
    """
    game = scenario.new(episode.start_seed, episode.chance_seed)
    for step in range(steps):
        play_again(scenario.id, game, [turn for turn in episode.turns if turn.step == step])
    return game


def play_again(scenario_id: str, game: Game, turns: Sequence[Turn]) -> None:
    """One step, by the actions of its turns. Raises GameFaultError where the game's own code fails, or refuses what
    it took then: it does not go the same way again.
    """
    with games_code(scenario_id):
        try:
            game.step({turn.player: turn.action for turn in turns})
        except GameFaultError:
            raise
        except GameError as error:
            raise GameFaultError(f"played again, it refuses a move: {error.message}", rule="seeds") from error


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything printable: the same parts give the same seed on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


_rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()


@asynccontextmanager
async def place_for(scenario: Scenario) -> AsyncIterator[None]:
    """A place for one more game of this scenario, where a server plays only so many at the same time."""
    if scenario.remote is None:
        yield
        return
    rooms = _rooms.setdefault(asyncio.get_running_loop(), {})
    async with rooms.setdefault(scenario.id, asyncio.Semaphore(scenario.remote.sessions)):
        yield


async def computed(scenario: Scenario, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a call into a game gives; where a server is asked, in a thread, so that other episodes go on meanwhile."""
    return call(*args, **kwargs) if scenario.remote is None else await asyncio.to_thread(call, *args, **kwargs)


@contextmanager
def few_collections() -> Iterator[None]:
    """Let Python search seldom for cycles, and not among what exists now, while many episodes are played.

    Turns make many objects and no cycles. With Python's own thresholds the searches took a quarter of a client's time
    at 64 episodes at once and two fifths at 4,096, most of it among the objects of imported modules, and stopped the
    event loop meanwhile (`benchmarks/results/client-collections.json`).
    """
    before = gc.get_threshold()
    if before == COLLECTION:  # whoever plays around this has done it
        yield
        return
    gc.freeze()
    gc.set_threshold(*COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def versions() -> dict[str, str]:
    """The versions a record needs to be reproduced: of what every game uses, and of what is loaded beside it."""
    packages = ("msgrpo", "gymnasium", "numpy", *(name for name in ENGINES if name in sys.modules))
    return {"python": platform.python_version()} | {package: _version(package) for package in packages}


@cache
def _version(package: str) -> str:
    """The version of a package, looked up once, since that takes longer than playing an episode."""
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "source"
