"""Short lines in the theme's colours, of which only those that have changed are drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip

from msgrpo.tui.widgets.styled import Styled

REVERSED = Style(reverse=True)
HERE = " here"  # after a kind: the cursor stands on it
Part = tuple[str, str]  # a text and its kind, which has a colour in msgrpo.tcss; "" has the usual one


def fitted(text: str, width: int) -> str:
    """The text in so many columns of one line: a line break or tab would move all that is drawn after it."""
    line = " ".join(text.split())
    return set_cell_size(line, width) if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


class Lines(Styled):
    """What stands here is drawn segment by segment: Textual's own texts are wrapped and styled anew each time."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"lines--{kind}"
        for kind in ("muted", "cursor", "track", "ahead", "gain", "loss", "mistake", "blunder", "sign-1", "sign-2")
    }

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._drawn: Sequence[Sequence[Part]] = ()

    def lines(self) -> Sequence[Sequence[Part]]:
        """What is to stand here, by the widget's size."""
        return ()

    def draw(self) -> None:
        before, self._drawn = self._drawn, self.lines()
        changed = [y for y, (was, now) in enumerate(zip_longest(before, self._drawn)) if was != now]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def on_resize(self) -> None:
        self._drawn = self.lines()
        self.refresh()

    def render_line(self, y: int) -> Strip:
        parts = self._drawn[y] if y < len(self._drawn) else ()
        strip = Strip([Segment(text, self._style(kind)) for text, kind in parts])
        return strip.adjust_cell_length(self.size.width, self.styled())

    def _style(self, kind: str) -> Style:
        name = kind.removesuffix(HERE)
        style = self.styled(f"lines--{name}" if name else "")
        return style if name == kind else style + REVERSED
