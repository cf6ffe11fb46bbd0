"""The app by its real keys, with scripted agents and a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.color import Color, ColorSystem
from textual.content import Content
from textual.theme import Theme
from textual.widgets import Static

from msgrpo.agent import Agent, Completion
from msgrpo.episode import read_episodes
from msgrpo.errors import EndpointError, MissingExtraError
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui.app import PlayApp
from msgrpo.tui.records import Records
from msgrpo.tui.screens.dialogs import Ask
from msgrpo.tui.screens.start import PREVIEW_S, StartScreen, command_of
from msgrpo.tui.session import Session, Setup
from msgrpo.tui.theme import THEMES
from msgrpo.tui.widgets.bars import ActionBars
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.moves import MoveList
from msgrpo.tui.widgets.panel import AgentPanel
from msgrpo.tui.widgets.text import clipped
from msgrpo.tui.widgets.timeline import Timeline
from tests.tui_helpers import ManualClock, answer, drained, play_screen, press, scripted, settle, ticks, until


def resolver(**agents: Agent):
    known = {"random": RandomAgent(), "optimal": OptimalAgent(), **agents}

    def resolve(spec: str) -> Agent:
        found = known[spec]
        if isinstance(found, Exception):
            raise found
        return found

    return resolve


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def app_of(clock: ManualClock, tmp_path: Path):
    def make(setup: Setup | None, **agents: Agent) -> PlayApp:
        return PlayApp(resolver(**agents), setup, clock=clock, runs=tmp_path / "runs", plays=tmp_path / "plays")

    return make


def text_of(app: PlayApp, selector: str) -> str:
    """What the widget that a selector finds shows."""
    widget = app.screen.query_one(selector)
    return " ".join(" ".join(strip.text for strip in widget.render_lines(widget.size.region)).split())


async def test_ctrl_c_says_in_plain_words_what_ends_the_app(app_of) -> None:
    app = app_of(Setup("snake", "human"))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "ctrl+c")
        assert [(note.title, note.message) for note in app._notifications] == [("", "ctrl+q ends the app.")]


# ── watch ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_watching_goes_by_the_clock_and_pauses(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", answer("up"), answer("right")))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        session = play_screen(app).match.sessions[0]
        assert session.cursor == 0
        await ticks(pilot, clock, 2)
        assert session.cursor == 2
        await press(pilot, "space")
        await ticks(pilot, clock, 3)
        assert session.cursor == 2
        await press(pilot, "n")
        assert session.cursor == 3
        assert "the apple is near" in text_of(app, ".text")
        assert "55%" in text_of(app, "ActionBars")
        assert "tokens 960" in text_of(app, ".stats")


async def test_speed_changes_the_pace(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("frozen-lake-4x4", "random", speed=1.0))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1)
        assert play_screen(app).match.last == 0
        await ticks(pilot, clock, 3)
        assert play_screen(app).match.last == 1
        await press(pilot, "plus")
        assert play_screen(app).pace.speed == 2.0
        await ticks(pilot, clock, 2)
        assert play_screen(app).match.last == 2
        await press(pilot, "minus", "minus")
        assert play_screen(app).pace.speed == 0.5


async def test_back_and_forth_jump_and_timeline(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake-solo", "optimal", seed=1))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 6)
        screen = play_screen(app)
        await press(pilot, "space", "left", "[")
        assert screen.match.cursor == 4
        assert screen.match.last == 6
        await press(pilot, "]", "home")
        assert screen.match.cursor == 0
        await press(pilot, "end")
        assert screen.match.cursor == 6
        await press(pilot, "g")
        await press(pilot, "9", "enter")  # beyond the end: not taken
        assert text_of(app, ".problem") == "a step from 0 to 6"
        await press(pilot, "backspace", "5", "enter")
        assert screen.match.cursor == 5
        timeline = screen.query_one(Timeline)
        column = next(x for x in range(timeline.size.width) if timeline.step_at(x) in (2, 3))
        await pilot.click(Timeline, offset=(column, 0))
        await settle(pilot)
        assert screen.match.cursor == timeline.step_at(column)


async def test_restart_repeats_the_start_and_next_seed_changes_it(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake", "random", seed=4))
    async with app.run_test() as pilot:
        await settle(pilot)
        start = play_screen(app).match.sessions[0].frames[0].board
        await ticks(pilot, clock, 2)
        await press(pilot, "r")
        assert play_screen(app).match.sessions[0].frames[0].board == start
        await press(pilot, "x")
        assert play_screen(app).match.sessions[0].seed == 5
        assert play_screen(app).match.sessions[0].frames[0].board != start


async def test_the_sitting_is_counted_and_drawn(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("frozen-lake", "optimal", seed=3))
    async with app.run_test(size=(120, 40)) as pilot:
        for _ in range(2):
            await settle(pilot)
            while not play_screen(app).match.over:
                await ticks(pilot, clock, 1)
            assert "goal reached" in text_of(app, ".status")
            await press(pilot, "r")
        assert "2 played, mean +1.00" in text_of(app, ".returns")


# ── step ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_step_mode_shows_prompt_then_answer_then_reward(app_of) -> None:
    app = app_of(Setup("snake", "s", seed=3, step=True), s=scripted("s", answer("up"), "no tag here"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        session = play_screen(app).match.sessions[0]
        assert "next it reads" in text_of(app, ".text")
        await press(pilot, "n")
        assert (session.last, list(session.answers)) == (0, ["snake1"])
        shown = text_of(app, ".text")
        assert "<action>up</action>" in shown
        assert "parsed" in shown
        await press(pilot, "n")
        assert session.last == 1
        assert "up → 0" in text_of(app, ".text")
        await press(pilot, "n", "n")
        assert session.frame.tallies["snake1"].invalid == 1
        assert "⊥ no tag" in text_of(app, ".text")


async def test_an_answer_is_shown_as_it_streams(app_of) -> None:
    gate = asyncio.Event()
    app = app_of(Setup("snake", "s", step=True), s=scripted("s", answer("up", "a long thought here."), gate=gate))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("n")
        await until(lambda: "a long" in text_of(app, ".text"))
        assert "here.<action>" not in text_of(app, ".text")
        assert "next it reads" in text_of(app, ".text")
        assert play_screen(app).asking.going
        gate.set()
        await settle(pilot)
        assert "here.<action>up</action>" in text_of(app, ".text")


# ── play, race, duel, take over ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("keys", [("up", "right", "down"), ("k", "l", "j"), ("w", "d", "s")])
async def test_a_person_plays_with_arrows_hjkl_and_wasd(app_of, keys: tuple[str, ...]) -> None:
    app = app_of(Setup("frozen-lake", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        assert "your move" in text_of(app, ".status")
        await press(pilot, *keys)
        turns = play_screen(app).match.sessions[0].episode.turns
        assert [turn.action for turn in turns] == ["up", "right", "down"]


async def test_a_persons_episode_is_a_record_that_replays(app_of, tmp_path: Path) -> None:
    app = app_of(Setup("frozen-lake", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        for _ in range(8):
            await press(pilot, "left")
        assert play_screen(app).match.over
    (episode,) = read_episodes(tmp_path / "plays" / "human.jsonl")
    assert episode.agents == {"player": "human"}
    assert episode.outcome == "truncated"
    assert Session.replay(episode).last == 8


async def test_keys_that_come_too_fast_never_scrub(app_of) -> None:
    app = app_of(Setup("frozen-lake", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        await pilot.press(*["left"] * 5)
        await settle(pilot)
        assert play_screen(app).match.live
        await press(pilot, "[")
        assert not play_screen(app).match.live
        played = play_screen(app).match.last
        await press(pilot, "left")
        assert play_screen(app).match.live
        assert play_screen(app).match.last == played


async def test_a_click_on_an_action_plays_it(app_of) -> None:
    app = app_of(Setup("frozen-lake-4x4", "human"))
    async with app.run_test() as pilot:
        await settle(pilot)
        bars = app.screen.query_one(ActionBars)
        column = next(x for x in range(60) if bars.action_at(x, 0) == "down")
        await pilot.click(ActionBars, offset=(column, 0))
        await settle(pilot)
        assert play_screen(app).match.sessions[0].episode.turns[0].action == "down"


async def test_a_race_moves_in_step_and_says_who_won(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("frozen-lake", "human", "optimal", seed=3))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        mine, its = play_screen(app).match.sessions
        assert mine.frame.board == its.frame.board
        await press(pilot, "left")
        assert (mine.last, its.last) == (1, 1)
        for _ in range(7):
            await press(pilot, "left")
        assert play_screen(app).match.over
        assert "optimal wins" in text_of(app, "#verdict")
        assert its.game.success


async def test_after_the_person_is_out_the_agent_plays_on_by_the_clock(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake", "human", "optimal", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        mine, its = play_screen(app).match.sessions
        while not mine.over:
            await press(pilot, "up")
        played = its.last
        await ticks(pilot, clock, 2)
        assert its.last > played


async def test_a_duel_is_one_board_with_simultaneous_moves(app_of) -> None:
    app = app_of(Setup("snake-duel", "human", "random", seed=2))
    async with app.run_test() as pilot:
        await settle(pilot)
        assert len(app.screen.query(BoardView)) == 1
        assert len(app.screen.query(AgentPanel)) == 2
        await press(pilot, "up")
        turns = play_screen(app).match.sessions[0].episode.turns
        assert [(t.player, t.step) for t in turns] == [("snake1", 0), ("snake2", 0)]
        assert turns[0].action == "up"


async def test_two_people_share_a_keyboard(app_of) -> None:
    app = app_of(Setup("snake-duel", "human", "human", seed=2))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "left")
        session = play_screen(app).match.sessions[0]
        assert session.last == 0
        await press(pilot, "w")
        assert [turn.action for turn in session.episode.turns] == ["left", "up"]


async def test_taking_over_and_handing_back(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake-solo", "optimal", seed=1))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 3)
        await press(pilot, "t")
        session = play_screen(app).match.sessions[0]
        assert "your move" in text_of(app, ".status")
        safe = OptimalAgent()
        move = (await safe.act(session.view("snake1"))).action
        await press(pilot, str(move))
        assert session.last == 4
        await press(pilot, "t")
        await ticks(pilot, clock, 2)
        assert session.last == 6
        assert session.episode.agents == {"snake1": "optimal+human"}


async def test_taking_over_a_past_moment(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake-solo", "optimal", seed=1))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 6)
        await press(pilot, "space", "[", "[", "[", "t")
        session = play_screen(app).match.sessions[0]
        assert (session.last, session.live) == (3, True)
        assert "your move" in text_of(app, ".status")


# ── replay ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_replay_scrubs_and_can_be_taken_over(app_of, clock: ManualClock, tmp_path: Path) -> None:
    app = app_of(Setup("snake-solo", "optimal", seed=1))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 5)
        await press(pilot, "space", "e")
        record = tmp_path / "plays" / "snake-solo-optimal-seed1.jsonl"
        episodes = list(read_episodes(record))
        assert (tmp_path / "plays" / "snake-solo-optimal-seed1-step5.svg").read_text().startswith("<svg")
        assert len(list((tmp_path / "plays").iterdir())) == 2
    app = PlayApp(resolver(), records=Records("a record", episodes), clock=clock, plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        screen = play_screen(app)
        assert (screen.match.cursor, screen.match.last, screen.pace.playing) == (0, 5, False)
        await press(pilot, "right", "right")
        assert screen.match.cursor == 2
        await press(pilot, "space")
        await ticks(pilot, clock, 1)
        assert screen.match.cursor == 4
        assert "replay of episode 1 of 1" in text_of(app, "#title")
        await press(pilot, "space", "t")
        assert "your move" in text_of(app, ".status")
        assert "played on from episode 1 of 1" in text_of(app, "#title")


async def test_a_message_goes_with_the_game_that_it_was_about(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake-solo", "optimal", seed=1))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "t", "t")
        assert [each.message for each in app._notifications] == ["optimal plays on."]
        await press(pilot, "x")
        assert not list(app._notifications)


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── the start screen ─────────────────────────────────────────────────────────────────────────────────────────


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


# ── the shell around ─────────────────────────────────────────────────────────────────────────────────────────


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
        assert "how likely the agent was" in str(app.screen.query(".help Static").last(Static).render())
        await press(pilot, "escape")
        commands = {command.title: command.help for command in app.get_system_commands(app.screen)}
        assert {"Take the seat, or hand it back", "Hint", "Save", "Go to step", "Light or dark"} <= set(commands)
        assert (commands["Save"], commands["The same again"]) == ("key: e", "key: r")
        assert not {"Up", "Action 1"} & set(commands)
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


async def test_what_a_model_waits_for_is_shown(app_of, clock: ManualClock) -> None:
    agent = scripted("s", answer("up"), gate=asyncio.Event())
    agent.model.trouble = "status 503 (retry 2 of 6)"
    app = app_of(Setup("snake", "s", seed=3), s=agent)
    async with app.run_test():
        await until(lambda: clock.calls)
        clock.tick(0.25)
        await until(lambda: "thinking" in text_of(app, ".status") and clock.calls)
        clock.tick(1.0)
        await until(lambda: "thinking … 1 s status 503 (retry 2 of 6)" in text_of(app, ".status"))


# ── what only a second look found ────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("hand", ["up", "w"])
async def test_choices_of_others_are_hidden_until_all_have_chosen(app_of, hand: str) -> None:
    """In a duel the agent's choice, words and bars were on the screen before the person chose."""
    gate = asyncio.Event()
    agent = scripted("s", answer("right", "I shall go right."), gate=gate)
    app = app_of(Setup("snake-duel", "human", "s", seed=3), s=agent)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: agent.model.calls)
        await drained(app)
        assert "I shall" not in text_of(app, "#panel-0-snake2 .text")  # while it streams
        gate.set()
        screen = play_screen(app)
        await until(lambda: "snake2" in screen.match.sessions[0].answers)
        await settle(pilot)
        panel = "#panel-0-snake2"
        assert "I shall" not in text_of(app, f"{panel} .text")
        assert "▸" not in text_of(app, f"{panel} ActionBars")
        assert "%" not in text_of(app, f"{panel} ActionBars")
        assert "has chosen" in text_of(app, f"{panel} .status")
        await press(pilot, hand)
        assert screen.match.last == 1
        assert "I shall go right" in text_of(app, f"{panel} .text")


async def test_two_people_have_names_and_keys_of_their_own_and_choose_in_secret(app_of) -> None:
    app = app_of(Setup("snake-duel", "human", "human", seed=3))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = play_screen(app)
        first, second = "#panel-0-snake1", "#panel-0-snake2"
        assert "player 1, your move: arrows or hjkl" in text_of(app, f"{first} .status")
        assert "player 2, your move: wasd" in text_of(app, f"{second} .status")
        await press(pilot, "up")
        assert "▸" not in text_of(app, f"{first} ActionBars")
        assert "has chosen" in text_of(app, f"{first} .status")
        assert screen.match.last == 0
        await press(pilot, "d")
        assert screen.match.last == 1
        assert "▸" in text_of(app, f"{first} ActionBars")


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


async def test_restart_and_next_seed_keep_speed_and_prompt(app_of) -> None:
    app = app_of(Setup("snake", "random", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "plus", "p", "x")
        assert (play_screen(app).pace.speed, play_screen(app).details, play_screen(app).setup.seed) == (8.0, True, 4)
        await press(pilot, "p", "r")
        assert (play_screen(app).pace.speed, play_screen(app).details, play_screen(app).setup.seed) == (8.0, False, 4)


async def test_a_long_streamed_answer_shows_its_end_and_scrolls_by_keys(app_of, clock: ManualClock) -> None:
    gate = asyncio.Event()
    words = " ".join(f"word{i}" for i in range(2000))
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", words * 2, gate=gate))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: clock.calls)
        clock.tick(1.0)
        box = app.screen.query_one(".words")
        await until(lambda: box.scroll_y == box.max_scroll_y > 0)
        await pilot.press("pageup")
        await until(lambda: box.scroll_y < box.max_scroll_y)
        gate.set()
        await settle(pilot)
        assert box.scroll_y == 0  # the whole answer, from its beginning
        await press(pilot, "pagedown", "i")
        assert box.scroll_y > 0  # where a person has scrolled to


async def test_words_that_have_no_room_say_that_they_go_on(app_of, clock: ManualClock) -> None:
    """They ended in the middle of a sentence, as if that were all."""
    words = " ".join(f"word{i}" for i in range(100))
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", answer("up", words), answer("left", "two words")))

    def seen() -> str:
        box = app.screen.query_one(".words").region
        rows = app.screen._compositor.render_strips()[box.y : box.bottom]
        return " ".join(" ".join(row.text[box.x : box.right] for row in rows).split())

    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1)
        assert "word1 " in seen()
        assert seen().endswith("… page down: more")
        await press(pilot, *["pagedown"] * 3)
        assert "word99" in seen()
        assert "more" not in seen()
        await ticks(pilot, clock, 1)
        assert seen() == "“two words”"


def test_a_text_that_is_cut_ends_with_a_sign_that_it_goes_on() -> None:
    text = Content("Walk over the ice to the goal.\nDo not fall into a hole.")
    assert str(clipped(text, 60, 2)) == str(text)
    assert str(clipped(text, 60, 1)) == "Walk over the ice to the goal.…"
    assert str(clipped(text, 10, 2)) == "Walk over\nthe ice t…"
    assert str(clipped(Content("x" * 30), 10, 2)) == f"{'x' * 10}\n{'x' * 9}…"


async def test_the_rules_on_the_start_screen_say_that_they_go_on(app_of) -> None:
    app = app_of(None)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, *["down"] * 5)
        await until(lambda: text_of(app, "#rules").endswith("…"))
        await pilot.resize_terminal(160, 60)
        await until(lambda: text_of(app, "#rules").endswith("direction."))


async def test_a_short_streamed_answer_stands_at_the_top(app_of, clock: ManualClock) -> None:
    gate = asyncio.Event()
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", answer("up", "two words"), gate=gate))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: clock.calls)
        clock.tick(1.0)
        box, words = app.screen.query_one(".words"), app.screen.query_one(".words .text")
        await until(lambda: "tw" in text_of(app, ".text"))
        await drained(app)
        assert words.region.y == box.region.y
        gate.set()
        await settle(pilot)
        assert words.region.y == box.region.y


async def test_arrows_after_the_end_do_not_scrub_away_from_it(app_of) -> None:
    app = app_of(Setup("snake", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        screen = play_screen(app)
        while not screen.match.over:
            await press(pilot, "left")
        end = screen.match.cursor
        await press(pilot, "left", "left", "right")
        assert screen.match.cursor == end
        await press(pilot, "[")
        assert screen.match.cursor == end - 1


async def test_after_escape_the_panel_says_what_can_be_done(app_of) -> None:
    gate = asyncio.Event()
    app = app_of(Setup("snake", "s", seed=3, step=True), s=scripted("s", answer("up"), gate=gate))
    async with app.run_test() as pilot:
        await pilot.press("n")
        await until(lambda: "thinking" in text_of(app, ".status"))
        await pilot.press("escape")
        await settle(pilot)
        assert "stopped waiting n: ask again t: play by hand" in text_of(app, ".status")


async def test_escape_on_your_own_turn_leaves(app_of) -> None:
    app = app_of(Setup("snake", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        await pilot.press("escape")
        await until(lambda: app.return_code is not None)
    assert app.return_code == 0


async def test_the_way_out_is_named_while_an_agent_keeps_one_waiting(app_of, clock: ManualClock) -> None:
    gate = asyncio.Event()
    app = app_of(Setup("snake", "s", seed=3, step=True), s=scripted("s", answer("up"), gate=gate))
    async with app.run_test() as pilot:
        await pilot.press("n")
        await until(lambda: "thinking" in text_of(app, ".status"))
        for _ in range(4):
            await until(lambda: clock.calls)
            clock.tick(1.0)
        await until(lambda: "esc: stop waiting t: play by hand" in text_of(app, ".status"))
        gate.set()
        await settle(pilot)


async def test_a_person_in_the_past_of_the_game_is_told(app_of) -> None:
    app = app_of(Setup("snake", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "up", "up", "[")
        assert "this is step 1 of 2" in text_of(app, ".status")


async def test_actions_fit_into_a_narrow_terminal(app_of) -> None:
    app = app_of(Setup("snake", "human", seed=3))
    async with app.run_test(size=(50, 24)) as pilot:
        await settle(pilot)
        bars = text_of(app, "ActionBars")
        assert all(action in bars for action in ("up", "down", "left", "right"))


async def test_saving_before_the_first_step_saves_nothing(app_of, tmp_path: Path) -> None:
    app = app_of(Setup("snake", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "e")
        assert not (tmp_path / "plays").exists()


async def test_what_was_saved_before_is_kept_and_the_files_are_named(
    app_of, clock: ManualClock, tmp_path: Path
) -> None:
    """The second record and the second picture were written over the first ones."""
    app = app_of(Setup("snake-solo", "optimal", "optimal", seed=1))
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1)
        await press(pilot, "space", "e", "n", "e")
        said = [note.message for note in app._notifications]
    name = "snake-solo-optimal-seed1"
    files = [[f"{name}{end}" for end in (".jsonl", "-2.jsonl", "-step1.svg")]]  # one record for each board
    files += [[f"{name}{end}" for end in ("-3.jsonl", "-4.jsonl", "-3-step2.svg")]]
    plays = tmp_path / "plays"
    assert said == [f"saved to {plays}/: {' and '.join(saved)}" for saved in files]
    assert sorted(file.name for file in plays.iterdir()) == sorted([*files[0], *files[1]])
    records = [plays / file for saved in files for file in saved[:2]]
    assert [next(iter(read_episodes(file))).turns[-1].step for file in records] == [0, 0, 1, 1]


async def test_after_taking_over_the_seat_is_asked_though_the_agent_ends_late(app_of) -> None:
    """An agent that takes its time to be cancelled must neither block the person nor answer for them."""

    asked, never, late = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Stubborn(RandomAgent):
        async def act(self, view, *, on_text=None):
            asked.set()
            try:
                await never.wait()
            except asyncio.CancelledError:
                await late.wait()
            return await super().act(view)

    app = app_of(Setup("snake", "s", seed=3, step=True), s=Stubborn("s"))
    async with app.run_test() as pilot:
        await pilot.press("n")
        await until(asked.is_set)
        await pilot.press("t")
        screen = play_screen(app)
        await until(screen.asking.people)
        late.set()
        await settle(pilot)
        assert [player for _, player, _ in screen.asking.people()] == ["snake1"]
        assert screen.match.sessions[0].answers == {}
        await press(pilot, "up")
        assert screen.match.last == 1


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
        command = [sys.executable, "-m", "msgrpo.cli", "eval", "random", "--scenario", "snake"]
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


async def test_in_a_race_esc_does_not_leave_while_an_agent_is_waited_for(app_of, clock: ManualClock) -> None:
    gate = asyncio.Event()
    app = app_of(Setup("snake", "human", "s", seed=3), s=scripted("s", answer("up"), gate=gate))
    async with app.run_test(size=(120, 40)) as pilot:
        for _ in range(5):
            await until(lambda: clock.calls)
            clock.tick(1.0)
        await until(lambda: "T: play by hand" in text_of(app, "#panel-1-snake1 .status"))
        assert "esc" not in text_of(app, "#panel-1-snake1 .status")
        await pilot.press("escape")
        await drained(app)
        assert play_screen(app).match.sessions
        assert play_screen(app).asking.people()
        gate.set()
        await settle(pilot)


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


async def test_a_replay_of_a_persons_game_scrubs_by_arrows(app_of, tmp_path: Path, clock: ManualClock) -> None:
    app = app_of(Setup("snake-duel", "human", "human", seed=3))
    async with app.run_test() as pilot:
        await settle(pilot)
        while not play_screen(app).match.over:
            await press(pilot, "left", "a")
    episodes = list(read_episodes(tmp_path / "plays" / "human.jsonl"))
    app = PlayApp(resolver(), records=Records("a record", episodes), clock=clock, plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "right")
        assert play_screen(app).match.cursor == 1
        assert "a move" not in text_of(app, "#panel-0-snake1 .status")
        assert [play_screen(app).match.sessions[0].name(f"snake{i}") for i in (1, 2)] == ["player 1", "player 2"]


# ── games from outside ───────────────────────────────────────────────────────────────────────────────────────

NIM = f"{Path(__file__).resolve().parents[1] / 'examples' / 'nim.py'}:scenario"


async def test_a_game_without_a_board_is_played_by_numbers_and_in_turns(app_of, clock: ManualClock) -> None:
    """Nim: the text stands where the board would, only who is to move is asked, and the winner is named."""
    app = app_of(Setup(NIM, "human", "optimal", seed=1))
    async with app.run_test(size=(90, 26)) as pilot:
        await settle(pilot)
        session = play_screen(app).match.sessions[0]
        stones = session.game.stones
        assert f"Stones: {stones}." in text_of(app, "BoardView")
        assert "1 one" in text_of(app, "#panel-0-first ActionBars")
        assert "the other is to move" in text_of(app, "#panel-0-second .status")
        await press(pilot, "2")
        await ticks(pilot, clock, 12)
        assert [turn.player for turn in session.episode.turns[:2]] == ["first", "second"]
        assert session.episode.turns[0].action == "two"
        for _ in range(12):
            if session.over:
                break
            await press(pilot, "1")
            await ticks(pilot, clock, 12)
        assert session.over
        assert "won" in text_of(app, "#panel-0-first .status") or "wins" in text_of(app, "#verdict")


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
        await ticks(pilot, clock, 1, PREVIEW_S)
        assert app.screen._preview is not None
        assert app.screen._preview.steps == 1


TALK = """
from msgrpo.game import AnyText, Game, Scenario

class Talk(Game):
    actions = AnyText()

    def observe(self, player):
        return "Say something."

    def legal(self, player):
        return AnyText(["hello"])

    def _advance(self, actions):
        return {"player": 0.1}

scenario = Scenario("talk", "talk", "Talk.", 9, "ours", lambda start, chance: Talk(9), actions=AnyText())
"""


async def test_a_move_in_many_words_stands_on_one_line(app_of, clock: ManualClock, tmp_path: Path) -> None:
    """A line break or a tab went to the terminal as it was, and moved all that stood after it."""
    (tmp_path / "talk.py").write_text(TALK)
    said = ("one\ntwo", "a\ttab", "日本語の長い言葉です", "x" * 99)
    app = app_of(Setup(f"{tmp_path / 'talk.py'}:scenario", "s"), s=scripted("s", *map(answer, said)))
    async with app.run_test(size=(120, 44)) as pilot:
        await ticks(pilot, clock, len(said))
        moves = app.screen.query_one(MoveList)
        drawn = [strip.text for strip in moves.render_lines(moves.size.region)]
        assert not set("".join(drawn)) & set("\n\t")
        rows = [" ".join(row.split()) for row in drawn[1 : 1 + len(said)]]
        assert rows == ["1 one two +0.1", "2 a tab +0.1", "3 日本語の長い… +0.1", f"4 {'x' * 12}… +0.1"]


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
