"""The board by the Line API: two columns a cell (more where there is room), a glyph and a colour each.

The letters are those of the text that a language model reads, so that a person compares the two at a glance; a
second sign beside each letter tells things apart without any colour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from rich.segment import Segment
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from msgrpo_agent.game import Board

SCALES = (5, 3, 2)  # odd ones have a middle row for the glyph
AXIS = 2  # columns of row labels on the left; one row of column labels below
NUMBERED = re.compile(r"(head|body) of \w+ (\d)")


def look(glyph: str, legend: Mapping[str, str]) -> tuple[str, str]:
    """(two columns of text, colour class) for a cell, from what the legend says about its glyph."""
    meaning = legend.get(glyph, "")
    if found := NUMBERED.match(meaning):
        part, number = found.groups()
        return (f"●{glyph}" if part == "head" else f"{glyph}{glyph}"), f"{part}-{1 if number == '1' else 2}"
    if "(+" in meaning:
        return f"{glyph}+", "good"
    if "(-" in meaning:
        return f"{glyph}-", "bad"
    known = {
        "you": (f"●{glyph}", "head-1"),
        "frozen": ("· ", "ice"),
        "empty": ("· ", "floor"),
        "hole": (glyph * 2, "hole"),
        "goal": (f"★{glyph}", "goal"),
    }
    return known.get(meaning, (glyph * 2, "floor"))


class BoardView(Widget):
    """Shows a `Board`; only the cells that changed are drawn again."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"board--{kind}"
        for kind in (
            "axis", "floor-a", "floor-b", "ice-a", "ice-b", "hole", "goal",
            "head-1", "head-2", "body-1", "body-2", "good", "bad",
        )
    }  # fmt: skip

    board: reactive[Board | None] = reactive(None, repaint=False)

    def __init__(self, board: Board, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.set_reactive(BoardView.board, board)

    @property
    def rows(self) -> int:
        return len(self.board.cells) if self.board else 0

    @property
    def columns(self) -> int:
        return len(self.board.cells[0]) if self.board else 0

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
        board, scale = self.board, self.scale
        left, top = self._margins()
        blank = self.rich_style
        line = y - top
        if board is None or not 0 <= line <= scale * self.rows:
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
                text, kind = look(glyph, board.legend)
                if kind in ("floor", "ice"):
                    kind += "-a" if (x + row) % 2 else "-b"
                style = self.get_component_rich_style(f"board--{kind}")
                shown = text.center(2 * scale) if part == middle else " " * (2 * scale)
                segments.append(Segment(shown, style))
        return Strip(segments).adjust_cell_length(self.size.width, blank)
