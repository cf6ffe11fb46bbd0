"""The boards and what is beside them: watching, stepping, playing, racing, duels and replays are all this screen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import ClassVar, Concatenate, ParamSpec, cast

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import Worker, WorkerState, get_current_worker

from msgrpo_agent.errors import MsgrpoError
from msgrpo_agent.game import MOVES, Game
from msgrpo_agent.prompt import Prompt
from msgrpo_agent.text import printable
from tui.agents import ARROWS, HUMAN, WASD, HumanAgent, LazyAgent
from tui.clock import Cancel
from tui.host import Host, host
from tui.messages import ActionChosen, AnswerStreamed, SeatAnswered, SeatFailed, SeekTo
from tui.screens.dialogs import Help, Jump
from tui.session import Match, Session, Setup, ending, verdict
from tui.widgets.board import BoardView, look
from tui.widgets.panel import AgentPanel
from tui.widgets.timeline import Timeline

P = ParamSpec("P")
SPEEDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
KEYS = {(ARROWS, WASD): "arrows, hjkl or wasd", (ARROWS,): "arrows or hjkl", (WASD,): "wasd"}
PATIENCE_S = 3  # of thinking, before the way out is named


def while_standing(
    method: Callable[Concatenate[PlayScreen, P], None],
) -> Callable[Concatenate[PlayScreen, P], None]:
    """Do nothing once the screen is being taken away: messages and timers still come when its widgets are gone."""

    @wraps(method)
    def guarded(self: PlayScreen, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.display:  # False from the moment of removal on
            method(self, *args, **kwargs)

    return cast("Callable[Concatenate[PlayScreen, P], None]", guarded)


def move_bindings() -> list[BindingType]:
    keys = {"up": ("up,k", "w"), "down": ("down,j", "s"), "left": ("left,h", "a"), "right": ("right,l", "d")}
    return [
        Binding(chosen, f"move('{way}','{hand}')", way, show=False, id=f"move.{way}{suffix}")
        for way, both in keys.items()
        for chosen, hand, suffix in zip(both, (ARROWS, WASD), ("", ".second"), strict=True)
    ]


class Lane(Vertical):
    """One board with its title, legend and ending."""

    def __init__(self, index: int, session: Session) -> None:
        super().__init__(id=f"lane-{index}", classes="lane")
        self.index = index
        self.border_title = session.scenario.id

    def show(self, session: Session) -> None:
        frame = session.frame
        self.query_one(BoardView).show(frame.board, frame.seen)
        self.border_subtitle = ending(session, frame)
        self.set_class(bool(self.border_subtitle), "ended")


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
        Binding("pagedown", "scroll_words(1)", "scroll the words", show=False, id="show.scroll-down"),
        Binding("pageup", "scroll_words(-1)", "scroll the words back", show=False, id="show.scroll-up"),
        Binding("t", "take_over(0)", "take over", id="seat.take"),
        Binding("T", "take_over(1)", "take over the second", show=False, id="seat.take-second"),
        Binding("r", "restart", "restart", id="game.restart"),
        Binding("x", "next_seed", "next seed", id="game.next"),
        Binding("enter", "retry", "ask again", show=False, id="seat.retry"),
        Binding("escape", "cancel", "stop waiting", show=False, id="seat.cancel"),
        Binding("e", "export", "save", show=False, id="file.export"),
        Binding("question_mark", "help", "help", id="app.help"),
        Binding("q", "leave", "leave", show=False, id="game.leave"),
    ]

    playing = reactive(True, init=False)
    forward = reactive(True, init=False)
    details = reactive(False, init=False)
    speed = reactive(4.0, init=False)

    def __init__(self, match: Match, setup: Setup, *, replay: bool = False, details: bool | None = None) -> None:
        super().__init__()
        self.match = match
        self.setup = setup
        self.replay = replay
        self.set_reactive(PlayScreen.speed, setup.speed)
        self.set_reactive(PlayScreen.details, setup.step if details is None else details)
        self.set_reactive(PlayScreen.playing, not setup.step and not replay)
        self._tick: Cancel | None = None
        self._second: Cancel | None = None
        self._asked_at = 0.0
        self.stopped = False  # a person stopped waiting for the answers
        self.note = ""  # beside the title: where the episode was recorded
        self.failed: dict[tuple[int, str], str] = {}

    # ── what is on the screen ────────────────────────────────────────────────────────────────────────────────

    @property
    def host(self) -> Host:
        return host(self)

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with Horizontal(id="table", classes="two" if len(self.match.sessions) > 1 else "one"):
            for i, session in enumerate(self.match.sessions):
                with Vertical(classes="side"):
                    with Lane(i, session):
                        yield BoardView(session.frame.board, session.frame.seen)
                        yield Static(legend(session), classes="legend")
                    with Vertical(classes="panels"):
                        for player in session.players:
                            yield AgentPanel(i, player, session)
        yield Static(id="verdict")
        yield Timeline(id="timeline")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.show_all()
        self.go()

    def on_unmount(self) -> None:
        for cancel in filter(None, (self._tick, self._second)):
            cancel()

    def panel(self, session: int, player: str) -> AgentPanel:
        return self.query_one(f"#panel-{session}-{player}", AgentPanel)

    @while_standing
    def show_all(self) -> None:
        """Draw everything from the match at its cursor."""
        for i, session in enumerate(self.match.sessions):
            self.query_one(f"#lane-{i}", Lane).show(session)
            for player in session.players:
                self.show_seat(i, player)
        mode = "replay" if self.replay else self.setup.mode
        title = f" msgrpo   {self.match.sessions[0].scenario.id} · seed {self.match.sessions[0].seed} · {mode}"
        note = Content.styled(f"   {self.note}", "$text-muted") if self.note else Content("")
        self.query_one("#title", Static).update(Content.styled(title, "bold") + note)
        result = verdict(self.match) if self.match.live else ""
        banner = self.query_one("#verdict", Static)
        banner.display = bool(result)
        banner.update(result)
        self.show_time()
        self.refresh_bindings()

    @while_standing
    def show_seat(self, index: int, player: str) -> None:
        session = self.match.sessions[index]
        returns = self.host.sitting.of(session, player)
        decision = session.answers.get(player) if session.live and not self.match.secret else None
        prompt = self.prompt_of(session, player)
        self.panel(index, player).show(session, returns, decision, details=self.details, prompt=prompt)
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
        panel, session = self.panel(index, player), self.match.sessions[index]
        agent = session.agents[player]
        if not session.live:
            way = "end, or a move" if self.match.human else "end"
            past = f"this is step {session.cursor} of {session.last}; {way}: back to the present"
            panel.say(past if session.human and not self.replay else "", "note")
        elif session.over:
            panel.say(ending(session, session.frame), "end")
        elif (index, player) in self.failed:
            again = "" if self.waiting_humans() else "enter: ask again   "  # first the person moves
            panel.say(f"{self.failed[index, player]}\n{again}{self.seat_key(index, player)}: play by hand", "error")
        elif player not in session.game.to_move:
            panel.say("the other is to move", "note")
        elif isinstance(agent, HumanAgent) and player not in session.answers:
            keys = keys_of(session.game, player, agent)
            panel.say(f"{agent.name}, your move: {keys}".removeprefix("you, "), "turn")
        elif self.match.secret and player in session.answers:
            panel.say("has chosen; shown when everybody has", "note")
        elif self.asking and player not in session.answers:
            panel.say(self.waiting_text(index, player), "wait")
        elif self.stopped and player not in session.answers:
            panel.say(f"stopped waiting   n: ask again   {self.seat_key(index, player)}: play by hand", "note")
        elif self.setup.step and not self.replay and not self.playing:
            panel.say("n: play it" if player in session.answers else "n: ask", "note")
        else:
            panel.say("")

    def seat_key(self, index: int, player: str) -> str:
        """The key that takes a seat over: t the first, T the second."""
        return "t" if self.match.seats().index((index, player)) == 0 else "T"

    def waiting_text(self, index: int, player: str) -> str:
        """What is being waited for, how long already, and after a while the way out."""
        agent = self.match.sessions[index].agents[player]
        loading = isinstance(agent, LazyAgent) and not agent.loaded
        trouble = agent.trouble if isinstance(agent, LazyAgent) else ""
        waited = int(self.host.clock.now() - self._asked_at)
        lines = [f"{'loading the agent' if loading else 'thinking'} … {f'{waited} s' if waited else ''}".rstrip()]
        if trouble:
            lines.append(trouble)
        if trouble or waited >= PATIENCE_S:
            stop = "" if self.waiting_humans() else "esc: stop waiting   "  # a person who waits may take their time
            lines.append(f"{stop}{self.seat_key(index, player)}: play by hand")
        return "\n".join(lines)

    @while_standing
    def show_time(self) -> None:
        self.query_one(Timeline).show(self.match, playing=self.playing, forward=self.forward, speed=self.speed)

    # ── the game's pace ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def asking(self) -> bool:
        return any(
            w.group == "agent" and w.node is self and not w.is_finished and not w.is_cancelled for w in self.workers
        )

    def go(self) -> None:
        """Do what comes next by itself: a person is asked at once, everything else follows the clock."""
        if self.match.live and self.match.human and self.forward:
            self.ask()
        elif self.playing:
            self.later()

    def later(self) -> None:
        if self._tick is not None:
            self._tick()
        self._tick = self.host.clock.after(self, 1 / self.speed, self.tick)

    @while_standing
    def tick(self) -> None:
        self._tick = None
        if self.playing:
            self.advance()

    def advance(self) -> None:
        """One step in the direction of play: through the history first, then by asking the agents."""
        if not self.forward:
            self.action_seek(-1)
            if self.match.cursor == 0:
                self.playing, self.forward = False, True
            else:
                self.later()
        elif not self.match.live:
            self.action_seek(1)
            if self.playing:
                self.later()
        elif self.match.over:
            self.playing = False
        elif self.match.ready:
            self.commit()
        else:
            self.ask()

    def ask(self) -> None:
        if self.asking or self.match.over:
            return
        if not self.match.waiting():
            self.commit()
            return
        self._asked_at = self.host.clock.now()
        self.failed.clear()
        self.stopped = False
        self.ask_everybody()
        self.watch_wait()

    @while_standing
    def watch_wait(self) -> None:
        """Keep the seconds on the screen while somebody thinks."""
        for index, player in self.match.seats():
            self.show_status(index, player)
        if self._second is not None:
            self._second()
        self._second = self.host.clock.after(self, 1.0, self.watch_wait) if self.asking else None

    @work(exclusive=True, group="agent", exit_on_error=False)
    async def ask_everybody(self) -> None:
        """Every seat without an answer decides at the same time; one that fails does not undo the others."""
        await asyncio.gather(*(self.ask_seat(index, player) for index, player in self.match.waiting()))

    async def ask_seat(self, index: int, player: str) -> None:
        session, asked = self.match.sessions[index], get_current_worker()
        streamed = partial(self.streamed, index, player)
        try:
            decision = await session.agents[player].act(session.view(player), on_text=streamed)
        except MsgrpoError as error:
            outcome: SeatFailed | SeatAnswered = SeatFailed(index, player, error.message, error.fix)
        except Exception as error:  # any fault of an agent is a message in the app, never its end
            said = printable(f"the agent crashed: {type(error).__name__}: {error}")
            outcome = SeatFailed(index, player, said)
        else:
            outcome = SeatAnswered(index, player)
        if asked.is_cancelled:  # an agent that ends late must not speak for who has the seat by now
            return
        if isinstance(outcome, SeatAnswered):
            session.answer(player, decision)
        self.post_message(outcome)

    def streamed(self, index: int, player: str, text: str) -> None:
        self.post_message(AnswerStreamed(index, player, text))

    @on(AnswerStreamed)
    @while_standing
    def show_stream(self, message: AnswerStreamed) -> None:
        if self.match.secret:
            return
        if message.player not in self.match.sessions[message.session].answers and self.match.live and self.asking:
            session = self.match.sessions[message.session]
            prompt = self.prompt_of(session, message.player) if self.details else None
            self.panel(message.session, message.player).stream(message.text, prompt)

    @on(SeatAnswered)
    @while_standing
    def seat_answered(self, message: SeatAnswered) -> None:
        for index, player in self.match.seats():  # the last person's choice reveals the others'
            self.show_seat(index, player)

    @on(SeatFailed)
    @while_standing
    def seat_failed(self, message: SeatFailed) -> None:
        text = message.message if message.fix is None else f"{message.message}\n{message.fix}"
        self.failed[message.session, message.player] = text
        self.show_status(message.session, message.player)

    @on(Worker.StateChanged)
    @while_standing
    def round_ended(self, event: Worker.StateChanged) -> None:
        if event.worker.group != "agent" or not event.worker.is_finished:
            return
        if event.state is WorkerState.ERROR:
            self.notify(f"the round failed: {event.worker.error}", severity="error")
        if event.state is WorkerState.SUCCESS and self.match.ready:
            if self.setup.step and not self.playing and not self.match.human:
                self.show_all()
            else:
                self.commit()
        else:
            self.playing = self.playing and not self.failed
            self.show_all()

    def commit(self) -> None:
        over = [session.over for session in self.match.sessions]
        self.match.commit()
        for was, session in zip(over, self.match.sessions, strict=True):
            if session.over and not was:
                self.note = self.host.finished(session)
        if self.match.over:
            self.playing = False
        self.show_all()
        self.go()

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "retry":
            return bool(self.failed)
        if action == "cancel":
            return True
        if action == "take_over":
            return len(self.match.seats()) > int(str(parameters[0]))
        if action in ("restart", "next_seed"):
            return not self.replay
        return True

    def waiting_humans(self) -> list[tuple[int, str, HumanAgent]]:
        found = []
        for index, player in self.match.waiting():
            agent = self.match.sessions[index].agents[player]
            if isinstance(agent, HumanAgent) and agent.waiting:
                found.append((index, player, agent))
        return found

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
        for index, player, person in self.waiting_humans():
            game = self.match.sessions[index].game
            if hand in person.hands and way in game.legal(player):
                person.choose(way)
                return

    def action_choose(self, number: int) -> None:
        """The `number`-th action that is legal now, for games that are not played with arrows."""
        for index, player, person in self.waiting_humans():
            legal = self.match.sessions[index].game.legal(player)
            if number <= len(legal) and not set(legal) <= set(MOVES):
                person.choose(legal[number - 1])
                return

    @on(ActionChosen)
    def bar_clicked(self, message: ActionChosen) -> None:
        for index, player, agent in self.waiting_humans():
            legal = self.match.sessions[index].game.legal(player)
            if (index, player) == (message.session, message.player) and message.action in legal:
                agent.choose(message.action)

    def action_pause(self) -> None:
        self.playing = not self.playing

    def watch_playing(self, playing: bool) -> None:
        if playing:
            if self.match.over and self.match.live and self.forward:
                self.match.seek(0)
            self.advance()
        self.show_all()

    def watch_speed(self) -> None:
        if self._tick is not None:
            self.later()
        self.show_time()

    def watch_details(self) -> None:
        self.show_all()

    def action_step(self) -> None:
        if self.playing:
            self.playing = False
        else:
            self.forward = True
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
            self.playing = False
            self.action_jump_to(step)

    def action_reverse(self) -> None:
        self.forward = not self.forward
        if self.playing:
            self.later()
        else:
            self.playing = True

    def action_speed(self, by: int) -> None:
        nearest = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        self.speed = SPEEDS[max(0, min(nearest + by, len(SPEEDS) - 1))]

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
            self.workers.cancel_group(self, "agent")
            session.hand_back(player)
            self.notify(f"{session.name(player)} plays on.")
        else:
            if session.over and session.live:
                self.notify("The game is over. Go back to a moment ([ or a click on the timeline), then take over.")
                return
            self.workers.cancel_group(self, "agent")
            if not self.match.live:
                self.notify(f"You play on from step {self.match.cursor}; what came after it is gone.")
            self.match.rewind()
            session.take_over(player)
        self.match.seat_people()
        self.failed.pop((index, player), None)
        self.forward = True
        self.show_all()
        self.call_after_refresh(self.go)

    def action_retry(self) -> None:
        """Ask those who failed again; while a person has still to move, the round is not over."""
        if not self.asking:
            self.failed.clear()
            self.ask()

    def action_cancel(self) -> None:
        """Stop waiting for an agent; where nothing but a person, or nobody, is waited for, leave.

        In a race or a duel where both are waited for, neither: the game would be lost, or the person's turn.
        """
        people = self.waiting_humans()
        if self.asking and not people:
            self.workers.cancel_group(self, "agent")
            self.stopped, self.playing = True, False
            self.show_all()
        elif len(people) == len([seat for seat in self.match.waiting() if seat not in self.failed]):
            self.action_leave()

    def action_scroll_words(self, pages: int) -> None:
        """Scroll what the agents read and say, a page at a time."""
        for panel in self.query(AgentPanel):
            panel.scroll_words(pages)

    def action_restart(self) -> None:
        setup = replace(self.setup, speed=self.speed)
        self.host.open_game(setup, replace=True, details=self.details)

    def action_next_seed(self) -> None:
        setup = replace(self.setup, speed=self.speed, seed=self.setup.seed + 1)
        self.host.open_game(setup, replace=True, details=self.details)

    def action_export(self) -> None:
        self.host.export(self.match)

    def action_help(self) -> None:
        self.app.push_screen(Help())

    def action_leave(self) -> None:
        self.host.leave()


def keys_of(game: Game, player: str, person: HumanAgent) -> str:
    """The keys that play: those of the person's hands where all that can be done is to go somewhere, else numbers."""
    legal = game.legal(player)
    if set(legal) <= set(MOVES):
        return KEYS[person.hands]
    return "  ".join(f"{i} {action}" for i, action in enumerate(legal[:9], start=1)) + (" …" if legal[9:] else "")


def legend(session: Session) -> Content:
    """What the signs on the board mean; a snake's head and body are one entry."""
    board = session.frame.board
    shown: dict[str, str] = {}
    for glyph, meaning in board.legend.items() if board else ():
        if board and board.roles.get(glyph, "floor") not in ("floor", "ice"):
            name = re.sub(r"^(head|body) of ", "", meaning)
            shown[name] = shown.get(name, "") + look(glyph, board)[0]
    parts = [
        Content.styled(f"\u00a0{signs}\u00a0", "bold") + Content.styled(name.replace(" ", "\u00a0"), "$text-muted")
        for name, signs in shown.items()
    ]
    return Content("  ").join(parts)
