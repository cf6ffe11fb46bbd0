"""The keys of a match: pace, history, seats, what is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from textual import on, work
from textual.binding import Binding, BindingType

from msgrpo.tui import hands
from msgrpo.tui.agents import ARROWS, WASD, EmptySeat, HumanAgent
from msgrpo.tui.clock import once_drawn, soon
from msgrpo.tui.messages import ActionChosen, SeekTo
from msgrpo.tui.screens.dialogs import Ask, Choose, Confirm, Help, answer_of
from msgrpo.tui.screens.match import MatchScreen
from msgrpo.tui.status import retry_from
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.keyline import SHORT, Hint
from msgrpo.tui.widgets.panel import AgentPanel
from msgrpo.tui.widgets.timeline import PLAIN, mark

# The first key of each name that a person may change, as it is without a change, and how long names are written.
KEYS_OF = {
    "play.pause": "space",
    "play.step": "n",
    "show.details": "p",
    "show.hint": "i",
    "seat.take": "t",
    "game.restart": "r",
    "game.next": "x",
    "game.leave": "q",
}


def move_bindings() -> list[BindingType]:
    """The four ways for two hands; the names of the first hand's keys can be changed."""
    keys = {"up": ("up,k", "w"), "down": ("down,j", "s"), "left": ("left,h", "a"), "right": ("right,l", "d")}
    return [
        Binding(chosen, f"move('{way}','{hand}')", way, show=False, id=name)
        for way, both in keys.items()
        for chosen, hand, name in zip(both, (ARROWS, WASD), (f"move.{way}", None), strict=True)
    ]


class PlayScreen(MatchScreen):
    """A match with its keys."""

    _skips = 0  # starts or episodes further on that were asked for and are not shown yet
    BINDINGS: ClassVar[list[BindingType]] = [
        *move_bindings(),
        *(Binding(str(n), f"choose({n})", f"action {n}") for n in range(10)),
        Binding("space", "pause", "pause, go on", id="play.pause"),
        Binding("n,full_stop", "step", "one step", id="play.step"),
        Binding("left_square_bracket,comma", "seek(-1)", "one step back"),
        Binding("right_square_bracket", "seek(1)", "one step forward"),
        Binding("home", "jump_to(0)", "start"),
        Binding("end", "jump_to(-1)", "end"),
        Binding("g", "jump", "go to step"),
        Binding("plus,equals_sign", "speed(1)", "faster"),
        Binding("minus", "speed(-1)", "slower"),
        Binding("p", "details", "prompt", id="show.details"),
        Binding("i", "hint", "hint", id="show.hint"),
        Binding("m,colon", "type_move", "type a move"),
        Binding("pagedown", "scroll_words(1)", "scroll the words"),
        Binding("pageup", "scroll_words(-1)", "scroll the words back"),
        Binding("t", "take_over(0)", "take the seat, or hand it back", id="seat.take"),
        Binding("T", "take_over(1)", "take the second seat"),
        Binding("r", "restart", "the same again", id="game.restart"),
        Binding("x", "next_seed", "the next start", id="game.next"),
        Binding("X", "episode(-1)", "episode before"),
        Binding("tab", "event(1)", "next event", priority=True),
        Binding("shift+tab", "event(-1)", "event before", priority=True),
        Binding("enter", "retry", "ask again, or try again"),
        Binding("escape", "cancel", "stop an agent, or leave"),
        Binding("e", "export", "save"),
        Binding("question_mark", "help", "help"),
        Binding("q", "leave", "leave", id="game.leave"),
    ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "take_over":
            return len(self.match.seats()) > int(str(parameters[0]))
        if action == "restart":
            return self.replay is None
        return True

    # ── which keys do something now ──────────────────────────────────────────────────────────────────────────

    def hints(self) -> list[Hint]:
        """By who is waited for: a person who moves, an agent, nobody because the game is over or stands."""
        if (look := self.match.to_look()) and self.match.live:
            shown = [Hint("enter", f"{self.match.sessions[look[0]].name(look[1])} looks", "retry")]
        elif self.match.over and self.match.live:
            shown = self._hints_of_the_end()
        elif self.match.choosing():
            shown = self._hints_of_a_turn()
        else:
            shown = self._hints_of_watching()
        return [*shown, Hint("?", "help", "help"), self._hint("game.leave", "leave", "leave")]

    def _hint(self, name: str, words: str, action: str) -> Hint:
        """A key that can be changed, as it is now."""
        keys = self.host.keys.get(name) or KEYS_OF[name]
        return Hint(SHORT.get(first := keys.split(",")[0], first), words, action)

    def _back(self) -> str:
        """The keys that scrub: where a person plays, arrows move."""
        return "[ ]" if self.match.people() else "← →"

    def _hints_of_the_end(self) -> list[Hint]:
        shown = []
        if self.replay is None and (self.series is None or self.series.over):
            if again := retry_from(self.match, self.judging):
                shown.append(Hint("enter", f"try step {again[1] + 1} again", "retry"))
            shown.append(self._hint("game.next", "next start", "next_seed"))
            shown.append(self._hint("game.restart", "again", "restart"))
        elif self.replay is not None and self.replay.further(1) is not None:
            shown.append(self._hint("game.next", "next episode", "next_seed"))
        return [
            *shown,
            Hint(self._back(), "look back", "seek(-1)"),
            Hint("tab", "events", "event(1)"),
            Hint("e", "save", "export"),
        ]

    def _hints_of_a_turn(self) -> list[Hint]:
        seats = [(self.match.sessions[index], player) for index, player in self.match.choosing()]
        game, player = seats[0][0].game, seats[0][1]
        shown = [Hint("arrows", "move")] if hands.arrows(game, player) else []
        if numbered := hands.numbers(game, player).values():
            low, high = min(numbered), max(numbered)
            shown.append(Hint(f"{low}" if low == high else f"{low}-{high}", "choose"))
        shown += [Hint("m", "type a move", "type_move")] if hands.listed(game, player) else []
        if any(session.scenario.judge is not None for session in self.match.sessions):
            shown.append(self._hint("show.hint", "hint", "hint"))
        if self.setup.live:
            shown += [self._hint("play.pause", "stop, go on", "pause"), Hint("+ −", "speed", "speed(1)")]
        if not all(isinstance(session.own[player], (HumanAgent, EmptySeat)) for session, player in seats):
            shown.append(self._hint("seat.take", "hand back", "take_over(0)"))
        shown.append(Hint("[ ]", "look back", "seek(-1)"))
        return [*shown, Hint("e", "save", "export"), self._hint("show.details", "prompt", "details")]

    def _hints_of_watching(self) -> list[Hint]:
        shown = [Hint("enter", "ask again", "retry")] if self.asking.failed else []
        if self.asking.going and not self.asking.people():
            shown.append(Hint("esc", "stop waiting", "cancel"))
        shown.append(self._hint("play.pause", "pause" if self.pace.playing else "go on", "pause"))
        shown.append(self._hint("play.step", "step", "step"))
        shown += [Hint(self._back(), "back, on", "seek(-1)"), Hint("+ −", "speed", "speed(1)")]
        shown.append(self._hint("show.details", "prompt", "details"))
        shown.append(self._hint("seat.take", "take over", "take_over(0)"))
        if self.replay is None or self.replay.further(1) is not None:
            shown.append(self._hint("game.next", "next", "next_seed"))
        return [*shown, Hint("e", "save", "export")]

    def action_move(self, way: str, hand: str) -> None:
        """A move while a person has a seat in a game that goes on; scrubbing where nobody plays.

        Keys are never taken for scrubbing at the end of a person's game. With two people each has a hand of keys.
        """
        if not self.match.human:
            if (self.replay or not self.match.people()) and way in ("left", "right") and hand == ARROWS:
                self.action_seek(-1 if way == "left" else 1)
            return
        if not self.match.live:  # nobody moves blindly: first back to the present
            self.jump_to(-1)
            return
        if self.look_first():
            return
        if self.setup.live:
            hands.want(self.match, self.asking, self.wanted, way, hand)
            if not self.pace.playing:  # the first key starts the game
                self.action_pause()
        else:
            hands.move(self.match, self.asking, way, hand)

    def look_first(self) -> bool:
        """Whether a person has to look at their cards before they move; nobody moves blindly."""
        if look := self.match.to_look():
            self.notify(f"{self.match.sessions[look[0]].name(look[1])}: enter shows your cards.")
        return look is not None

    def action_choose(self, number: int) -> None:
        if self.look_first():
            return
        why_not = hands.choose(self.match, self.asking, number)
        if why_not:
            self.notify(why_not)

    @work(group="dialog")
    async def action_type_move(self) -> None:
        """Choose one of the legal moves by typing its beginning, or from the list."""
        people = self.asking.people()
        if people and not self.look_first():
            index, player, _ = people[0]
            game = self.match.sessions[index].game
            legal, others = game.legal(player), game.other_names(player)
            action = await answer_of(self, Choose(f"your move: one of {len(legal)}", legal, others))
            if action is not None:
                hands.pick(self.match, self.asking, index, player, action)

    @on(ActionChosen)
    def bar_clicked(self, message: ActionChosen) -> None:
        if self.look_first():
            return
        hands.pick(self.match, self.asking, message.session, message.player, message.action)

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
        last = self.match.last

        def no_step(typed: str) -> str:
            return "" if re.fullmatch("[0-9]{1,9}", typed) and int(typed) <= last else f"a step from 0 to {last}"

        step = await answer_of(self, Ask(f"go to step 0 … {last}", "step", check=no_step))
        if step is not None:
            self.pace.playing = False
            self.jump_to(int(step))

    def action_speed(self, by: int) -> None:
        self.pace.change_speed(by)
        self.show_time()

    def action_details(self) -> None:
        self.details = not self.details

    def action_take_over(self, seat: int) -> None:
        """Sit down at the moment that is shown, or hand the seat back to whoever had it."""
        index, player = self.match.seats()[seat]
        session = self.match.sessions[index]
        if self.match.human_seat(index, player):
            if isinstance(session.own[player], HumanAgent):
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
            self.rewind()
            session.take_over(player)
            self.left_record = self.replay is not None
        self.match.seat_people()
        self.asking.failed.pop((index, player), None)
        self.show_all()
        once_drawn(self, self.go)

    def rewind(self) -> None:
        """Make the moment that is shown the present; what was said of the game's end is no longer true."""
        self.notes = ()
        self.set_reactive(MatchScreen.hint, False)
        self.match.rewind()

    def action_retry(self) -> None:
        """Ask those who failed again; after the end, sit down where the worst mistake was made. Where cards are
        covered, show theirs to the person whose move it is.

        While a person has still to move, the round is not over.
        """
        if look := self.match.to_look():
            self.match.sessions[look[0]].looks = look[1]
            self.jump_to(-1)
            return
        again = retry_from(self.match, self.judging) if self.match.live and self.series is None else None
        if again is not None:
            self.jump_to(again[1])
            if self.match.human_seat(*again[0]):
                self.rewind()
                self.show_all()
                once_drawn(self, self.go)
            else:
                self.action_take_over(0)
        elif self.asking.failed and not self.asking.going:
            self.asking.failed.clear()
            self.ask()

    def action_cancel(self) -> None:
        """Stop an agent that is waited for, or plays by itself; where nothing but a person, or nobody, is waited for,
        leave: after a question, if a person's game has begun.

        In a race or a duel where both are waited for, neither: the game would be lost, or the person's turn.
        """
        only_people = self.asking.only_people()
        by_itself = self.pace.playing and self.replay is None and not only_people
        if (self.asking.going or by_itself) and not self.asking.people():
            if self.asking.going:
                self.asking.stop()
            self.pace.playing = False
            self.show_all()
        elif only_people or not self.asking.going:
            if any(session.human_played and not session.over for session in self.match.sessions):
                self.leave_after_asking()
            else:
                self.action_leave()

    @work(group="dialog")
    async def leave_after_asking(self) -> None:
        if await answer_of(self, Confirm("Leave this game?", "leave, and keep it as unfinished", "play on")):
            self.action_leave()

    def action_scroll_words(self, pages: int) -> None:
        """Scroll what the agents read and say, and a game that is a text, a page at a time."""
        for words in (*self.query(AgentPanel), *self.query(BoardView)):
            words.scroll_words(pages)

    def action_restart(self) -> None:
        if self.replay is not None or self.fresh:  # a record's agents are not asked; a key held down is one restart
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
        self._another()

    def _another(self) -> None:
        """Show what was asked for last, once the keys that have come are handled: a held one builds few screens."""
        self._skips += 1
        if self._skips == 1:
            soon(self, self._open_another)

    def _open_another(self) -> None:
        skips, self._skips = self._skips, 0
        if self.replay is not None:
            self.host.replay(self.replay, replace=True)
            return
        setup = replace(self.setup, speed=self.pace.speed, seed=self.setup.seed + skips)
        self.host.open_game(setup, replace=True, details=self.details)

    def action_episode(self, by: int) -> None:
        """The next or previous episode of a record."""
        if self.replay is not None and self.replay.move(by):
            self._another()
        elif self.replay is not None:
            self.notify(f"This is the {'last' if by > 0 else 'first'} episode of the list.")

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
        self.host.export(self.match)

    def action_help(self) -> None:
        self.app.push_screen(Help(self.match.sessions[0].scenario.rules))

    def action_leave(self) -> None:
        self.host.leave()
