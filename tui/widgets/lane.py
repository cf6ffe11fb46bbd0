"""One board, and in words whose it is, what its signs mean, what the position is worth, how it ended."""

from __future__ import annotations

import re
from itertools import chain
from typing import get_args

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.markup import escape

from msgrpo.game import Board, Place, Role
from msgrpo.tui.agents import HumanAgent
from msgrpo.tui.session import Frame, Mood, Session, ending, mood
from msgrpo.tui.shades import MUTED
from msgrpo.tui.widgets.board import AXIS, EMPTY, PAINTS, SCALES, BoardView, look
from msgrpo.tui.widgets.text import Text, lines

NARROWEST, AROUND, ABOVE = 30, 4, 2  # columns of a lane; columns and rows of its border and padding
BETWEEN = "   "  # two signs of the legend
# Lines for what the last move and the position are worth; letters of it for each player where there is room.
WORTH, LETTERS = 2, 150
CHIPS = {
    "head-1": "$snake-1",
    "body-1": "$snake-body-1",
    "head-2": "$snake-2",
    "body-2": "$snake-body-2",
    "wall": "$board-mark",
    "won": "$success",
    "thing": "$panel",
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
        self._worth = ""

    def compose(self) -> ComposeResult:
        yield Text(classes="caption")
        yield BoardView(*self._session.shown, paged=True)
        yield Text(classes="worth")
        yield Text(classes="legend")

    @property
    def board(self) -> BoardView:
        return self.query_one(BoardView)

    def show(self, worth: str) -> None:
        session, frame = self._session, self._session.frame
        board, seen = session.shown
        self.board.show(board, seen)
        rewarded = [roles for player, roles in zip(session.players, HEADS, strict=False) if _reward(frame, player)]
        if session.cursor == self._shown + 1 and rewarded:
            self.board.flash(chain.from_iterable(rewarded))
        self._shown = session.cursor
        first = session.players[0]
        whose = f" · {session.name(first)}" if self._several else ""
        end = ending(session, frame)  # where it has no room, the panel says it
        self._titles(escape(f"{session.scenario.id}{whose}"), escape(end if len(end) <= self.size.width else ""))
        how = mood(session, first) if frame.ending else None
        for kind in get_args(Mood):
            self.set_class(how == kind, kind)
        self.set_class(self._several and isinstance(session.agents[first], HumanAgent), "person")
        self.query_one(".caption", Text).show(Content.styled(board.caption if board else "", "bold"))
        self.show_worth(worth)

    def _titles(self, above: str, below: str) -> None:
        if self.border_title != above:
            self.border_title = above
        if self.border_subtitle != below:
            self.border_subtitle = below

    def show_worth(self, worth: str) -> None:
        self._worth = worth
        self._write_worth()

    def _write_worth(self) -> None:
        """The lines of what a position is worth that have room as a whole, and in any case the first one."""
        text, width = self.query_one(".worth", Text), max(1, self.content_size.width)
        height = text.styles.height
        room = int(height.value) if height is not None else 0
        shown: list[str] = []
        for line in self._worth.split("\n"):
            taken = lines(Content("\n".join([*shown, line])), width)
            if taken <= room or not shown:
                shown.append(line)
        text.show(Content("\n".join(shown)))

    def least(self, width: int) -> int:
        """The rows that the board takes at its smallest, in so many columns."""
        board = self._session.shown[0]
        caption = Content(board.caption if board else "")
        return self.board.rows + 1 + ABOVE + lines(caption, width - AROUND) if board else 0

    def fit(self, width: int, height: int, *, whole_width: bool) -> None:
        """Take what the board needs of so many columns and rows at the largest scale that fits.

        It depends on the room and on the position alone. What the signs mean and what the position is worth are left
        out where the board needs their lines. `whole_width`: all columns are taken, and only the needed rows.
        """
        shown, board = self._session.shown[0], self.board
        judged = WORTH if self._session.scenario.judge is not None else 0
        letters = LETTERS * len(self._session.players)
        caption = Content(shown.caption if shown else "")
        for scale in (*SCALES, 1):
            wide = min(width, max(NARROWEST, AXIS + 2 * scale * board.columns + AROUND))
            inner = (width if whole_width else wide) - AROUND
            rows = scale * board.rows + 1 + ABOVE + lines(caption, inner)
            signs = legend(shown, inner)
            words = min(3, lines(signs, inner)), judged
            needed = rows if self._several else rows + sum(words)  # two boards side by side come before their words
            if AXIS + 2 * scale * board.columns + AROUND <= width and needed <= height:
                break
        room = height - rows
        if judged and not whole_width and not self._several:
            judged = max(WORTH, min(1 + letters // inner, room - words[0]))
        self.query_one(".caption").display = bool(caption)
        self._keep(".worth", judged, room)
        self._write_worth()
        self.query_one(".legend", Text).show(signs)
        self._keep(".legend", words[0], room - (judged if judged <= room else 0))
        if shown is None:
            wide, rows = max(NARROWEST, width), height
        taken = sum(line for line in (judged, words[0]) if line <= room)
        if not whole_width and not self._several:  # the lane is as high as the window: a long legend may fill it
            left = room - (judged if judged <= room else 0)
            self._keep(".legend", min(lines(signs, inner), max(words[0], left)), left)
        self.styles.width = width if whole_width else wide
        self.styles.height = min(height, rows + taken) if whole_width else "1fr"

    def _keep(self, name: str, needed: int, room: int) -> None:
        line = self.query_one(name)
        line.display = 0 < needed <= room
        line.styles.height = max(1, needed)


def legend(board: Board | None, width: int) -> Content:
    """What the signs that are on the board mean; a snake's head and body are one entry, and the white and the black
    piece of a kind.

    In lines of so many columns: a sign and its name stay together, which Textual would part at any blank.
    """
    if board is None:
        return Content("")
    shown: dict[str, Content] = {}
    # sign -> what it means, in each of its colours -> a place where it stands
    there: dict[str, dict[str, Place]] = {}
    for y, row in enumerate(board.cells):
        for x, glyph in enumerate(row):
            there.setdefault(glyph, {}).setdefault(board.named((y, x)), (y, x))
    for glyph in board.legend:
        floor = board.roles.get(glyph, "floor") in ("floor", "ice")
        if floor and (glyph in EMPTY or board.roles.get(glyph) == "ice"):
            continue
        for meaning, place in there.get(glyph, {}).items():
            if meaning == glyph:
                continue  # an x that means x
            name = re.sub(r"^(head of|body of|white|black) ", "", meaning)
            signs, kind = look(board, place)
            paint = board.colours.get(place)
            ground = PAINTS[paint][0] if paint in PAINTS else CHIPS.get(kind, f"${kind}")
            chip = Content.styled(signs, f"bold auto on {'$panel' if floor else ground}")
            shown[name] = shown.get(name, Content("")) + chip
    parts = [signs + Content.styled(f"\u00a0{name}".replace(" ", "\u00a0"), MUTED) for name, signs in shown.items()]
    rows: list[Content] = []
    for part in parts:
        if rows and rows[-1].cell_length + len(BETWEEN) + part.cell_length <= width:
            rows[-1] += Content(BETWEEN) + part
        else:
            rows.append(part)
    widest = max((row.cell_length for row in rows), default=0)  # so that they begin below each other
    return Content("\n").join([row.pad_right(widest - row.cell_length) for row in rows])
