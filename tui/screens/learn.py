"""Watching a model learn: the curve so far beside one episode.

The film shows one start after more and more updates. Without it an update's groups are shown, and one of their
episodes with the credit of each turn.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Region
from textual.markup import escape
from textual.screen import Screen
from textual.widgets import Static
from textual_plotext import PlotextPlot

from msgrpo.errors import MsgrpoError
from msgrpo.text import counted
from msgrpo.tui.clock import Cancel, once_drawn, once_laid_out, stands
from msgrpo.tui.host import Host, host
from msgrpo.tui.learning import Learning
from msgrpo.tui.pace import Pace
from msgrpo.tui.recording import Recording
from msgrpo.tui.screens.dialogs import Help
from msgrpo.tui.session import Session, ending
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.keyline import Hint, KeyLine
from msgrpo.tui.widgets.learning import HERE, Groups, draw_curve, facts, turns, words
from msgrpo.tui.widgets.text import clipped

LOOK_S = 1.0  # between two looks into the folder
SAID, SAID_FILM = 4, 2  # lines of what the model said, as msgrpo.tcss has them
FILM_SPEED = 4.0  # steps a second of the film


class LearnScreen(Screen[None]):
    """Only reads: a run that goes on is not disturbed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "update(-1)", "update before"),
        Binding("right", "update(1)", "after"),
        Binding("home", "update(-1000000)", "first update"),
        Binding("end", "update(1000000)", "newest"),
        Binding("up", "group(-1)", "group up"),
        Binding("down", "group(1)", "group"),
        Binding("g", "group(0)", "groups"),
        Binding("tab", "sample", "episode", priority=True),
        Binding("space", "pause", "film, pause"),
        Binding("n,full_stop,right_square_bracket", "step(1)", "step"),
        Binding("left_square_bracket,comma", "step(-1)", "back"),
        Binding("plus,equals_sign", "speed(1)", "faster"),
        Binding("minus", "speed(-1)", "slower"),
        Binding("e", "export", "save"),
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
        self._trouble = ""  # that has been told
        self.recording = Recording()  # empty unless the sitting is recorded
        self._untaken = 0  # pictures that wait for their layout

    @property
    def host(self) -> Host:
        return host(self)

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
        yield KeyLine()

    def on_mount(self) -> None:
        if not stands(self):  # the app ends as this screen opens
            return
        if self.host.record and len(self.run.film):
            self.action_pause()
        else:
            self.show_run()
            self.pace.later()
        # the curve's colours are the theme's
        self.app.theme_changed_signal.subscribe(self, lambda _: self.show_run())
        self.look_again()

    def on_resize(self) -> None:
        once_drawn(self, self.show_run)

    def on_unmount(self) -> None:
        self.pace.stop()
        if self._looking is not None:
            self._looking()
        self.host.keep_recording(self.recording)

    def look_again(self) -> None:
        """Read what is new, now and then."""
        before = self.run.step
        try:
            new = self.run.look()
            self._trouble = ""
        except MsgrpoError as error:
            self.tell(error.message)
            new = False
        if self.run.step != before and not self.run.filming:
            self.show_episode()
        elif new:
            self.show_run()
        else:
            self.show_title()
        self._looking = self.host.clock.after(self, LOOK_S, self.look_again)

    def tell(self, trouble: str) -> None:
        """Say what is wrong, once as long as it stays the same."""
        if trouble != self._trouble:
            self._trouble = trouble
            self.notify(trouble, severity="error")

    # ── what is on the screen ────────────────────────────────────────────────────────────────────────────────

    def show_title(self) -> None:
        line = Content.styled(f" msgrpo   {self.run.title(self.size.width - 11)}", "bold")
        self.query_one("#title", Static).update(line)

    def show_run(self) -> None:
        """The curve, the groups or the scenes, and the numbers of the update."""
        run = self.run
        self.show_title()
        draw_curve(self.query_one(PlotextPlot), run)
        alone = f"   ┼ {run.evaluated} alone" if run.evaluated else ""
        self.query_one("#progress").border_title = escape(f"{run.score}{alone}")
        self.query_one("#progress").border_subtitle = "⠒ in training   ┼ in validation, 95 %"
        self.query_one(Groups).show(run)
        numbers = self.query_one("#facts", Static)
        numbers.update(facts(run, numbers.size.width or self.size.width))
        self.query_one(KeyLine).show(self.hints())
        self.show_board()

    def show_board(self) -> None:
        run, box = self.run, self.query_one("#episode")
        board = self.query_one(BoardView)
        said, listed = self.query_one("#said", Static), self.query_one("#turns", Static)
        box.border_title = self.episode_title()
        box.set_class(run.filming, "filming")
        if isinstance(self.session, str):
            board.show(None, self.session)
            said.update("")
            listed.update("")
            box.border_subtitle = ""
        else:
            frame = self.session.frame
            board.show(frame.board, frame.seen)
            said.update(clipped(words(run, self.session), said.size.width, SAID_FILM if run.filming else SAID))
            listed.update(turns(run, self.session))
            limit = self.session.scenario.step_limit
            box.border_subtitle = escape(ending(self.session, frame)) or f"step {frame.step} of {limit}"
        once_drawn(self, self._keep_in_sight)
        self.picture()

    def _keep_in_sight(self) -> None:
        """Scroll to the turn that the board shows: a small screen has no room for all."""
        listed = self.query_one("#turns", Static)
        lines = str(listed.content).split("\n")
        below = next((number for number, line in enumerate(reversed(lines), start=1) if line.startswith(HERE)), None)
        y = 0 if below is None else listed.size.height - below
        self.query_one(VerticalScroll).scroll_to_region(Region(0, y, 1, 1), animate=False)

    def episode_title(self) -> str:
        run = self.run
        if run.filming:
            return f"after {counted(run.film.step, 'update')}"
        follows = "" if run.following else "   (end: the newest)"
        return f"update {run.step}{follows}" if run.step else "no update" if run.done else "no update yet"

    def hints(self) -> list[Hint]:
        """The keys that do something now, the most important ones first."""
        run, film, plays = self.run, self.run.film, isinstance(self.session, Session)
        on = "pause" if self.pace.playing else "play"
        if run.filming:
            keys = [
                (True, Hint("space", on, "pause")),
                (len(film) > 1, Hint("← →", "update", "update(1)")),
                (film.starts > 1, Hint("tab", "other start", "sample")),
                (True, Hint("g", "groups", "group(0)")),
            ]
        else:
            keys = [
                (len(film) > 0 or plays, Hint("space", "film" if len(film) else on, "pause")),
                (len(run.steps) > 1, Hint("← →", "update", "update(1)")),
                (run.update is not None and len(run.update.groups) > 1, Hint("↑ ↓", "group", "group(1)")),
                (len(run.samples()) > 1, Hint("tab", "episode", "sample")),
            ]
        keys += [(plays, Hint("n", "step", "step(1)")), (plays, Hint("+ −", "speed", "speed(1)"))]
        shown = [hint for does, hint in [*keys, (True, Hint("e", "save", "export"))] if does]
        return [*shown, Hint("?", "help", "help"), Hint("q", "leave", "leave")]

    def show_episode(self) -> None:
        """Another episode: from its beginning where it plays, else its end."""
        self.session = self.run.session()
        if isinstance(self.session, Session) and self.run.filming and not self.pace.playing:
            self.session.seek(self.session.last)
        self.show_run()
        if self.pace.playing:
            self.pace.later()

    def picture(self) -> None:
        """Record what is there once it is laid out."""
        if self.host.record:
            self._untaken += 1
            once_laid_out(self, self.take)

    def take(self) -> None:
        self._untaken -= 1
        self.recording.take(self, self.host.clock.now())

    # ── keys and pace ────────────────────────────────────────────────────────────────────────────────────────

    def tick(self) -> None:
        """The next step; after the last one the film goes on to its next scene, and another episode begins again."""
        session = self.session
        if self.host.unattended and self._untaken:  # a recording shows every step, on a slow machine as well
            pass
        elif isinstance(session, Session) and not session.live:
            session.seek(session.cursor + 1)
            self.show_board()
        elif self.run.filming and self.run.film.last:
            self.film_over()
            return
        elif self.run.filming:
            self.run.film.move(1)
            self.show_episode()
        elif isinstance(session, Session):
            session.seek(0)
            self.show_board()
        self.pace.later()

    def film_over(self) -> None:
        """The last scene has been played; an app that nobody looks at ends."""
        self.pace.playing = False
        self.show_run()
        once_laid_out(self, self.host.game_over)

    def action_update(self, by: int) -> None:
        try:
            if self.run.filming:
                self.run.film.move(by)
            else:
                self.run.move(by)
        except MsgrpoError as error:
            self.notify(str(error), severity="error")
        self.show_episode()

    def action_group(self, by: int) -> None:
        """To a group of an update; out of the film, where that is shown."""
        self.run.filming = False
        self.run.move_group(by)
        self.show_episode()

    def action_sample(self) -> None:
        if self.run.filming:
            self.run.film.move_start()
        else:
            self.run.move_sample()
        self.show_episode()

    def action_pause(self) -> None:
        """Begin the film, where the run has one; then pause and go on, after its end from the beginning."""
        film = self.run.film
        over = self.run.filming and film.last and not (isinstance(self.session, Session) and not self.session.live)
        if len(film) and (not self.run.filming or (over and not self.pace.playing)):
            if not self.run.filming:
                self.pace.speed = FILM_SPEED
            self.run.filming, film.place, self.pace.playing = True, 0, True
            self.show_episode()
            return
        self.pace.playing = not self.pace.playing
        if self.pace.playing:
            self.pace.later()
        self.show_run()

    def action_step(self, by: int) -> None:
        self.pace.playing = False
        if isinstance(self.session, Session):
            self.session.seek(self.session.cursor + by)
        self.show_run()

    def action_speed(self, by: int) -> None:
        self.pace.change_speed(by)

    def action_export(self) -> None:
        self.host.export_run(self.run)

    def action_help(self) -> None:
        self.app.push_screen(Help(first="A run that learns"))

    def action_leave(self) -> None:
        self.host.leave()
