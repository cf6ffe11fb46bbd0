"""Asking the seats of a match for their answers: all at the same time, each failure kept to its own seat."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from textual.message import Message

from msgrpo.errors import MsgrpoError
from msgrpo.text import printable
from msgrpo.tui.agents import HumanAgent, LazyAgent
from msgrpo.tui.match import Match
from msgrpo.tui.messages import AnswerStreamed, RoundEnded, SeatAnswered, SeatFailed

Seat = tuple[int, str]  # (session, player)
REDRAW_S = 0.05  # between two drawings of an answer that grows: keys come first


class Asking:
    """One round at a time. `tell` gets what happens, from this thread or from another; `now` is the time in seconds.

    An answer goes to its session at once; an agent that ends after its round was dropped speaks for nobody.
    """

    def __init__(self, match: Match, tell: Callable[[Message], object], now: Callable[[], float]) -> None:
        self._match, self._tell, self._now = match, tell, now
        self._round: asyncio.Task[None] | None = None
        self._began = 0.0
        self.failed: dict[Seat, str] = {}  # why, and what may help
        self.stopped = False  # a person stopped waiting for the answers
        self._words: dict[Seat, str] = {}  # of this round: the newest ones that are not told yet
        self._due = False  # they will be told
        self._told = 0.0  # when words were told last, by the event loop
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def going(self) -> bool:
        return self._round is not None

    @property
    def waited(self) -> int:
        """Whole seconds since the round began."""
        return int(self._now() - self._began)

    def start(self) -> None:
        """Ask everybody whose answer the step still needs."""
        self._began = self._now()
        self.failed.clear()
        self.stopped = False
        self._words = {}
        self._loop = asyncio.get_running_loop()
        self._round = self._loop.create_task(self._ask(self._match.waiting()))

    def stop(self) -> None:
        """A person has waited long enough."""
        self.drop()
        self.stopped = True

    def searching(self) -> bool:
        """Whether only reference players are asked, who say nothing before their answer."""
        asked = [self._match.sessions[index].agents[player] for index, player in self._match.waiting()]
        return self.going and all(isinstance(agent, LazyAgent) and agent.searches for agent in asked)

    async def soon(self, seconds: float) -> None:
        """Wait so long at most for the answers."""
        if self._round is not None:
            await asyncio.wait({self._round}, timeout=seconds)

    def drop(self) -> None:
        """Give the round up; nothing of it is told any more."""
        self._words = {}
        if self._round is not None:
            self._round.cancel()
            self._round = None

    async def _ask(self, seats: list[Seat]) -> None:
        await asyncio.gather(*(self._ask_seat(index, player) for index, player in seats))
        self._round = None
        self._tell(RoundEnded())

    async def _ask_seat(self, index: int, player: str) -> None:
        session, asked = self._match.sessions[index], self._round
        try:
            decision = await session.agents[player].act(
                session.view(player), on_text=partial(self._streamed, self._words, index, player)
            )
        except MsgrpoError as error:
            self._fail(asked, index, player, "\n".join(filter(None, (error.message, error.fix))))
        except Exception as error:  # any fault of an agent is a message in the app, never its end
            self._fail(asked, index, player, printable(f"the agent crashed: {type(error).__name__}: {error}"))
        else:
            if asked is self._round:
                session.answer(player, decision)
                self._tell(SeatAnswered(index, player))

    def _fail(self, asked: asyncio.Task[None] | None, index: int, player: str, why: str) -> None:
        if asked is self._round:
            self.failed[index, player] = why
            self._tell(SeatFailed(index, player))

    def _streamed(self, words: dict[Seat, str], index: int, player: str, text: str) -> None:
        """Tell the first words at once, and then the newest ones a few times a second, however fast they come; none
        of a round that was dropped, whose agents may speak on for a while, into `words` of their own.

        An agent calls this from its own thread.
        """
        if words is not self._words:
            return
        words[index, player] = text
        if not self._due and self._loop is not None and not self._loop.is_closed():
            self._due = True
            self._loop.call_soon_threadsafe(self._tell_soon)

    def _tell_soon(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self._told + REDRAW_S), self._tell_words)

    def _tell_words(self) -> None:
        self._due = False  # what is said from here on is told by this call or by another
        self._told = asyncio.get_running_loop().time()
        words = self._words
        for index, player in list(words):
            self._tell(AnswerStreamed(index, player, words.pop((index, player))))

    # ── people ───────────────────────────────────────────────────────────────────────────────────────────────

    def people(self) -> list[tuple[int, str, HumanAgent]]:
        """The people whose move is waited for."""
        waiting = ((*seat, self._match.sessions[seat[0]].agents[seat[1]]) for seat in self._match.waiting())
        return [(i, player, agent) for i, player, agent in waiting if isinstance(agent, HumanAgent) and agent.waiting]

    def only_people(self) -> bool:
        """Whether nobody but people is waited for; also where nobody is."""
        return len(self.people()) == len([seat for seat in self._match.waiting() if seat not in self.failed])

    def loading(self, index: int, player: str) -> bool:
        agent = self._match.sessions[index].agents[player]
        return isinstance(agent, LazyAgent) and not agent.loaded

    def trouble(self, index: int, player: str) -> str:
        """What the seat's model says it is waiting for, or nothing."""
        agent = self._match.sessions[index].agents[player]
        return agent.trouble if isinstance(agent, LazyAgent) else ""
