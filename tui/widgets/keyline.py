"""The line at the foot of a screen: the keys that do something now, and what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.events import Click
from textual.widget import Widget

GAP = 2  # columns between two keys
SHORT = {  # how keys are written, in the list of commands too
    "question_mark": "?",
    "full_stop": ".",
    "escape": "esc",
    "enter": "enter",
    "plus": "+",
    "minus": "−",
    "pageup": "page up",
    "pagedown": "page down",
}


@dataclass(frozen=True)
class Hint:
    """A key as it is written, what it does in a word or two, and the action of the screen that it stands for."""

    key: str
    words: str
    action: str = ""

    @property
    def width(self) -> int:
        return len(self.key) + 1 + len(self.words) + GAP


class KeyLine(Widget):
    """As many of the keys as fit; the last two, help and the way out, always do."""

    def __init__(self) -> None:
        super().__init__(id="keys")
        self.hints: Sequence[Hint] = ()

    def show(self, hints: Sequence[Hint]) -> None:
        if hints != self.hints:
            self.hints = hints
            self.refresh()

    def fitting(self, width: int) -> list[Hint]:
        """The keys that are shown in so many columns."""
        if not self.hints:
            return []
        *others, last = self.hints
        always = [*others[-1:], last]
        room = width - 1 - sum(hint.width for hint in always)
        shown = []
        for hint in others[:-1]:
            room -= hint.width
            if room < 0:
                break
            shown.append(hint)
        return [*shown, *always]

    def render(self) -> Content:
        parts = [Content(" ")]
        for hint in self.fitting(self.size.width):
            parts += [Content.styled(hint.key, "bold $text-accent"), Content(f" {hint.words}{' ' * GAP}")]
        return Content("").join(parts)

    async def on_click(self, event: Click) -> None:
        column = 1
        for hint in self.fitting(self.size.width):
            column += hint.width
            if event.x < column:
                if hint.action:
                    await self.screen.run_action(hint.action)
                return
