"""One board, and in words whose it is, what its signs mean, what the position is worth, how it ended."""

from __future__ import annotations

import re
from itertools import chain
from typing import get_args

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.markup import escape
from textual.widgets import Static

from msgrpo.game import Board, Role
from msgrpo.tui.agents import HumanAgent
from msgrpo.tui.session import Frame, Mood, Session, ending, mood
from msgrpo.tui.widgets.board import BoardView, look

NARROWEST, AROUND = 30, 4  # columns of a lane; those of its border and padding
CHIPS = {
    "head-1": "$snake-1",
    "body-1": "$snake-body-1",
    "head-2": "$snake-2",
    "body-2": "$snake-body-2",
    "wall": "$board-mark",
    "won": "$success",
}  # theme colours that are not named as their class is
# Whom a reward of the first and of the second player lights up.
HEADS: tuple[tuple[Role, ...], ...] = (("own", "won", "lost"), ("other", "won", "lost"))


def _reward(frame: Frame, player: str) -> float:
    return frame.turns[player].reward if player in frame.turns else 0.0


class Lane(Vertical):
    """`several` says that another board stands beside it."""

    def __init__(self, index: int, session: Session, *, several: bool) -> None:
        super().__init__(id=f"lane-{index}", classes="lane")
        self.index = index
        self._session = session
        self._several = several
        self._shown = 0  # the step that stood there before

    def compose(self) -> ComposeResult:
        frame = self._session.frame
        yield BoardView(frame.board, frame.seen)
        if self._session.scenario.judge is not None:
            yield Static(classes="worth", markup=False)
        yield Static(legend(frame.board), classes="legend")

    def show(self, worth: str) -> None:
        session, frame = self._session, self._session.frame
        board = self.query_one(BoardView)
        board.show(frame.board, frame.seen)
        paid = [roles for player, roles in zip(session.players, HEADS, strict=False) if _reward(frame, player)]
        if session.cursor == self._shown + 1 and paid:
            board.flash(chain.from_iterable(paid))
        self._shown = session.cursor
        first = session.players[0]
        whose = f" · {session.name(first)}" if self._several else ""
        self.border_title = escape(f"{session.scenario.id}{whose}")
        self.border_subtitle = escape(ending(session, frame))
        how = mood(session, first) if frame.ending else None
        for kind in get_args(Mood):
            self.set_class(how == kind, kind)
        self.set_class(self._several and isinstance(session.agents[first], HumanAgent), "person")
        self.show_worth(worth)

    def show_worth(self, worth: str) -> None:
        for line in self.query(".worth").results(Static):  # none, where nobody judges
            line.update(worth)

    def fit(self, room: int) -> None:
        """Take the columns that the board fills at its height, and leave the rest to what stands beside it."""
        board = self.query_one(BoardView)
        self.styles.width = max(NARROWEST, min(board.width_in(board.size.height) + AROUND, room))


def legend(board: Board | None) -> Content:
    """What the signs on the board mean; a snake's head and body are one entry."""
    shown: dict[str, Content] = {}
    for glyph, meaning in board.legend.items() if board else ():
        if board and board.roles.get(glyph, "floor") not in ("floor", "ice"):
            name = re.sub(r"^(head|body) of ", "", meaning)
            signs, kind = look(glyph, board)
            chip = Content.styled(signs, f"bold auto on {CHIPS.get(kind, f'${kind}')}")
            shown[name] = shown.get(name, Content("")) + chip
    parts = [
        signs + Content.styled(f"\u00a0{name}".replace(" ", "\u00a0"), "$text-muted") for name, signs in shown.items()
    ]
    return Content("   ").join(parts)
