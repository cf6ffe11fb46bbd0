"""The probabilities of the actions as bars, the chosen one marked; a click chooses for the person who plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.content import Content
from textual.events import Click
from textual.reactive import reactive
from textual.widget import Widget

from msgrpo.tui.messages import ActionChosen

WIDEST = 60  # columns of a bar
EASE_S = 0.2  # in which bars come to their new length
EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """`share` of `width` columns in eighths of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


class ActionBars(Widget):
    """One line an action."""

    eased: reactive[float] = reactive(1.0)  # the way of the bars from what they showed before to what they show now

    def __init__(self, session: int, player: str, actions: Sequence[str]) -> None:
        super().__init__()
        self.session = session
        self.player = player
        self.actions = actions
        self.probabilities: Mapping[str, float] | None = None
        self._before: Mapping[str, float] = {}
        self.chosen: str | None = None

    def show(self, probabilities: Mapping[str, float] | None, chosen: str | None) -> None:
        grown = (self.probabilities is None) != (probabilities is None)
        if probabilities and probabilities != self.probabilities and self.app.animation_level != "none":
            self._before = {action: self._share(action) for action in self.actions}
            self.eased = 0.0
            self.animate("eased", 1.0, duration=EASE_S, easing="out_cubic", level="full")
        self.probabilities, self.chosen = probabilities, chosen
        self.refresh(layout=grown)

    def _share(self, action: str) -> float:
        """How long the bar of an action is drawn at this moment."""
        before, now = self._before.get(action, 0.0), (self.probabilities or {}).get(action, 0.0)
        return before + self.eased * (now - before)

    def _in_one_line(self, width: int) -> bool:
        """Without probabilities the actions stand beside each other, where they fit."""
        return self.probabilities is None and sum(len(action) + 4 for action in self.actions) <= width + 1

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return 1 if self._in_one_line(width) else len(self.actions)

    def render(self) -> Content:
        if self._in_one_line(self.size.width):
            return Content(" ").join(self._label(action, len(action)) for action in self.actions)
        if self.probabilities is None:
            return Content("\n").join(self._label(action, len(action)) for action in self.actions)
        name_width = max(map(len, self.actions))
        width = max(4, min(WIDEST, self.size.width - name_width - 9))
        lines = []
        for action in self.actions:
            share = self.probabilities.get(action, 0.0)
            style = "$accent" if action == self.chosen else "$secondary 70%"
            drawn = Content.styled(bar(self._share(action), width), style) + Content(f" {share:>4.0%}")
            lines.append(self._label(action, name_width) + drawn)
        return Content("\n").join(lines)

    def _label(self, action: str, width: int) -> Content:
        if action == self.chosen:
            return Content.styled(f"▸ {action:<{width}} ", "bold $accent")
        return Content.styled(f"  {action:<{width}} ", "" if self.probabilities else "$text-muted")

    def action_at(self, x: int, y: int) -> str | None:
        """The action drawn at a place of the widget."""
        if not self._in_one_line(self.size.width):
            return self.actions[y] if 0 <= y < len(self.actions) else None
        column = 0
        for action in self.actions:
            column += len(action) + 4
            if x < column:
                return action
        return None

    def on_click(self, event: Click) -> None:
        action = self.action_at(event.x, event.y)
        if action is not None:
            self.post_message(ActionChosen(self.session, self.player, action))
