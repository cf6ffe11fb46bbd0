"""The boards and what is beside them: watching, stepping, playing, racing, duels and replays are all this screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, cast

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.screen import Screen

from msgrpo.errors import MsgrpoError
from msgrpo.prompt import Prompt
from msgrpo.tui.agents import HUMAN, HumanAgent, LazyAgent
from msgrpo.tui.asking import Asking
from msgrpo.tui.choices import introduced
from msgrpo.tui.clock import Cancel, after, once_drawn, once_laid_out, stands
from msgrpo.tui.drawing import Drawing
from msgrpo.tui.host import Host, host
from msgrpo.tui.judging import Judging
from msgrpo.tui.match import Match
from msgrpo.tui.messages import AnswerStreamed, Judged, RoundEnded, SeatAnswered, SeatFailed
from msgrpo.tui.pace import Pace
from msgrpo.tui.recording import Recording
from msgrpo.tui.records import Records
from msgrpo.tui.series import Series, standing
from msgrpo.tui.session import Session, Setup
from msgrpo.tui.shades import MUTED
from msgrpo.tui.status import status, worth
from msgrpo.tui.widgets.keyline import Hint, KeyLine
from msgrpo.tui.widgets.lane import Lane
from msgrpo.tui.widgets.moves import MoveList
from msgrpo.tui.widgets.panel import NOTHING, AgentPanel
from msgrpo.tui.widgets.text import Text, lines
from msgrpo.tui.widgets.timeline import Timeline

P = ParamSpec("P")
BETWEEN_S = 2.0  # two games of a series
SOON_S = 0.02  # till a recording looks again whether its picture is finished
STACKED = 60  # columns below which the panels stand under the board
PANEL = 34  # columns of a panel beside a board, where there is room for more
# Rows of a panel below a board: border, numbers, words, how it ended; where there is room, the bars come to it.
LOW = 6
LEAST = 4  # rows of a panel beside another board that would be cut off: its numbers
ON = "(on)"  # what no action is called where a game goes on by itself


def while_standing(
    method: Callable[Concatenate[MatchScreen, P], None],
) -> Callable[Concatenate[MatchScreen, P], None]:
    """Do nothing once the screen is being taken away: messages and timers still come when its widgets are gone."""

    @wraps(method)
    def guarded(self: MatchScreen, *args: P.args, **kwargs: P.kwargs) -> None:
        if stands(self):
            method(self, *args, **kwargs)

    return cast("Callable[Concatenate[MatchScreen, P], None]", guarded)


class MatchScreen(Screen[None]):
    """Shows a match and lets it go on. Watching goes by the clock; a person's game waits for the person."""

    details = reactive(False, init=False)
    hint = reactive(False, init=False)

    def __init__(
        self,
        match: Match,
        setup: Setup,
        *,
        replay: Records | None = None,
        series: Series | None = None,
        details: bool | None = None,
    ) -> None:
        super().__init__()
        self.match = match
        self.setup = setup
        self.replay = replay
        self.series = series
        self.wanted: dict[tuple[int, str], str] = {}  # live: what a person pressed since the last tick
        self.set_reactive(MatchScreen.details, setup.step if details is None else details)
        self._begins = not setup.step and replay is None and not setup.live  # by itself
        self.pace = Pace(
            lambda seconds, call: self.host.clock.after(self, seconds, call),
            self.tick,
            speed=setup.speed,
            playing=self._begins,
        )
        self.judging = Judging(match, self.post_message)
        self.asking = Asking(match, self.post_message, lambda: self.host.clock.now())
        self.drawing = Drawing(self, self.judging, self.asking, self.pace, self.watch_wait)
        self._second: Cancel | None = None
        self._next: Cancel | None = None
        self.counted = False  # in the series
        self.notes: tuple[str, ...] = ()  # beside the title: the place that the episode takes, where it was recorded
        self.left_record = False  # somebody took a seat of a replay over
        self.recording = Recording()  # empty unless the sitting is recorded
        self._untaken = 0  # pictures that wait for their layout

    # ── what is on the screen ────────────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> Host:
        return host(self)

    def compose(self) -> ComposeResult:
        yield Text(id="title")
        with Horizontal(id="table", classes="two" if len(self.match.sessions) > 1 else "one"):
            for i, session in enumerate(self.match.sessions):
                with Vertical(classes="side"):
                    yield Lane(i, session, several=len(self.match.sessions) > 1)
                    with Vertical(classes="panels"):
                        for player in session.players:
                            yield AgentPanel(i, player, session)
        yield Text(id="verdict")
        yield Timeline(id="timeline")
        yield KeyLine()

    def on_mount(self) -> None:
        self.pace.playing = self.pace.playing or self.host.unattended
        self.show_all()
        self.go()

    def on_unmount(self) -> None:
        self.drawing.now()
        self.pace.stop()
        self.asking.drop()
        self.judging.drop()
        for cancel in filter(None, (self._second, self._next)):
            cancel()
        for session in self.match.sessions:
            self.host.broken_off(session)
        self.host.keep_recording(self.recording)

    def picture(self) -> None:
        """Record what is there once what was shown last is laid out."""
        if not self.host.record:
            return
        self._untaken += 1
        once_laid_out(self, self.take)

    def ended(self, trouble: str = "") -> None:
        """Nothing more comes by itself, once the last picture is taken."""
        self.show_all()
        self._over(trouble)

    @while_standing
    def _over(self, trouble: str) -> None:
        if self.host.unattended and self._untaken:
            after(self, SOON_S, lambda: self._over(trouble))
        else:
            once_laid_out(self, lambda: self.host.game_over(trouble))

    @while_standing
    def take(self, drawn: bool = False) -> None:
        """Nobody waits for a recording that runs by itself: its pictures are of what is judged, and drawn since."""
        if self.host.unattended and not (self.judging.done and not self.drawing.going):
            after(self, SOON_S, lambda: once_drawn(self, self.take))
            return
        if self.host.unattended and not drawn:
            once_laid_out(self, lambda: self.take(drawn=True))
            return
        self._untaken -= 1
        self.recording.take(self, self.host.clock.now())

    def lane(self, session: int) -> Lane:
        return self.query_one(f"#lane-{session}", Lane)

    @while_standing
    def on_resize(self) -> None:
        self.fit()

    def fit(self) -> None:
        """Give the boards the room that they can fill, and the panels the rest."""
        width, height = self.size
        several = len(self.match.sessions) > 1
        # title, history, keys; who won, whose line is kept free where two may win, so that no board jumps at the end
        height -= 3 + max(several, lines(Content(self.banner()), width))
        stacked = width < STACKED
        for i, session in enumerate(self.match.sessions):
            panels = len(session.players) if len(self.match.sessions) == 1 else 1
            if several:
                bars = max(len(session.game.own_actions(player)) for player in session.players)
                low = max(LOW, min(LOW + bars, height // 3))
                high = max(height - low, min(self.lane(i).least(width // 2), height - LEAST))
                self.lane(i).fit(width // 2, max(LOW, high), whole_width=True)
            elif stacked:
                self.lane(i).fit(width, max(LOW, height - LOW * panels), whole_width=True)
            else:
                board = session.shown[0] is not None
                wide = max(width // 2, width - max(PANEL, width * 3 // 10)) if board else width // 2
                self.lane(i).fit(wide, height, whole_width=False)

    def panel(self, session: int, player: str) -> AgentPanel:
        return self.query_one(f"#panel-{session}-{player}", AgentPanel)

    @while_standing
    def show_all(self) -> None:
        """Draw everything from the match at its cursor, in one frame."""
        self.drawing.begin()
        for i, session in enumerate(self.match.sessions):
            self.lane(i).show(self.worth(i))
            for player in session.players:
                self.show_seat(i, player)
        self.query_one("#title", Text).show(self.title_line())
        banner, result = self.query_one("#verdict", Text), self.banner()
        banner.display = bool(result)
        banner.show(Content(result))
        self.show_time()
        self.show_keys()
        self.fit()
        self.picture()

    def banner(self) -> str:
        """The sentence under the boards: who won, how the series stands."""
        return standing(self.match, self.series)

    def worth(self, index: int) -> str:
        width = self.lane(index).content_size.width
        return worth(self.match, self.judging, index, hint=self.hint, idle=self.idle, width=width)

    @property
    def idle(self) -> str:
        """What a turn without an action is called: in real time the game goes on without one."""
        return ON if self.setup.live else NOTHING

    def hints(self) -> list[Hint]:
        """The keys that do something now, the most important ones first."""
        return []

    def show_keys(self) -> None:
        self.query_one(KeyLine).show(self.hints())

    def title_line(self) -> Content:
        """Who plays what, from which start, how; in a series which game it is; where the episode was recorded."""
        mode = self.setup.mode
        if self.setup.live and not self.pace.playing and not self.match.over:
            mode = "live: a move starts it, space stops it"
        if self.replay is not None:
            what = "played on from" if self.left_record else "replay of"
            mode = f"{what} episode {self.replay.place + 1} of {len(self.replay.episodes)}"
        names = " vs ".join(self.match.sessions[i].name(player) for i, player in self.match.seats())
        first = self.match.sessions[0]
        title = f" msgrpo   {names} · {first.scenario.id} · seed {first.seed} · {mode}"
        if self.series is not None:
            title += f" · game {self.series.played + (not self.counted)} of {self.series.games}"
        line = Content.styled(title, "bold")
        for note in self.notes:  # a part of one says nothing
            more = line + Content.styled(f"   {note}", MUTED)
            line = more if more.cell_length <= self.size.width else line
        return line

    @while_standing
    def show_seat(self, index: int, player: str) -> None:
        session = self.match.sessions[index]
        returns = self.host.sitting.of(session, player)
        decision = session.answers.get(player) if session.live and not self.match.secret else None
        prompt = self.prompt_of(session, player)
        agent, rules = session.agents[player], ""
        if isinstance(agent, (HumanAgent, LazyAgent)) and not self.moved(session, player):
            rules = session.rules(player) if agent.spec == HUMAN else introduced(agent.spec) + session.scenario.rules
        self.panel(index, player).show(
            session,
            self.judging,
            returns,
            decision,
            details=self.details,
            prompt=prompt,
            rules=rules,
            idle=self.idle,
        )
        self.show_status(index, player)

    @staticmethod
    def moved(session: Session, player: str) -> bool:
        """Whether the player has moved before the moment that is shown; others may have."""
        return any(player in frame.turns for frame in session.frames[: session.cursor + 1])

    def prompt_of(self, session: Session, player: str) -> Prompt | None:
        """What the seat reads next: the whole prompt of a language model, the state for anybody else."""
        if session.over or not session.live:
            return None
        agent, view = session.agents[player], session.view(player)
        prompt = agent.prompt(view) if isinstance(agent, LazyAgent) else None
        return prompt or Prompt("", view.observation)

    @while_standing
    def show_status(self, index: int, player: str) -> None:
        by_step = self.setup.step and not self.pace.playing and self.replay is None
        idle = ON if self.setup.live else "giving no action"
        text, kind = status(self.match, self.asking, self.judging, index, player, by_step=by_step, idle=idle)
        self.panel(index, player).say(text, kind)

    @while_standing
    def show_time(self) -> None:
        self.query_one(Timeline).show(self.match, self.pace, self.judging)

    def watch_hint(self) -> None:
        self.show_all()

    def watch_details(self) -> None:
        self.show_all()

    def jump_to(self, step: int) -> None:
        """Show another moment; -1 is the present."""
        self.match.seek(self.match.last if step < 0 else step)
        self.show_all()

    # ── the game's pace ──────────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        """Do what comes next by itself: a person is asked at once, everything else follows the clock."""
        if self.match.live and self.match.human:
            self.ask()
        elif self.pace.playing:
            self.pace.later()

    @property
    def fresh(self) -> bool:
        """Whether nothing has been played or changed since the game began, so that the same again would be this."""
        asking, sessions = self.asking, self.match.sessions
        as_begun = all(session.agents == session.own and not session.answers for session in sessions)
        quiet = not asking.failed and not asking.stopped and self.pace.playing == self._begins
        return self.match.last == 0 and as_begun and quiet

    @property
    def held(self) -> bool:
        """A dialog stands before a game in real time, which waits for it to be closed."""
        return self.setup.live and self.app.screen is not self

    def on_screen_resume(self) -> None:
        """The dialog is closed: what came meanwhile is played, and the next step has its whole time."""
        if self.setup.live and self.match.ready and not self.asking.going:
            self.round_ended(RoundEnded())
        elif self.setup.live and self.pace.playing:
            self.pace.later()

    @while_standing
    def tick(self) -> None:
        if self.held:
            return
        people = self.asking.people()
        if self.host.unattended and self._untaken:  # a recording shows every step, on a slow machine as well
            self.pace.later()
        elif self.setup.live and people and self.match.live:
            for index, player, person in people:
                person.choose(self.wanted.pop((index, player), None))
        else:
            self.advance()

    def advance(self) -> None:
        """One step on: through the history first, then by asking the agents."""
        if not self.match.live:
            self.jump_to(self.match.cursor + 1)
            if self.pace.playing:
                self.pace.later()
        elif self.match.over:
            self.pace.playing = False
            self.ended()
        elif self.match.ready:
            self.commit()
        else:
            self.ask()

    def play_on(self) -> None:
        """Play has just begun again; at the end, from the start."""
        if self.match.over and self.match.live:
            self.match.seek(0)
        self.advance()

    def ask(self) -> None:
        if self.asking.going or self.match.over:
            return
        if self.match.empty():  # a record ends here, and who it names is not asked
            self.pace.playing = False
            self.ended()
            return
        if not self.match.waiting():
            self.commit()
            return
        self.drawing.asked = True
        self.drawing.begin()
        self.asking.start()
        if self.setup.live and self.pace.playing:
            self.pace.later()

    @while_standing
    def watch_wait(self) -> None:
        """Keep the seconds on the screen while somebody thinks."""
        for index, player in self.match.seats():
            self.show_status(index, player)
        self.show_keys()
        if self._second is not None:
            self._second()
        self._second = self.host.clock.after(self, 1.0, self.watch_wait) if self.asking.going else None

    @on(AnswerStreamed)
    @while_standing
    def show_stream(self, message: AnswerStreamed) -> None:
        if self.match.secret:
            return
        session = self.match.sessions[message.session]
        if session.covers(message.player):
            return
        if message.player not in session.answers and self.match.live and self.asking.going:
            prompt = self.prompt_of(session, message.player) if self.details else None
            self.panel(message.session, message.player).stream(message.text, prompt)

    @on(Judged)
    @while_standing
    def show_judgement(self, message: Judged) -> None:
        for i, session in enumerate(self.match.sessions):
            self.lane(i).show_worth(self.worth(i))
            for player in session.players:
                self.panel(i, player).query_one(MoveList).show(session, self.judging, idle=self.idle)
                self.show_status(i, player)
        self.show_time()
        self.show_keys()

    @on(SeatAnswered)
    @while_standing
    def seat_answered(self, message: SeatAnswered) -> None:
        if self.match.ready:  # the round has ended, and with it everything is drawn
            return
        for index, player in self.match.seats():  # the last person's choice reveals the others'
            self.show_seat(index, player)

    @on(SeatFailed)
    @while_standing
    def seat_failed(self, message: SeatFailed) -> None:
        self.show_status(message.session, message.player)

    @on(RoundEnded)
    @while_standing
    def round_ended(self, message: RoundEnded) -> None:
        if self.held and self.match.ready:
            return
        if self.match.ready and not (self.setup.step and not self.pace.playing and not self.match.human):
            self.commit()
            return
        if self.asking.failed:
            self.pace.playing = False
            self.ended("; ".join(self.asking.failed.values()))
        else:
            self.show_all()

    def commit(self) -> None:
        over = [session.over for session in self.match.sessions]
        self.drawing.moved = not self.match.human
        if self.match.chosen_by_people() and not self.setup.live:  # a hint is for the move that it was asked for
            self.set_reactive(MatchScreen.hint, False)
        try:
            self.match.commit()
        except MsgrpoError as error:  # the game's own code failed: what was played stays on the screen
            self.pace.playing = False
            self.notify(str(error), severity="error", timeout=20)
            self.ended(error.message)
            return
        for was, session in zip(over, self.match.sessions, strict=True):
            if session.over and not was:
                self.notes = self.host.finished(session) or self.notes
        if self.match.over:
            self.pace.playing = False
            self.series_goes_on()
        if self.match.over and (self.series is None or self.series.over):
            self.ended()
        else:
            self.show_all()
        self.go()

    def series_goes_on(self) -> None:
        """Count the game, and open the next one after a moment; at the end the card stays."""
        if self.series is None or self.counted:
            return
        self.counted = True
        self.series.add(self.match)
        if not self.series.over:
            self._next = self.host.clock.after(self, BETWEEN_S, self.next_game)

    @while_standing
    def next_game(self) -> None:
        if self.app.screen is not self:  # somebody reads the help
            self._next = self.host.clock.after(self, BETWEEN_S, self.next_game)
        elif self.series is not None:
            setup = replace(self.series.next(), speed=self.pace.speed)
            self.host.open_game(setup, replace=True, series=self.series, details=self.details)
