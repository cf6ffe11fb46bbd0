"""Watching a model learn: the curve so far, the groups of an update, one of their episodes with the credit of each
turn."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.markup import escape
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual_plotext import PlotextPlot

from msgrpo.errors import MsgrpoError
from msgrpo.tui.clock import Cancel
from msgrpo.tui.host import host
from msgrpo.tui.learning import Learning
from msgrpo.tui.pace import Pace
from msgrpo.tui.screens.dialogs import Help
from msgrpo.tui.session import Session, ending
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.learning import Groups, draw_curve, turns, words

LOOK_S = 1.0  # between two looks into the folder


class LearnScreen(Screen[None]):
    """Only reads: a run that goes on is not disturbed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "update(-1)", "update before"),
        Binding("right", "update(1)", "after"),
        Binding("home", "update(-1000000)", "first update", show=False),
        Binding("end", "update(1000000)", "newest", show=False),
        Binding("up", "group(-1)", "group up", show=False),
        Binding("down", "group(1)", "group"),
        Binding("tab", "sample", "episode", priority=True),
        Binding("space", "pause", "pause/go"),
        Binding("n,full_stop,right_square_bracket", "step(1)", "step"),
        Binding("left_square_bracket,comma", "step(-1)", "back", show=False),
        Binding("plus,equals_sign", "speed(1)", "faster", show=False),
        Binding("minus", "speed(-1)", "slower", show=False),
        Binding("question_mark", "help", "help"),
        Binding("q,escape", "leave", "leave"),
    ]

    def __init__(self, run: Learning) -> None:
        super().__init__()
        self.run = run
        self.session: Session | str = run.session()
        self.pace = Pace(
            lambda seconds, call: host(self).clock.after(self, seconds, call), self.tick, speed=2.0, playing=True
        )
        self._looking: Cancel | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Horizontal(id="learning"):
            with Vertical(id="progress"):
                yield PlotextPlot(id="curve")
                yield Groups()
                yield Static(id="facts", markup=False)
            with Vertical(id="episode"):
                yield BoardView(None)
                yield Static(id="said", markup=False)
                with VerticalScroll(can_focus=False):
                    yield Static(id="turns", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.show_run()
        self.pace.later()
        self.look_again()

    def on_unmount(self) -> None:
        self.pace.stop()
        if self._looking is not None:
            self._looking()

    def look_again(self) -> None:
        """Read what is new, now and then."""
        before = self.run.step
        try:
            new = self.run.look()
        except MsgrpoError as error:
            self.notify(str(error), severity="error")
            new = False
        if self.run.step != before:
            self.show_episode()
        if new:
            self.show_run()
        else:
            self.show_title()
        self._looking = host(self).clock.after(self, LOOK_S, self.look_again)

    # ── what is on the screen ────────────────────────────────────────────────────────────────────────────────

    def show_title(self) -> None:
        self.query_one("#title", Static).update(Content.styled(f" msgrpo   {self.run.title()}", "bold"))

    def show_run(self) -> None:
        """The curve, the groups and the numbers of the update."""
        run = self.run
        self.show_title()
        draw_curve(self.query_one(PlotextPlot), run)
        self.query_one("#progress").border_title = escape(run.score)
        self.query_one("#progress").border_subtitle = "⠒ in training   ┼ on validation starts, 95 %"
        self.query_one(Groups).show(run)
        parts = [Content.styled(f"{name} ", "$text-muted") + Content(value) for name, value in run.facts()]
        self.query_one("#facts", Static).update(Content("  ").join(parts))
        self.show_board()

    def show_board(self) -> None:
        run, box = self.run, self.query_one("#episode")
        board, said, listed = (
            self.query_one(BoardView),
            self.query_one("#said", Static),
            self.query_one("#turns", Static),
        )
        follows = "" if run.following else "   (end: the newest)"
        box.border_title = f"update {run.step}{follows}" if run.step else "no update yet"
        if isinstance(self.session, str):
            board.show(None, self.session)
            said.update("")
            listed.update("")
            box.border_subtitle = ""
            return
        frame = self.session.frame
        board.show(frame.board, frame.seen)
        said.update(words(run, self.session))
        listed.update(turns(run, self.session))
        limit = self.session.scenario.step_limit
        box.border_subtitle = escape(ending(self.session, frame)) or f"step {frame.step} of {limit}"

    def show_episode(self) -> None:
        """Another episode, from its beginning."""
        self.session = self.run.session()
        self.show_run()
        if self.pace.playing:
            self.pace.later()

    # ── keys and pace ────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """The next step; after the last one the episode begins again."""
        if isinstance(self.session, Session):
            self.session.seek(0 if self.session.live else self.session.cursor + 1)
        self.show_board()
        self.pace.later()

    def action_update(self, by: int) -> None:
        try:
            self.run.move(by)
        except MsgrpoError as error:
            self.notify(str(error), severity="error")
        self.show_episode()

    def action_group(self, by: int) -> None:
        self.run.move_group(by)
        self.show_episode()

    def action_sample(self) -> None:
        self.run.move_sample()
        self.show_episode()

    def action_pause(self) -> None:
        self.pace.playing = not self.pace.playing
        if self.pace.playing:
            self.pace.later()

    def action_step(self, by: int) -> None:
        self.pace.playing = False
        if isinstance(self.session, Session):
            self.session.seek(self.session.cursor + by)
        self.show_board()

    def action_speed(self, by: int) -> None:
        self.pace.change_speed(by)

    def action_help(self) -> None:
        self.app.push_screen(Help())

    def action_leave(self) -> None:
        host(self).leave()
