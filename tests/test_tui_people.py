"""What a person meets who plays: rules, keys, moves without a key, the end of a game, the size of the board."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import cast

import pytest
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.color import Color
from textual.command import CommandPalette

from msgrpo.agent import Agent, Decision, OnText, View
from msgrpo.episode import read_episodes
from msgrpo.errors import UsageError
from msgrpo.games import get_scenario
from msgrpo.references import RandomAgent
from msgrpo.run_log import GroupRow, Member
from msgrpo.tui import hands, launch
from msgrpo.tui.agents import HumanAgent
from msgrpo.tui.app import PlayApp
from msgrpo.tui.asking import Asking
from msgrpo.tui.learning import Learning
from msgrpo.tui.match import Match
from msgrpo.tui.messages import AnswerStreamed
from msgrpo.tui.plain import _append_board
from msgrpo.tui.screens.dialogs import Choose, Confirm
from msgrpo.tui.screens.match import MatchScreen
from msgrpo.tui.session import Session, Setup
from msgrpo.tui.showcase import Showcase
from msgrpo.tui.theme import DAY, NIGHT, THEMES
from msgrpo.tui.widgets.board import PAINTS, BoardView
from msgrpo.tui.widgets.keyline import Hint, KeyLine
from msgrpo.tui.widgets.lane import legend
from msgrpo.tui.widgets.learning import Groups
from msgrpo.tui.widgets.panel import DRAWN, AgentPanel, shortened
from msgrpo.tui.widgets.timeline import Timeline
from tests.tui_helpers import (
    ManualClock,
    answer,
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


def app_of(tmp_path: Path, setup: Setup | None, **more: object) -> PlayApp:
    return PlayApp(resolver(), setup, clock=ManualClock(), runs=tmp_path, plays=tmp_path / "plays", **more)  # type: ignore[arg-type]


async def test_a_game_by_hand_from_its_rules_to_trying_again(tmp_path: Path) -> None:
    app = app_of(tmp_path, Setup("frozen-lake", "human"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        session = play_screen(app).match.sessions[0]
        assert "Walk over the ice to the goal" in text_of(app, ".text")
        assert keys_of(app).startswith("arrows move i hint")
        assert keys_of(app).endswith("? help q leave")
        assert "take over" not in keys_of(app)  # it is this person's seat
        await press(pilot, "i")
        assert "best right" in text_of(app, ".worth")  # not left and up, which run into the edge
        await press(pilot, "right")
        assert "Walk over" not in text_of(app, ".text")
        await press(pilot, "escape")
        assert isinstance(app.screen, Confirm)
        await press(pilot, "escape")
        assert play_screen(app).match.sessions[0] is session
        await press(pilot, "left", "down")
        assert session.over
        end = text_of(app, ".status")
        assert "fell in the hole at (0,2) 1 mistake, the worst at step 3: down lost 1.00" in end
        assert "enter: try step 3 again" in end
        assert keys_of(app).startswith("enter try step 3 again x next start r again")
        await press(pilot, "enter")
        assert (session.last, session.over) == (2, False)
        assert "your move" in text_of(app, ".status")
        await press(pilot, "escape", "enter")  # leaves, and the game stays as unfinished
    finished, begun = read_episodes(tmp_path / "plays" / "human.jsonl")
    assert [turn.action for turn in finished.turns] == ["right", "left", "down"]
    assert ([turn.action for turn in begun.turns], begun.outcome.value) == (["right", "left"], "playing")


async def test_the_title_says_of_the_end_what_has_room_and_nothing_of_it_when_the_game_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = PlayApp(resolver(), Setup("frozen-lake", "human"), clock=ManualClock(), runs=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "right", "left", "down")
        assert text_of(app, "#title").endswith("play recorded in plays/human.jsonl")
        await press(pilot, "enter")
        assert text_of(app, "#title").endswith("play")  # another game is played now
        await press(pilot, "down", "enter", "down")
        assert text_of(app, "#title").endswith("play place 1 of 3 by hand, the best 0")  # no part of where


async def test_a_hint_is_for_the_move_that_it_was_asked_for(tmp_path: Path) -> None:
    """It stayed for all later moves."""
    app = app_of(tmp_path, Setup("frozen-lake", "human"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "i")
        assert "best" in text_of(app, ".worth")
        await press(pilot, "right")
        assert "now:" not in text_of(app, ".worth")
        await press(pilot, "i", "left_square_bracket", "right_square_bracket")  # a look back is no move
        assert "now:" in text_of(app, ".worth")
        await press(pilot, "i")
        assert "now:" not in text_of(app, ".worth")


async def test_in_real_time_a_hint_stays_until_it_is_put_away(tmp_path: Path) -> None:
    """Each tick is a move: it would be gone before anybody has read it."""
    clock = ManualClock()
    setup = Setup("snake", "human", live=True)
    app = PlayApp(resolver(), setup, clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "i", "up")
        await ticks(pilot, clock, 2)
        screen = app.screen
        assert isinstance(screen, MatchScreen)
        assert screen.match.cursor > 0
        assert screen.hint
        await press(pilot, "i")
        assert not screen.hint


async def test_a_hint_stays_till_the_person_has_moved_whose_turn_comes_later(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    app = app_of(tmp_path, Setup("spiel:tic_tac_toe", "random", "human", step=True))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = play_screen(app)
        await press(pilot, "i")
        assert screen.hint
        await until(lambda: screen.match.last == 1 or not screen.asking.going)
        await press(pilot, "n", "n")
        assert (screen.match.last >= 1, screen.hint) == (True, True)
        move = screen.match.sessions[0].game.legal(screen.match.sessions[0].game.to_move[0])[0]
        await press(pilot, "m", *move, "enter")
        assert not screen.hint


async def test_a_lost_position_is_called_lost(tmp_path: Path) -> None:
    app = app_of(tmp_path, Setup("frozen-lake", "human"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "up", "up", "up", "i")
        assert "the goal is out of reach" in text_of(app, ".worth")
        await press(pilot, "left", "i")
        assert "now: the goal is out of reach last: left lost nothing more" in text_of(app, ".worth")
        await press(pilot, "i", "down")
        assert "down lost nothing more: the goal was already out of reach" in text_of(app, ".worth")


async def test_a_key_that_comes_before_the_game_asks_is_kept_and_a_move_is_one_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    display = App._display

    def counted(self: App[None], screen: object, renderable: object) -> None:
        if renderable is not None:
            drawn.append(renderable)
        display(self, screen, renderable)  # type: ignore[arg-type]

    app = app_of(tmp_path, Setup("frozen-lake-8x8", "human"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = play_screen(app)
        for way in ("up", "up"):
            screen.action_move(way, "arrows")  # the second comes while the first is still being played
        await settle(pilot)
        assert screen.match.last == 2
        await press(pilot, "i", "up", "up")
        monkeypatch.setattr(App, "_display", counted)
        played = screen.match.last
        drawn.clear()
        app.simulate_key("up")
        while screen.match.last == played or screen.drawing.going:
            await asyncio.sleep(0)
        assert not drawn  # nothing of the move is on the screen before all of it can be
        await settle(pilot)
        assert drawn


async def test_a_page_key_comes_before_the_palette_has_its_lines(tmp_path: Path) -> None:
    app = app_of(tmp_path, Setup("frozen-lake", "human"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.action_command_palette()
        while not isinstance(app.screen, CommandPalette) or not app.screen.query("CommandList"):
            await asyncio.sleep(0)
        app.screen._action_command_list("page_down")
        await press(pilot, "pagedown", "pageup", "escape")
        assert play_screen(app).match.sessions[0].last == 0


@pytest.mark.parametrize("sizes", [[(80, 24), (120, 40)], [(200, 60), (60, 20), (120, 40)]])
async def test_the_size_of_a_board_does_not_depend_on_earlier_ones(
    tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    async def lane_after(sizes: list[tuple[int, int]]) -> tuple[int, int, int]:
        app = app_of(tmp_path, Setup("snake", "optimal"))
        async with app.run_test(size=sizes[0]) as pilot:
            await settle(pilot)
            await press(pilot, "space", "n", "n")
            for size in sizes[1:]:
                await pilot.resize_terminal(*size)
                await settle(pilot)
            board = app.screen.query_one(BoardView)
            return play_screen(app).lane(0).size.width, board.size.height, board.scale

    assert await lane_after(sizes) == await lane_after(sizes[-1:])


@pytest.mark.parametrize(("size", "scale"), [((120, 40), 2), ((200, 60), 4)])
async def test_boards_come_before_panels_in_a_race(tmp_path: Path, size: tuple[int, int], scale: int) -> None:
    app = app_of(tmp_path, Setup("snake", "human", "optimal"))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        for board in app.screen.query(BoardView):
            assert (board.scale, board.cut_off) == (scale, "")


@pytest.mark.parametrize("named", [True, False], ids=["compare", "first screen"])
async def test_every_action_has_its_bar_in_a_comparison(tmp_path: Path, named: bool) -> None:
    agents = {name: scripted(name, answer("up"), answer("left")) for name in ("one", "two")}
    setup = Setup("frozen-lake", "one", "two") if named else None
    app = PlayApp(agents.__getitem__, setup, clock=ManualClock(), runs=tmp_path, showcase=Showcase())
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "space", *(["n", "n"] if named else []))
        screen = app.screen
        assert isinstance(screen, MatchScreen)
        screen.jump_to(-1)
        await settle(pilot)
        for panel in screen.query(AgentPanel):
            assert panel.bars.probabilities is not None
            assert panel.bars.size.height == 4
            assert panel.content_region.contains_region(panel.bars.region)
        for board in screen.query(BoardView):
            assert board.scale == 5


async def test_who_waits_for_an_agent_reads_what_it_is_and_what_is_played(tmp_path: Path) -> None:
    gate = threading.Event()

    def load(spec: str) -> Agent:
        gate.wait(60)
        return scripted(spec, answer("down"))

    app = PlayApp(load, Setup("frozen-lake", "nano", "nano:frozen-lake"), clock=ManualClock(), runs=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        play_screen(app).ask()
        await until(lambda: "loading the agent" in text_of(app, "#panel-0-player .status"))
        first, second = (text_of(app, f"#panel-{number}-player .text") for number in (0, 1))
        assert first.startswith(
            "nano is a language model of one million parameters, untrained: it knows the rules and"
        )
        assert second.startswith(
            "nano is a language model of one million parameters, trained on frozen-lake. Frozen Lake."
        )
        gate.set()
        while play_screen(app).match.last < 1:
            await asyncio.sleep(0.01)
        await settle(pilot)
        assert text_of(app, "#panel-0-player .text") == "“the apple is near.”"


async def test_what_the_moves_of_a_duel_were_worth_is_not_cut_off(tmp_path: Path) -> None:
    app = app_of(tmp_path, Setup("snake-duel", "human", "optimal"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "up", "up", "i")
        screen = play_screen(app)
        while "…" in screen.worth(0):
            await settle(pilot)
        assert screen.worth(0).count("\n") == 2  # now, and the last move of each
        assert text_of(app, ".worth") == " ".join(screen.worth(0).split())
        assert app.screen.query_one(BoardView).cut_off == ""


@pytest.mark.parametrize(("size", "dropped"), [((120, 40), 0), ((80, 24), 1)])
async def test_what_has_no_room_below_a_board_is_left_out_as_a_whole(
    size: tuple[int, int], dropped: int, tmp_path: Path
) -> None:
    app = app_of(tmp_path, Setup("snake-duel", "optimal", "random", seed=3, step=True))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        await press(pilot, *"nnnnnn")
        said = play_screen(app).worth(0).split("\n")
        assert {line.split(":")[0] for line in said[:1]} == ({"optimal"} if size[0] == 120 else {"last"})
        assert text_of(app, ".worth") == " ".join(said[: len(said) - dropped])


async def test_a_reference_player_that_errs_is_said_to_be_a_search(tmp_path: Path) -> None:
    clock = ManualClock()
    setup = Setup("snake-duel", "optimal", "random", seed=1)
    app = PlayApp(resolver(), setup, clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "elsewhere it searches, and can err" in text_of(app, "#panel-0-snake1 .text")
        while not play_screen(app).match.over:
            await ticks(pilot, clock, 1)
        first, second = (text_of(app, f"#panel-0-{player} .status") for player in ("snake1", "snake2"))
        assert first.endswith("up lost 1.38 a strong search player; the judge looks further")
        assert "3 mistakes" in second
        assert "search" not in second


async def test_no_row_is_hidden_while_rows_are_empty(tmp_path: Path) -> None:
    app = app_of(tmp_path, Setup("snake", "human"))
    async with app.run_test(size=(60, 20)) as pilot:
        await settle(pilot)
        assert app.screen.query_one(BoardView).cut_off == ""
        await pilot.resize_terminal(45, 24)
        await settle(pilot)
        assert app.screen.query_one(BoardView).cut_off == ""
        assert play_screen(app).lane(0).outer_size.width == 45
    app = app_of(tmp_path, Setup("snake", "optimal", "random"))
    async with app.run_test(size=(60, 20)) as pilot:
        await settle(pilot)
        assert [board.cut_off for board in app.screen.query(BoardView)] == ["", ""]


async def test_babyai_shows_its_mission_and_up_goes_forward(tmp_path: Path) -> None:
    pytest.importorskip("minigrid")
    app = app_of(tmp_path, Setup("babyai-goto", "human"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert text_of(app, ".caption") == "Mission: go to the green key. You carry nothing."
        signs = text_of(app, ".legend")
        assert "?? not seen" in signs
        assert "Kg green key" in signs
        assert "ball" not in signs  # there is none
        board = app.screen.query_one(BoardView)
        row = 4 * board.scale + board._margins()[1] + (board.scale - 1) // 2
        key = next(part for part in board.render_line(row) if part.text.strip() == "Kg")
        assert key.style is not None
        assert key.style.bgcolor is not None
        assert key.style.bgcolor.name == PAINTS["green"][0]
        await press(pilot, "up", "w")
        session = play_screen(app).match.sessions[0]
        assert [turn.action for turn in session.episode.turns] == ["forward", "forward"]
        await press(pilot, "1")
        assert session.episode.turns[2].action == "left"


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_things_of_two_colours_differ_without_colours(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: under NO_COLOR a green key and a red one were the same K."""
    pytest.importorskip("minigrid")
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_of(tmp_path, Setup("babyai-goto", "human"))
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        view = app.screen.query_one(BoardView)
        board = play_screen(app).match.sessions[0].frame.board
        assert board is not None
        (key,) = board.colours
        other = next(place for place in ((0, 0), (0, 1)) if place != key)
        cells = [list(row) for row in board.cells]
        cells[other[0]][other[1]] = "K"
        both = replace(board, cells=tuple(map(tuple, cells)), colours={key: "green", other: "red"})
        view.show(both, "")
        await settle(pilot)
        drawn = " ".join(strip.text for strip in view.render_lines(view.size.region))
        assert (drawn.count("Kg"), drawn.count("Kr")) == (1, 1)
        signs = str(legend(both, 60)).replace("\u00a0", " ")
        assert "Kg green key" in signs
        assert "Kr red key" in signs
        text = Text()
        _append_board(text, both)
        assert f"red key at ({other[1]},6)" in str(text)
        assert "green key at " in str(text)


async def test_the_number_of_a_move_does_not_change(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    app = app_of(tmp_path, Setup("spiel:tic_tac_toe", "human", "optimal"))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "5")
        session = play_screen(app).match.sessions[0]
        assert session.episode.turns[0].action == "x(1,1)"
        bars = play_screen(app).panel(0, "player1").bars
        assert bars.numbers["x(2,2)"] == 9
        taken = session.episode.turns[1].action or ""
        assert taken.replace("o", "x") not in bars.legal
        drawn = {
            part.text.strip(): part.style
            for y in range(bars.size.height)
            for part in bars.render_line(y)
            if part.style
        }
        lit = {name: drawn[name].color.triplet for name in ("5 x(1,1)", "9 x(2,2)") if drawn[name].color}
        assert sum(lit["5 x(1,1)"]) < sum(lit["9 x(2,2)"]) < sum(Color.parse(NIGHT.foreground).rgb)  # taken; free
        await press(pilot, str(bars.numbers[taken.replace("o", "x")]))
        assert session.last == 2
        assert "not possible now" in str([note.message for note in app._notifications])
        assert text_of(app, "BoardView").startswith("0 o")  # rows are named as the moves name them


async def test_a_digit_plays_the_move_whose_name_ends_in_it(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    app = app_of(tmp_path, Setup("spiel:connect_four", "human", "random"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert keys_of(app).startswith("0-6 choose")
        await press(pilot, "3", "0")
        turns = play_screen(app).match.sessions[0].episode.turns_of("player1")
        assert [turn.action for turn in turns] == ["x3", "x0"]


async def test_the_rules_stay_until_the_person_moves_and_every_piece_is_in_the_legend(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    app = app_of(tmp_path, Setup("spiel:chess", "human", "random"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        session = play_screen(app).match.sessions[0]
        assert session.last == 1  # the other has moved
        assert text_of(app, "#panel-0-player1 .text").startswith("You are Black. Chess, 2 players. The winner gains")
        assert [play_screen(app).panel(0, player).border_title for player in session.players] == [
            "you · Black",
            "random · White",
        ]
        assert text_of(app, ".legend") == "B b bishop K k king N n knight P p pawn Q q queen R r rook"
        assert text_of(app, "#panel-0-player2 .text") == f"played {session.episode.turns[0].action}"
        await pilot.resize_terminal(80, 24)
        await settle(pilot)
        rows = app.screen.query_one(".legend")
        drawn = [strip.text.replace("\u00a0", " ").rstrip() for strip in rows.render_lines(rows.size.region)]
        assert drawn == [" B b  bishop   K k  king", " N n  knight   P p  pawn", " Q q  queen   R r  rook"]
        await press(pilot, "m", "a", "6", "enter")
        assert session.last == 3
        assert "Chess, 2 players" not in text_of(app, "#panel-0-player1 .text")


def test_a_sign_is_not_parted_from_its_name() -> None:
    pytest.importorskip("pyspiel")
    board = get_scenario("spiel:chess").new(0, 0).board()
    shown = [str(line).replace("\u00a0", " ") for line in legend(board, 48).wrap(48)]
    assert [line.rstrip() for line in shown] == [
        "B b  bishop   K k  king   N n  knight",
        "P p  pawn   Q q  queen   R r  rook",
    ]
    game = get_scenario("spiel:tic_tac_toe").new(0, 0)
    game.step({player: game.legal(player)[0] for player in game.to_move})
    assert not legend(game.board(), 48)  # it said that x means x


async def test_a_move_without_a_key_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    app = app_of(tmp_path, Setup("spiel:chess", "random", "human"))
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "a b c d e f g h" in text_of(app, "BoardView")
        assert keys_of(app).startswith("m type a move")
        await press(pilot, "m", "e")
        assert isinstance(app.screen, Choose)
        assert app.screen.fitting("e") == ["e3", "e4"]
        await press(pilot, "9", "down", "enter")
        assert "none begins so" in text_of(app, ".choose Options")
        await press(pilot, "backspace", "4", "enter")
        session = play_screen(app).match.sessions[0]
        assert session.episode.turns[0].action == "e4"
        await press(pilot, "m", *"G1F")
        assert text_of(app, ".choose Options") == "Nf3 g1f3"
        await press(pilot, "3", "enter")
        assert session.episode.turns[2].action == "Nf3"


async def test_pieces_are_joined_to_a_few_drawings_and_the_newest_is_the_last() -> None:
    class Fast:
        spec = "fast"

        def settings(self) -> dict[str, object]:
            return {}

        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            assert on_text is not None
            for number in range(1, 2001):
                on_text("x" * number)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            return Decision("up")

        async def close(self) -> None:
            """Nothing to close."""

    scenario = get_scenario("frozen-lake")
    told: list[object] = []
    asking = Asking(Match([Session(scenario, {"player": Fast()}, 0)]), told.append, lambda: 0.0)
    asking.start()
    while asking.going or asking._words:
        await asyncio.sleep(0.01)
    words = [message.text for message in told if isinstance(message, AnswerStreamed)]
    assert len(words) <= 10
    assert words[-1] == "x" * 2000


async def test_words_of_a_round_that_was_dropped_are_nobodys() -> None:
    """They stood in the panel of the person who had taken the seat over, or of who was asked next."""
    heard: list[OnText] = []

    class Slow(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            assert on_text is not None
            heard.append(on_text)
            on_text("not told yet")
            await asyncio.Event().wait()
            raise AssertionError

    told: list[object] = []
    asking = Asking(Match([Session(get_scenario("frozen-lake"), {"player": Slow()}, 0)]), told.append, lambda: 0.0)
    asking.start()
    await until(lambda: len(heard) == 1)
    asking.drop()
    asking.start()
    await until(lambda: len(heard) == 2 and bool(told))
    for says, words in ((heard[0], "late"), (heard[1], "in time")):
        await until(lambda: not asking._words)
        says(words)
    await until(lambda: not asking._words)
    asking.drop()
    assert {message.text for message in told if isinstance(message, AnswerStreamed)} == {"not told yet", "in time"}


async def being_asked() -> tuple[Asking, list[OnText], list[object]]:
    """An agent that is asked and never answers: how it speaks, and what has been told of its words."""
    heard: list[OnText] = []

    class Slow(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            assert on_text is not None
            heard.append(on_text)
            await asyncio.Event().wait()
            raise AssertionError

    told: list[object] = []
    asking = Asking(Match([Session(get_scenario("frozen-lake"), {"player": Slow()}, 0)]), told.append, lambda: 0.0)
    asking.start()
    await until(lambda: heard)
    return asking, heard, told


@pytest.mark.parametrize("line", range(1, 10))
async def test_no_word_of_an_answer_is_told_whenever_it_is_given_up(line: int) -> None:
    """An agent speaks in its own thread, which may be anywhere in the code when the next round begins."""
    asking, heard, told = await being_asked()
    lines = 0

    def next_round(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line" and frame.f_code is Asking._streamed.__code__
        if lines == line and asking._round is first:
            asking.drop()
            asking.start()
        return next_round

    first, before = asking._round, sys.gettrace()
    sys.settrace(next_round)
    try:
        heard[0]("stale")
    finally:
        sys.settrace(before)
    await until(lambda: told or not asking._words)
    assert [message.text for message in told if isinstance(message, AnswerStreamed)] == ["stale"] * (lines < line)
    asking.drop()


@pytest.mark.parametrize("line", range(1, 10))
async def test_words_that_come_while_others_are_told_are_told_too(line: int) -> None:
    """Words that came just when the telling ended were thrown away, and those before them stood there instead."""
    asking, heard, told = await being_asked()
    lines = 0

    def speaks(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line" and frame.f_code is Asking._tell_words.__code__
        if lines == line:
            lines += 1
            heard[0]("last")
        return speaks

    before = sys.gettrace()
    sys.settrace(speaks)
    try:
        heard[0]("first")
        await until(lambda: told and not asking._words)
    finally:
        sys.settrace(before)
    if lines <= line:  # nothing was said while the first words were told
        heard[0]("last")
    await until(lambda: len(told) > 1 or not asking._words)
    asking.drop()
    assert [message.text for message in told if isinstance(message, AnswerStreamed)][-1] == "last"


async def test_nothing_is_told_of_words_that_came_just_before_the_round_was_dropped() -> None:
    class Speaks(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            assert on_text is not None
            on_text("first")
            asking.drop()
            raise asyncio.CancelledError

    told: list[object] = []
    asking = Asking(Match([Session(get_scenario("frozen-lake"), {"player": Speaks()}, 0)]), told.append, lambda: 0.0)
    asking.start()
    for _ in range(9):
        await asyncio.sleep(0)
    assert told == []


def test_a_key_that_was_kept_for_what_is_gone_moves_nobody() -> None:
    """The last key of a lost game was played at once when its worst mistake was tried again."""
    person = HumanAgent()
    session = Session(get_scenario("frozen-lake"), {"player": person}, 0)
    session.answer("player", Decision("right"))
    session.commit()
    person.kept = "left"  # the key came faster than the game
    session.seek(0)
    session.rewind()
    assert person.kept is None


def test_a_long_text_is_drawn_by_its_beginning_and_end() -> None:
    cut = shortened("a" * 5_000_000 + "\n" * 5_000_000 + "end")
    assert len(cut) < DRAWN + 100
    assert "9,996,003 characters are not shown" in cut
    assert cut.endswith("end")


def test_the_foot_keeps_help_and_the_way_out() -> None:
    line = KeyLine()
    line.hints = [Hint("a", "x" * 60), Hint("b", "y" * 60), Hint("?", "help"), Hint("q", "leave")]
    assert [hint.key for hint in line.fitting(90)] == ["a", "?", "q"]


def test_real_time_is_for_games_that_go_on_by_themselves() -> None:
    with pytest.raises(UsageError, match="stands still"):
        launch.setup("frozen-lake", "human", None, 0, None, step=False, live=True)
    setup = launch.setup("snake", "human", None, 0, None, step=False, live=True)
    assert setup is not None
    assert setup.speed == 2


def test_a_turning_player_s_arrows() -> None:
    game = get_scenario("snake").new(0, 0)
    assert hands.aimed(game, game.to_move[0], "up") == "up"
    assert hands.numbers(game, game.to_move[0]) == {}
    board = game.board()
    assert board is not None
    assert str(legend(board, 120)).endswith("●2\u00a0snake\u00a02")  # as the rules call it


def contrast(style: Style) -> float:
    """Of a letter and its ground, as WCAG counts it: 1 is invisible, 21 black on white."""
    assert style.color is not None
    assert style.bgcolor is not None
    light = []
    for colour in (style.color, style.bgcolor):
        parts = [part / 255 for part in colour.get_truecolor()]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        light.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(light) + 0.05) / (min(light) + 0.05)


@pytest.mark.parametrize(("theme", "least"), [(NIGHT.name, 3), (DAY.name, 3), ("textual-light", 2.5)])
@pytest.mark.parametrize(
    ("setup", "package"),
    [
        (Setup("snake", "optimal", "random", seed=3), "textual"),
        (Setup("gym:BabyAI-GoToLocal-v0", "human", seed=4), "minigrid"),
    ],
    ids=["comparison", "babyai"],
)
async def test_what_is_said_can_be_read_by_day_and_by_night(
    setup: Setup, package: str, theme: str, least: float, tmp_path: Path
) -> None:
    """The faults: light green on white in the history, walls and what is not seen in the colour of the floor, the
    steps to come as a white line on white, and in Textual's own light theme its light accents as letters.
    """
    pytest.importorskip(package)
    app = app_of(tmp_path, setup)
    async with app.run_test(size=(120, 40)) as pilot:
        app.theme = theme
        await settle(pilot)
        await press(pilot, "space", *"nnnnnn")
        segments = [part for line in app.screen._compositor.render_strips() for part in line]
        words = [part for part in segments if any(letter.isalnum() or letter in "?⁇#+−!" for letter in part.text)]
        assert len(words) > 40
        faint = {part.text.strip(): round(contrast(part.style), 1) for part in words if contrast(part.style) < least}
        assert faint == {}
        timeline = app.screen.query_one(Timeline)
        (to_come,) = {
            part for strip in timeline.render_lines(timeline.size.region) for part in strip if "─" in part.text
        }
        assert contrast(to_come.style) > 1.8


@pytest.mark.parametrize("theme", [NIGHT.name, DAY.name, "textual-light", "textual-dark"])
async def test_the_sign_of_the_smallest_advantage_can_be_read(theme: str) -> None:
    """The faults: a small advantage was a pale sign, at 1.9 to 1 in light themes; now every theme has at least 3."""
    members = [Member(total=0, advantage=a, kept=True) for a in (1, 0.001, -0.001, -1)]
    row = GroupRow(scenario="frozen-lake", start_seed=7, player="player", members=members)
    run = SimpleNamespace(update=SimpleNamespace(groups=[row]), group=1, member=None, trouble="", filming=False)

    class Signs(App[None]):
        def compose(self) -> ComposeResult:
            yield Groups()

    app = Signs()
    async with app.run_test(size=(40, 8)) as pilot:
        for own in THEMES:
            app.register_theme(own)
        app.query_one(Groups).show(cast("Learning", run))
        for name in (NIGHT.name, theme):  # the signs follow a change of the theme
            app.theme = name
            await settle(pilot)
        groups = app.query_one(Groups)
        strips = groups.render_lines(groups.size.region)
        signs = [part for strip in strips for part in strip if part.text.strip() in ("▲", "▼")]
        assert len(signs) == 4
        found = [contrast(part.style) for part in signs]
        assert min(found) >= 2.95
        assert found[1] < found[0]  # and still the paler the smaller
        assert found[2] < found[3]
