"""The app around the games, by real keys: its start screen, palette, help, themes and colours."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.color import Color, ColorSystem
from textual.theme import Theme
from textual.widgets import OptionList, Static

from msgrpo.game import Game
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.tui.app import PlayApp
from msgrpo.tui.screens.dialogs import HELP, SIGNS, Ask, Help
from msgrpo.tui.screens.start import PREVIEW_S, StartScreen, command_of
from msgrpo.tui.session import Setup
from msgrpo.tui.theme import THEMES
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.options import Options
from tests.tui_helpers import (
    NIM,
    ManualClock,
    play_screen,
    press,
    resolver,
    settle,
    text_of,
    until,
)


async def test_ctrl_c_says_in_plain_words_and_once_what_ends_the_app(app_of) -> None:
    """Held down it covered the board with the same words."""
    app = app_of(Setup("snake", "human"))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "ctrl+c", "ctrl+c")
        assert [(note.title, note.message) for note in app._notifications] == [("", "ctrl+q ends the app.")]


async def test_a_message_drives_no_terminal(tmp_path: Path) -> None:
    """Those that name a run's folder did."""
    app = PlayApp(resolver(), Setup("frozen-lake", "human"), clock=ManualClock(), runs=tmp_path)
    async with app.run_test() as pilot:
        app.notify("runs/my\x1b[2J")
        await settle(pilot)
        assert [note.message for note in app._notifications] == ["runs/my\ufffd[2J"]


async def test_the_start_screen_starts_what_it_says(app_of, clock: ManualClock) -> None:
    app = app_of(None)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, StartScreen)
        await press(pilot, *["down"] * 5, "right", *["down"] * 4)
        assert "msgrpo play snake --agent human --against" in text_of(app, "#command")
        await press(pilot, "right", "end")
        assert text_of(app, "#command").endswith("--agent human --against random")
        await press(pilot, "enter")
        assert play_screen(app).setup == Setup("snake", "human", "random")
        await press(pilot, "q")
        assert isinstance(app.screen, StartScreen)


async def test_trained_runs_and_typed_endpoints_can_be_chosen(app_of, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "fl"
    run.mkdir(parents=True)
    (run / "adapter_config.json").write_text("{}")
    (run / "config.json").write_text('{"scenario": "frozen-lake"}')
    baseline = tmp_path / "runs" / "dqn-fl"
    baseline.mkdir()
    (baseline / "dqn.json").write_text('{"scenario": "frozen-lake"}')
    app = app_of(None)
    async with app.run_test(size=(160, 60)) as pilot:
        await until(lambda: "│fl (frozen-lake)" in text_of(app, "#agents"))
        assert "dqn-fl (DQN, frozen-lake)" in text_of(app, "#agents")
        await press(pilot, "u")
        assert str(app.screen.query_one(".dialog").border_subtitle) == "enter: done   esc: close"
        await press(pilot, *"foo bar", "enter")
        assert "begins with http" in text_of(app, ".problem")
        await press(pilot, *["backspace"] * 7, *"http://h:1/v1", "enter")
        assert "name the model after a #" in text_of(app, ".problem")
        await press(pilot, *"#m", "enter")
        assert "--agent 'endpoint:http://h:1/v1#m'" in text_of(app, "#command")
        named = app.screen.query_one("#agents", OptionList).get_option("endpoint:http://h:1/v1#m").prompt
        assert str(named) == "m at http://h:1/v1"  # the model first: a narrow list cuts the end off
        await press(pilot, "u", *"http://h:1/v1#m", "enter")  # it ended the app: one entry twice
        assert "--agent 'endpoint:http://h:1/v1#m'" in text_of(app, "#command")


def test_the_command_is_what_a_shell_takes_as_it_is_meant() -> None:
    setup = Setup("my game.py:scenario", "adapter:runs/my run", "endpoint:http://h:1/v1?a=b&c#m")
    given = shlex.split(command_of(setup), comments=True)
    assert given == ["msgrpo", "play", setup.scenario, "--agent", setup.agent, "--against", setup.against]


async def test_the_start_screens_command_asks_models_as_this_app_does(tmp_path: Path, clock: ManualClock) -> None:
    """It left the options out."""
    asked = ["--max-tokens", "64", "--prompt", "my file.toml"]
    app = PlayApp(resolver(), None, clock=clock, runs=tmp_path, plays=tmp_path, options=asked)
    async with app.run_test(size=(160, 60)) as pilot:
        await settle(pilot)
        assert "--max-tokens 64 --prompt 'my file.toml'" in text_of(app, "#command")


async def test_without_torch_the_start_screen_says_what_can_play(app_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msgrpo.tui.choices.find_spec", lambda name: None)
    app = app_of(Setup("snake", "nano"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, StartScreen)
        assert "[train]'" in text_of(app, "#command")
        await press(pilot, "enter")
        assert play_screen(app).setup == Setup("snake", "optimal", "random")


async def test_keys_can_be_remapped(clock: ManualClock) -> None:
    app = PlayApp(resolver(), Setup("snake", "optimal"), keys={"play.pause": "z"}, clock=clock)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "space")
        assert play_screen(app).pace.playing
        await press(pilot, "z")
        assert not play_screen(app).pace.playing


async def test_help_palette_theme_resize_and_quit(app_of) -> None:
    app = app_of(Setup("snake", "human"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "question_mark")
        shown = [static.size.height for static in app.screen.query(".help Static")][1:]
        assert sum(shown) == len((HELP + SIGNS).splitlines())  # no line is broken in two
        await pilot.resize_terminal(60, 20)
        await settle(pilot)
        signs = app.screen.query(".help Static").last(Static)
        lines = [strip.text for strip in signs.render_lines(signs.size.region)]
        assert "how likely the agent was" in lines[0]
        assert len(lines) > 5
        assert all(line[:2] == "  " and line[11:13].isspace() for line in lines[1:])  # words stand beside their keys
        await press(pilot, "escape")
        commands = {command.title: command.help for command in app.get_system_commands(app.screen)}
        assert {"Take the seat, or hand it back", "Hint", "Save", "Go to step", "Light or dark"} <= set(commands)
        assert (commands["Save"], commands["The same again"]) == ("key: e", "key: r")
        assert (commands["Ask again, or try again"], commands["Slower"]) == ("key: enter", "key: −")  # as at the foot
        assert not {"Up", "Action 1"} & set(commands)
        assert not {"Keys", "Maximize"} & set(commands)  # esc did not close these keys, and they were not all true
        await press(pilot, "ctrl+p", *"go to step")
        await until(lambda: app.screen.query_one("CommandList").option_count == 1)
        await press(pilot, "enter")
        await until(lambda: isinstance(app.screen, Ask))
        await press(pilot, "escape")
        app.action_toggle_light()
        await pilot.resize_terminal(200, 60)
        await settle(pilot)
        assert app.screen.query_one(BoardView).scale == 5
        assert app.screen.query_one(BoardView).cut_off == ""
        await pilot.resize_terminal(30, 10)
        await settle(pilot)
        board = app.screen.query_one(BoardView)
        shown = [board.render_line(y).text for y in range(board.size.height)]
        rows = sum(line.strip()[:1].isdigit() for line in shown[:-1])
        assert f"{board.rows - rows} rows" in shown[-1]
        assert "hidden" in shown[-1]
        await press(pilot, "up")
        assert play_screen(app).match.last == 1
        await press(pilot, "ctrl+q")
    assert app.return_code == 0


@pytest.mark.parametrize("dialog", ["question_mark", "g", "ctrl+p"])
async def test_the_keys_of_every_screen_are_those_of_a_dialog_too(
    app_of, dialog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ctrl+z and ctrl+t did nothing while a dialog was open."""
    suspended = []
    monkeypatch.setattr(PlayApp, "action_suspend_process", lambda app: suspended.append(app))
    app = app_of(Setup("snake", "human"))
    async with app.run_test() as pilot:
        await settle(pilot)
        before, screen = app.theme, app.screen
        await pilot.press(dialog)
        await until(lambda: app.screen is not screen)
        await pilot.press("ctrl+z", "ctrl+t")
        await until(lambda: app.theme != before)
        assert suspended == [app]


async def test_the_palette_of_the_start_screen_has_its_commands(app_of) -> None:
    app = app_of(None)
    async with app.run_test() as pilot:
        await settle(pilot)
        commands = {command.title: command.help for command in app.get_system_commands(app.screen)}
        assert {"Play", "Watch a run", "High scores", "Seed", "Endpoint"} <= set(commands)
        assert (commands["Watch a run"], commands["Seed before"]) == ("key: w", "key: S")


async def test_no_color_keeps_every_sign_apart(app_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_of(Setup("snake-poison-apple-and-banana", "human", seed=3))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        board = text_of(app, "BoardView")
        assert all(sign in board for sign in ("●1", "●2", "A-", "B+"))


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
@pytest.mark.parametrize("system", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT, ColorSystem.STANDARD])
@pytest.mark.parametrize(
    "roles",
    [
        ("snake-1", "snake-2", "snake-body-1", "snake-body-2", "good", "bad", "board-a"),
        ("snake-1", "snake-2", "snake-body-1", "snake-body-2", "good", "bad", "board-b"),
        ("snake-1", "hole", "goal", "ice-a"),
        ("snake-1", "hole", "goal", "ice-b"),
        ("success", "lost", "hole", "goal", "ice-a"),
        ("success", "lost", "hole", "goal", "ice-b"),
        ("success", "lost", "good", "snake-2", "snake-body-2", "board-a"),
        ("success", "lost", "good", "snake-2", "snake-body-2", "board-b"),
    ],
)
def test_what_stands_on_a_board_has_a_colour_of_its_own(
    theme: Theme, system: ColorSystem, roles: tuple[str, ...]
) -> None:
    shown = {Color.parse(theme.variables.get(role) or getattr(theme, role)).downgrade(system) for role in roles}
    assert len({(colour.number, colour.triplet) for colour in shown}) == len(roles)


async def test_one_click_selects_and_the_second_starts(app_of) -> None:
    app = app_of(None)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await pilot.click("#games", offset=(3, 3))
        await pilot.click("#ways", offset=(3, 4))
        await settle(pilot)
        assert isinstance(app.screen, StartScreen)
        assert app.screen.chosen("games") == "frozen-lake-big-slippery"
        assert app.screen.chosen("ways") == "step"
        await pilot.click("#ways", offset=(3, 4))
        await settle(pilot)
        assert play_screen(app).setup.step


async def test_the_rules_on_the_start_screen_say_that_they_go_on(app_of) -> None:
    app = app_of(None)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, *["down"] * 5)
        await until(lambda: text_of(app, "#rules").endswith("…"))
        await pilot.resize_terminal(160, 60)
        await until(lambda: text_of(app, "#rules").endswith("direction."))


async def test_the_start_screen_lists_a_game_from_outside_that_was_named(app_of, clock: ManualClock) -> None:
    app = app_of(Setup(NIM, "random", "random"))
    async with app.run_test(size=(90, 26)) as pilot:
        await settle(pilot)
        app.choose()
        await settle(pilot)
        assert isinstance(app.screen, StartScreen)
        assert app.screen.chosen("games") == NIM
        assert app.screen.setup.scenario == NIM
        assert "Nim. Stones lie on a heap" in text_of(app, "#rules")


async def test_the_start_screen_names_players_that_know_a_game_which_is_none_of_ours(app_of) -> None:
    """In chess it was nano, which has never seen a chess board: its first answer lost the game."""
    pytest.importorskip("pyspiel")
    pytest.importorskip("torch")
    app = app_of(None)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, StartScreen)
        games, agents = screen.query_one("#games", Options), screen.query_one("#agents", Options)
        before = screen.chosen("agents"), screen.chosen("others")

        async def named(game: str) -> tuple[str, str]:
            games.highlighted = [option.id for option in games.options].index(game)
            await settle(pilot)
            return screen.chosen("agents"), screen.chosen("others")

        assert before == ("nano:frozen-lake", "nano")
        assert await named("spiel:tic_tac_toe") == ("optimal", "random")
        assert await named("spiel:2048") == ("random", "random")  # it has no reference player
        assert await named("frozen-lake") == before
        assert await named("spiel:tic_tac_toe") == ("optimal", "random")
        agents.highlighted = [option.id for option in agents.options].index("nano")
        await settle(pilot)
        assert screen.setup.against == "nano"  # a person may want it


async def test_the_preview_moves_by_a_reference_player_that_gives_a_set(
    app_of, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = get_scenario("frozen-lake")
    monkeypatch.setitem(SCENARIOS, lake.id, replace(lake, reference=lambda game, player: set(game.actions)))
    app = app_of(Setup(lake.id, "random"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        app.choose()
        await settle(pilot)
        clock.tick(PREVIEW_S)
        await until(lambda: app.screen._preview is not None and app.screen._preview.steps == 1)


@pytest.fixture
def slow_lake(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Frozen Lake with a reference player that searches until the event comes."""
    lake, found = get_scenario("frozen-lake"), threading.Event()

    def search(game: Game, player: str) -> list[str]:
        if not found.wait(10):
            found.set()  # nobody waited elsewhere
        return ["down"]

    monkeypatch.setitem(SCENARIOS, lake.id, replace(lake, reference=search, judge=None))
    yield found
    found.set()


async def test_a_reference_player_that_searches_long_does_not_stop_the_app(
    app_of, clock: ManualClock, slow_lake: threading.Event
) -> None:
    """In chess no key did anything for as long as it searched, and what a person had just played was not shown."""
    app = app_of(Setup("frozen-lake", "optimal", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        clock.tick(0.25)
        await until(lambda: not play_screen(app).asking.loading(0, "player"))
        await pilot.press("question_mark")
        await until(lambda: isinstance(app.screen, Help))
        assert not slow_lake.is_set()
        await pilot.press("escape")
        slow_lake.set()
        await settle(pilot)
        assert play_screen(app).match.sessions[0].last == 1


async def test_a_preview_whose_reference_player_searches_long_lets_another_game_be_chosen(
    app_of, clock: ManualClock, slow_lake: threading.Event
) -> None:
    """At chess the start screen stood still for seconds before each move of its small board."""
    app = app_of(Setup("frozen-lake", "random"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        app.choose()
        await settle(pilot)
        clock.tick(PREVIEW_S)
        await press(pilot, "down")
        assert app.screen.chosen("games") == "frozen-lake-slippery"
        assert not slow_lake.is_set()


async def test_a_preview_stands_still_after_a_move_that_was_searched_for_long(
    app_of, clock: ManualClock, slow_lake: threading.Event
) -> None:
    """At chess the start screen kept a processor busy for as long as it was open."""
    app = app_of(Setup("frozen-lake", "random"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        app.choose()
        await settle(pilot)
        before = app.screen._timer
        clock.tick(PREVIEW_S)
        await settle(pilot)
        clock.time += 2 * PREVIEW_S
        slow_lake.set()
        await until(lambda: app.screen._timer is not before)
        assert app.screen._preview is None


@pytest.mark.parametrize("columns", [60, 80])
async def test_a_narrow_start_screen_tells_agents_apart_and_says_how_to_move(app_of, columns: int) -> None:
    app = app_of(None)
    async with app.run_test(size=(columns, 24)) as pilot:
        await settle(pilot)
        lists = [app.screen.query_one(f"#{name}") for name in ("games", "ways", "agents")]
        *_, agents = ([strip.text for strip in each.render_lines(each.size.region)] for each in lists)
        assert len({line.strip() for line in agents[:3]}) == 3
        frame = [str(each.border_subtitle) for each in lists[:2]]
        assert frame == ["↑ ↓ choose", "← → tab next list"]
        assert all(len(said) + 4 <= each.outer_size.width for said, each in zip(frame, lists, strict=False))
        assert ("u endpoint" in text_of(app, "#keys")) == (columns == 80)
