"""The first screen: what training did to a small model, on the same boards before and after."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from msgrpo.tui.agents import HUMAN
from msgrpo.tui.match import Match
from msgrpo.tui.screens.dialogs import Help
from msgrpo.tui.screens.match import MatchScreen
from msgrpo.tui.session import Session, Setup
from msgrpo.tui.showcase import Showcase
from msgrpo.tui.widgets.keyline import Hint

NEXT_S = 3.0  # after a start has ended, till the next one begins
NAMES = ("before training", "after training")


class ShowcaseScreen(MatchScreen):
    """Two recorded episodes side by side; nothing is loaded, and nobody is asked."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "choose a game", priority=True),
        Binding("t", "play", "play this board"),
        Binding("x,right,n", "move(1)", "the next start"),
        Binding("left", "move(-1)", "the start before"),
        Binding("g,tab", "other_game", "the other game", priority=True),
        Binding("space", "pause", "pause, go on"),
        Binding("question_mark", "help", "help"),
        Binding("q,escape", "app.quit", "quit"),
    ]

    def __init__(self, showcase: Showcase) -> None:
        pair = showcase.pair
        sessions = [Session.replay(episode, "play") for episode in (pair.before, pair.after)]
        for session, name in zip(sessions, NAMES, strict=True):
            session.rename(name)
        specs = [spec for session in sessions for spec in session.episode.agents.values()]
        super().__init__(Match(sessions), Setup(pair.scenario, specs[0], specs[1], pair.before.start_seed))
        self.showcase = showcase
        self._held = False  # it played when another screen came over it

    def banner(self) -> str:
        return self.showcase.sentence()

    def title_line(self) -> Content:
        return Content.styled(f" msgrpo   {self.showcase.title()}", "bold")

    def hints(self) -> list[Hint]:
        return [
            Hint("enter", "choose a game", "choose"),
            Hint("t", "play this board", "play"),
            Hint("→", "next start", "move(1)"),
            Hint("tab", "other game", "other_game"),
            Hint("space", "pause" if self.pace.playing else "go on", "pause"),
            Hint("?", "help", "help"),
            Hint("q", "quit", "app.quit"),
        ]

    def ended(self, trouble: str = "") -> None:
        self.pace.playing = True  # it goes on by itself
        super().ended(trouble)
        self._next = self.host.clock.after(self, NEXT_S, self.next_start)

    def next_start(self) -> None:
        if self.app.screen is self:
            self.action_move(1)
        else:  # somebody reads the help, or plays
            self._next = self.host.clock.after(self, NEXT_S, self.next_start)

    def on_screen_suspend(self) -> None:
        self._held, self.pace.playing = self.pace.playing, False

    def on_screen_resume(self) -> None:
        if self._held:
            self._held, self.pace.playing = False, True
            if self._next is None:
                self.pace.later()

    def action_pause(self) -> None:
        """Stop, also while the next start is waited for; going on from the end plays from the start again."""
        if self._next is not None:
            self._next()
            self._next = None
        self.pace.playing = not self.pace.playing
        if self.pace.playing:
            self.play_on()
        self.show_all()

    def action_move(self, by: int) -> None:
        self.showcase.move(by)
        self.host.open_showcase(self.showcase)

    def action_other_game(self) -> None:
        self.showcase.next_game()
        self.host.open_showcase(self.showcase)

    def action_play(self) -> None:
        """The same start and luck, by hand."""
        self.host.open_game(Setup(self.setup.scenario, HUMAN, seed=self.setup.seed))

    def action_choose(self) -> None:
        self.host.choose_game()

    def action_help(self) -> None:
        self.app.push_screen(Help(self.match.sessions[0].scenario.rules, first="The recorded games"))
