"""One client's plays of our games, as an environment server offers them; `env_server.py` puts this behind OpenEnv.

An answer without a legal action, and a move after the end, are no errors: the client sees the state again and why.
Steps, rewards and ends are those of `msgrpo.episode`.
"""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from msgrpo.agent import Parsed, cleaned, parse_action
from msgrpo.episode import GAME_FAULT, derive_seed, observation_of, outcome_of
from msgrpo.errors import GameFaultError, UsageError, first_fault, nearest
from msgrpo.game import Game, Outcome, Scenario, Split
from msgrpo.games import get_scenario
from msgrpo.limits import games_code

TASKS = 1000  # starts of a split that have a number; `seed` reaches all others
GAME_OVER = "game_over"  # why a move after the end does nothing
NO_GAME = "no_game"
NOT_BEGUN = "no game has begun: reset first, over the same websocket (/ws); plain HTTP keeps none between requests"
MOST_SEED = 2**63 - 1


class Start(BaseModel):
    """What a client asks for at a reset; other fields are for others and are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)

    scenario: str | None = Field(None, max_length=200)
    split: Split = "train"
    seed: int | None = Field(None, ge=0, le=MOST_SEED)  # the first start of the split from this seed on
    index: int | None = Field(None, ge=0, lt=TASKS)  # the start of this number in the split
    chance_seed: int | None = Field(None, ge=0, le=MOST_SEED)  # the luck; without it, it follows from the start
    injected_state: dict[str, Any] | None = None


class Saved(BaseModel):
    """What brings a game back: its seeds, and the moves from its start on."""

    model_config = ConfigDict(extra="ignore")

    scenario: str
    split: Split = "train"
    start_seed: int = Field(ge=0, le=MOST_SEED)
    chance_seed: int = Field(ge=0, le=MOST_SEED)
    moves: list[dict[str, str | None]] = []


class Seat(BaseModel):
    """A player who is to move: what this player reads, and may do."""

    player: str
    text: str
    legal_actions: list[str]


class Seen(BaseModel):
    """What a client gets after a reset and after a step.

    `text` and `legal_actions` are those of `player`, the first who is to move; `seats` are all who move now, where
    there are several. `failures` says of each player whose answer was no legal action why it was not.
    """

    scenario: str = ""
    text: str
    player: str = ""
    legal_actions: list[str] = []
    seats: list[Seat] = []
    rules: str = ""
    step: int = 0
    step_limit: int = 0
    rewards: dict[str, float] = {}
    failures: dict[str, str] = {}
    outcome: Outcome = Outcome.PLAYING
    success: bool | None = None
    error: str | None = None  # of the game itself: such an episode has no result
    reward: float | None = None  # of the first player
    done: bool = False


class Move(BaseModel):
    """What a client does: `action` or `answer` of the first player who is to move, or each player's action."""

    action: str = Field("", description="the name of an action; legal_actions lists what is legal now")
    answer: str = Field("", description="or a model's whole answer, whose last <action>…</action> counts")
    moves: dict[str, str] = Field({}, description="where several players move at once: each player's action")


class Catalogue:
    """The scenarios that a server offers, the usual one first, and the starts of their splits by number."""

    def __init__(self, names: Sequence[str]) -> None:
        self.scenarios = {name: get_scenario(name) for name in names}
        self._starts = defaultdict[tuple[str, str], list[int]](list)
        self._lock = threading.Lock()

    def get(self, name: str | None) -> Scenario:
        """Raises UsageError for a scenario that the server was not started with: a client's word loads no code."""
        if name is None:
            return next(iter(self.scenarios.values()))
        if name not in self.scenarios:
            raise UsageError(f"this server offers no {name!r}", fix=nearest(name, self.scenarios))
        return self.scenarios[name]

    @staticmethod
    def tasks(scenario: Scenario) -> int:
        """How many starts of a split have a number."""
        return 1 if scenario.one_start else TASKS

    def start_of(self, scenario: Scenario, split: Split, index: int) -> int:
        """The start seed of this number. Raises IndexError beyond the last one."""
        if not 0 <= index < self.tasks(scenario):
            raise IndexError(f"{scenario.id} has the starts 0 to {self.tasks(scenario) - 1} in {split}, not {index}")
        with self._lock:
            known = self._starts[scenario.id, split]
            while len(known) <= index:  # no iterator is kept: a game's fault would end it for good
                known.append(next(scenario.starts(split, known[-1] + 1 if known else 0)))
            return known[index]


class Session:
    """One client's games, one after the other."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.saved: Saved | None = None
        self.game: Game | None = None
        self._closed = False
        self._last = Seen(text=NOT_BEGUN, error=NO_GAME, done=True)

    def reset(self, **asked: Any) -> Seen:
        """Begin a game. Raises UsageError for what no game begins with, GameError for moves that were none."""
        self._open()
        try:
            start = Start.model_validate(asked)
            saved = None if start.injected_state is None else Saved.model_validate(start.injected_state)
        except ValidationError as error:
            raise UsageError(
                f"reset: {first_fault(error, 'reset')}", fix=f"its fields: {', '.join(Start.model_fields)}"
            ) from error
        saved = saved or self._new(start)
        scenario = self.catalogue.get(saved.scenario)
        if len(saved.moves) > scenario.step_limit:
            raise UsageError(f"injected_state has {len(saved.moves)} moves; {scenario.step_limit} are the most")
        try:
            game = scenario.new(saved.start_seed, saved.chance_seed)
            for moves in saved.moves:
                with games_code(scenario.id):
                    game.step(moves)
            self.saved, self.game = saved, game
            return self._keep(self._look(scenario, game, {}, {}))
        except GameFaultError as fault:
            self.saved, self.game = saved, None
            return self._failed(fault)

    def step(self, move: Move) -> Seen:
        """Play one move of all who are to move. Raises UsageError for a move of a player who is not."""
        self._open()
        game, saved = self.game, self.saved
        if game is None or saved is None or self._last.done:
            return self._too_late()
        scenario = self.catalogue.get(saved.scenario)
        try:
            with games_code(scenario.id):
                moving = tuple(game.to_move)
            read = _read(move, game, moving)
            actions = {player: parsed.action for player, parsed in read.items()}
            with games_code(scenario.id):
                rewards = game.step(actions)
            saved.moves.append(actions)
            failures = {player: str(parsed.failure) for player, parsed in read.items() if parsed.failure}
            return self._keep(self._look(scenario, game, rewards, failures))
        except GameFaultError as fault:
            return self._failed(fault)

    def close(self) -> None:
        """Forget the game; whoever still holds the session is told."""
        self.game, self.saved, self._closed = None, None, True

    def _open(self) -> None:
        if self._closed:
            raise UsageError("this session was closed, as one that is idle for long is", fix="connect again")

    def _new(self, start: Start) -> Saved:
        scenario = self.catalogue.get(start.scenario)
        if start.index is not None:
            try:
                seed = self.catalogue.start_of(scenario, start.split, start.index)
            except IndexError as error:
                raise UsageError(str(error)) from error
        else:
            first = secrets.randbelow(2**31) if start.seed is None else start.seed
            with games_code(scenario.id):
                seed = next(scenario.starts(start.split, first))
        chance = derive_seed("env-luck", seed) if start.chance_seed is None else start.chance_seed
        return Saved(scenario=scenario.id, split=start.split, start_seed=seed, chance_seed=chance)

    def _look(
        self, scenario: Scenario, game: Game, rewards: Mapping[str, float], failures: Mapping[str, str]
    ) -> Seen:
        with games_code(scenario.id):
            outcome = outcome_of(game)
            done = outcome is not Outcome.PLAYING
            moving = (scenario.players[0],) if done else tuple(game.to_move)
            seats = [
                Seat(
                    player=player,
                    text=observation_of(game, player),
                    legal_actions=[] if done else list(game.legal(player)),
                )
                for player in moving
            ]
            return Seen(
                scenario=scenario.id,
                **seats[0].model_dump(),
                seats=seats if len(seats) > 1 else [],
                rules=scenario.rules,
                step=game.steps,
                step_limit=game.step_limit,
                rewards=dict(rewards),
                failures=dict(failures),
                outcome=outcome,
                success=game.success,
                reward=rewards[scenario.players[0]] if rewards else None,
                done=done,
            )

    def _keep(self, seen: Seen) -> Seen:
        self._last = seen
        return seen

    def _failed(self, fault: GameFaultError) -> Seen:
        """The game's own code failed: the episode ends without a result."""
        name = "" if self.saved is None else self.saved.scenario
        return self._keep(Seen(scenario=name, text=fault.message, error=GAME_FAULT, done=True))

    def _too_late(self) -> Seen:
        if self._last.error:
            return self._last
        players = self.catalogue.get(self._last.scenario).players
        nothing = dict.fromkeys(players, 0.0)
        return self._last.model_copy(
            update={"rewards": nothing, "reward": 0.0, "failures": {self._last.player: GAME_OVER}}
        )


def _read(move: Move, game: Game, moving: Sequence[str]) -> dict[str, Parsed]:
    """ψ for all who are to move. Raises UsageError where a move is of somebody else."""
    strangers = sorted(set(move.moves) - set(moving))
    if strangers:
        raise UsageError(f"{strangers[0]!r} is not to move; to move: {', '.join(moving)}")
    answers = {player: f"<action>{action}</action>" for player, action in move.moves.items()}
    if move.action or move.answer:
        answers.setdefault(moving[0], f"<action>{move.action}</action>" if move.action else move.answer)
    return {
        player: parse_action(cleaned(answers.get(player, "")), game.actions, game.legal(player)) for player in moving
    }
