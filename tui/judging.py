"""What the moves of a match were worth: judged one position at a time in a thread, the one that is shown first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from textual.message import Message

from msgrpo.errors import GameError
from msgrpo.game import Game, Judgement, Scenario
from msgrpo.judge import judgement_of
from msgrpo.references import known_best
from msgrpo.signals import in_daemon_thread
from msgrpo.text import counted
from msgrpo.tui.match import Match
from msgrpo.tui.messages import Judged
from msgrpo.tui.session import Session

SAME = 1e-9  # points within which two exact values are one
Position = tuple[int, int, str]  # (session, step, who is to move)


@dataclass(frozen=True)
class Advice:
    """What a position is worth, and the moves to recommend: of the best ones those that need the fewest steps."""

    judgement: Judgement
    moves: tuple[str, ...]
    lost: bool  # nothing that is done here changes the result any more, and it is a bad one


class Judging:
    """`tell` hears of every judgement. A position that is played again otherwise is judged again."""

    def __init__(self, match: Match, tell: Callable[[Message], object]) -> None:
        self._match, self._tell = match, tell
        self._found: dict[Position, tuple[Game, Advice]] = {}
        self._work: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.failed = ""  # why nothing is judged any more

    def of(self, index: int, step: int, player: str) -> Advice | None:
        """What is known of the position before the move of `step`, once it is judged."""
        game, advice = self._found.get((index, step, player), (None, None))
        session = self._match.sessions[index]
        return advice if step <= session.last and game is session.game_at(step) else None

    def lost(self, index: int, step: int, player: str) -> tuple[float, str]:
        """(regret, sign) of the move that led to `step`; nothing where there was none or it is not judged yet."""
        frames = self._match.sessions[index].frames
        turn = frames[step].turns.get(player) if step < len(frames) else None
        advice = self.of(index, step - 1, player) if turn is not None else None
        if turn is None or advice is None:
            return 0.0, ""
        return advice.judgement.regret(turn.action), advice.judgement.sign(turn.action)

    def mistakes(self, index: int, player: str) -> dict[int, float]:
        """What each mistake of a game lost, step -> points; the step counts from 1."""
        frames = self._match.sessions[index].frames
        costs = {frame.step: self.lost(index, frame.step, player) for frame in frames if player in frame.turns}
        return {step: lost for step, (lost, sign) in costs.items() if sign}

    def summary(self, index: int, player: str, idle: str) -> str:
        """The mistakes of a game that is over: how many, and the worst. Empty where nothing is judged.

        `idle` is what a turn without an action is called.
        """
        session = self._match.sessions[index]
        steps = [frame.step for frame in session.frames if player in frame.turns]
        if not steps or any(self.of(index, step - 1, player) is None for step in steps):
            return ""
        costs = self.mistakes(index, player)
        if not costs:
            return "no mistake"
        worst = max(costs, key=lambda step: costs[step])
        chosen = session.frames[worst].turns[player].action or idle
        return f"{counted(len(costs), 'mistake')}, the worst at step {worst}: {chosen} lost {costs[worst]:.2f}"

    def look(self) -> None:
        """Judge what is not judged yet."""
        if self._work is None and not self.failed and self._next() is not None:
            self._work = asyncio.get_running_loop().create_task(self._judge())

    @property
    def done(self) -> bool:
        """Whether there is nothing left to judge."""
        return bool(self.failed) or self._next() is None

    @property
    def going(self) -> bool:
        return self._work is not None

    def drop(self) -> None:
        if self._work is not None:
            self._work.cancel()
            self._work = None

    async def soon(self, seconds: float) -> None:
        """Judge, and wait so long at most till what is shown is judged."""
        self.look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._work is not None and not self._shown():
                    self._news.clear()
                    await self._news.wait()

    async def _judge(self) -> None:
        try:
            await self._judge_all()
        except GameError as error:  # of a foreign judge: nothing more is judged, and the game goes on
            self.failed = f"no move is judged any more: {error.message}"
            self._tell(Judged())
        finally:
            self._work = None
            self._news.set()

    async def _judge_all(self) -> None:
        while (wanted := self._next()) is not None:
            index, step, player = wanted
            session = self._match.sessions[index]
            game = session.game_at(step)
            advice = await in_daemon_thread(lambda: advise(session.scenario, game, player))  # noqa: B023 (awaited at once)
            self._found[wanted] = game, advice
            self._tell(Judged())
            self._news.set()

    def _shown(self) -> bool:
        """Whether the positions that are shown are judged, and those before the moves that are shown."""
        return all(
            self.of(index, step, player) is not None
            for index, session in enumerate(self._match.sessions)
            if session.scenario.judge is not None
            for step in (session.cursor, session.cursor - 1)
            for player in to_move(session, step)
        )

    def _next(self) -> Position | None:
        """The position that is shown, or else the newest that is not judged."""
        for index, session in enumerate(self._match.sessions):
            if session.scenario.judge is None:
                continue
            shown = (session.cursor, session.cursor - 1, *range(session.last, -1, -1))
            for step in shown:
                for player in to_move(session, step):
                    if self.of(index, step, player) is None:
                        return index, step, player
        return None


def advise(scenario: Scenario, game: Game, player: str) -> Advice:
    """Judge a position. The scenario must have a judge. Raises GameFaultError where that fails."""
    judgement = judgement_of(scenario, game, player)
    known = known_best(scenario, game, player) or ()
    values = [value for action, value in judgement.values.items() if action is not None]
    settled = judgement.exact and max(values) - min(values) < SAME
    bad = judgement.value < -SAME or (scenario.goal and judgement.value < SAME)
    return Advice(judgement, tuple(a for a in judgement.best if a in known) or tuple(judgement.best), settled and bad)


def to_move(session: Session, step: int) -> tuple[str, ...]:
    """Who moves in a position; nobody after the end."""
    return () if step < 0 or session.frames[step].ending else session.game_at(step).to_move
