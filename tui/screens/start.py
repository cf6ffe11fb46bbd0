"""Choose a game, a way to play it and an agent; what is chosen is also shown as a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static
from textual.widgets.option_list import Option

from msgrpo.episode import observation_of
from msgrpo.errors import MsgrpoError
from msgrpo.game import Board, Game, Outcome, Scenario, shown_board
from msgrpo.games import get_scenario
from msgrpo.games.outside import runs_code
from msgrpo.limits import games_code
from msgrpo.references import best_actions
from msgrpo.signals import in_daemon_thread
from msgrpo.text import printable
from msgrpo.tui.agents import HUMAN
from msgrpo.tui.choices import (
    Choice,
    game_choices,
    is_here,
    recent_games,
    remember,
    remembered,
    training_runs,
    with_recent,
)
from msgrpo.tui.clock import Cancel, once_drawn, stands
from msgrpo.tui.host import host
from msgrpo.tui.match import knowing, nano_reads
from msgrpo.tui.pace import SPEEDS, neighbour
from msgrpo.tui.screens.dialogs import Ask, Choose, Help, Pick, answer_of
from msgrpo.tui.session import LIVE_SPEED, SPEED, Setup, short_name
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.keyline import Hint, KeyLine
from msgrpo.tui.widgets.options import Options
from msgrpo.tui.widgets.text import Clipped

ENDPOINT = "endpoint"
EXAMPLE = "http://127.0.0.1:8000/v1#model"
YOURS = "?"  # the entry of the list of games at which a person names one
OWN = "Your own game: a file and its scenario, as in my_game.py:scenario. msgrpo games new writes a first one."
LISTS = ("games", "ways", "agents", "others")
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.5)
PREVIEW_S, PREVIEWED = 0.6, 8  # seconds a move, and moves, before a preview begins again
WAYS = {
    "watch": "watch",
    "step": "step through",
    "play": "play yourself",
    "live": "play in real time",
    "race": "race the agent",
    "compare": "compare two agents",
    "duel": "duel the agent",
    "duel-watch": "watch a duel",
}


def ways_of(scenario: Scenario | None, *, live: bool) -> list[str]:
    """The ways to play; `live`: in real time too, where a player who does nothing keeps a direction."""
    if scenario is not None and len(scenario.players) > 1:
        return ["duel", "duel-watch"]
    return ["compare", "play", "watch", "step", "race", *(["live"] if live else [])]


def setup_of(
    scenario: str, way: str, agent: str, against: str, *, seed: int, speed: float, temperature: float = 1.0
) -> Setup:
    """The setup of a way to play: who sits where."""
    if way == "live" and speed == SPEED:
        speed = LIVE_SPEED
    setup = Setup(scenario, agent, None, seed, speed, way == "step", way == "live", temperature)
    if way in ("play", "live", "race", "duel"):
        return replace(setup, agent=HUMAN, against=None if way in ("play", "live") else agent)
    return replace(setup, against=against) if way in ("compare", "duel-watch") else setup


def command_of(setup: Setup, asked: Sequence[str] = ()) -> str:
    """The command that plays the same; `asked` are the options that say how models are asked."""
    parts = ["msgrpo play", shlex.quote(setup.scenario), "--agent", shlex.quote(setup.agent)]
    if setup.against is not None:
        parts += ["--against", shlex.quote(setup.against)]
    if setup.seed:
        parts += ["--seed", str(setup.seed)]
    if setup.speed != (LIVE_SPEED if setup.live else SPEED):
        parts += ["--speed", f"{setup.speed:g}"]
    if setup.temperature != 1:
        parts += ["--temperature", f"{setup.temperature:g}"]
    parts += ["--step"] * setup.step + ["--live"] * setup.live
    return " ".join([*parts, *map(shlex.quote, asked)])


def no_endpoint(typed: str) -> str:
    """Why this is no endpoint; empty where it is one."""
    address, _, model = typed.removeprefix(f"{ENDPOINT}:").partition("#")
    if not address.startswith(("http://", "https://")):
        return f"an address begins with http:// or https://, as in {EXAMPLE}"
    return "" if model else f"name the model after a #, as in {EXAMPLE}"


def previewed(scenario: Scenario, game: Game, seed: int) -> tuple[Game, Board | None, str]:
    """(the game after the reference player's next move, its board, what is read there); after a few moves a new game.

    Raises MsgrpoError where somebody's game or reference player fails.
    """
    with games_code(scenario.id):
        if game.outcome is not Outcome.PLAYING or game.steps >= PREVIEWED:
            game = scenario.new(seed, seed)
        else:
            game.step({player: best_actions(scenario, game, player)[0] for player in game.to_move})
        return game, shown_board(game), observation_of(game, (game.to_move or game.players)[0])


KEYS = (
    Hint("enter", "play", "start"),
    Hint("s", "seed", "seed(1)"),
    Hint("w", "runs", "watch_run"),
    Hint("h", "scores", "high_scores"),
    Hint("o", "replay", "open_replay"),
    Hint("u", "endpoint", "endpoint"),
    Hint("+ −", "speed", "speed(1)"),
    Hint("t", "temperature", "temperature(1)"),
    Hint("?", "help", "help"),
    Hint("q", "quit", "app.quit"),
)


class StartScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "start", "play", priority=True),
        Binding("right", "app.focus_next", "next column", show=False),
        Binding("left", "app.focus_previous", "previous column", show=False),
        Binding("o", "open_replay", "replay"),
        Binding("w", "watch_run", "watch a run"),
        Binding("h", "high_scores", "high scores"),
        Binding("s", "seed(1)", "seed"),
        Binding("S", "seed(-1)", "seed before", show=False),
        Binding("plus,equals_sign", "speed(1)", "faster", show=False),
        Binding("minus", "speed(-1)", "slower", show=False),
        Binding("t", "temperature(1)", "temperature", show=False),
        Binding("T", "temperature(-1)", "lower temperature", show=False),
        Binding("u", "endpoint", "endpoint"),
        Binding("question_mark", "help", "help"),
        Binding("q", "app.quit", "quit"),
    ]

    def __init__(self, choices: list[Choice], *, scenario: str, notice: str = "", seed: int, speed: float) -> None:
        super().__init__()
        self.choices = choices
        self.scenario = scenario
        self.games: list[Choice] = []  # known once the app is, which remembers the last ones
        self.notice = notice
        self.seed = seed
        self.speed = speed
        self.temperature = 1.0
        self.asked: Sequence[str] = ()  # how models are asked: options of the command
        self._previewed: Scenario | None = None  # whose moves the small board shows
        self._preview: Game | None = None
        self._timer: Cancel | None = None
        self._instead: dict[str, tuple[str, str]] = {}  # list of agents -> (nano, who was chosen in its place)
        self._loads = set[str]()  # games from outside that are being loaded
        self._clicked: tuple[str, str] | None = None  # (list, entry) that was clicked last

    def compose(self) -> ComposeResult:
        yield Static(Content.styled(" msgrpo   language agents in text games", "bold"), id="title")
        with Horizontal(id="choices"):
            with Vertical(classes="column games"):
                recent = filter(is_here, recent_games(remembered(host(self).memory)))
                self.games = game_choices(list(recent), self.scenario)
                games = Options(
                    *map(self._option, self.games), Option("your own: file.py:scenario", YOURS), id="games"
                )
                games.border_title, games.border_subtitle = "game", "↑ ↓ choose"
                yield games
            with Vertical(classes="column ways"):
                ways = Options(id="ways")
                ways.border_title, ways.border_subtitle = "how", "← → tab next list"
                yield ways
            with Vertical(classes="column"):
                for name, title in (("agents", "agent"), ("others", "against")):
                    options = Options(*map(self._option, self.choices), id=name)
                    options.border_title = title
                    yield options
        with Horizontal(id="about"):
            yield BoardView(None)
            yield Clipped(id="rules")
        yield Static(id="command")
        yield KeyLine()

    @staticmethod
    def _option(choice: Choice) -> Option:
        title = printable(choice.title)
        return Option(
            Content(title if choice.missing is None else f"✗ {title}"), choice.spec, choice.missing is not None
        )

    def on_mount(self) -> None:
        if not stands(self):  # the app ends as this screen opens
            return
        games = self.query_one("#games", Options)
        games.highlighted = [choice.spec for choice in self.games].index(self.scenario)
        games.focus()
        playable = [i for i, choice in enumerate(self.choices) if choice.missing is None]
        self.query_one("#agents", Options).highlighted = playable[0]
        specs = [self.choices[i].spec for i in playable]
        second = specs.index("nano") if "nano" in specs else min(1, len(playable) - 1)
        self.query_one("#others", Options).highlighted = playable[second]
        self.query_one(KeyLine).show(KEYS)
        self.show_game()
        if not self.notice:
            self.choose_again()
        self._timer = host(self).clock.after(self, PREVIEW_S, self.preview)

    def chosen(self, list_id: str) -> str:
        options = self.query_one(f"#{list_id}", Options)
        option = options.get_option_at_index(options.highlighted or 0)
        return str(option.id)

    @property
    def setup(self) -> Setup:
        chosen = {name: self.chosen(name) for name in LISTS}
        return setup_of(
            *(chosen[name] for name in LISTS), seed=self.seed, speed=self.speed, temperature=self.temperature
        )

    def show_game(self) -> None:
        name, board, rules = self.chosen("games"), self.query_one(BoardView), self.query_one("#rules", Clipped)
        self._previewed = self._preview = None
        board.display = False
        try:
            scenario, game, shown, seen = None, None, None, ""
            if name != YOURS and not runs_code(name):
                scenario = get_scenario(name)
                game = scenario.new(self.seed, self.seed)
                with games_code(name):
                    shown, seen = shown_board(game), game.observe(game.to_move[0])
        except MsgrpoError as error:
            rules.show(Content(str(error)))
            return
        self._offer_ways(ways_of(scenario, live=bool(shown and shown.facing)))
        if scenario is None:
            enter = "loading it …" if name in self._loads else "enter loads it: its code runs, and the game opens"
            rules.show(Content(OWN if name == YOURS else f"{name}\n\n{enter}"))
        else:
            self._previewed, self._preview = scenario, game
            board.show(shown, seen)
            room = self.query_one("#about").size.height
            board.display = room > board.rows  # a board that is cut off says less than none
            board.styles.width = min(board.width_in(room), max(26, self.size.width * 6 // 10))
            about = Content.styled(scenario.id, "bold $primary") + Content(f"   {scenario.step_limit} steps\n")
            rules.show(about + Content(scenario.rules))
        self.show_command()

    def _offer_ways(self, wanted: list[str]) -> None:
        ways = self.query_one("#ways", Options)
        if [option.id for option in ways.options] != wanted:
            ways.set_options([Option(WAYS[way], id=way) for way in wanted])
            ways.highlighted = 0

    def on_resize(self) -> None:
        once_drawn(self, self.show_game)  # the room of the board is known then

    def show_command(self) -> None:
        way = self.chosen("ways")
        agents = self.query_one("#agents")
        agents.display = way not in ("play", "live")
        self.query_one("#others").display = way in ("compare", "duel-watch")
        text = Content.styled(" $ ", "$text-accent") + Content.styled(command_of(self.setup, self.asked), "bold")
        if self.chosen("games") == YOURS:
            text = Content.styled(" enter: type its name", "bold")
        missing = list(dict.fromkeys(choice.missing for choice in [*self.choices, *self.games] if choice.missing))
        if self.notice:
            text = Content.styled(f" {self.notice}\n", "$text-warning") + text
        elif missing:
            text = Content.styled(f" ✗ play after: {missing[0]}\n", "$text-warning") + text
        self.query_one("#command", Static).update(text)

    @on(Options.OptionHighlighted)
    def highlighted(self, event: Options.OptionHighlighted) -> None:
        if event.option_list.id == "games":
            self.show_game()
            self._follow_game()
        elif self.query_one("#ways", Options).option_count:
            self.show_command()

    def _follow_game(self) -> None:
        """An adapter of nano that was trained on another game gives way to the one of this game.

        nano, which reads our games only, gives way to players that know the game, until it is one of ours again.
        """
        scenario = self._previewed
        if scenario is not None:
            for name, other in (("agents", knowing(scenario)), ("others", "random")):
                self._stand_in(name, other, ours=nano_reads(scenario))
        agents = self.query_one("#agents", Options)
        trained = f"nano:{self.chosen('games')}"
        specs = [option.id for option in agents.options if not option.disabled]
        if self.chosen("agents").startswith("nano:") and trained in specs:
            agents.highlighted = [option.id for option in agents.options].index(trained)

    def _stand_in(self, name: str, other: str, *, ours: bool) -> None:
        """In a list of agents, choose another for nano where the game is not ours, and nano again where it is."""
        options = self.query_one(f"#{name}", Options)
        chosen, (before, stands) = self.chosen(name), self._instead.get(name, ("", ""))
        if not ours and chosen.partition(":")[0] == "nano":
            self._instead[name] = chosen, other
            wanted = other
        elif chosen == stands:
            wanted = before if ours else other
            self._instead[name] = before, wanted
        else:
            return
        options.highlighted = [option.id for option in options.options].index(wanted)

    @on(Options.OptionSelected)
    def clicked(self, event: Options.OptionSelected) -> None:
        """A click selects; a second one on the same entry starts. (Enter is a key of the screen.)"""
        here = (str(event.option_list.id), str(event.option.id))
        if here == self._clicked and self.is_active:  # further clicks open no game over the one that they began
            self.action_start()
        self._clicked = here

    def action_start(self) -> None:
        name = self.chosen("games")
        if name == YOURS:
            self.action_own_game()
        elif not runs_code(name):
            self._start()
        elif name not in self._loads:
            self._loads.add(name)
            self._load_and_start(name)

    @work(group="loading")
    async def _load_and_start(self, name: str) -> None:
        """Load a game from outside, which may take a minute, and open it if it is chosen still."""
        self.show_game()
        try:
            await in_daemon_thread(lambda: get_scenario(name))
        except MsgrpoError as error:
            self.notify(str(error), severity="error")
        else:
            if self.is_active and self.chosen("games") == name:
                self._start()
        self._loads.remove(name)
        if stands(self):
            self.show_game()

    def _start(self) -> None:
        chosen = {name: self.chosen(name) for name in LISTS}
        if not host(self).open_game(self.setup):
            return
        before = remembered(host(self).memory)
        chosen["recent"] = with_recent(before, chosen["games"])
        try:
            numbers = {"seed": self.seed, "speed": self.speed, "temperature": self.temperature}
            remember(host(self).memory, chosen | {name: f"{number:g}" for name, number in numbers.items()})
        except OSError as error:
            self.notify(f"the choices cannot be kept in {host(self).memory}: {error.strerror}", severity="warning")

    @work(group="dialog")
    async def action_own_game(self) -> None:
        """Type the name of a game from outside; it joins the list, and enter plays it."""
        typed = await answer_of(self, Ask("a game: file.py:scenario", "my_game.py:scenario"))
        if typed is not None:
            games = self.query_one("#games", Options)
            if typed not in [option.id for option in games.options]:
                self.games.append(Choice(typed, typed))
                games.add_option(Option(Content(printable(typed)), typed))
            games.highlighted = [option.id for option in games.options].index(typed)

    def choose_again(self) -> None:
        """What was chosen the last time, as far as it is there."""
        before = remembered(host(self).memory)
        for name in LISTS:
            options = self.query_one(f"#{name}", Options)
            for place, option in enumerate(options.options):
                if option.id == before.get(name) and not option.disabled:
                    options.highlighted = place
            if name == "games":
                self.show_game()  # its ways
        if re.fullmatch("[0-9]{1,18}", before.get("seed", "")):
            self.seed = int(before["seed"])
        self.speed = next((speed for speed in SPEEDS if f"{speed:g}" == before.get("speed")), self.speed)
        chosen = (value for value in TEMPERATURES if f"{value:g}" == before.get("temperature"))
        self.temperature = next(chosen, self.temperature)
        self.show_game()

    @work(group="dialog")
    async def action_watch_run(self) -> None:
        """Watch a training run; of several, one that is chosen, the one that wrote last being the first."""
        folders = training_runs(host(self).runs)
        if not folders:
            self.notify(f"No run below {host(self).runs}/ yet. Start one: msgrpo train frozen-lake", timeout=10)
            return
        names = [folder.name for folder in folders]
        name = names[0] if len(names) == 1 else await answer_of(self, Choose("watch a run", names))
        if name is not None:
            host(self).open_run(folders[names.index(name)])

    def action_seed(self, by: int) -> None:
        self.seed = max(0, self.seed + by)
        self.show_game()

    def action_speed(self, by: int) -> None:
        self.speed = neighbour(SPEEDS, self.speed, by)
        self.show_command()

    def action_temperature(self, by: int) -> None:
        self.temperature = neighbour(TEMPERATURES, self.temperature, by)
        self.show_command()

    def preview(self) -> None:
        """The next move of the scenario's reference player on the small board; from the start again after a few."""
        game, scenario = self._preview, self._previewed
        moving = self.query_one(BoardView).display and self.app.animation_level != "none"
        if moving and game is not None and scenario is not None and scenario.reference is not None:
            self._move(scenario, game)
        else:
            self._timer = host(self).clock.after(self, PREVIEW_S, self.preview)

    @work(group="preview")
    async def _move(self, scenario: Scenario, game: Game) -> None:
        """Where the reference player searches for longer than a move is shown, the board stands still after it."""
        clock, seed = host(self).clock, self.seed
        began = clock.now()
        try:
            moved = await in_daemon_thread(lambda: previewed(scenario, game, seed))
        except MsgrpoError:  # of somebody's game
            moved = None
        if not stands(self):
            return
        if self._preview is game:  # no other game was chosen meanwhile
            self._preview = moved[0] if moved is not None and clock.now() - began <= PREVIEW_S else None
            if moved is not None:
                self.query_one(BoardView).show(*moved[1:])
        self._timer = clock.after(self, PREVIEW_S, self.preview)

    def on_unmount(self) -> None:
        if self._timer is not None:
            self._timer()

    @work(group="dialog")
    async def action_endpoint(self) -> None:
        typed = await answer_of(self, Ask("an endpoint: URL#model", EXAMPLE, check=no_endpoint))
        if typed is None:
            return
        address = typed.removeprefix(f"{ENDPOINT}:")
        spec = f"{ENDPOINT}:{address}"
        if spec not in [choice.spec for choice in self.choices]:
            self.choices.append(Choice(spec, f"{short_name(spec)} at {address.rpartition('#')[0]}"))
            for name in ("agents", "others"):
                self.query_one(f"#{name}", Options).add_option(self._option(self.choices[-1]))
        agents = self.query_one("#agents", Options)
        agents.highlighted = agents.get_option_index(spec)

    @work(group="dialog")
    async def action_open_replay(self) -> None:
        path = await answer_of(self, Pick(Path(), "a record: a file of episodes, or a folder of such"))
        if path is not None:
            host(self).open_records(path)

    def action_high_scores(self) -> None:
        host(self).open_high_scores()

    def action_help(self) -> None:
        self.app.push_screen(Help(first="The start screen"))
