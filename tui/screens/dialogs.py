"""Small windows over the screen: help, a question, a move, a line to type in, a record to pick."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from rich.table import Table
from rich.text import Text, TextType
from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import DirectoryTree, Input, Static
from textual.widgets.option_list import Option

from msgrpo.text import printable
from msgrpo.tui.choices import RUNS
from msgrpo.tui.clock import once_drawn, stands
from msgrpo.tui.export import PLAYS
from msgrpo.tui.shades import MUTED
from msgrpo.tui.widgets.options import Options, laid_out

Answer = TypeVar("Answer")
KEYS_WIDTH = 12  # columns of the keys in HELP and SIGNS
HELP = """\
[bold $primary]Playing[/]
  arrows     or hjkl or wasd: move; a number or a click chooses
  m          type a move, or choose it from the list
  i  enter   a hint for this move;  at the end: the worst step again
[bold $primary]Watching[/]
  space      pause, go on; at the end, from the start again
  n  + −     one step (in step mode: ask, then play it);  the speed
  p          the prompt, the raw answer, what was made of it
  ← →  tab   a step back, forward (\\[ and ] while you play);  next event
  t          take the seat at the moment that is shown, or hand it back
[bold $primary]The game[/]
  r  x       the same start and luck again;  the next start, or episode
  e          save the record and a picture (SVG) of the screen
  esc  q     stop an agent, or leave;  leave at once
[bold $primary]The recorded games[/] (msgrpo play)
  enter  t   choose a game;  play this board yourself
  → ←  tab   the next start, the one before;  the other game
[bold $primary]A run that learns[/] (w on the start screen, msgrpo play --run DIR)
  space      the film: the same start as training goes on
  ← →  ↑ ↓   the update before, after;  groups;  tab: episodes
  g  n  + −  back to the groups;  one step;  the speed
[bold $primary]Records[/] (o on the start screen, msgrpo view DIR)
  enter  b   watch the chosen episode;  the best first, or as played
  f  a  /    filter by result, agent, words;  c: two side by side
[bold $primary]The start screen[/]
  s S  t T   the next seed, the one before;  temperature
  w h o u q  watch a run, high scores, open a record, an endpoint, quit
[bold $primary]Everywhere[/]
  ctrl+p     all commands and themes
  ctrl+t     light or dark;  ctrl+q  quit
"""
SIGNS = """\
[bold $primary]Signs[/]
  p and bars how likely the agent was to choose each action
  + − ! ? ⁇  a gain, a loss, no legal action, a mistake, a blunder
  ⊥          no legal action was found in the answer
  ▲ △ ▼ ▽    above, below the group's mean; hollow: not learnt from
  flat       a group in which all were equal: nothing to learn
"""


class Dialog(ModalScreen[Answer]):
    """A window that is closed once: a second enter, typed before the first is handled, closes no screen below it."""

    def dismiss(self, result: Answer | None = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_active else AwaitComplete()


async def answer_of(screen: Screen[None], dialog: Dialog[Answer]) -> Answer | None:
    """What a dialog is answered; none of a second one, whose key was typed before the first was there."""
    if isinstance(screen.app.screen, Dialog):
        return None
    answer: Answer = await screen.app.push_screen_wait(dialog)
    return answer


class Help(Dialog[None]):
    """The keys and signs, those of the screen that is shown `first`, and above them the rules of its game."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter,space", "dismiss", "close")]

    def __init__(self, rules: str = "", *, first: str = "Playing") -> None:
        super().__init__()
        self.rules, self.first = rules, first

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog help") as box:
            box.border_title = "help"
            box.border_subtitle = "↑ ↓: scroll   esc: close"
            if self.rules:
                yield Static(Content.styled("The rules\n", "bold $primary") + Content(self.rules + "\n"))
            parts = re.split(r"^(?=\[bold)", HELP, flags=re.MULTILINE)[1:]
            here = f"[bold $primary]{self.first}["
            for part in [*sorted(parts, key=lambda part: not part.startswith(here)), SIGNS]:
                heading, *lines = part.splitlines()
                yield Static(Content.from_markup(heading))
                yield Static(in_columns(lines))


def in_columns(lines: Sequence[str]) -> Table:
    """Lines of HELP whose words stay beside their keys in a narrow window, too."""
    columns = Table.grid(padding=(0, 1))
    columns.add_column(no_wrap=True, min_width=KEYS_WIDTH)
    for line in lines:
        columns.add_row(line[:KEYS_WIDTH].rstrip(), line[KEYS_WIDTH:].strip())
    return columns


class Confirm(Dialog[bool]):
    """One question; enter or y agrees."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,y,q", "dismiss(True)", "yes"),
        Binding("escape,n,space", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str, yes: str, no: str) -> None:
        super().__init__()
        self.question, self.answers = question, f"enter: {yes}   esc: {no}"

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = self.question
            yield Static(Content(self.answers))


NONE_FITS = "none begins so"


class Choose(Dialog[str | None]):
    """One of many: type its beginning, or go down the list. `others` are further names of some, name -> choice."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "close"),
        Binding("down", "move(1)", "down", priority=True),
        Binding("up", "move(-1)", "up", priority=True),
    ]

    def __init__(self, title: str, choices: Sequence[str], others: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.heading, self.choices, self.others = title, list(dict.fromkeys(choices)), dict(others or {})

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog choose") as box:
            box.border_title = self.heading
            box.border_subtitle = "enter: choose   esc: close"
            yield Input(placeholder="type it, or choose with ↑ ↓")
            yield Options()

    def on_mount(self) -> None:
        if stands(self):
            self.list_choices("")

    def fitting(self, typed: str) -> list[str]:
        """Those that begin with what was typed; where the case tells two apart (b4, Bb4), the case counts.

        Their further names count where none begins so.
        """
        exact = [choice for choice in self.choices if choice.startswith(typed)]
        small = typed.casefold()
        return (
            exact
            or [choice for choice in self.choices if choice.casefold().startswith(small)]
            or list(dict.fromkeys(choice for name, choice in self.others.items() if name.startswith(small)))
        )

    @on(Input.Changed)
    def typed(self, event: Input.Changed) -> None:
        self.list_choices(event.value.strip())

    def list_choices(self, typed: str) -> None:
        options = self.query_one(Options)
        further = {choice: name for name, choice in self.others.items()}
        fitting = [
            Option(
                Content(printable(f"{choice:<8}")) + Content.styled(printable(further.get(choice, "")), MUTED),
                id=choice,
            )
            for choice in self.fitting(typed)
        ]
        options.set_options(fitting or [Option(NONE_FITS, disabled=True)])
        options.highlighted = 0 if fitting else None

    def action_move(self, by: int) -> None:
        options = self.query_one(Options)
        if options.highlighted is not None:
            options.highlighted = (options.highlighted + by) % options.option_count

    def on_input_submitted(self, event: Input.Submitted) -> None:
        options = self.query_one(Options)
        if event.value.strip() in self.choices:
            self.dismiss(event.value.strip())
        elif options.highlighted is not None:
            self.dismiss(str(options.get_option_at_index(options.highlighted).id))

    def on_option_list_option_selected(self, event: Options.OptionSelected) -> None:
        self.dismiss(str(event.option.id))


class Palette(CommandPalette):
    """Textual's own, whose list may not have its lines yet when a page key comes."""

    def _action_command_list(self, action: str) -> None:
        with laid_out():
            super()._action_command_list(action)


class Ask(Dialog[str | None]):
    """One line of text; an empty one is none, or with `empty` an answer as well.

    `check` says why a text will not do, and the window stays with it; empty where it will.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "close")]

    def __init__(
        self, title: str, placeholder: str, *, empty: bool = False, check: Callable[[str], str] = lambda typed: ""
    ) -> None:
        super().__init__()
        self.check = check
        self.heading = title
        self.placeholder = placeholder
        self.empty = empty

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = self.heading
            box.border_subtitle = "enter: done   esc: close"
            yield Input(placeholder=self.placeholder)
            yield Static(classes="problem", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        problem = self.check(typed) if typed else ""
        self.query_one(".problem", Static).update(problem)
        if not problem:
            self.dismiss(typed if typed or self.empty else None)


class RecordTree(DirectoryTree):
    """Folders, and the files that hold episodes. Where records are kept is open, and there the cursor begins."""

    async def watch_path(self) -> None:
        """Not in `on_mount`: the tree is read here, and what was open before that is closed again."""
        await super().watch_path()
        folder = Path(self.path).resolve()  # the one in which the app was started is only called "."
        self.root.set_label(folder.name or str(folder))
        kept = [node for node in self.root.children if node.data and node.data.path.name in (RUNS.name, PLAYS.name)]
        for node in kept:
            node.expand()
        if kept:
            once_drawn(self, lambda: self.move_cursor(kept[0]))

    def process_label(self, label: TextType) -> Text:
        """A file's name is whatever somebody wrote, and what it holds would drive the terminal."""
        return Text(printable(str(label)).replace("\n", " "))

    def filter_paths(self, paths: Iterable[Path]) -> Iterable[Path]:
        return [
            path
            for path in paths
            if not path.name.startswith(".")
            and (path.is_dir() or (path.suffix == ".jsonl" and path.stem != "metrics"))
        ]


class Pick(Dialog[Path | None]):
    """A file or a folder below `root`; a path may be typed as well."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "close"),
        Binding("o", "folder", "open this folder"),
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
