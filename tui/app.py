"""The Textual app: seats agents, remembers the sitting, switches screens. Games and agents come from outside."""

from __future__ import annotations

import asyncio
import io
import shlex
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.notifications import SeverityLevel
from textual.screen import Screen

from msgrpo.episode import Episode
from msgrpo.errors import MsgrpoError, RecordError
from msgrpo.files import replace_bytes
from msgrpo.games import SCENARIOS
from msgrpo.text import printable
from msgrpo.tui import export
from msgrpo.tui.agents import Resolve, Table
from msgrpo.tui.choices import RUNS, agent_choices, missing_extra
from msgrpo.tui.clock import Clock, RealClock
from msgrpo.tui.driver import TerminalDriver
from msgrpo.tui.learning import Learning
from msgrpo.tui.match import Match, new_match
from msgrpo.tui.recording import Recording
from msgrpo.tui.records import Records, standing_by_hand
from msgrpo.tui.scenes import shows
from msgrpo.tui.screens.dialogs import Palette
from msgrpo.tui.screens.learn import LearnScreen
from msgrpo.tui.screens.play import PlayScreen
from msgrpo.tui.screens.records import RecordsScreen
from msgrpo.tui.screens.showcase import ShowcaseScreen
from msgrpo.tui.screens.start import StartScreen
from msgrpo.tui.series import Series
from msgrpo.tui.session import SPEED, Session, Setup, Sitting
from msgrpo.tui.showcase import Showcase
from msgrpo.tui.still import still
from msgrpo.tui.theme import DAY, NIGHT, THEMES
from msgrpo.tui.widgets.keyline import SHORT

TEXTUALS = ("Keys", "Maximize", "Minimize")  # commands of Textual: ? shows the keys, and each screen has its layout
NOT_COMMANDS = ("move(", "choose(", "app.", "screen.")  # moves, which keys and clicks make, and keys of Textual


class PlayApp(App[None]):
    """`setup` starts a game at once, `records` are replayed, `run` is watched; without any the recorded comparison
    is shown, where there is one, else the start screen.

    `plays_on` is the agent, named by a person, that a seat of a record can be handed to.
    """

    TITLE = "msgrpo"
    CSS_PATH = "msgrpo.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (60, "-narrow"), (100, "-wide")]  # noqa: RUF012 (Textual has no ClassVar here)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall"), (48, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "suspend", show=False, priority=True),  # in dialogs too
        Binding("ctrl+t", "toggle_light", "light or dark", show=False, priority=True),
    ]

    def __init__(
        self,
        resolve: Resolve,
        setup: Setup | None = None,
        *,
        records: Records | None = None,
        run: Learning | None = None,
        plays_on: str | None = None,
        games: int = 1,
        options: Sequence[str] = (),
        keys: dict[str, str] | None = None,
        clock: Clock | None = None,
        runs: Path = RUNS,
        plays: Path = export.PLAYS,
        memory: Path | None = None,
        record: bool = False,
        showcase: Showcase | None = None,
    ) -> None:
        super().__init__()
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = NIGHT.name
        self.table = Table(resolve)
        self.first = setup
        self.records = records
        self.run_shown = run
        self.plays_on = plays_on
        self.games = games
        self.asked = options  # how models are asked in games that are chosen here
        self.keys = keys or {}
        self.clock: Clock = clock or RealClock()
        self.runs = runs
        self.plays = plays
        self.memory = memory
        self.sitting = Sitting()
        self.record = record
        self.showcase = showcase
        self.recording = Recording()  # of the whole sitting, where it is recorded
        self.trouble = ""  # why an app that nobody looks at ended

    def get_driver_class(self) -> type[Driver]:
        driver = super().get_driver_class()
        return TerminalDriver if driver is LinuxDriver else driver

    def on_mount(self) -> None:
        self.set_keymap(self.keys)
        if self.unattended:
            self.animation_level = "none"  # a picture may be taken in the middle of a movement
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):  # leave the terminal as it was
            loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        if self.run_shown is not None:
            self.push_screen(LearnScreen(self.run_shown))
        elif self.records is not None:
            self.show_records(self.records)
        elif self.first is not None and (notice := self._missing(self.first)) is None:
            self.open_game(self.first, series=Series(self.first, self.games) if self.games > 1 else None)
        elif self.showcase is not None:
            self.push_screen(ShowcaseScreen(self.showcase))
        else:
            self.choose(notice if self.first is not None and notice else "")

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Messages quote names, files and models: brackets in them are brackets, and nothing drives the terminal.

        What stands there is not said again: the messages of a key that is held down would cover the board.
        """
        text = printable(message)
        if text not in [shown.message for shown in self._notifications]:
            super().notify(text, title=title, severity=severity, timeout=timeout, markup=False)

    @staticmethod
    def _missing(setup: Setup) -> str | None:
        for spec in filter(None, (setup.agent, setup.against)):
            fix = missing_extra(spec)
            if fix is not None:
                return f"{spec} needs packages that are not here: {fix}   These agents can play now:"
        return None

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """The board's colours under any other theme."""
        return (NIGHT if self.current_theme.dark else DAY).variables

    async def on_unmount(self) -> None:
        await self.table.close()

    # ── screens ──────────────────────────────────────────────────────────────────────────────────────────────

    def open_showcase(self, showcase: Showcase) -> None:
        self._show(ShowcaseScreen(showcase), replace=True)

    def choose_game(self) -> None:
        self._show(self._start_screen(), replace=True)

    def choose(self, notice: str = "") -> None:
        self.push_screen(self._start_screen(notice))

    def _start_screen(self, notice: str = "") -> StartScreen:
        scenario = self.first.scenario if self.first is not None else next(iter(SCENARIOS))
        seed, speed = (self.first.seed, self.first.speed) if self.first is not None else (0, SPEED)
        choices = agent_choices(self.runs)
        start = StartScreen(choices, scenario=scenario, notice=notice, seed=seed, speed=speed)
        start.asked = self.asked
        return start

    def open_game(
        self, setup: Setup, *, replace: bool = False, series: Series | None = None, details: bool | None = None
    ) -> bool:
        try:
            match = new_match(setup, self.table.seat)
        except MsgrpoError as error:
            self.notify(str(error), severity="error")
            return False
        self._show(PlayScreen(match, setup, series=series, details=details), replace=replace)
        return True

    def _show(self, screen: Screen[None], *, replace: bool = False) -> None:
        """Messages about what was shown before go with it."""
        self.clear_notifications()
        if replace:
            self.switch_screen(screen)
        else:
            self.push_screen(screen)

    def open_run(self, folder: Path) -> None:
        try:
            run = Learning.of(folder)
        except MsgrpoError as error:
            self.notify(str(error), severity="error")
            return
        self._show(LearnScreen(run))

    @property
    def by_hand(self) -> Path:
        """The record of what people have played."""
        return self.plays / export.BY_HAND.name

    def open_records(self, path: Path) -> None:
        self._show_read(partial(Records.read, path))

    def open_high_scores(self) -> None:
        self._show_read(partial(Records.high_scores, self.by_hand))

    def _show_read(self, read: Callable[[], Records]) -> None:
        try:
            self.show_records(read())
        except MsgrpoError as error:
            self.notify(str(error), severity="error", timeout=10)

    def show_records(self, records: Records) -> None:
        """The list, and over it the chosen episode, if there is one to choose."""
        if len(records.episodes) > 1:
            self._show(RecordsScreen(records))
        if len(records.episodes) == 1 or records.chosen:
            self.replay(records)

    def replay(self, records: Records, *, replace: bool = False, beside: Episode | None = None) -> None:
        try:
            screen = self._replayed(records, [records.episode, *([beside] if beside else [])])
        except MsgrpoError as error:
            self.notify(str(error), severity="error", timeout=10)
            return
        self._show(screen, replace=replace)

    def _replayed(self, records: Records, episodes: Sequence[Episode]) -> PlayScreen:
        sessions = []
        for episode in episodes:
            session = Session.replay(episode, records.command)
            if self.plays_on is not None:
                session.offer(self.table.seat(self.plays_on))
            sessions.append(session)
        match = Match(sessions)
        match.seat_people()
        return PlayScreen(match, Setup(episodes[0].scenario, next(iter(episodes[0].agents.values()))), replay=records)

    def leave(self) -> None:
        """Back to the start screen, or out of the app where the game was asked for by name."""
        if len(self.screen_stack) > 2:
            self.clear_notifications()
            self.pop_screen()
        else:
            self.exit()

    # ── what stays ───────────────────────────────────────────────────────────────────────────────────────────

    def finished(self, session: Session) -> tuple[str, ...]:
        """An episode ended: it counts in the sitting, and a person's is recorded. Says its place and where."""
        self.sitting.add(session)
        if not session.human_played or not self._record(session):
            return ()
        return self._recorded(session.episode)

    def broken_off(self, session: Session) -> None:
        if session.human_played and not session.over:
            self._record(session)

    def _record(self, session: Session) -> bool:
        """Write a person's episode down; where that cannot be, or not yet, return False and say why, or later."""
        try:
            if export.append_unless_locked(self.by_hand, session.episode):
                return True
        except RecordError as error:
            self.notify(error.message, severity="error")
        else:
            self._record_later(session.episode.model_copy(deep=True))
        return False

    def _record_later(self, episode: Episode) -> None:
        """Wait aside for the other app that is writing, and then say so; the thread ends before the program does."""

        def written(waited: asyncio.Future[None]) -> None:
            error = waited.exception()
            if isinstance(error, RecordError):
                self.notify(error.message, severity="error")
            elif error is None:
                self.notify(", ".join(self._recorded(episode)))

        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, export.append_episode, self.by_hand, episode).add_done_callback(written)

    def _recorded(self, episode: Episode) -> tuple[str, ...]:
        """The place that a recorded episode takes, and where it is."""
        return tuple(filter(None, (standing_by_hand(self.by_hand, episode), f"recorded in {self.by_hand}")))

    def keep_recording(self, recording: Recording) -> None:
        if self.record:
            self.recording = recording.after(self.recording)

    @property
    def unattended(self) -> bool:
        return self.is_headless and self.record

    def game_over(self, trouble: str = "") -> None:
        if self.unattended:
            self.trouble = trouble
            self.exit()

    def export(self, match: Match) -> None:
        """Save the record and a picture of the screen, to the folder or to the browser."""
        if not any(session.last for session in match.sessions):
            self.notify("Nothing has been played yet, so there is nothing to save.")
            return
        files = []
        for session in match.sessions:
            line = export.episode_line(session.episode).encode()
            files.append(self._deliver(f"{export.file_stem(session)}.jsonl", line))
            if not files[-1]:
                return
        first = match.sessions[0]
        title = f"msgrpo play {shlex.quote(first.scenario.id)} --seed {first.seed}"
        picture = f"{Path(files[0]).stem}-step{match.cursor}.svg"
        files.append(self._deliver(picture, self.export_screenshot(title=title).encode()))
        self._tell_saved(files)

    def export_run(self, run: Learning) -> None:
        """Save a picture of the screen, and of a run with a film six of its scenes."""
        name = export.safe_stem(f"{run.folder.resolve().name}-after-{run.film.step if run.filming else run.step}")
        shown = f"msgrpo {shows(run.folder)}"
        pictures = {f"{name}.svg": self.export_screenshot(title=shown)}
        if len(run.film):
            try:
                pictures[f"{export.safe_stem(run.folder.resolve().name)}-film.svg"] = still(run.film)
            except MsgrpoError as error:  # its scenes are damaged; the screen is saved all the same
                self.notify(error.message, severity="error")
        moving = f"   moving: {shown} --record film.gif" if len(run.film) else ""
        self._tell_saved([self._deliver(file, picture.encode()) for file, picture in pictures.items()], moving)

    def _tell_saved(self, files: Sequence[str], further: str = "") -> None:
        """Name the files that were saved; an empty name is one that could not be, which has been said."""
        if all(files):
            where = "sent to the browser's downloads" if self.is_web else f"saved to {self.plays}/"
            self.notify(f"{where}: {' and '.join(files)}{further}")

    def _deliver(self, filename: str, data: bytes) -> str:
        """Write a new file, or offer it to the browser, and return its name: another one where a file has this name.
        Where it cannot be written, say why and return an empty name.
        """
        if self.is_web:
            self.deliver_binary(io.BytesIO(data), save_filename=filename)
            return filename
        try:
            self.plays.mkdir(parents=True, exist_ok=True)
            filename = export.unused(self.plays, filename)
            replace_bytes(self.plays / filename, data)
        except OSError as error:
            self.notify(f"{self.plays / filename} cannot be written: {error.strerror}", severity="error")
            return ""
        return filename

    def action_command_palette(self) -> None:
        if self.use_command_palette and not CommandPalette.is_open(cast("App[object]", self)):
            self.push_screen(Palette(id="--command-palette"))

    def action_help_quit(self) -> None:
        """Ctrl-C copies where text is typed, so elsewhere it does not end the app: say what does."""
        self.notify("ctrl+q ends the app.")

    def action_toggle_light(self) -> None:
        self.theme = NIGHT.name if self.theme == DAY.name else DAY.name

    def get_key_display(self, binding: Binding) -> str:
        return SHORT.get(binding.key) or super().get_key_display(binding)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        yield from (each for each in super().get_system_commands(screen) if each.title not in TEXTUALS)
        yield SystemCommand("Light or dark", "Switch between day ice and night ice", self.action_toggle_light)
        named: set[str] = set()
        for _, (node, binding, *_) in screen.active_bindings.items():
            if node is screen and binding.action not in named and not binding.action.startswith(NOT_COMMANDS):
                named.add(binding.action)
                yield SystemCommand(
                    binding.description.capitalize(),
                    f"key: {self.get_key_display(binding)}",
                    partial(screen.run_action, binding.action),
                )
