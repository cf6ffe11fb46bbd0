"""The board by the Line API: two columns a cell (more where there is room), a glyph and a colour each.

The letters are those of the text that a language model reads, so that a person compares the two at a glance; a
second sign beside each letter tells things apart without any colour.
"""

from __future__ import annotations

import textwrap
from typing import ClassVar

from rich.segment import Segment
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from msgrpo_agent.game import Board, Role

SCALES = (5, 3, 2)  # odd ones have a middle row for the glyph
AXIS = 2  # columns of row labels on the left; one row of column labels below
# Colour class and sign of each role; {0} is the cell's own letter.
LOOKS: dict[Role, tuple[str, str]] = {
    "own": ("head-1", "●{0}"),
    "own-body": ("body-1", "{0}{0}"),
    "other": ("head-2", "●{0}"),
    "other-body": ("body-2", "{0}{0}"),
    "good": ("good", "{0}+"),
    "bad": ("bad", "{0}-"),
    "wall": ("wall", "{0}{0}"),
    "hole": ("hole", "{0}{0}"),
    "goal": ("goal", "★{0}"),
    "ice": ("ice", "· "),
}
EMPTY = (".", " ", "_")  # letters that a floor does not show


def look(glyph: str, board: Board) -> tuple[str, str]:
    """(two columns of text, colour class) for a cell, by its role."""
    role = board.roles.get(glyph, "floor")
    if role == "floor":
        return ("· " if glyph in EMPTY else glyph * 2), "floor"
    kind, sign = LOOKS[role]
    return sign.format(glyph), kind


class BoardView(Widget):
    """Shows a `Board`; only the cells that changed are drawn again."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"board--{kind}"
        for kind in (
            "axis", "floor-a", "floor-b", "ice-a", "ice-b", "wall", "hole", "goal",
            "head-1", "head-2", "body-1", "body-2", "good", "bad",
        )
    }  # fmt: skip

    board: reactive[Board | None] = reactive(None, repaint=False)

    text: reactive[str] = reactive("", repaint=True)  # what is shown of a game without a board

    def __init__(self, board: Board | None, text: str = "", *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.set_reactive(BoardView.board, board)
        self.set_reactive(BoardView.text, text)

    def show(self, board: Board | None, text: str) -> None:
        self.board, self.text = board, text

    @property
    def rows(self) -> int:
        return len(self.board.cells) if self.board else len(self._lines())

    @property
    def columns(self) -> int:
        return len(self.board.cells[0]) if self.board else max(map(len, self._lines())) // 2 + 1

    def _lines(self) -> list[str]:
        """The text of a game without a board, wrapped."""
        width = max(20, self.size.width - AXIS)
        return [part for line in self.text.split("\n") for part in textwrap.wrap(line, width) or [""]]

    def scale_in(self, width: int, height: int) -> int:
        """The largest scale at which the board fits."""
        for scale in SCALES:
            if AXIS + 2 * scale * self.columns <= width and scale * self.rows + 1 <= height:
                return scale
        return 1

    @property
    def scale(self) -> int:
        return self.scale_in(self.size.width, self.size.height)

    def _margins(self) -> tuple[int, int]:
        """(columns, rows) of empty space before the board, so that it stands in the middle."""
        scale = self.scale
        width, height = AXIS + 2 * scale * self.columns, scale * self.rows + 1
        return max(0, (self.size.width - width) // 2), max(0, (self.size.height - height) // 2)

    def watch_board(self, old: Board | None, new: Board | None) -> None:
        if old is None or new is None or len(old.cells) != len(new.cells) or len(old.cells[0]) != len(new.cells[0]):
            self.refresh()
            return
        scale, (left, top) = self.scale, self._margins()
        regions = [
            Region(left + AXIS + 2 * scale * x, top + scale * y, 2 * scale, scale)
            for y, (before, after) in enumerate(zip(old.cells, new.cells, strict=True))
            for x, (was, now) in enumerate(zip(before, after, strict=True))
            if was != now
        ]
        if regions:
            self.refresh(*regions)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return AXIS + 2 * self.columns

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.rows + 1

    def render_line(self, y: int) -> Strip:
        if self.board is None:
            lines = self._lines()
            shown = lines[y] if y < len(lines) else ""
            return Strip([Segment(shown, self.rich_style)]).adjust_cell_length(self.size.width, self.rich_style)
        board, scale = self.board, self.scale
        left, top = self._margins()
        blank = self.rich_style
        line = y - top
        if not 0 <= line <= scale * self.rows:
            return Strip.blank(self.size.width, blank)
        axis = self.get_component_rich_style("board--axis")
        segments = [Segment(" " * left, blank)]
        middle = (scale - 1) // 2
        if line == scale * self.rows:
            labels = "".join(str(x % 10).center(2 * scale) for x in range(self.columns))
            segments.append(Segment(" " * AXIS + labels, axis))
        else:
            row, part = divmod(line, scale)
            label = str((self.rows - 1 - row) % 10) if part == middle else " "
            segments.append(Segment(label.ljust(AXIS), axis))
            for x, glyph in enumerate(board.cells[row]):
                text, kind = look(glyph, board)
                if kind in ("floor", "ice"):
                    kind += "-a" if (x + row) % 2 else "-b"
                style = self.get_component_rich_style(f"board--{kind}")
                shown = text.center(2 * scale) if part == middle else " " * (2 * scale)
                segments.append(Segment(shown, style))
        return Strip(segments).adjust_cell_length(self.size.width, blank)
