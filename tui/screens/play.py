"""The boards and what is beside them: watching, stepping, playing, racing, duels and replays are all this screen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ClassVar, Concatenate, ParamSpec, cast

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Footer, Static

from msgrpo_agent.prompt import Prompt
from tui import hands
from tui.agents import ARROWS, HUMAN, WASD, LazyAgent
from tui.asking import Asking
from tui.clock import Cancel, once_drawn, stands
from tui.film import Film
from tui.host import Host, host
from tui.judging import Judging
from tui.messages import ActionChosen, AnswerStreamed, Judged, RoundEnded, SeatAnswered, SeatFailed, SeekTo
from tui.pace import Pace
from tui.records import Records
from tui.screens.dialogs import Help, Jump
from tui.series import Series, standing
from tui.session import Match, Session, Setup
from tui.status import status, worth
from tui.widgets.lane import Lane
from tui.widgets.moves import MoveList
from tui.widgets.panel import AgentPanel
from tui.widgets.timeline import PLAIN, Timeline, mark

P = ParamSpec("P")
BETWEEN_S = 2.0  # two games of a series
STACKED = 60  # columns below which the panels stand under the board


def while_standing(
    method: Callable[Concatenate[PlayScreen, P], None],
) -> Callable[Concatenate[PlayScreen, P], None]:
    """Do nothing once the screen is being taken away: messages and timers still come when its widgets are gone."""

    @wraps(method)
    def guarded(self: PlayScreen, *args: P.args, **kwargs: P.kwargs) -> None:
        if stands(self):
            method(self, *args, **kwargs)

    return cast("Callable[Concatenate[PlayScreen, P], None]", guarded)


def move_bindings() -> list[BindingType]:
    keys = {"up": ("up,k", "w"), "down": ("down,j", "s"), "left": ("left,h", "a"), "right": ("right,l", "d")}
    return [
        Binding(chosen, f"move('{way}','{hand}')", way, show=False, id=f"move.{way}{suffix}")
        for way, both in keys.items()
        for chosen, hand, suffix in zip(both, (ARROWS, WASD), ("", ".second"), strict=True)
    ]


class PlayScreen(Screen[None]):
    """Plays a match. Watching goes by the clock; a person's game waits for the person."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *move_bindings(),
        *(Binding(str(n), f"choose({n})", show=False) for n in range(1, 10)),
        Binding("space", "pause", "pause/go", id="play.pause"),
        Binding("n,full_stop", "step", "step", id="play.step"),
        Binding("left_square_bracket,comma", "seek(-1)", "back", id="play.back"),
        Binding("right_square_bracket", "seek(1)", "forward", show=False, id="play.forward"),
        Binding("home", "jump_to(0)", "start", show=False, id="play.home"),
        Binding("end", "jump_to(-1)", "end", show=False, id="play.end"),
        Binding("g", "jump", "go to step", show=False, id="play.jump"),
        Binding("b", "reverse", "backwards", show=False, id="play.reverse"),
        Binding("plus,equals_sign", "speed(1)", "faster", show=False, id="play.faster"),
        Binding("minus", "speed(-1)", "slower", show=False, id="play.slower"),
        Binding("p", "details", "prompt", id="show.details"),
        Binding("i", "hint", "hint", show=False, id="show.hint"),
        Binding("pagedown", "scroll_words(1)", "scroll the words", show=False, id="show.scroll-down"),
        Binding("pageup", "scroll_words(-1)", "scroll the words back", show=False, id="show.scroll-up"),
        Binding("t", "take_over(0)", "take over", id="seat.take"),
        Binding("T", "take_over(1)", "take over the second", show=False, id="seat.take-second"),
        Binding("r", "restart", "restart", id="game.restart"),
        Binding("x", "next_seed", "next seed", id="game.next"),
        Binding("X", "episode(-1)", "episode before", show=False, id="game.before"),
        Binding("tab", "event(1)", "next event", show=False, id="play.event", priority=True),
        Binding("shift+tab", "event(-1)", "event before", show=False, id="play.event-before", priority=True),
        Binding("enter", "retry", "ask again", show=False, id="seat.retry"),
        Binding("escape", "cancel", "stop waiting", show=False, id="seat.cancel"),
        Binding("e", "export", "save", show=False, id="file.export"),
        Binding("question_mark", "help", "help", id="app.help"),
        Binding("q", "leave", "leave", show=False, id="game.leave"),
    ]

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
        self.set_reactive(PlayScreen.details, setup.step if details is None else details)
        self.pace = Pace(
            lambda seconds, call: self.host.clock.after(self, seconds, call),
            self.tick,
            speed=setup.speed,
            playing=not setup.step and replay is None and not setup.live,
        )
        self.judging = Judging(match, self.post_message)
        self.asking = Asking(match, self.post_message, lambda: self.host.clock.now())
        self._second: Cancel | None = None
        self._next: Cancel | None = None
        self.counted = False  # in the series
        self.note = ""  # beside the title: where the episode was recorded
        self.film = Film()

    # ── what is on the screen ────────────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> Host:
        return host(self)

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with Horizontal(id="table", classes="two" if len(self.match.sessions) > 1 else "one"):
            for i, session in enumerate(self.match.sessions):
                with Vertical(classes="side"):
                    yield Lane(i, session, several=len(self.match.sessions) > 1)
                    with Vertical(classes="panels"):
                        for player in session.players:
                            yield AgentPanel(i, player, session)
        yield Static(id="verdict", markup=False)
        yield Timeline(id="timeline")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.pace.playing = self.pace.playing or self.host.unattended
        self.show_all()
        self.go()

    def on_unmount(self) -> None:
        self.pace.stop()
        self.asking.drop()
        self.judging.drop()
        for cancel in filter(None, (self._second, self._next)):
            cancel()
        self.host.filmed(self.film)

    def picture(self) -> None:
        """Film what is there once what was shown last has its final layout, which takes a second refresh."""
        once_drawn(self, lambda: once_drawn(self, self.take))

    def ended(self, trouble: str = "") -> None:
        """Nothing more comes by itself, once the last picture is taken."""
        self.show_all()
        once_drawn(self, lambda: once_drawn(self, lambda: self.host.game_over(trouble)))

    @while_standing
    def take(self) -> None:
        self.film.take(self, self.host.clock.now())

    def lane(self, session: int) -> Lane:
        return self.query_one(f"#lane-{session}", Lane)

    def on_resize(self) -> None:
        if len(self.match.sessions) == 1:
            room = self.size.width * 56 // 100 if self.size.width >= STACKED else self.size.width
            once_drawn(self, lambda: self.lane(0).fit(room))

    def panel(self, session: int, player: str) -> AgentPanel:
        return self.query_one(f"#panel-{session}-{player}", AgentPanel)

    @while_standing
    def show_all(self) -> None:
        """Draw everything from the match at its cursor."""
        for i, session in enumerate(self.match.sessions):
            self.lane(i).show(worth(self.match, self.judging, i, hint=self.hint))
            for player in session.players:
                self.show_seat(i, player)
        self.query_one("#title", Static).update(self.title_line())
        result = standing(self.match, self.series)
        banner = self.query_one("#verdict", Static)
        banner.display = bool(result)
        banner.update(result)
        self.show_time()
        self.refresh_bindings()
        self.judging.look()
        self.picture()

    def title_line(self) -> Content:
        """Who plays what, from which start, how; in a series which game it is; where the episode was recorded."""
        mode = self.setup.mode
        if self.setup.live and not self.pace.playing and not self.match.over:
            mode = "live: a move starts it, space stops it"
        if self.replay is not None:
            mode = f"replay of episode {self.replay.place + 1} of {len(self.replay.episodes)}"
        names = " vs ".join(self.match.sessions[i].name(player) for i, player in self.match.seats())
        first = self.match.sessions[0]
        title = f" msgrpo   {names} · {first.scenario.id} · seed {first.seed} · {mode}"
        if self.series is not None:
            title += f" · game {self.series.played + (not self.counted)} of {self.series.games}"
        note = Content.styled(f"   {self.note}", "$text-muted") if self.note else Content("")
        return Content.styled(title, "bold") + note

    @while_standing
    def show_seat(self, index: int, player: str) -> None:
        session = self.match.sessions[index]
        returns = self.host.sitting.of(session, player)
        decision = session.answers.get(player) if session.live and not self.match.secret else None
        prompt = self.prompt_of(session, player)
        self.panel(index, player).show(session, self.judging, returns, decision, details=self.details, prompt=prompt)
        self.show_status(index, player)

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
        text, kind = status(self.match, self.asking, self.judging, index, player, by_step=by_step)
        self.panel(index, player).say(text, kind)

    @while_standing
    def show_time(self) -> None:
        self.query_one(Timeline).show(self.match, self.pace, self.judging)

    # ── the game's pace ──────────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        """Do what comes next by itself: a person is asked at once, everything else follows the clock."""
        if self.match.live and self.match.human and self.pace.forward:
            self.ask()
        elif self.pace.playing:
            self.pace.later()

    @while_standing
    def tick(self) -> None:
        people = self.asking.people()
        if self.setup.live and people and self.match.live and self.pace.forward:
            for index, player, person in people:
                person.choose(self.wanted.pop((index, player), None))
        else:
            self.advance()

    def advance(self) -> None:
        """One step in the direction of play: through the history first, then by asking the agents."""
        pace = self.pace
        if not pace.forward:
            self.action_seek(-1)
            if self.match.cursor == 0:
                pace.playing, pace.forward = False, True
                self.show_all()
            else:
                pace.later()
        elif not self.match.live:
            self.action_seek(1)
            if pace.playing:
                pace.later()
        elif self.match.over:
            pace.playing = False
            self.ended()
        elif self.match.ready:
            self.commit()
        else:
            self.ask()

    def ask(self) -> None:
        if self.asking.going or self.match.over:
            return
        if not self.match.waiting():
            self.commit()
            return
        self.asking.start()
        self.watch_wait()
        if self.setup.live and self.pace.playing:
            self.pace.later()

    @while_standing
    def watch_wait(self) -> None:
        """Keep the seconds on the screen while somebody thinks."""
        for index, player in self.match.seats():
            self.show_status(index, player)
        if self._second is not None:
            self._second()
        self._second = self.host.clock.after(self, 1.0, self.watch_wait) if self.asking.going else None

    @on(AnswerStreamed)
    @while_standing
    def show_stream(self, message: AnswerStreamed) -> None:
        if self.match.secret:
            return
        session = self.match.sessions[message.session]
        if message.player not in session.answers and self.match.live and self.asking.going:
            prompt = self.prompt_of(session, message.player) if self.details else None
            self.panel(message.session, message.player).stream(message.text, prompt)

    @on(Judged)
    @while_standing
    def show_judgement(self, message: Judged) -> None:
        for i, session in enumerate(self.match.sessions):
            self.lane(i).show_worth(worth(self.match, self.judging, i, hint=self.hint))
            for player in session.players:
                self.panel(i, player).query_one(MoveList).show(session, self.judging)
                self.show_status(i, player)
        self.show_time()

    @on(SeatAnswered)
    @while_standing
    def seat_answered(self, message: SeatAnswered) -> None:
        for index, player in self.match.seats():  # the last person's choice reveals the others'
            self.show_seat(index, player)

    @on(SeatFailed)
    @while_standing
    def seat_failed(self, message: SeatFailed) -> None:
        self.show_status(message.session, message.player)

    @on(RoundEnded)
    @while_standing
    def round_ended(self, message: RoundEnded) -> None:
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
        self.match.commit()
        for was, session in zip(over, self.match.sessions, strict=True):
            if session.over and not was:
                self.note = self.host.finished(session)
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

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "retry":
            return bool(self.asking.failed)
        if action == "cancel":
            return True
        if action == "take_over":
            return len(self.match.seats()) > int(str(parameters[0]))
        if action == "restart":
            return self.replay is None
        return True

    def action_move(self, way: str, hand: str) -> None:
        """A move while a person has a seat in a game that goes on; scrubbing where nobody plays.

        Keys that come faster than the game are dropped, never taken for scrubbing, also at the end of a person's
        game. With two people each has a hand of keys.
        """
        if not self.match.human:
            if (self.replay or not self.match.people()) and way in ("left", "right") and hand == ARROWS:
                self.action_seek(-1 if way == "left" else 1)
            return
        if not self.match.live:  # nobody moves blindly: first back to the present
            self.action_jump_to(-1)
            return
        if self.setup.live:
            hands.want(self.match, self.asking, self.wanted, way, hand)
            if not self.pace.playing:  # the first key starts the game
                self.action_pause()
        else:
            hands.move(self.match, self.asking, way, hand)

    def action_choose(self, number: int) -> None:
        hands.choose(self.match, self.asking, number)

    @on(ActionChosen)
    def bar_clicked(self, message: ActionChosen) -> None:
        hands.click(self.match, self.asking, message.session, message.player, message.action)

    def action_pause(self) -> None:
        self.pace.playing = not self.pace.playing
        if self.pace.playing and self.setup.live and self.asking.people():
            self.pace.later()
        elif self.pace.playing:
            self.play_on()
        self.show_all()

    def play_on(self) -> None:
        """Play has just begun again; at the end, from the start."""
        if self.match.over and self.match.live and self.pace.forward:
            self.match.seek(0)
        self.advance()

    def action_hint(self) -> None:
        self.hint = not self.hint

    def watch_hint(self) -> None:
        self.show_all()

    def watch_details(self) -> None:
        self.show_all()

    def action_step(self) -> None:
        if self.pace.playing:
            self.pace.playing = False
            self.show_all()
        else:
            self.pace.forward = True
            self.advance()

    def action_seek(self, by: int) -> None:
        self.action_jump_to(max(0, self.match.cursor + by))

    def action_jump_to(self, step: int) -> None:
        """Show another moment; -1 is the present."""
        self.match.seek(self.match.last if step < 0 else step)
        self.show_all()

    @on(SeekTo)
    def seek_to(self, message: SeekTo) -> None:
        self.action_jump_to(message.step)

    @work(group="dialog")
    async def action_jump(self) -> None:
        step = await self.app.push_screen_wait(Jump(self.match.last))
        if step is not None:
            self.pace.playing = False
            self.action_jump_to(step)

    def action_reverse(self) -> None:
        self.pace.forward = not self.pace.forward
        if self.pace.playing:
            self.pace.later()
        else:
            self.pace.playing = True
            self.play_on()
        self.show_all()

    def action_speed(self, by: int) -> None:
        self.pace.change_speed(by)
        self.show_time()

    def action_details(self) -> None:
        self.details = not self.details

    def action_take_over(self, seat: int) -> None:
        """Sit down at the moment that is shown, or hand the seat back to whoever had it."""
        index, player = self.match.seats()[seat]
        session = self.match.sessions[index]
        if session.agents[player].spec == HUMAN:
            if session.own[player].spec == HUMAN:
                self.notify("This seat is yours from the start; nobody is there to take it back.")
                return
            self.asking.drop()
            session.hand_back(player)
            self.notify(f"{session.name(player)} plays on.")
        else:
            if session.over and session.live:
                self.notify("The game is over. Go back to a moment ([ or a click on the timeline), then take over.")
                return
            self.asking.drop()
            if not self.match.live:
                self.notify(f"You play on from step {self.match.cursor}; what came after it is gone.")
            if self._next is not None:
                self._next()  # the series waits for this game to end again
            self.match.rewind()
            session.take_over(player)
        self.match.seat_people()
        self.asking.failed.pop((index, player), None)
        self.pace.forward = True
        self.show_all()
        once_drawn(self, self.go)

    def action_retry(self) -> None:
        """Ask those who failed again; while a person has still to move, the round is not over."""
        if not self.asking.going:
            self.asking.failed.clear()
            self.ask()

    def action_cancel(self) -> None:
        """Stop waiting for an agent; where nothing but a person, or nobody, is waited for, leave.

        In a race or a duel where both are waited for, neither: the game would be lost, or the person's turn.
        """
        if self.asking.going and not self.asking.people():
            self.asking.stop()
            self.pace.playing = False
            self.show_all()
        elif self.asking.only_people():
            self.action_leave()

    def action_scroll_words(self, pages: int) -> None:
        """Scroll what the agents read and say, a page at a time."""
        for panel in self.query(AgentPanel):
            panel.scroll_words(pages)

    def action_restart(self) -> None:
        if self.counted:
            self.notify("This game of the series is counted; the next one comes by itself.")
            return
        setup = replace(self.setup, speed=self.pace.speed)
        self.host.open_game(setup, replace=True, series=self.series, details=self.details)

    def action_next_seed(self) -> None:
        """Another start; in a record, the next episode."""
        if self.replay is not None:
            self.action_episode(1)
            return
        if self.series is not None and not self.series.over:
            self.notify("In a series the next game comes by itself.")
            return
        setup = replace(self.setup, speed=self.pace.speed, seed=self.setup.seed + 1)
        self.host.open_game(setup, replace=True, details=self.details)

    def action_episode(self, by: int) -> None:
        """The next or previous episode of a record."""
        if self.replay is not None and self.replay.move(by):
            self.host.replay(self.replay, replace=True)
        elif self.replay is not None:
            self.notify("There is no further episode that way in this list.")

    def action_event(self, by: int) -> None:
        """To the next or previous step at which something happened: a reward, an invalid answer, a mistake."""
        steps = [step for step in range(self.match.last + 1) if self.eventful(step)]
        there = [s for s in steps if (s > self.match.cursor if by > 0 else s < self.match.cursor)]
        if there:
            self.pace.playing = False
            self.action_jump_to(min(there) if by > 0 else max(there))

    def eventful(self, step: int) -> bool:
        for i, session in enumerate(self.match.sessions):
            if step <= session.last:
                frame = session.frames[step]
                signs = [self.judging.lost(i, step, player)[1] for player in frame.turns]
                if mark(frame) != PLAIN or any(signs):
                    return True
        return False

    def action_export(self) -> None:
        self.host.export(self.match, self.film)

    def action_help(self) -> None:
        self.app.push_screen(Help())

    def action_leave(self) -> None:
        self.host.leave()
