"""What a screen may ask of the app that it stands in. Screens know this and not the app, which knows the screens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from textual.screen import Screen

from msgrpo.episode import Episode
from msgrpo.tui.clock import Clock
from msgrpo.tui.learning import Learning
from msgrpo.tui.match import Match
from msgrpo.tui.recording import Recording
from msgrpo.tui.records import Records
from msgrpo.tui.series import Series
from msgrpo.tui.session import Session, Setup, Sitting
from msgrpo.tui.showcase import Showcase


class Host(Protocol):
    clock: Clock
    sitting: Sitting
    runs: Path  # where trained runs are

    @property
    def unattended(self) -> bool:
        """Nobody looks: games start by themselves, and the app ends with the last one."""
        ...

    record: bool  # what is shown is recorded
    memory: Path | None  # the file in which the start screen's choices are kept
    keys: dict[str, str]  # the keys that a person has changed, by name

    def open_game(
        self, setup: Setup, *, replace: bool = False, series: Series | None = None, details: bool | None = None
    ) -> bool:
        """Show a game of its own, in place of the present one with `replace`; False, and said why, where it cannot
        be opened."""
        ...

    def open_records(self, path: Path) -> None:
        """Show a record: its only episode, or the list of them."""
        ...

    def open_high_scores(self) -> None:
        """Show what people have reached by hand, the best first."""
        ...

    def open_showcase(self, showcase: Showcase) -> None:
        """Show the recorded comparison at its present start, in place of the screen that is there."""
        ...

    def choose_game(self) -> None:
        """Show the start screen in place of the screen that is there."""
        ...

    def open_run(self, folder: Path) -> None:
        """Watch a training run."""
        ...

    def replay(self, records: Records, *, replace: bool = False, beside: Episode | None = None) -> None:
        """Show the record's chosen episode, and another one beside it."""
        ...

    def finished(self, session: Session) -> tuple[str, ...]:
        """Count an episode that has ended, record a person's, and say what place it takes and where it is; nothing
        where it could not be written, or not yet, which the app says by itself."""
        ...

    def broken_off(self, session: Session) -> None:
        """Record a person's game that is left before its end."""
        ...

    def export(self, match: Match) -> None:
        """Save the game that is shown."""
        ...

    def export_run(self, run: Learning) -> None:
        """Save the screen that shows a run, and six scenes of its film as one picture."""
        ...

    def keep_recording(self, recording: Recording) -> None:
        """Keep what a screen showed, where the sitting is recorded."""
        ...

    def game_over(self, trouble: str = "") -> None:
        """Nothing more comes by itself: an app that nobody looks at ends."""
        ...

    def leave(self) -> None:
        """Go back to the start screen, or out of the app."""
        ...


def host(screen: Screen[Any]) -> Host:
    return cast("Host", screen.app)
