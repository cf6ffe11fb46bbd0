"""A text on the screen that is laid out anew only where its height changes."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


class Text(Static):
    """`show` draws another text in the same place; the screen is laid out again only where that needs other lines."""

    def __init__(self, content: Content | str = "", *, id: str | None = None, classes: str | None = None) -> None:
        self._shown = Content(content) if isinstance(content, str) else content
        super().__init__(self._shown, id=id, classes=classes, markup=False)

    def show(self, content: Content) -> None:
        before, self._shown = self._shown, content
        if content.is_same(before):
            return
        width = self.size.width
        grown = width == 0 or lines(content, width) != lines(before, width)
        self.update(content, layout=grown)


class Clipped(Static):
    """A text in a room that the screen gives it; where it has no room as a whole, its last line ends with …"""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, markup=False)
        self._whole = Content("")

    def show(self, content: Content) -> None:
        self._whole = content
        self.on_resize()

    def on_resize(self) -> None:
        self.update(clipped(self._whole, *self.content_size), layout=False)


def clipped(content: Content, width: int, height: int) -> Content:
    """As much of a text as so many columns and rows hold; … ends it where more follows."""
    rows = content.wrap(max(1, width))
    if len(rows) <= height or not height:
        return content
    last = rows[height - 1].rstrip().truncate(max(0, width - 1)).rstrip()
    return Content("\n").join([*rows[: height - 1], last + Content("…")])


def lines(content: Content, width: int) -> int:
    """The lines that a text takes in so many columns."""
    return len(content.wrap(max(1, width))) if content else 0
