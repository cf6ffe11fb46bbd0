"""Playing, by real keys: a person alone, in a race, in a duel, taking a seat over; games from outside the package."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.events import Key

from msgrpo.episode import read_episodes
from msgrpo.games import get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui.agents import HumanAgent
from msgrpo.tui.app import PlayApp
from msgrpo.tui.records import Records
from msgrpo.tui.screens.dialogs import Confirm
from msgrpo.tui.screens.play import PlayScreen
from msgrpo.tui.session import Session, Setup
from msgrpo.tui.widgets.bars import ActionBars
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.panel import AgentPanel
from tests.tui_helpers import (
    NIM,
    ManualClock,
    answer,
    drained,
    keys_of,
    play_screen,
    press,
    resolver,
    scripted,
    settle,
    text_of,
    ticks,
    until,
)


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
    assert Session.replay(episode, "play").last == 8


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


async def test_escape_stops_an_agent_that_plays_and_then_leaves(app_of) -> None:
    """The second one, and any in a game that stood, did nothing."""
    app = app_of(Setup("snake", "s", seed=3), s=scripted("s", answer("up")))
    async with app.run_test() as pilot:
        await settle(pilot)
        screen = play_screen(app)
        await press(pilot, "escape")
        assert (screen.pace.playing, app.return_code) == (False, None)
        assert "stopped waiting" not in text_of(app, ".status")  # it was said where nobody had been asked
        await pilot.press("escape")
        await until(lambda: app.return_code is not None)


async def test_escape_leaves_the_replay_of_a_game_that_was_left() -> None:
    """It did nothing: whose move it was when the game was left counted as somebody who is waited for."""
    session = Session(get_scenario("snake"), {"snake1": RandomAgent()}, 3)
    app = PlayApp(resolver(), records=Records("one", [session.episode]), clock=ManualClock())
    async with app.run_test() as pilot:
        await settle(pilot)
        assert play_screen(app).replay is not None
        await pilot.press("escape")
        await until(lambda: app.return_code is not None)


async def test_a_replay_that_is_played_on_by_hand_is_left_after_a_question_and_kept(tmp_path: Path) -> None:
    """It was gone without a word; a replay of a person's game in which nobody has moved is only left."""
    lake = get_scenario("frozen-lake")
    episode = Session(lake, {"player": RandomAgent()}, 3).episode
    app = PlayApp(resolver(), records=Records("one", [episode]), clock=ManualClock(), plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "t", "up", "escape")
        assert isinstance(app.screen, Confirm)
        await pilot.press("enter")
        await until(lambda: app.return_code is not None)
    (kept,) = read_episodes(tmp_path / "human.jsonl")
    assert ([turn.action for turn in kept.turns], kept.agents) == (["up"], {"player": "human"})

    app = PlayApp(resolver(), records=Records("one", [kept]), clock=ManualClock(), plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "end", "t")
        await pilot.press("escape")
        await until(lambda: app.return_code is not None)
    assert len(list(read_episodes(tmp_path / "human.jsonl"))) == 1


async def test_a_persons_own_game_is_played_on_from_its_replay(tmp_path: Path) -> None:
    """It could not be: whose seat it had been in the record was said to sit there."""
    episode = Session(get_scenario("frozen-lake"), {"player": HumanAgent()}, 3).episode
    app = PlayApp(resolver(), records=Records("one", [episode]), clock=ManualClock(), plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "t", "up")
        assert play_screen(app).match.last == 1
        await press(pilot, "t")
        assert "Nobody is there to take it back" in str([note.message for note in app._notifications])


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


async def test_while_an_agent_thinks_a_person_is_told_the_keys_that_look_back(app_of) -> None:
    """The foot named the arrows, which are the person's moves."""
    gate = asyncio.Event()
    app = app_of(Setup("snake", "human", "s", seed=3), s=scripted("s", answer("up"), gate=gate))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("up")
        await until(lambda: "stop waiting" in keys_of(app))
        assert "[ ] back, on" in keys_of(app)
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


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (45, 24)])
async def test_a_person_sees_every_action_beside_an_opponent(app_of, size: tuple[int, int]) -> None:
    """In 60 columns two of tic-tac-toe's nine were seen: the opponent's panel had half of the rows."""
    pytest.importorskip("pyspiel")
    app = app_of(Setup("spiel:tic_tac_toe", "human", "optimal"))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        for _ in range(2):
            panel = play_screen(app).panel(0, "player1")
            assert panel.content_region.contains_region(panel.bars.region)
            assert "9 x(2,2)" in text_of(app, "#panel-0-player1 ActionBars")
            await press(pilot, "5")


async def test_numbers_fill_a_panel_that_has_become_wider(app_of) -> None:
    """Until the next move they stood as in the narrow one; and in the first picture they were cut off."""
    app = app_of(Setup("snake", "human"))
    async with app.run_test(size=(60, 20)) as pilot:
        await settle(pilot)
        assert text_of(app, ".stats") == "return 0 step 0/20"
        assert text_of(app, ".returns") == "none finished"
        await pilot.resize_terminal(120, 40)
        await settle(pilot)
        assert text_of(app, ".stats") == "return 0 step 0/20 invalid 0"
        assert text_of(app, ".returns") == "this sitting: none finished"


async def test_no_number_of_a_narrow_panel_is_cut_off_or_parted_from_its_name(app_of, clock: ManualClock) -> None:
    """It said: this sitting: 1 played, mean +   and: invalid, with the number on the next line."""
    app = app_of(Setup("frozen-lake", "up", seed=3, speed=64.0), up=scripted("up", answer("up")))
    async with app.run_test(size=(70, 30)) as pilot:
        await ticks(pilot, clock, 10)
        panel = play_screen(app).query_one(AgentPanel)
        panel.styles.width = 26
        await settle(pilot)
        await press(pilot, "p")
        assert text_of(app, ".returns") == "1 played, mean +0.00"
        stats = app.screen.query_one(".stats")
        rows = [strip.text.rstrip() for strip in stats.render_lines(stats.size.region)]
        assert rows == ["return 0  step 8/8", "tokens 2560", "time 2.0 s"]  # invalid answers, where there are some


async def test_a_person_alone_with_a_snake_of_the_game_is_told_which_one_is_theirs(app_of) -> None:
    for game, said in (("snake", "You are snake1. Snake on"), ("frozen-lake", "Frozen Lake.")):
        app = app_of(Setup(game, "human", seed=3))
        async with app.run_test(size=(120, 40)) as pilot:
            await settle(pilot)
            assert text_of(app, ".text").startswith(said)


async def test_the_text_of_a_game_without_a_board_leaves_half_the_window_to_the_player(app_of) -> None:
    """Two numbers and their names stood below each other beside an empty space."""
    app = app_of(Setup(NIM, "human", "random"))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        assert play_screen(app).query_one(AgentPanel).outer_size.width == 50


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


async def test_two_people_at_one_keyboard_see_their_own_cards_alone(tmp_path: Path) -> None:
    """Each saw the other's cards; a key before somebody has looked moves nobody."""
    pytest.importorskip("pyspiel")
    setup = Setup("spiel:kuhn_poker", "human", "human")
    app = PlayApp(resolver(), setup, clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        match = play_screen(app).match
        for player, number in (("player 1", "1"), ("player 2", "2"), ("player 1", "1")):
            assert keys_of(app).startswith(f"enter {player} looks")
            steps = match.last
            await press(pilot, number, "p", "left_square_bracket", "right_square_bracket")
            assert match.last == steps
            shown = text_of(app, "BoardView") + "".join(text_of(app, f"#panel-0-player{n} .text") for n in (1, 2))
            assert "cards are covered" in shown
            assert "Step" not in shown
            await press(pilot, "p", "enter")
            assert f"You are {player.replace(' ', '')}." in text_of(app, "BoardView")
            await press(pilot, number)
        assert match.over
        assert "Step" in text_of(app, "BoardView")


async def test_a_person_sees_no_cards_and_no_words_of_an_agent_before_the_end(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    agents = resolver(talks=scripted("talks", answer("Bet", "my card is a king")))
    setup = Setup("spiel:kuhn_poker", "human", "talks")
    app = PlayApp(agents, setup, clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await press(pilot, "p", "1")
        match = play_screen(app).match
        assert (match.last, match.over) == (2, False)
        for _ in range(3):
            assert "You are player1." in text_of(app, "BoardView")
            assert "king" not in text_of(app, "#panel-0-player2 .text")
            assert "You are player2." not in text_of(app, "#panel-0-player2 .text")
            await press(pilot, "left_square_bracket")
        await press(pilot, "end", "1")
        assert match.over
        await press(pilot, "left_square_bracket")
        assert "king" in text_of(app, "#panel-0-player2 .text")


async def test_a_restart_is_one_however_often_it_is_asked_for(tmp_path: Path) -> None:
    """Twenty quick presses made twenty screens, and ctrl+q waited for them."""
    app = PlayApp(resolver(), Setup("snake", "optimal"), clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        for change in ("n", "space", "t", "plus"):  # a step is played, or the game stands, or a person sits there
            await press(pilot, change, *(["n"] if change == "n" else []))
            began = play_screen(app)
            await press(pilot, "r")
            assert (play_screen(app) is began) == (change == "plus")
            again = play_screen(app)
            await press(pilot, "r", "r", "r")
            assert play_screen(app) is again


async def test_a_key_for_the_next_start_that_is_held_down_builds_few_screens(
    app_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of thirty presses a second built a screen, and the app went on long after the key was let go."""
    built: list[int] = []
    mounted = PlayScreen.on_mount

    def on_mount(screen: PlayScreen) -> None:
        built.append(screen.setup.seed)
        mounted(screen)

    monkeypatch.setattr(PlayScreen, "on_mount", on_mount)
    app = app_of(Setup("snake", "optimal"))
    async with app.run_test() as pilot:
        await settle(pilot)
        for _ in range(5):
            app.post_message(Key("x", "x"))
        await settle(pilot)
        assert play_screen(app).setup.seed == 5
        assert built == [0, 5]
        await press(pilot, "x")
        assert play_screen(app).setup.seed == 6


LONG = """
from msgrpo.game import Game, Scenario

class Long(Game):
    actions = ("on", "back")

    def __init__(self, start_seed, chance_seed):
        super().__init__(3)

    def observe(self, player):
        return "\\n".join(f"line {n} of step {self.steps}" for n in range(60))

    def _advance(self, actions):
        return {"player": 1.0}

scenario = Scenario("long", "long", "Go.", 3, "[test]", Long, actions=Long.actions)
"""


async def test_of_a_game_that_is_a_long_text_the_end_is_shown_and_the_rest_by_page_up(app_of, tmp_path: Path) -> None:
    """It was cut off without a word: a game of TextArena has its board at the end."""
    (tmp_path / "long.py").write_text(LONG)
    app = app_of(Setup(f"{tmp_path / 'long.py'}:scenario", "human"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)

        def stands(first: str, last: str) -> bool:
            shown = text_of(app, "BoardView")
            return shown.startswith(first) and shown.endswith(last)

        assert stands("… page up: more", "line 59 of step 0")
        await press(pilot, "pageup")
        assert stands("… page up: more", "… page down: more")
        await press(pilot, "pageup", "pageup", "pageup")
        assert stands("line 0 of step 0", "… page down: more")
        await press(pilot, "1")
        assert stands("… page up: more", "line 59 of step 1")
