"""The screens on which the app opens: the recorded comparison, and the choice of a game and its players."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from msgrpo.errors import RecordError
from msgrpo.games import get_scenario
from msgrpo.tui import showcase
from msgrpo.tui.app import PlayApp
from msgrpo.tui.choices import remember
from msgrpo.tui.screens.play import PlayScreen
from msgrpo.tui.screens.showcase import NEXT_S, ShowcaseScreen
from msgrpo.tui.screens.start import StartScreen
from msgrpo.tui.session import SPEED, Session
from msgrpo.tui.showcase import Showcase
from msgrpo.tui.widgets.options import Options
from tests.tui_helpers import (
    ManualClock,
    keys_of,
    play_screen,
    press,
    resolver,
    settle,
    text_of,
    ticks,
    until,
)


@asynccontextmanager
async def first_screen(tmp_path: Path) -> AsyncIterator[tuple[PlayApp, Pilot[None], ManualClock, ShowcaseScreen]]:
    """The app as it opens on the recorded comparison."""
    clock = ManualClock()
    app = PlayApp(resolver(), None, clock=clock, runs=tmp_path, plays=tmp_path, showcase=Showcase())
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, ShowcaseScreen)
        yield app, pilot, clock, app.screen


def test_the_recorded_comparison_is_real_and_small() -> None:
    """Every episode of it is simulated again, and no start of it is one of training."""
    shown = Showcase()
    assert showcase.FILE.stat().st_size < 300_000
    assert shown.games == list(showcase.GAMES)
    for pair in shown.pairs:
        for episode, agent in ((pair.before, "nano"), (pair.after, f"nano:{pair.scenario}")):
            assert list(episode.agents.values()) == [agent]
            Session.replay(episode, "play")
        assert pair.before.start_seed == pair.after.start_seed == pair.after.chance_seed
    for game in shown.games:
        seeds = {pair.before.start_seed for pair in shown.pairs if pair.scenario == game}
        scenario = get_scenario(game)
        assert len(seeds) == 20
        assert all(next(scenario.starts("test", seed)) == seed for seed in seeds)
    assert shown.pair.better
    assert "before 7 reach the goal, after 19" in shown.sentence()


def test_a_comparison_that_was_changed_does_not_replay(tmp_path: Path) -> None:
    lines = gzip.decompress(showcase.FILE.read_bytes()).replace(b'"reward":1.0', b'"reward":2.0', 1)
    file = tmp_path / "changed.gz"
    file.write_bytes(gzip.compress(lines))
    episodes = [episode for pair in Showcase(file).pairs for episode in (pair.before, pair.after)]
    changed = next(episode for episode in episodes if any(turn.reward == 2 for turn in episode.turns))
    with pytest.raises(RecordError, match="differs"):
        Session.replay(changed, "play")


async def test_the_app_opens_on_the_comparison_and_the_board_can_be_played(tmp_path: Path) -> None:
    async with first_screen(tmp_path) as (app, pilot, clock, screen):
        assert "before and after training" in text_of(app, "#verdict")
        for _ in range(10):
            clock.tick(0.25)
            await settle(pilot)
        assert screen.match.over
        seed = screen.setup.seed
        await press(pilot, "t")
        playing = play_screen(app).match.sessions[0]
        assert (playing.scenario.id, playing.seed, playing.human) == ("frozen-lake", seed, True)
        assert playing.frame.board == screen.match.sessions[0].frames[0].board
        await press(pilot, "q", "tab")
        assert isinstance(app.screen, ShowcaseScreen)
        assert app.screen.setup.scenario == "snake"
        await press(pilot, "enter")
        assert isinstance(app.screen, StartScreen)


async def test_a_comparison_that_was_stopped_stays_so_when_help_is_closed(tmp_path: Path) -> None:
    """Closing the help set it going again."""
    async with first_screen(tmp_path) as (_, pilot, clock, screen):
        await ticks(pilot, clock, 2)
        await press(pilot, "space", "question_mark", "escape")
        await ticks(pilot, clock, 4)
        assert (screen.pace.playing, screen.match.cursor) == (False, 2)
        await press(pilot, "space", "question_mark")
        held = screen.match.cursor
        await ticks(pilot, clock, 4)
        assert screen.match.cursor == held
        await press(pilot, "escape")
        await ticks(pilot, clock, 1)
        assert screen.match.cursor == held + 1


@pytest.mark.parametrize("help_at", ["the last step", "the end"])
async def test_a_comparison_goes_on_though_help_was_open_at_its_end(help_at: str, tmp_path: Path) -> None:
    """The next start was due behind the help, and never came."""
    async with first_screen(tmp_path) as (app, pilot, clock, screen):
        while screen._next is None if help_at == "the end" else not screen.match.live:
            await ticks(pilot, clock, 1)
        await press(pilot, "question_mark")
        await ticks(pilot, clock, 2, NEXT_S)
        await press(pilot, "escape")
        assert app.screen is screen
        assert screen.match.live
        await ticks(pilot, clock, 2, NEXT_S)
        assert app.screen is not screen


async def test_a_comparison_that_is_played_again_is_not_cut_short_by_the_next_start(tmp_path: Path) -> None:
    async with first_screen(tmp_path) as (app, pilot, clock, screen):
        while screen._next is None:
            await ticks(pilot, clock, 1)
        await press(pilot, "space", "space", "space")  # stopped, from its start again, and stopped
        await ticks(pilot, clock, 1, NEXT_S)
        assert app.screen is screen
        assert not screen.match.live


async def test_a_comparison_that_goes_on_by_itself_is_not_called_stopped(tmp_path: Path) -> None:
    """Between two starts the foot said `go on` and the timeline ||, though the next start came by itself."""
    async with first_screen(tmp_path) as (app, pilot, clock, screen):
        while screen._next is None:
            await ticks(pilot, clock, 1)
        assert "space pause" in keys_of(app)
        assert text_of(app, "#timeline").startswith("▶")
        await press(pilot, "space")
        assert "space go on" in keys_of(app)
        assert text_of(app, "#timeline").startswith("||")
        await ticks(pilot, clock, 2, NEXT_S)
        assert app.screen is screen
        await press(pilot, "question_mark")
        assert "play this board yourself" in app.export_screenshot().replace("&#160;", " ")
        await press(pilot, "escape", "right")
        assert app.screen is not screen


async def test_the_start_screen_offers_games_from_outside_and_loads_no_code_unasked(tmp_path: Path) -> None:
    game = tmp_path / "my_game.py"
    game.write_text("raise SystemExit('was loaded')\n")
    memory = tmp_path / "memory.json"
    memory.write_text(f'{{"recent": "{game}:scenario", "games": "{game}:scenario"}}')
    app = PlayApp(resolver(), None, clock=ManualClock(), runs=tmp_path, plays=tmp_path / "plays", memory=memory)
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, StartScreen)
        assert screen.chosen("games") == f"{game}:scenario"
        assert "enter loads it" in text_of(app, "#rules")
        names = [choice.spec for choice in screen.games]
        assert {"babyai-goto", "spiel:chess", "spiel:connect_four"} <= set(names)
        before = memory.read_text()
        await press(pilot, "enter")
        await until(lambda: not screen._loads)
        assert "was loaded" in str([note.message for note in app._notifications])
        assert memory.read_text() == before
        await press(pilot, "home")
        assert screen.chosen("games") == "frozen-lake"
        assert "compare" in text_of(app, "#ways")


async def test_a_game_that_takes_long_to_load_is_said_to_load_and_opens_then(tmp_path: Path) -> None:
    """The app stood still meanwhile, and said nothing: up to a minute, for a file as for a server."""
    game, go_on = tmp_path / "my_game.py", tmp_path / "go-on"
    game.write_text(
        "from pathlib import Path\nfrom time import sleep\n"
        f"while not Path({str(go_on)!r}).exists():\n    sleep(0.01)\n"
        "from msgrpo.games import get_scenario\nscenario = get_scenario('frozen-lake')\n"
    )
    memory = tmp_path / "memory.json"
    remember(memory, {"recent": f"{game}:scenario", "games": f"{game}:scenario", "ways": "play"})
    app = PlayApp(resolver(), None, clock=ManualClock(), runs=tmp_path, plays=tmp_path / "plays", memory=memory)
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        screen = app.screen
        await press(pilot, "enter", "enter", "plus", "s", "up", "down")
        assert isinstance(screen, StartScreen)
        assert text_of(app, "#rules").endswith("loading it …")
        go_on.touch()
        await until(lambda: isinstance(app.screen, PlayScreen))
        await settle(pilot)
        assert app.screen_stack[-2] is screen
        assert (screen.speed > SPEED, screen.seed, screen._loads) == (True, 1, set())  # keys were heard


@pytest.mark.parametrize("fails", ["reference", "move", "board"])
async def test_a_game_of_ones_own_that_fails_on_the_start_screen_does_not_end_the_app(
    fails: str, tmp_path: Path
) -> None:
    """Once it was loaded, the start screen plays its reference player's moves: a fault of it ended the app."""
    name, clock = f"{tmp_path / 'my_game.py'}:scenario", ManualClock()
    (tmp_path / "my_game.py").write_text(
        "from dataclasses import replace\n"
        "from msgrpo.games.frozen_lake import FrozenLake\n"
        "from msgrpo.games import get_scenario\n"
        "lake = get_scenario('frozen-lake')\n"
        "class Mine(FrozenLake):\n"
        "    def board(self):\n"
        f"        return 1 / 0 if {fails == 'board'} else super().board()\n"
        "def make(start, chance):\n"
        "    game = lake.make(start, chance)\n"
        "    game.__class__ = Mine\n"
        "    return game\n"
        "scenario = replace(lake, id='mine', make=make, reference=lambda game, player: ['jump' if "
        f"{fails == 'move'} else 1 / 0])\n"
    )
    get_scenario(name)  # as if it had been played
    memory = tmp_path / "memory.json"
    remember(memory, {"recent": name, "games": name})
    app = PlayApp(resolver(), None, clock=clock, runs=tmp_path, plays=tmp_path, memory=memory)
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, StartScreen)
        assert screen.chosen("games") == name
        assert ("division by zero" in text_of(app, "#rules")) == (fails == "board")
        for _ in range(4):
            clock.tick(1.0)
            await settle(pilot)
        assert app.screen is screen


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
async def test_in_a_small_window_the_lakes_can_be_told_apart(tmp_path: Path, size: tuple[int, int]) -> None:
    """In 60 columns four games were called frozen-lake-…"""
    app = PlayApp(resolver(), None, clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        games = text_of(app, "#games")
        assert all(f"frozen-lake-{how}" in games for how in ("sl", "bi", "4x", "8x"))


async def test_in_80_columns_an_agent_is_called_what_the_command_calls_it(tmp_path: Path) -> None:
    """Two were called `untrained nano: k…` and `frozen-lake: nano…`."""
    app = PlayApp(resolver(), None, clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert {"│nano:frozen-lake", "│nano:snake"} <= set(text_of(app, "#agents").split())


async def test_the_start_screen_prints_no_command_that_does_not_work_and_keeps_help_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = tmp_path / "memory.json"
    (tmp_path / "here.py").write_text("")
    remember(memory, {"recent": "gone.py:scenario\nhere.py:scenario", "games": "gone.py:scenario"})
    app = PlayApp(resolver(), None, clock=ManualClock(), runs=tmp_path, plays=tmp_path, memory=memory)
    async with app.run_test(size=(60, 20)) as pilot:
        await settle(pilot)
        assert keys_of(app).endswith("? help q quit")
        games = app.screen.query_one("#games", Options)
        names = [option.id for option in games.options]
        assert "here.py:scenario" in names
        assert "gone.py:scenario" not in names  # it was played in another folder
        games.highlighted = names.index("?")
        await settle(pilot)
        assert text_of(app, "#command") == "enter: type its name"


@pytest.mark.parametrize(
    "memory",
    [
        {"games": "spiel:efg_game(filename=theirs.efg)", "recent": "spiel:efg_game(filename=theirs.efg)"},
        {"games": "A" * 5000 + ".py:scenario", "recent": "A" * 5000 + ".py:scenario"},
        {"recent": "~nobody-of-this-name/game.py:scenario"},
        {"recent": "?\nmine.py:scenario\n?"},
        {"recent": "A" * 2_000_000},
        {"recent": "\x1b[2J:x"},
        {"seed": "²"},
        {"seed": "9" * 5000},
    ],
)
async def test_what_the_start_screen_remembers_is_data(
    memory: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: an OpenSpiel game with parameters, which can name a file, was loaded as soon as it was remembered;
    its sibling, a record's game, was refused (`trust.names_code`). Other values ended the app in a traceback.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.efg").write_text("no game")
    file = tmp_path / "memory.json"
    file.write_text(json.dumps(memory))
    app = PlayApp(resolver(), None, clock=ManualClock(), runs=tmp_path, plays=tmp_path / "plays", memory=file)
    async with app.run_test(size=(120, 60)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, StartScreen)
        assert "OpenSpiel" not in text_of(app, "#rules")
        assert all(len(choice.spec) < 1000 and "\x1b" not in choice.spec for choice in app.screen.games)
        assert app.screen.seed == 0


async def test_choices_that_cannot_be_kept_are_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    memory = tmp_path / "state" / "choices.json"
    app = PlayApp(resolver(), None, clock=ManualClock(), runs=tmp_path, plays=tmp_path, memory=memory)
    async with app.run_test(size=(100, 30)) as pilot:
        await press(pilot, "enter")
        assert [note.message for note in app._notifications] == [
            f"the choices cannot be kept in {memory}: File exists"
        ]
