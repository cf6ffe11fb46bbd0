"""The list of a record's episodes: filter it, choose one, watch it."""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import DataTable, Static
from textual.widgets.data_table import RowKey

from msgrpo.tui.host import host
from msgrpo.tui.records import Records
from msgrpo.tui.screens.dialogs import Ask, Help, answer_of
from msgrpo.tui.widgets.keyline import Hint, KeyLine

KEYS = (
    Hint("enter", "watch", "watch"),
    Hint("f", "filter", "filter"),
    Hint("a", "agent", "agent"),
    Hint("/", "search", "search"),
    Hint("b", "best", "best"),
    Hint("c", "compare", "compare"),
    Hint("?", "help", "help"),
    Hint("q", "leave", "leave"),
)

NONE_LISTED = "No episode is left. f: another filter   a: another agent   / and enter: without words"


class EpisodeTable(DataTable[Text]):
    """Rows of which one is chosen: home and end go to the first and the last one."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", "first", show=False),
        Binding("end", "scroll_bottom", "last", show=False),
    ]


class RecordsScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "filter", "filter"),
        Binding("a", "agent", "agent"),
        Binding("slash", "search", "search"),
        Binding("b", "best", "best first"),
        Binding("c", "compare", "side by side"),
        Binding("question_mark", "help", "help"),
        Binding("q,escape", "leave", "leave"),
    ]

    def __init__(self, records: Records) -> None:
        super().__init__()
        self.records = records
        self._shown = records.place  # the chosen episode when the list was last made

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        yield EpisodeTable(cursor_type="row", zebra_stripes=True)
        yield Static(id="none", markup=False)
        yield KeyLine()

    def on_mount(self) -> None:
        self.query_one(KeyLine).show(KEYS)
        self._choose_best()
        self.show_list()

    def on_screen_resume(self) -> None:
        """Another episode may have been chosen meanwhile; after a dialog the row that was highlighted stays."""
        if self.records.place != self._shown:
            self.show_list()

    def show_list(self) -> None:
        self._shown = self.records.place
        table = self.query_one(EpisodeTable)
        columns, listed = self.records.table()
        table.clear(columns=True)
        for place, name in enumerate(columns):  # one that finds its width by itself may be drawn before it has
            table.add_column(name, width=max(map(cell_len, (name, *(line[place] for line in listed.values())))))
        for place, line in listed.items():
            table.add_row(*map(Text, line), key=str(place))
        if self.records.place in listed:
            table.move_cursor(row=list(listed).index(self.records.place))
        table.display = bool(listed)
        self.query_one("#none", Static).update("" if listed else NONE_LISTED)
        if listed:
            table.focus()
        count = f"{len(listed)} of {len(self.records.episodes)} episodes: {self.records.told}"
        self.query_one("#title", Static).update(Content.styled(f" msgrpo   {count} · {self.records.name}", "bold"))

    @on(DataTable.RowSelected)
    def selected(self, event: DataTable.RowSelected) -> None:
        if self.is_active:  # a second enter, typed before the first is handled, opens nothing over what is shown
            self._choose(event.row_key)
            host(self).replay(self.records)

    def _choose(self, row: RowKey) -> None:
        """The list shows it already: the highlighted row is where it is."""
        self._shown = self.records.place = int(str(row.value))

    def action_watch(self) -> None:
        """The key line's click; the enter key is the table's."""
        self.query_one(EpisodeTable).action_select_cursor()

    def action_filter(self) -> None:
        self.records.next_filter()
        self.show_list()

    def action_agent(self) -> None:
        self.records.next_agent()
        self.show_list()

    def action_best(self) -> None:
        self.records.best_first = not self.records.best_first
        self._choose_best()
        self.show_list()

    def _choose_best(self) -> None:
        """A list that begins with the best is read from there."""
        listed = self.records.listed()
        if self.records.best_first and listed:
            self.records.place = listed[0]

    @work(group="dialog")
    async def action_search(self) -> None:
        """List the episodes in which somebody wrote certain words; none lists all again."""
        typed = await answer_of(self, Ask("words that an answer holds", "hole", empty=True))
        if typed is not None:
            self.records.words = typed
            self.show_list()

    def action_compare(self) -> None:
        """The chosen episode, and beside it another agent's on the same start, with the same luck."""
        table = self.query_one(EpisodeTable)
        if not table.row_count:
            return
        self._choose(table.coordinate_to_cell_key(table.cursor_coordinate).row_key)
        others = self.records.beside(self.records.place)
        if others:
            host(self).replay(self.records, beside=others[0])
        else:
            self.notify("No other agent has an episode on this start here.")

    def action_help(self) -> None:
        self.app.push_screen(Help(first="Records"))

    def action_leave(self) -> None:
        host(self).leave()
