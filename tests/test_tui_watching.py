"""Watching, by real keys: the clock, steps, scrubbing, replays, and a model's words and prompts beside the board."""

from __future__ import annotations

import asyncio
from pathlib import Path

from textual.content import Content

from msgrpo.episode import read_episodes
from msgrpo.tui.app import PlayApp
from msgrpo.tui.records import Records
from msgrpo.tui.session import Setup
from msgrpo.tui.widgets.moves import MoveList
from msgrpo.tui.widgets.text import clipped
from msgrpo.tui.widgets.timeline import Timeline
from tests.tui_helpers import (
    ManualClock,
    answer,
    drained,
    play_screen,
    press,
    resolver,
    scripted,
    settle,
    text_of,
    ticks,
    until,
)


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
        assert not app.screen.query_one(".returns").region  # nobody who sits in a record plays in this sitting
        await press(pilot, "space", "t")
        assert "your move" in text_of(app, ".status")
        assert "this sitting: none finished" in text_of(app, ".returns")
        assert "played on from episode 1 of 1" in text_of(app, "#title")


async def test_a_message_goes_with_the_game_that_it_was_about(app_of, clock: ManualClock) -> None:
    app = app_of(Setup("snake-solo", "optimal", seed=1))
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "t", "t")
        assert [each.message for each in app._notifications] == ["optimal plays on."]
        await press(pilot, "x")
        assert not list(app._notifications)


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
    said = ("one\ntwo", "a\ttab", "日本語の長い言葉です" * 3, "x" * 99)
    app = app_of(Setup(f"{tmp_path / 'talk.py'}:scenario", "s"), s=scripted("s", *map(answer, said)))
    async with app.run_test(size=(120, 44)) as pilot:
        await ticks(pilot, clock, len(said))
        moves = app.screen.query_one(MoveList)
        drawn = [strip.text for strip in moves.render_lines(moves.size.region)]
        assert not set("".join(drawn)) & set("\n\t")
        rows = [" ".join(row.split()) for row in drawn[1 : 1 + len(said)]]
        cut = ("日本語の長い言葉です" * 3)[:18], "x" * 36
        assert rows == ["1 one two +0.1", "2 a tab +0.1", f"3 {cut[0]}… +0.1", f"4 {cut[1]}… +0.1"]


async def test_a_move_that_lost_little_is_not_said_to_have_lost_nothing(app_of) -> None:
    """It said: down lost 0.00, better up; down is worth 0.0002 less there."""
    app = app_of(Setup("frozen-lake-slippery", "human"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "down")
        assert text_of(app, ".worth") == "last: down lost <0.01, better up"
        assert text_of(app, "MoveList").endswith("down 0 <0.01")
