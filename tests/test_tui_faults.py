"""Agents that fail, hang, crash, or say what no terminal should get: shown, and the game goes on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from textual.events import Key

from msgrpo.agent import Completion
from msgrpo.errors import EndpointError, MissingExtraError
from msgrpo.games import get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui.agents import LazyAgent, in_daemon_thread
from msgrpo.tui.app import PlayApp
from msgrpo.tui.records import Records
from msgrpo.tui.screens.dialogs import Choose, Dialog
from msgrpo.tui.screens.play import PlayScreen
from msgrpo.tui.screens.records import RecordsScreen
from msgrpo.tui.screens.start import StartScreen
from msgrpo.tui.session import Session, Setup
from msgrpo.tui.widgets.options import Options
from tests.command_line import PROGRAM, ended
from tests.tui_helpers import (
    ManualClock,
    answer,
    play_screen,
    press,
    resolver,
    scripted,
    settle,
    text_of,
    ticks,
    until,
)


async def test_a_failing_endpoint_is_shown_and_asked_again(app_of, clock: ManualClock) -> None:
    fault = EndpointError("connection refused at http://127.0.0.1:1/v1", kind="connection", fix="is it running?")
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", fault, answer("up")))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1)
        status = text_of(app, ".status")
        assert "connection refused" in status
        assert "is it running?" in status
        assert "enter: ask again" in status
        assert not play_screen(app).pace.playing
        assert play_screen(app).match.last == 0
        await press(pilot, "enter")
        assert play_screen(app).match.sessions[0].answers or play_screen(app).match.last == 1


async def test_a_crash_is_a_message_and_the_game_goes_on_by_hand(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", ZeroDivisionError("division by zero")))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1)
        assert "the agent crashed: ZeroDivisionError" in text_of(app, ".status")
        await press(pilot, "t", "up")
        assert play_screen(app).match.last == 1


async def test_a_hanging_agent_is_shown_and_cancelled(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", answer("up"), gate=asyncio.Event()))
    async with app.run_test() as pilot:
        await until(lambda: clock.calls)
        clock.tick(0.25)
        await until(lambda: "thinking" in text_of(app, ".status") and clock.calls)
        clock.tick(1.0)
        clock.tick(1.0)
        await until(lambda: "2 s" in text_of(app, ".status"))
        assert play_screen(app).asking.going
        await press(pilot, "escape")
        assert not play_screen(app).asking.going
        await press(pilot, "t", "up")
        assert play_screen(app).match.last == 1


async def test_one_failing_seat_does_not_undo_the_other(app_of) -> None:
    fault = EndpointError("gone", kind="connection")
    agent = scripted("s", fault, answer("up"))
    app = app_of(Setup("snake-duel", "human", "s", seed=2), s=agent)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "up")
        session = play_screen(app).match.sessions[0]
        assert list(session.answers) == ["snake1"]
        assert session.last == 0
        await press(pilot, "enter")
        assert session.last == 1


async def test_rubbish_is_an_invalid_answer_never_a_move(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("frozen-lake-4x4", "s"), s=scripted("s", "\x00[/] [bold]<action>fly</action>"))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 2)
        session = play_screen(app).match.sessions[0]
        assert session.frame.tallies["player"].invalid == 2
        assert session.frame.board == session.frames[0].board
        assert "⊥ no action: illegal" in text_of(app, ".text")


async def test_an_agent_that_cannot_be_made_says_how_to_get_it(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake", "s"), s=MissingExtraError("the agent 's'", "train"))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1)
        assert "[train]'" in text_of(app, ".status")


@pytest.mark.parametrize("way", ["streamed", "whole", "reasoning", "replayed", "failed", "crashed"])
async def test_no_text_from_outside_drives_the_terminal(app_of, way: str, clock: ManualClock, tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\x9b2J\x85evil\u202e" * 3
    gate = asyncio.Event()
    if way != "streamed":
        gate.set()
    model = {"failed": EndpointError(evil, kind="timeout"), "crashed": ValueError(evil)}.get(way, answer("up", evil))
    agent = scripted("s", model, gate=gate)
    if way == "reasoning":
        plain, complete = agent.model, agent.model.complete
        plain.complete = lambda *a, **k: _with_reasoning(complete, evil, *a, **k)
    app = app_of(Setup("snake", "s", seed=3, step=True), s=agent)
    if way == "replayed":
        record = tmp_path / "r.jsonl"
        command = [*PROGRAM, "eval", "random", "--scenario", "snake"]
        command += ["--episodes", "1", "--out", str(tmp_path / "eval")]
        subprocess.run(command, check=True, capture_output=True)
        line = json.loads((tmp_path / "eval" / "random" / "snake.jsonl").read_text())
        for turn in line["turns"]:
            turn |= {"answer": evil, "reasoning": evil}
        record.write_text(json.dumps(line) + "\n")
        app = PlayApp(resolver(), records=Records.read(record), clock=clock, plays=tmp_path)
    async with app.run_test(size=(100, 40)) as pilot:

        def drawn() -> str:
            return "".join(segment.text for strip in app.screen._compositor.render_strips() for segment in strip)

        await pilot.press("n")
        await until(lambda: "evil" in drawn())
        assert not set(drawn()) & set("\x1b\x07\x9b\x85\u202e")
        gate.set()
        await settle(pilot)


async def _with_reasoning(complete, text: str, *arguments, **named) -> Completion:
    return replace(await complete(*arguments, **named), reasoning=text)


async def test_asking_again_waits_for_the_person_and_then_works(app_of) -> None:
    """An agent of a race fails while the person thinks: enter must not lose the failure."""
    failing = scripted("s", EndpointError("down", kind="server_error"), answer("up"))
    app = app_of(Setup("snake", "human", "s", seed=3), s=failing)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: "down" in text_of(app, "#panel-1-snake1 .status"))
        await pilot.press("enter")
        await pilot.press("up")
        await until(lambda: play_screen(app).match.sessions[0].answers)
        await until(lambda: "enter: ask again" in text_of(app, "#panel-1-snake1 .status"))
        await pilot.press("enter")
        await settle(pilot)
        assert play_screen(app).match.last == 1


async def test_what_no_future_holds_is_raised_all_the_same() -> None:
    """A StopIteration was refused by the future, and the seat was said to be thinking for ever."""

    def stopped() -> None:
        raise StopIteration("no more moves")

    with pytest.raises(RuntimeError, match="no more moves"):
        await asyncio.wait_for(in_daemon_thread(stopped), 60)


async def test_searches_that_nobody_waits_for_do_not_pile_up() -> None:
    """Who left a game twenty times left twenty searches, which took the processor from the app."""
    go_on, begun = threading.Event(), 0

    def search(game: object, player: str) -> list[str]:
        nonlocal begun
        begun += 1
        go_on.wait(60)
        return ["up"]

    scenario = replace(get_scenario("snake-solo"), reference=search)
    agent = LazyAgent("optimal", lambda spec: OptimalAgent())
    session = Session(scenario, {scenario.players[0]: agent}, 0)
    view = session.view(scenario.players[0])
    for wanted in range(1, 21):
        asked = asyncio.create_task(agent.act(view))
        deadline = asyncio.get_running_loop().time() + (60 if wanted < 3 else 0.05)
        while begun < wanted and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        asked.cancel()
    assert begun == 2
    last = asyncio.create_task(agent.act(view))
    go_on.set()
    assert (await asyncio.wait_for(last, 60)).action == "up"
    assert begun == 3


LEAVES = """
import asyncio, atexit, sys, threading
from msgrpo import cli
from msgrpo.errors import UsageError
from msgrpo.tui.agents import in_daemon_thread
atexit.register(print, "Python ends by itself")
async def give_up():
    await asyncio.wait_for(in_daemon_thread(threading.Event().wait), 0.01)
def command():
    if "search" in sys.argv:
        try:
            asyncio.run(give_up())
        except TimeoutError:
            pass
    print("the app is left")
    if "error" in sys.argv:
        raise UsageError("the other seat failed")
    sys.exit(int(sys.argv[1]))
cli.make_app = lambda: command
cli.main()
"""


@pytest.mark.parametrize(
    ("how", "own"),
    [(["3"], True), (["3", "search"], False), (["0", "search"], False), (["2", "search", "error"], False)],
)
def test_a_search_that_goes_on_does_not_see_the_end_of_python(how: list[str], own: bool) -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES, *how], capture_output=True, text=True)
    assert ended.returncode == int(how[0])
    assert ended.stdout == "the app is left\n" + "Python ends by itself\n" * own


@pytest.mark.slow
def test_ctrl_c_during_a_search_is_no_crash() -> None:
    """OpenSpiel's search came back to a Python that was ending: a segmentation fault, or `terminate called`."""
    pytest.importorskip("pyspiel")
    command = [sys.executable, "-P", "-m", "msgrpo.cli", "play", "spiel:chess", "--agent", "optimal", "--plain"]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as playing:
        assert playing.stdout is not None
        for line in playing.stdout:
            if line.startswith("Black: "):  # the first search is over, and the second one begins
                break
        playing.send_signal(signal.SIGINT)
        _, errors = playing.communicate(timeout=120)
    assert playing.returncode == 130
    assert all(line.startswith("waiting for ") for line in errors.splitlines())  # as on a slow machine


async def test_a_list_of_choices_that_is_taken_away_at_once_ends_nothing(app_of) -> None:
    """It looked for its options when they were gone, which ended the app: as keys typed fast can do."""
    app = app_of(Setup("frozen-lake", "human"))
    async with app.run_test() as pilot:
        await settle(pilot)
        app.push_screen(Choose("your move", ["up", "down"]))
        app.pop_screen()
        await settle(pilot)
        assert play_screen(app).match.live


async def test_a_move_that_a_game_names_twice_is_offered_once(app_of) -> None:
    """Two options of one name ended the app, where a game's `legal` names a move twice."""
    app = app_of(Setup("frozen-lake", "human"))
    async with app.run_test() as pilot:
        await settle(pilot)
        app.push_screen(Choose("your move", ["up", "up", "down"]))
        await until(lambda: isinstance(app.screen, Choose) and app.screen.query_one(Options).option_count == 2)


@pytest.mark.parametrize("opened", ["m", "g"])
async def test_a_second_enter_in_a_dialog_closes_no_screen_below_it(opened: str, app_of) -> None:
    """Typed before the first was handled it closed the game, and a third one ended the app."""
    app = app_of(Setup("frozen-lake", "human"))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, opened)
        for _ in range(2):
            app.post_message(Key("enter", "\r"))
        for _ in range(20):
            await pilot.pause()
        assert play_screen(app).match.last == (1 if opened == "m" else 0)


async def test_a_second_enter_in_a_list_of_episodes_opens_no_second_replay() -> None:
    """Typed before the first was handled it did: one over the other, each to be left by itself."""
    lake = get_scenario("frozen-lake")
    episodes = [Session(lake, {"player": RandomAgent()}, seed).episode for seed in range(2)]
    app = PlayApp(resolver(), records=Records("two", episodes), clock=ManualClock())
    async with app.run_test() as pilot:
        await settle(pilot)
        for _ in range(2):
            app.post_message(Key("enter", "\r"))
        await until(lambda: isinstance(app.screen, PlayScreen))
        await settle(pilot)
        assert isinstance(app.screen_stack[-2], RecordsScreen)


@pytest.mark.parametrize("key", ["o", "u", "escape"])
async def test_a_dialog_whose_key_is_typed_twice_stands_once(key: str, app_of) -> None:
    """Below the first a second one stood, to be closed by itself."""
    app = app_of(Setup("frozen-lake", "human") if key == "escape" else None)
    async with app.run_test() as pilot:
        await settle(pilot)
        if key == "escape":
            await press(pilot, "up")
        below = app.screen
        for _ in range(2):
            below.run_worker(below.run_action({"o": "open_replay", "u": "endpoint"}.get(key, "cancel")))
        await until(lambda: isinstance(app.screen, Dialog))
        await settle(pilot)
        assert app.screen_stack[-2] is below


@pytest.mark.parametrize("opened", ["game", "start screen", "run"])
async def test_an_app_that_is_ended_while_a_screen_opens_ends_in_good_order(
    opened: str, app_of, tmp_path: Path
) -> None:
    """It ended with a traceback: what the screen was to show came when nothing was on it yet."""
    (tmp_path / "config.json").write_text('{"scenario": "frozen-lake", "steps": 1}')
    for turns in range(3):
        app = app_of(None)
        async with app.run_test() as pilot:
            await settle(pilot)
            before = app.screen
            if opened == "game":
                app.open_game(Setup("frozen-lake", "random"))
            elif opened == "run":
                app.open_run(tmp_path)
            else:
                app.choose()
            await until(lambda app=app, before=before: app.screen is not before)
            for _ in range(turns):
                await asyncio.sleep(0)


async def test_a_third_click_on_the_start_screen_opens_no_second_game(app_of) -> None:
    """Both went on, one over the other, and asked their agents."""
    app = app_of(None)
    async with app.run_test() as pilot:
        await settle(pilot)
        agents = app.screen.query_one("#agents", Options)
        agents.highlighted = agents.get_option_index("random")
        await pilot.click("#games", offset=(3, 1), times=3)
        await until(lambda: isinstance(app.screen, PlayScreen))
        await settle(pilot)
        assert isinstance(app.screen_stack[-2], StartScreen)
