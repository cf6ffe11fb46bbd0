"""A widget that draws its lines itself and keeps the styles of their parts."""

from __future__ import annotations

from typing import Self

from rich.style import Style
from textual.geometry import Region
from textual.widget import Widget


class Styled(Widget):
    """Textual works the styles out anew whenever a line is to be drawn; here they stay till all of it is."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        self._kept: dict[str, Style] = {}
        super().__init__(id=id, classes=classes)

    def styled(self, component: str = "") -> Style:
        """The style of a component class, and of the widget itself where none is named."""
        if component not in self._kept:
            self._kept[component] = self.get_component_rich_style(component) if component else self.rich_style
        return self._kept[component]

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        if not regions:  # another theme comes this way, too
            self._kept.clear()
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def notify_style_update(self) -> None:
        self._kept.clear()
        super().notify_style_update()
