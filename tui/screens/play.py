"""The keys of a match: pace, history, seats, what is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual import on, work
from textual.binding import Binding, BindingType

from msgrpo.tui import hands
from msgrpo.tui.agents import ARROWS, HUMAN, WASD, EmptySeat
from msgrpo.tui.clock import once_drawn
from msgrpo.tui.messages import ActionChosen, SeekTo
from msgrpo.tui.screens.dialogs import Help, Jump
from msgrpo.tui.screens.match import MatchScreen
from msgrpo.tui.widgets.panel import AgentPanel
from msgrpo.tui.widgets.timeline import PLAIN, mark


def move_bindings() -> list[BindingType]:
    keys = {"up": ("up,k", "w"), "down": ("down,j", "s"), "left": ("left,h", "a"), "right": ("right,l", "d")}
    return [
        Binding(chosen, f"move('{way}','{hand}')", way, show=False, id=f"move.{way}{suffix}")
        for way, both in keys.items()
        for chosen, hand, suffix in zip(both, (ARROWS, WASD), ("", ".second"), strict=True)
    ]


class PlayScreen(MatchScreen):
    """A match with its keys."""

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
            self.jump_to(-1)
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

    def action_hint(self) -> None:
        self.hint = not self.hint

    def action_step(self) -> None:
        if self.pace.playing:
            self.pace.playing = False
            self.show_all()
        else:
            self.pace.forward = True
            self.advance()

    def action_seek(self, by: int) -> None:
        self.jump_to(max(0, self.match.cursor + by))

    def action_jump_to(self, step: int) -> None:
        self.jump_to(step)

    @on(SeekTo)
    def seek_to(self, message: SeekTo) -> None:
        self.jump_to(message.step)

    @work(group="dialog")
    async def action_jump(self) -> None:
        step = await self.app.push_screen_wait(Jump(self.match.last))
        if step is not None:
            self.pace.playing = False
            self.jump_to(step)

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
            if isinstance(session.own[player], EmptySeat):
                self.notify("Nobody is there to take it back: msgrpo play --replay FILE --agent NAME names who is.")
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
            self.left_record = self.replay is not None
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
        if self.replay is not None:  # a record's agents are not asked
            return
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
            self.jump_to(min(there) if by > 0 else max(there))

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
