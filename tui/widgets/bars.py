"""The probabilities of the actions as bars, the chosen one marked; a click chooses for the person who plays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from textual.content import Content
from textual.events import Click
from textual.reactive import reactive
from textual.widget import Widget

from msgrpo.tui.messages import ActionChosen
from msgrpo.tui.shades import DISABLED, MUTED

WIDEST = 60  # columns of a bar
MOST_LINES = 8  # of actions without probabilities; the rest is in the list of moves
EASE_S = 0.2  # in which bars come to their new length
EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """`share` of `width` columns in eighths of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


class ActionBars(Widget):
    """One line an action where there are probabilities, else the actions in columns; what is illegal now is dim.

    `numbers` are the keys that choose an action, where numbers do.
    """

    eased: reactive[float] = reactive(1.0)  # the way of the bars from what they showed before to what they show now

    def __init__(self, session: int, player: str, actions: Sequence[str]) -> None:
        super().__init__()
        self.session = session
        self.player = player
        self.actions = actions
        self.legal: Collection[str] = actions
        self.numbers: Mapping[str, int] = {}
        self.probabilities: Mapping[str, float] | None = None
        self._before: Mapping[str, float] = {}
        self.chosen: str | None = None

    def show(
        self,
        probabilities: Mapping[str, float] | None,
        chosen: str | None,
        *,
        legal: Collection[str],
        numbers: Mapping[str, int],
    ) -> None:
        before = self.probabilities, self.chosen, self.legal, self.numbers
        if before == (probabilities, chosen, legal, numbers):
            return
        rows = self.rows(self.size.width)
        if probabilities and probabilities != self.probabilities and self.app.animation_level != "none":
            self._before = {action: self._share(action) for action in self.actions}
            self.eased = 0.0
            self.animate("eased", 1.0, duration=EASE_S, easing="out_cubic", level="full")
        self.probabilities, self.chosen, self.legal, self.numbers = probabilities, chosen, legal, numbers
        self.refresh(layout=rows != self.rows(self.size.width))

    def _share(self, action: str) -> float:
        """How long the bar of an action is drawn at this moment."""
        before, now = self._before.get(action, 0.0), (self.probabilities or {}).get(action, 0.0)
        return before + self.eased * (now - before)

    def rows(self, width: int) -> int:
        if self.probabilities is not None:
            return len(self.actions)
        return min(MOST_LINES, -(-len(self.actions) // self._columns(width))) if self.actions else 0

    def _columns(self, width: int) -> int:
        """Actions beside each other, where there are no probabilities to show."""
        return max(1, (width + 1) // (self._widest + 1))

    @property
    def _widest(self) -> int:
        return max((len(self._named(action)) for action in self.actions), default=1) + 3

    def _named(self, action: str) -> str:
        return f"{self.numbers[action]} {action}" if action in self.numbers else action

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return self.rows(width)

    def render(self) -> Content:
        names = max((len(self._named(action)) for action in self.actions), default=1)
        if self.probabilities is None:
            columns = self._columns(self.size.width)
            listed = self.actions[: columns * MOST_LINES]
            rows = [listed[i : i + columns] for i in range(0, len(listed), columns)]
            return Content("\n").join(Content(" ").join(self._label(a, names) for a in row) for row in rows)
        width = max(4, min(WIDEST, self.size.width - names - 9))
        drawn = []
        for action in self.actions:
            share = self.probabilities.get(action, 0.0)
            style = "$accent" if action == self.chosen else "$secondary 70%"
            line = Content.styled(bar(self._share(action), width), style) + Content(f" {share:>4.0%}")
            drawn.append(self._label(action, names) + line)
        return Content("\n").join(drawn)

    def _label(self, action: str, width: int) -> Content:
        if action == self.chosen:
            return Content.styled(f"▸ {self._named(action):<{width}} ", "bold $text-accent")
        dim = DISABLED if action not in self.legal else "" if self.probabilities else MUTED
        return Content.styled(f"  {self._named(action):<{width}} ", dim)

    def action_at(self, x: int, y: int) -> str | None:
        """The action drawn at a place of the widget."""
        if self.probabilities is not None:
            place = y
        else:
            columns = self._columns(self.size.width)
            column = x // (self._widest + 1)
            place = y * columns + column if column < columns else -1
        return self.actions[place] if 0 <= place < len(self.actions) else None

    def on_click(self, event: Click) -> None:
        action = self.action_at(event.x, event.y)
        if action is not None:
            self.post_message(ActionChosen(self.session, self.player, action))
