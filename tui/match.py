"""What stands side by side on the screen: one session, or two from the same start with the same luck. No Textual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgrpo.agent import Agent
from msgrpo.errors import UsageError
from msgrpo.game import Scenario
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.retold import SIGN
from msgrpo.references import check_reference
from msgrpo.tui.agents import ARROWS, WASD, EmptySeat, HumanAgent
from msgrpo.tui.session import Session, Setup, names_of


@dataclass
class Match:
    """One session, or two side by side that move in step; the shorter one waits at its end."""

    sessions: Sequence[Session]

    @property
    def cursor(self) -> int:
        return max(session.cursor for session in self.sessions)

    @property
    def last(self) -> int:
        return max(session.last for session in self.sessions)

    @property
    def live(self) -> bool:
        return all(session.live for session in self.sessions)

    @property
    def over(self) -> bool:
        return all(session.over for session in self.sessions)

    @property
    def human(self) -> bool:
        """A person has a seat in a game that goes on."""
        return any(session.human and not session.over for session in self.sessions)

    @property
    def ready(self) -> bool:
        playing = [session for session in self.sessions if not session.over]
        return bool(playing) and all(session.ready for session in playing)

    def seats(self) -> list[tuple[int, str]]:
        """Every (session, player), in the order of the screen."""
        return [(i, player) for i, session in enumerate(self.sessions) for player in session.players]

    def waiting(self) -> list[tuple[int, str]]:
        return [(i, player) for i, session in enumerate(self.sessions) for player in session.waiting()]

    def choosing(self) -> list[tuple[int, str]]:
        """The people whose move the step still needs."""
        return [seat for seat in self.waiting() if self.human_seat(*seat)]

    def chosen_by_people(self) -> bool:
        """Whether a person's move is among those that the step has."""
        return any(
            self.human_seat(i, player) for i, session in enumerate(self.sessions) for player in session.answers
        )

    def to_look(self) -> tuple[int, str] | None:
        """Who of two people looks at their cards before they move, while the other looks away."""
        first = next(iter(self.choosing()), None)
        return first if first is not None and self.sessions[first[0]].covers(first[1]) else None

    def human_seat(self, session: int, player: str) -> bool:
        return isinstance(self.sessions[session].agents[player], HumanAgent)

    def empty(self) -> list[tuple[int, str]]:
        """The seats whose answer is needed and in which nobody sits."""
        return [(i, p) for i, p in self.waiting() if isinstance(self.sessions[i].agents[p], EmptySeat)]

    @property
    def secret(self) -> bool:
        """Whether a person has still to choose while others have seats: till then nobody's choice is shown."""
        return len(self.seats()) > 1 and any(
            isinstance(self.sessions[i].agents[player], HumanAgent) for i, player in self.waiting()
        )

    def people(self) -> list[HumanAgent]:
        """The people at the board, in the order of their seats."""
        agents = [self.sessions[i].agents[player] for i, player in self.seats()]
        return [agent for agent in agents if isinstance(agent, HumanAgent)]

    def seat_people(self) -> None:
        """Give each of two people a name and keys of their own; one alone is `you`, with all keys. Agents with one
        short name are told apart.
        """
        called = names_of({self.sessions[i].agents[player].spec for i, player in self.seats()})
        for session in self.sessions:
            session.called = called
        people = self.people()
        for number, (person, hand) in enumerate(zip(people, (ARROWS, WASD), strict=False), start=1):
            alone = len(people) == 1
            person.name = "you" if alone else f"player {number}"
            person.hands = (ARROWS, WASD) if alone else (hand,)

    def commit(self) -> None:
        for session in self.sessions:
            if session.ready:
                session.commit()

    def seek(self, step: int) -> None:
        for session in self.sessions:
            session.seek(step)

    def rewind(self) -> None:
        for session in self.sessions:
            session.rewind()


def knowing(scenario: Scenario) -> str:
    """An agent that knows the game, and needs no model."""
    return "random" if scenario.reference is None else "optimal"


def nano_reads(scenario: Scenario) -> bool:
    """Whether it is a game of ours, in other words too: nano has seen no other."""
    return scenario.id.partition(SIGN)[0] in SCENARIOS


def usual(scenario: Scenario) -> str:
    """The agent where nobody is named."""
    return "nano" if nano_reads(scenario) else knowing(scenario)


def opponent(setup: Setup) -> str:
    """The second agent; where nobody is named one that needs no model."""
    return setup.against or knowing(get_scenario(setup.scenario))


def new_match(setup: Setup, seat: Callable[[str, float], Agent]) -> Match:
    """The boards of a setup: a duel shares one, two agents of a one-player game get one each.

    `seat` makes the agent of a name and a temperature. Raises MsgrpoError where the game cannot begin so.
    """
    scenario = get_scenario(setup.scenario)
    players = scenario.players
    if len(players) > 2:
        raise UsageError(f"{scenario.id} has {len(players)} players; the app seats two")
    if "optimal" in (setup.agent, setup.against):
        check_reference(scenario)
    if len(players) == 1:
        specs = [setup.agent] if setup.against is None else [setup.agent, setup.against]
        agents = [seat(spec, setup.temperature) for spec in specs]
        match = Match([Session(scenario, {players[0]: agent}, setup.seed) for agent in agents])
    else:
        specs = [setup.agent, opponent(setup)]
        seated = {player: seat(spec, setup.temperature) for player, spec in zip(players, specs, strict=True)}
        match = Match([Session(scenario, seated, setup.seed)])
    match.seat_people()
    return match
