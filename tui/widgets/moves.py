"""The moves of one seat as a list: step, action, its probability, reward, and what it lost; a click goes there."""

from __future__ import annotations

from rich.cells import cell_len
from textual.events import Click

from msgrpo.tui.judging import Judging
from msgrpo.tui.messages import SeekTo
from msgrpo.tui.session import Frame, Session, loss, points
from msgrpo.tui.widgets.lines import Lines, Part, fitted

BESIDE = 19  # columns of the step, the probability and the reward
SIGNS = {"": "muted", "?": "mistake", "??": "blunder"}


class MoveList(Lines):
    """As many lines as there is room for, around the step that is shown."""

    def __init__(self, index: int, player: str) -> None:
        super().__init__(classes="moves")
        self.index, self.player = index, player
        self._session: Session | None = None
        self._judging: Judging | None = None
        self._idle = ""

    def show(self, session: Session, judging: Judging, *, idle: str) -> None:
        """`idle` is what a turn without an action is called."""
        self._session, self._judging, self._idle = session, judging, idle
        self.draw()

    def _rows(self) -> list[Frame]:
        """The frames that are shown, one below the other."""
        if self._session is None:
            return []
        played = [frame for frame in self._session.frames if self.player in frame.turns]
        here = sum(frame.step <= self._session.cursor for frame in played)
        room = max(1, self.size.height - 1)
        first = max(0, min(here - room // 2 - 1, len(played) - room))
        return played[first : first + room]

    def lines(self) -> list[list[Part]]:
        if self._session is None or self._judging is None:
            return []
        listed = self._session.game.actions
        width = max(6, *map(cell_len, listed)) if listed else max(6, self.size.width - BESIDE)
        rows = self._rows()
        judged = self._session.scenario.judge is not None
        head = f"step  {'action':<{width}}    p  reward" + ("   lost" if judged else "")
        return [[(head if rows else "", "muted")], *(self._line(self._judging, frame, width) for frame in rows)]

    def _line(self, judging: Judging, frame: Frame, width: int) -> list[Part]:
        turn = frame.turns[self.player]
        p = (turn.action_probabilities or {}).get(turn.action or "")
        here = self._session is not None and frame.step == self._session.cursor
        text = f"{frame.step:>4}  {fitted(turn.action or self._idle, width)} {'' if p is None else f'{p:.0%}':>4}"
        lost, sign = judging.lost(self.index, frame.step, self.player)
        return [
            (text, "cursor" if here else ""),
            (f" {points(turn.paid):>7}", "gain" if turn.paid > 0 else "loss" if turn.paid < 0 else ""),
            (f" {loss(lost):>6} {sign}" if lost else "", SIGNS[sign]),
        ]

    def on_click(self, event: Click) -> None:
        rows = self._rows()
        if 0 < event.y <= len(rows):
            self.post_message(SeekTo(rows[event.y - 1].step))
