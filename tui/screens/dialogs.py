"""Small windows over the screen: go to a step, help, an address to type in, a record to pick."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.validation import Integer
from textual.widgets import DirectoryTree, Input, Static

HELP = """\
[bold $primary]Watching[/]
  space      pause, go on; at the end, from the start again
  n          one step; in step mode: ask, then play the answer
  + -        faster, slower
  p  i       the prompt, the raw answer, what was made of it;  a hint
[bold $primary]Back and forth[/]
  ← →        one step back, forward (or \\[ and ]); home, end
  g  b       go to a step;  play backwards;  tab: to the next event
[bold $primary]Playing[/]
  arrows     or hjkl or wasd: move; a click on an action does it too
  t  T       take the first (second) seat, or hand it back
[bold $primary]Watching a run learn[/] (w on the start screen, msgrpo play --run DIR)
  ← →  ↑ ↓   the update before, after;  groups;  tab: episodes
[bold $primary]Records[/] (o on the start screen, msgrpo view DIR)
  f  a  /    filter by result, agent, words;  c: two side by side
[bold $primary]The game[/]
  r  x       the same luck again;  the next seed, or episode (X: before)
  e          save record, picture (SVG) and recordings (asciicast, GIF)
  enter esc  ask again after a failure;  stop waiting, or leave
  ctrl+p     all commands and themes
  ctrl+t     light or dark;  ctrl+q  quit
"""


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,enter,space", "dismiss", "close", id="help.close")
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help") as box:
            box.border_title = "help"
            box.border_subtitle = "esc closes"
            yield Static(Content.from_markup(HELP))


class Jump(ModalScreen[int | None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "close", id="jump.close")]

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = f"go to step 0 … {self.last}"
            yield Input(type="integer", placeholder="step", validators=[Integer(0, self.last)])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.validation_result is not None and event.validation_result.is_valid:
            self.dismiss(int(event.value))


class Ask(ModalScreen[str | None]):
    """One line of text; an empty one is none, or with `empty` an answer as well."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "close", id="ask.close")]

    def __init__(self, title: str, placeholder: str, *, empty: bool = False) -> None:
        super().__init__()
        self.heading = title
        self.placeholder = placeholder
        self.empty = empty

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = self.heading
            yield Input(placeholder=self.placeholder)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        self.dismiss(typed if typed or self.empty else None)


class RecordTree(DirectoryTree):
    """Folders, and the files that hold episodes."""

    def filter_paths(self, paths: Iterable[Path]) -> Iterable[Path]:
        return [
            path
            for path in paths
            if not path.name.startswith(".")
            and (path.is_dir() or (path.suffix == ".jsonl" and path.stem != "metrics"))
        ]


class Pick(ModalScreen[Path | None]):
    """A file or a folder below `root`; a path may be typed as well."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "close", id="pick.close"),
        Binding("o", "folder", "open this folder", id="pick.folder"),
    ]

    def __init__(self, root: Path, title: str) -> None:
        super().__init__()
        self.root, self.heading = root, title

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog pick") as box:
            box.border_title = self.heading
            box.border_subtitle = "enter: open   o: open a whole folder   esc: close"
            yield RecordTree(self.root)
            yield Input(placeholder="or type a path")

    @on(DirectoryTree.FileSelected)
    def picked(self, event: DirectoryTree.FileSelected) -> None:
        self.dismiss(event.path)

    def action_folder(self) -> None:
        node = self.query_one(RecordTree).cursor_node
        if node is not None and node.data is not None:
            self.dismiss(node.data.path)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.dismiss(Path(event.value.strip()))
