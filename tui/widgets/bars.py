"""The probabilities of the actions as bars, the chosen one marked; a click chooses for the person who plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.content import Content
from textual.events import Click
from textual.widget import Widget

from tui.messages import ActionChosen

EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """`share` of `width` columns in eighths of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


class ActionBars(Widget):
    """One line an action."""

    def __init__(self, session: int, player: str, actions: Sequence[str]) -> None:
        super().__init__()
        self.session = session
        self.player = player
        self.actions = actions
        self.probabilities: Mapping[str, float] | None = None
        self.chosen: str | None = None

    def show(self, probabilities: Mapping[str, float] | None, chosen: str | None) -> None:
        self.probabilities, self.chosen = probabilities, chosen
        self.refresh()

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self.actions)

    def render(self) -> Content:
        name_width = max(map(len, self.actions))
        width = max(4, self.size.width - name_width - 9)
        lines = []
        for action in self.actions:
            chosen = action == self.chosen
            style = "$accent" if chosen else "$secondary 70%"
            label = Content.styled(
                f"{'▸' if chosen else ' '} {action:<{name_width}} ", "bold $accent" if chosen else ""
            )
            if self.probabilities is None:
                lines.append(label)
            else:
                share = self.probabilities.get(action, 0.0)
                lines.append(label + Content.styled(bar(share, width), style) + Content(f" {share:>4.0%}"))
        return Content("\n").join(lines)

    def on_click(self, event: Click) -> None:
        if 0 <= event.y < len(self.actions):
            self.post_message(ActionChosen(self.session, self.player, self.actions[event.y]))
