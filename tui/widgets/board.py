"""The board by the Line API: two columns a cell with a letter and a colour, or pictures where there is room.

The letters are those of the text that a language model reads, so that a person compares the two at a glance; a
second sign beside each letter tells things apart without any colour. Without colours big cells keep their letters.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import groupby, pairwise
from typing import ClassVar

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.strip import Strip

from msgrpo.game import Board, Place, Role
from msgrpo.tui.clock import after
from msgrpo.tui.sprites import DRAWN, SMALLEST, WAY, sprite
from msgrpo.tui.widgets.styled import Styled

FLASH_S = 0.25  # how long a reward lights up who got it
SCALES = (6, 5, 4, 3, 2)  # rows of a cell; nothing grows beyond the first
AXIS = 2  # columns of row labels on the left; one row of column labels below
# What a thing's colour in the game is on the screen: ground and letter, the same under every theme, and the second
# sign that tells it without colours.
PAINTS = {
    "red": ("#d9534f", "#ffffff", "r"),
    "green": ("#3fa34d", "#04140c", "g"),
    "blue": ("#3f7fd9", "#ffffff", "b"),
    "purple": ("#9657c9", "#ffffff", "p"),
    "yellow": ("#e0c341", "#2b1d00", "y"),
    "grey": ("#9aa3ad", "#14181d", "e"),
    "white": ("#e9edf2", "#14181d", "w"),
    "black": ("#2f3640", "#e9edf2", "k"),
}
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
    "won": ("won", "★{0}"),
    "lost": ("lost", "×{0}"),
    "ice": ("ice", "· "),
    "thing": ("thing", "{0} "),
}
NO_SIDES: frozenset[str] = frozenset()
EMPTY = (".", " ", "_")  # letters that a floor does not show


def look(board: Board, place: Place) -> tuple[str, str]:
    """(two columns of text, colour class) for a cell, by its role; a thing has its colour as second sign."""
    glyph = board.cells[place[0]][place[1]]
    role, paint = board.roles.get(glyph, "floor"), board.colours.get(place)
    if role == "thing" and paint in PAINTS and board.named(place) != board.legend.get(glyph, glyph):
        return glyph + PAINTS[paint][2], "thing"
    if role == "floor":
        return ("· ", "floor") if glyph in EMPTY else (glyph * 2, "sign")
    kind, sign = LOOKS[role]
    return sign.format(glyph), kind


class BoardView(Styled):
    """Shows a `Board`; only the cells that changed are drawn again."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"board--{kind}"
        for kind in (
            "axis", "floor-a", "floor-b", "sign-a", "sign-b", "ice-a", "ice-b", "wall", "hole", "goal",
            "head-1", "head-2", "body-1", "body-2", "good", "bad", "won", "lost", "leaf", "lit", "thing",
        )
    }  # fmt: skip

    board: reactive[Board | None] = reactive(None, repaint=False)

    text: reactive[str] = reactive("", repaint=False)  # what is shown of a game without a board

    def __init__(self, board: Board | None, text: str = "", *, paged: bool = False) -> None:
        """`paged`: keys page through a long text, and it says so."""
        super().__init__()
        self._paged = paged
        self._below = 0  # lines of the text that follow the last one that is shown
        self.set_reactive(BoardView.board, board)
        self.set_reactive(BoardView.text, text)
        self._lit: frozenset[Role] = frozenset()
        self._joined: Board | None = None  # the board of the joints
        self._joints: Mapping[Place, frozenset[str]] = {}

    def flash(self, roles: Iterable[Role]) -> None:
        """Light up the cells of these roles for a moment, where the app moves at all (TEXTUAL_ANIMATIONS)."""
        if self.app.animation_level != "none":
            self._light(frozenset(roles))
            after(self, FLASH_S, lambda: self._light(frozenset()))

    def _light(self, roles: frozenset[Role]) -> None:
        either, self._lit = self._lit | roles, roles
        if self.board is not None:
            of = self.board.roles
            rows = enumerate(self.board.cells)
            self._draw((y, x) for y, row in rows for x, glyph in enumerate(row) if of.get(glyph, "floor") in either)

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

    def _seen(self) -> list[str]:
        """The lines of the text that have room: its end, where what is new stands, or what was paged back to. A first
        or a last line says that there is more.
        """
        lines, room = self._lines(), self.size.height
        above = max(0, len(lines) - room - self._below)
        seen = lines[above : above + room]
        for place, there, key in ((0, above, "up"), (-1, len(lines) - above - room, "down")):
            if there > 0 and seen:
                seen[place] = f"… page {key}: more" if self._paged else "…"
        return seen

    def scroll_words(self, pages: int) -> None:
        """Page through the text of a game without a board."""
        room = self.size.height
        self._below = max(0, min(self._below - pages * max(1, room - 2), len(self._lines()) - room))
        self.refresh()

    def scale_in(self, width: int, height: int) -> int:
        """The largest scale at which the board fits."""
        for scale in SCALES:
            if AXIS + 2 * scale * self.columns <= width and scale * self.rows + 1 <= height:
                return scale
        return 1

    @property
    def scale(self) -> int:
        return self.scale_in(*self.size)

    @property
    def cut_off(self) -> str:
        """What is said on the last line where the window is too small for the cells of a board; else nothing."""
        columns = -(-(AXIS + 2 * self.columns - self.size.width) // 2)
        if self.rows <= self.size.height and columns <= 0:
            return ""
        rows = self.rows - self.size.height + 1  # the warning takes a line
        parts = [f"{n} {name}" for n, name in ((rows, "rows"), (columns, "columns")) if n > 0]
        summary = f"{' and '.join(parts)} hidden"
        longer = f"{summary}: enlarge the window"
        return next((text for text in (longer, summary) if len(text) <= self.size.width), "too small")

    def _margins(self) -> tuple[int, int]:
        """(columns, rows) of empty space before the board, so that it stands in the middle."""
        size, scale = self.size, self.scale
        width, height = AXIS + 2 * scale * self.columns, scale * self.rows + 1
        return max(0, (size.width - width) // 2), max(0, (size.height - height) // 2)

    def width_in(self, height: int) -> int:
        """The columns that the board takes where only the height is given."""
        return AXIS + 2 * self.scale_in(10_000, height) * self.columns

    def watch_board(self, old: Board | None, new: Board | None) -> None:
        if old is None or new is None or len(old.cells) != len(new.cells) or len(old.cells[0]) != len(new.cells[0]):
            self.refresh()
            return
        before, after = joints(old), joints(new)

        def drawn(board: Board, sides: Mapping[Place, frozenset[str]], place: Place) -> tuple[object, ...]:
            glyph = board.cells[place[0]][place[1]]
            parts = sides.get(place), board.facing.get(place), board.colours.get(place)
            return glyph, board.roles.get(glyph), *parts

        places = [(y, x) for y, row in enumerate(new.cells) for x in range(len(row))]
        self._draw(place for place in places if drawn(old, before, place) != drawn(new, after, place))

    def _draw(self, places: Iterable[Place]) -> None:
        """Draw these cells again."""
        scale, (left, top) = self.scale, self._margins()
        regions = [Region(left + AXIS + 2 * scale * x, top + scale * y, 2 * scale, scale) for y, x in places]
        if regions:
            self.refresh(*regions)

    def watch_text(self) -> None:
        self._below = 0
        if self.board is None:
            self.refresh()

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return AXIS + 2 * self.columns

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.rows + 1

    def render_line(self, y: int) -> Strip:
        if self.board is None:
            seen = self._seen()
            shown = seen[y] if y < len(seen) else ""
            return Strip([Segment(shown, self.styled())]).adjust_cell_length(self.size.width, self.styled())
        if y == self.size.height - 1 and self.cut_off:
            warning = self.styled("board--lost")
            return Strip([Segment(self.cut_off, warning)]).adjust_cell_length(self.size.width, self.styled())
        board, scale = self.board, self.scale
        left, top = self._margins()
        blank = self.styled()
        line = y - top
        if not 0 <= line <= scale * self.rows:
            return Strip.blank(self.size.width, blank)
        axis = self.styled("board--axis")
        segments = [Segment(" " * left, blank)]
        middle = (scale - 1) // 2
        if line == scale * self.rows:
            names = board.across or [str(x % 10) for x in range(self.columns)]
            labels = "".join(name[:2].center(2 * scale) for name in names)
            segments.append(Segment(" " * AXIS + labels, axis))
        else:
            row, part = divmod(line, scale)
            name = board.down[row] if board.down else str((self.rows - 1 - row) % 10)
            segments.append(Segment((name[:1] if part == middle else " ").ljust(AXIS), axis))
            for x, glyph in enumerate(board.cells[row]):
                if self._drawn(glyph, scale):
                    segments += self._picture(board, row, x, part, scale)
                    continue
                text, kind = look(board, (row, x))
                lit = board.roles.get(glyph, "floor") in self._lit
                paint = board.colours.get((row, x))
                style = self._style("lit" if lit else kind, row, x)
                if paint in PAINTS and not lit:
                    ground, ink, _ = PAINTS[paint]
                    style += Style(color=ink, bgcolor=ground)
                shown = text.center(2 * scale) if part == middle else " " * (2 * scale)
                segments.append(Segment(shown, style))
        return Strip(segments).adjust_cell_length(self.size.width, blank)

    def _style(self, kind: str, row: int, x: int) -> Style:
        if kind in ("floor", "sign", "ice"):
            kind += "-a" if (x + row) % 2 else "-b"
        return self.styled(f"board--{kind}")

    def _drawn(self, glyph: str, scale: int) -> bool:
        """Whether a cell is a picture and no letter."""
        role = self.board.roles.get(glyph, "floor") if self.board else "floor"
        return role in DRAWN and 2 * scale >= SMALLEST and not self.app.no_color

    def _picture(self, board: Board, row: int, x: int, part: int, scale: int) -> list[Segment]:
        """One line of a cell's picture: in each column the upper pixel is the character, the lower its ground."""
        role = board.roles[board.cells[row][x]]
        style = self._style(DRAWN[role], row, x)
        ice = "ice" in board.roles.values()
        ground = "lit" if role in self._lit else "hole" if role == "lost" and ice else "ice" if ice else "floor"
        below = self._style(ground, row, x).bgcolor
        mark = self.styled("board--leaf") if role == "good" else style
        if self._joined is not board:
            self._joined, self._joints = board, joints(board)
        sides, facing = self._joints.get((row, x), NO_SIDES), board.facing.get((row, x), "up")
        return _picture_line(role, scale, part, sides, facing, (style.bgcolor, mark.color, below))


@lru_cache(maxsize=2048)
def _picture_line(
    role: Role,
    scale: int,
    part: int,
    sides: frozenset[str],
    facing: str,
    paints: tuple[Color | None, Color | None, Color | None],
) -> list[Segment]:
    """One line of a picture; `paints` are the colours of its shape, of its mark and of what is below."""
    pixels = sprite(role, 2 * scale, sides, facing)
    paint = dict(zip("#o.", paints, strict=True))
    return [
        Segment("▀" * len(list(same)), Style(color=paint[above], bgcolor=paint[under]))
        for (above, under), same in groupby(zip(pixels[2 * part], pixels[2 * part + 1], strict=True))
    ]


def joints(board: Board) -> dict[Place, frozenset[str]]:
    """The sides of each cell to which its chain goes on."""
    sides: dict[Place, set[str]] = {}
    for chain in board.chains:
        for cell, other in pairwise(chain):
            for here, there in ((cell, other), (other, cell)):
                way = (there[1] - here[1], there[0] - here[0])
                sides.setdefault(here, set()).update(side for side, step in WAY.items() if step == way)
    return {place: frozenset(names) for place, names in sides.items()}
