"""What is played and what can be done with it, without a screen.

A `Session` is one game with its history: one immutable `Frame` a step, a cursor that scrubs through them, the
agents in their seats and the record. Nothing here imports Textual.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from msgrpo.agent import Agent, Decision, View
from msgrpo.episode import Episode, Turn, apply_turn, new_episode, observation_of, view_of
from msgrpo.errors import GameError, GameFaultError, RecordError
from msgrpo.game import Board, Game, Outcome, Scenario, shown_board
from msgrpo.games import SCENARIOS, get_scenario, may_load
from msgrpo.limits import games_code
from msgrpo.specs import names_an_agent
from msgrpo.text import printable
from msgrpo.trust import check_named
from msgrpo.tui.agents import HUMAN, EmptySeat, HumanAgent

SPEED, LIVE_SPEED = 4.0, 2.0  # steps a second, unless somebody asks for another; the second in real time
COVERED = "The cards are covered: each of two people looks at their own, while the other looks away."
Mood = Literal["good", "bad", "limit"]  # of an end: won, lost, or the steps are used up


@dataclass(frozen=True)
class Setup:
    """What a person asked for: the game, who plays, from which start, how fast (steps a second)."""

    scenario: str
    agent: str
    against: str | None = None
    seed: int = 0
    speed: float = SPEED
    step: bool = False
    live: bool = False  # a person's game goes on by itself, in the person's time
    temperature: float = 1.0  # of the language models

    @property
    def mode(self) -> str:
        if len(get_scenario(self.scenario).players) > 1:
            return "duel"
        if self.against is not None:
            return "race" if HUMAN in (self.agent, self.against) else "compare"
        if self.agent == HUMAN:
            return "live" if self.live else "play"
        return "step" if self.step else "watch"


@dataclass(frozen=True)
class Tally:
    """What one player's turns add up to."""

    total: float = 0.0  # the return so far, with what came while others moved
    invalid: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def plus(self, turn: Turn | None, total: float) -> Tally:
        if turn is None:
            return replace(self, total=total)
        return Tally(
            total,
            self.invalid + (turn.failure is not None),
            self.tokens + turn.prompt_tokens + turn.completion_tokens,
            self.seconds + turn.latency_s,
        )


@dataclass(frozen=True)
class Frame:
    """One moment: the board, the turns that led to it, and what the players have gathered.

    `seen` is what the first player to move reads: it is shown where there is no board.
    """

    step: int
    board: Board | None
    seen: str
    outcome: Outcome
    ending: str
    turns: Mapping[str, Turn]
    tallies: Mapping[str, Tally]

    @classmethod
    def of(cls, game: Game, turns: Mapping[str, Turn], tallies: Mapping[str, Tally]) -> Frame:
        seen = observation_of(game, (game.to_move or game.players)[0])
        ending = printable(str(game.ending))
        return cls(game.steps, shown_board(game), seen, game.outcome, ending, turns, tallies)


class Session:
    """One game, played turn by turn. `answers` holds the decisions of the step that is being played."""

    def __init__(self, scenario: Scenario, agents: Mapping[str, Agent], seed: int) -> None:
        self.scenario = scenario
        self.agents = dict(agents)
        self.own = dict(agents)  # who gets the seat back when a person hands it over
        self.seed = seed
        self.episode = new_episode(scenario, self.agents, seed, seed, seed)
        self.answers: dict[str, Decision] = {}
        self.called: Mapping[str, str] = {}  # the agents that a screen shows together: spec -> name
        self.looks: str | None = None  # who of two people sees their own cards now
        self.cursor = 0
        self._replayed = 0  # steps of the record that it is the replay of
        self._start(scenario.new(seed, seed))

    def _start(self, game: Game) -> None:
        self._games = [game]
        self._by: list[dict[str, str]] = []  # player -> spec, a step
        self._settings: dict[str, dict[str, Any]] = {}
        tallies = dict.fromkeys(game.players, Tally())
        with games_code(self.scenario.id):
            self.frames = [Frame.of(game, {}, tallies)]

    @classmethod
    def replay(cls, episode: Episode, command: str) -> Session:
        """The session of a record, simulated again. Raises RecordError at the first difference, and UsageError for a
        game from outside that nobody has allowed: `command` shows the record, and is given with what allows it.

        Its seats are empty: who is named in a record is never asked, and never loaded.
        """
        if not may_load(episode.scenario):
            check_named([("the game", episode.scenario)], "a record", command)
        scenario = get_scenario(episode.scenario)
        people = [player for player in scenario.players if episode.agents.get(player) == HUMAN]
        names = {player: f"player {number}" for number, player in enumerate(people, start=1) if len(people) > 1}
        agents = {
            player: EmptySeat(names.get(player, ""), spec, episode.settings.get(player, {}))
            for player, spec in episode.agents.items()
        }
        if set(agents) != set(scenario.players):
            raise RecordError(f"the record's players are not {', '.join(scenario.players)}")
        session = cls(scenario, agents, episode.start_seed)
        session.episode = episode.model_copy(deep=True)
        session._start(scenario.new(episode.start_seed, episode.chance_seed))
        session._settings = {agent.spec: agent.settings() for agent in agents.values()}
        for number, (step, turns) in enumerate(groupby(episode.turns, key=lambda turn: turn.step)):
            if step != number:
                raise RecordError(f"the record lacks step {number}")
            session._simulate(step, {turn.player: turn for turn in turns})
        session.cursor, session._replayed = 0, session.last
        return session

    def _simulate(self, step: int, turns: Mapping[str, Turn]) -> None:
        game = self.game.copy()
        try:
            with games_code(self.scenario.id):
                states = {player: observation_of(game, player) for player in game.to_move}
                rewards = game.step({player: turn.action for player, turn in turns.items()})
        except GameError as error:
            raise RecordError(f"step {step} of the record cannot be played: {error.message}") from error
        for player, turn in turns.items():
            differs = ""
            if states[player] != turn.state:
                differs = "what the player read then is another text in the game"
            elif rewards[player] != turn.reward:
                differs = f"reward {turn.reward:g} recorded, {rewards[player]:g} played"
            if differs:
                raise RecordError(
                    f"step {step} of the record differs from the game for {player}: {differs}",
                    fix="the record was changed, or comes from another version of the game",
                )
        self._append(game, turns, {player: self.episode.agents[player] for player in turns})

    @property
    def game(self) -> Game:
        """The game where it stands, whatever the cursor shows."""
        return self._games[-1]

    def game_at(self, step: int) -> Game:
        """The game as it stood after so many steps; to look at, not to play."""
        return self._games[step]

    @property
    def players(self) -> tuple[str, ...]:
        return self.game.players

    @property
    def frame(self) -> Frame:
        return self.frames[self.cursor]

    @property
    def last(self) -> int:
        return len(self.frames) - 1

    @property
    def live(self) -> bool:
        """The cursor is where the game stands."""
        return self.cursor == self.last

    @property
    def over(self) -> bool:
        return self.game.outcome is not Outcome.PLAYING

    @property
    def human(self) -> bool:
        return any(isinstance(agent, HumanAgent) for agent in self.agents.values())

    @property
    def human_played(self) -> bool:
        """Whether a person has played a step here, and not only in the record that it is the replay of."""
        return any(HUMAN in specs.values() for specs in self._by[self._replayed :])

    def covers(self, player: str) -> bool:
        """Whether what a player reads and says is kept from the people who play: other cards, till the game is over.

        One person sees their own; of two each looks in turn.
        """
        people = [one for one in self.players if isinstance(self.agents[one], HumanAgent)]
        if not (self.scenario.hidden and people and len(self.players) > 1) or self.over:
            return False
        return player != (people[0] if len(people) == 1 else self.looks)

    @property
    def shown(self) -> tuple[Board | None, str]:
        """The board and the text of the moment at the cursor; of covered cards what the one reads who may look."""
        covered = [player for player in self.players if self.covers(player)]
        if not covered:
            return self.frame.board, self.frame.seen
        with games_code(self.scenario.id):
            seen = [observation_of(self.game_at(self.cursor), one) for one in self.players if one not in covered]
        return None, seen[0] if seen else COVERED

    def view(self, player: str) -> View:
        return view_of(self.game, self.scenario, player, self.episode.sampling_seed, self.episode.turns_of(player))

    def waiting(self) -> list[str]:
        """The players whose answer the step still needs."""
        return [] if self.over else [player for player in self.game.to_move if player not in self.answers]

    @property
    def ready(self) -> bool:
        return not self.over and not self.waiting()

    def answer(self, player: str, decision: Decision) -> None:
        self.answers[player] = decision
        self.looks = None

    def commit(self) -> Frame:
        """Play the step that everybody has answered. The cursor follows if it was live."""
        if not self.ready:
            raise GameError(f"nothing to play: waiting for {', '.join(self.waiting()) or 'nobody, the game is over'}")
        followed = self.live
        game = self.game.copy()
        with games_code(self.scenario.id):
            views = {player: self.view(player) for player in self.game.to_move}
        decisions = {player: self.answers[player] for player in self.game.to_move}
        before = self._kept()
        try:
            apply_turn(self.episode, game, views, decisions, format_penalty=0.0)
            turns = {turn.player: turn for turn in self.episode.turns[-len(decisions) :]}
            self._append(game, turns, {player: agent.spec for player, agent in self.agents.items()})
        except GameFaultError:  # the step has not happened: neither for the screen nor for the record
            self.episode = before
            raise
        for agent in self.agents.values():
            self._settings[agent.spec] = agent.settings()
        self.answers = {}
        self._sign()
        if followed:
            self.cursor = self.last
        return self.frames[-1]

    def _kept(self) -> Episode:
        """The episode as it is now, whatever a step writes into it: of its turns only a player's last one changes."""
        last = {id(turn) for player in self.players for turn in self.episode.turns_of(player)[-1:]}
        turns = [turn.model_copy() if id(turn) in last else turn for turn in self.episode.turns]
        return self.episode.model_copy(update={"turns": turns, "prefix": dict(self.episode.prefix)})

    def _append(self, game: Game, turns: Mapping[str, Turn], specs: dict[str, str]) -> None:
        before = self.frames[-1].tallies
        tallies = {player: before[player].plus(turns.get(player), game.returns[player]) for player in game.players}
        with games_code(self.scenario.id):
            frame = Frame.of(game, dict(turns), tallies)
        self._games.append(game)
        self._by.append(specs)
        self.frames.append(frame)

    def _sign(self) -> None:
        """Who played goes into the record; a seat that changed hands names all of them: `nano+human`."""
        for player in self.players:
            specs = list(dict.fromkeys(by[player] for by in self._by)) or [self.agents[player].spec]
            name = "+".join(specs)
            self.episode.agents[player] = name
            parts = {spec: self._settings.get(spec, {}) for spec in specs}
            self.episode.settings[player] = parts[name] if len(specs) == 1 else {"model": name, "parts": parts}

    def seek(self, step: int) -> None:
        self.cursor = max(0, min(step, self.last))

    def rewind(self) -> None:
        """Make the moment at the cursor the present: what came after it is gone from game and record."""
        kept = self.cursor
        if kept == self.last:
            return
        self._replayed = min(self._replayed, kept)
        self.answers, self.looks = {}, None
        for agent in self.agents.values():
            if isinstance(agent, HumanAgent):
                agent.kept = None  # a key that came too fast was meant for what is gone
        self._games, self._by, self.frames = self._games[: kept + 1], self._by[:kept], self.frames[: kept + 1]
        self.episode.turns = [turn for turn in self.episode.turns if turn.step < kept]
        for player in self.players:  # what the steps that are gone paid to who had moved before is gone, too
            own = self.episode.turns_of(player)
            for turn in own[-1:]:
                turn.late = self.game.returns[player] - sum(one.paid for one in own[:-1]) - turn.reward
        self.episode.outcome, self.episode.success = self.game.outcome, self.game.success
        self.episode.returns = dict(self.game.returns)
        self.episode.error = self.episode.error_message = None
        self._sign()

    def take_over(self, player: str) -> None:
        """A person takes the seat at the moment that is shown."""
        self.rewind()
        self.answers.pop(player, None)
        self.agents[player], self.looks = HumanAgent(), None

    def hand_back(self, player: str) -> None:
        self.answers.pop(player, None)
        self.agents[player] = self.own[player]

    def rename(self, name: str) -> None:
        """What the screen calls who sits in a record's seats."""
        for agent in self.agents.values():
            if isinstance(agent, EmptySeat):
                agent.name = name

    def offer(self, agent: Agent) -> None:
        """A person has named who may play on: every empty seat is handed to this agent, when it is handed on."""
        for player, own in self.own.items():
            if isinstance(own, EmptySeat):
                self.own[player] = agent

    def side(self, player: str) -> str:
        """What a player is called at the board: White, x; empty where there is only one."""
        return printable(str(self.game.side(player))) if len(self.players) > 1 else ""

    def title(self, player: str) -> str:
        """Who sits in a seat, and whose side it is."""
        return " · ".join(filter(None, (self.name(player), self.side(player))))

    def rules(self, player: str) -> str:
        """The rules for a person, who is told first which side is theirs."""
        alone = player == Scenario.players[0]  # nobody else is on the board
        return (
            self.scenario.rules
            if alone
            else f"You are {printable(str(self.game.side(player)))}. {self.scenario.rules}"
        )

    def name(self, player: str) -> str:
        agent = self.agents[player]
        own = agent.name if isinstance(agent, (HumanAgent, EmptySeat)) else ""
        return own or self.called.get(agent.spec) or short_name(agent.spec)

    def subject(self, player: str) -> str:
        """Who a sentence is about: the one who sits there, or, where one agent has both seats, the side."""
        name = self.name(player)
        return name if [self.name(one) for one in self.players].count(name) == 1 else self.side(player)


@dataclass
class Sitting:
    """The returns of this sitting's finished episodes, by scenario and agent."""

    returns: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, session: Session) -> None:
        for player, total in session.episode.returns.items():
            self.returns[session.scenario.id, session.episode.agents[player]].append(total)

    def of(self, session: Session, player: str) -> list[float]:
        return self.returns.get((session.scenario.id, session.agents[player].spec), [])


def short_name(spec: str) -> str:
    """What a narrow screen calls an agent: `fl` for adapter:runs/fl, the model's name for an endpoint.

    A name that a game or another agent has as well keeps the agent's kind: `adapter:snake`, `adapter:optimal`.
    """
    kind, colon, rest = spec.partition(":")
    if not colon or kind == "nano":
        return spec
    name = rest.rpartition("#")[2] if kind == "endpoint" else rest.rstrip("/").rpartition("/")[2] or rest
    return f"{kind}:{name}" if name in SCENARIOS or names_an_agent(name) else name


def names_of(specs: Collection[str]) -> dict[str, str]:
    """What a narrow screen calls agents that it shows together: by their short names, or, where several have the
    same, by as many parts of the whole name, from its end, as tell them apart: `a/seed-0` and `b/seed-0`.
    """
    names = {spec: short_name(spec) for spec in specs}
    return {spec: _apart(spec, {one for one in specs if names[one] == names[spec]} - {spec}) for spec in names}


def _apart(spec: str, others: Collection[str]) -> str:
    if not others:
        return short_name(spec)
    parts, wholes = spec.rstrip("/").split("/"), [f"/{one.rstrip('/')}" for one in others]
    ends = ("/".join(parts[-number:]) for number in range(1, len(parts)))
    return next((end for end in ends if not any(whole.endswith(f"/{end}") for whole in wholes)), spec)


def points(value: float) -> str:
    """A reward or return as people write it: +1, −1 or 0."""
    return f"{value:+g}" if value else "0"


def loss(value: float) -> str:
    """What a move lost; what is too little for two digits is not called nothing."""
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def ending(session: Session, frame: Frame) -> str:
    """How a game ended, in its own words, with who sits there for each player; empty while it goes on."""
    text = frame.ending
    for player in session.players:
        text = re.sub(rf"\b{re.escape(player)}\b", session.subject(player).replace("\\", r"\\"), text)
    return text


def mood(session: Session, player: str) -> Mood:
    """How the end looks from a seat: by the goal where there is one, by the others' returns where there are others,
    else by what the last step paid."""
    if session.game.success is not None:
        return "good" if session.game.success else "limit" if session.game.outcome is Outcome.TRUNCATED else "bad"
    if len(session.players) > 1:
        totals = session.game.returns
        best = max(total for other, total in totals.items() if other != player)
        return "limit" if totals[player] == best else "good" if totals[player] > best else "bad"
    before, after = (frame.tallies[player].total for frame in session.frames[-2:])
    return "good" if after > before else "bad" if after < before else "limit"
