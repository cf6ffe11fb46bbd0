"""Who wins, series of games, playing in real time, and records as a list."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from textual.app import App, ComposeResult
from textual.widgets import DataTable

from msgrpo.agent import Agent, Decision
from msgrpo.episode import read_episodes
from msgrpo.errors import RecordError, UsageError
from msgrpo.evals.record import RecordFile
from msgrpo.evals.stats import bootstrap_mean
from msgrpo.game import Judge, Judgement, Outcome
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui.app import PlayApp
from msgrpo.tui.export import TRIES, append_episode
from msgrpo.tui.judging import Advice, Judging, advise
from msgrpo.tui.match import Match, new_match
from msgrpo.tui.plain import play_plain
from msgrpo.tui.records import Records, reached, standing_by_hand
from msgrpo.tui.screens.match import BETWEEN_S
from msgrpo.tui.screens.records import RecordsScreen
from msgrpo.tui.screens.start import StartScreen
from msgrpo.tui.series import Series, standing, verdict, winner
from msgrpo.tui.session import Session, Setup
from msgrpo.tui.status import worth
from msgrpo.tui.widgets.bars import ActionBars
from msgrpo.tui.widgets.board import BoardView
from tests.command_line import PROGRAM
from tests.tui_helpers import PATIENCE_S, ManualClock, answer, play_screen, press, scripted, settle, ticks, until

ROOT = Path(__file__).parents[1]


def seat(spec: str, temperature: float = 1.0) -> Agent:
    return {"random": RandomAgent, "optimal": OptimalAgent}[spec]()


async def finish(match: Match) -> Match:
    while not match.over:
        for i, player in match.waiting():
            session = match.sessions[i]
            session.answer(player, await session.agents[player].act(session.view(player)))
        match.commit()
    return match


def walked(setup: Setup, *ways: list[str | None]) -> Match:
    """A race in which the two take these ways, to the end."""
    match = new_match(setup, seat)
    for session, moves in zip(match.sessions, ways, strict=True):
        for move in moves:
            session.answer("player", Decision(move))
            session.commit()
    assert match.over
    return match


async def test_equal_returns_are_told_apart_by_the_steps() -> None:
    """Both reach the goal; the one who took fewer steps wins. By the return alone it would be a draw."""
    match = await finish(new_match(Setup("frozen-lake", "optimal", "optimal", seed=3), seat))
    assert winner(match) is None
    assert "a draw" in verdict(match)
    quick = [turn.action for turn in match.sessions[0].episode.turns]
    slow = ["left", *quick]  # the start is in a corner: one step lost
    raced = walked(Setup("frozen-lake", "random", "optimal", seed=3), slow, quick)
    assert [session.frames[-1].tallies["player"].total for session in raced.sessions] == [1.0, 1.0]
    assert winner(raced) == 1
    assert verdict(raced).endswith(f"optimal wins, in {len(quick)} steps against {len(slow)}")


async def test_in_a_series_the_seeds_advance_and_the_seats_of_a_duel_change() -> None:
    series = Series(Setup("snake-duel", "optimal", "random", seed=7), 4)
    seats = []
    for _ in range(4):
        setup = series.next()
        seats.append((setup.agent, setup.seed))
        match = await finish(new_match(setup, seat))
        series.add(match)
        if not series.over:
            assert f"after {series.played} game{'s' if series.played > 1 else ''}: " in standing(match, series)
    assert seats == [("optimal", 7), ("random", 8), ("optimal", 9), ("random", 10)]
    assert series.over
    assert series.wins[0] > series.wins[1]  # whoever sits where: the wrong variant counts seats, and draws level
    assert "no interval from fewer than 8 games" in series.card()
    assert all(difference >= 0 for difference in series.differences)
    series.differences *= 2
    low, high = bootstrap_mean(series.differences, seed=0)
    assert f"[{low:+.2f}, {high:+.2f}]" in series.card()
    series.differences = [1.0] * 8  # of equal games there is none
    assert "difference +1.00 [no interval]" in series.card()


async def test_the_app_plays_a_series_to_its_card(tmp_path: Path) -> None:
    clock = ManualClock()
    setup = Setup("frozen-lake", "optimal", "random", seed=3, speed=4.0)
    app = PlayApp(seat, setup, games=3, clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        for game in range(3):
            assert play_screen(app).match.sessions[0].seed == 3 + game
            while not play_screen(app).match.over:
                await ticks(pilot, clock, 1)
            await ticks(pilot, clock, 1, BETWEEN_S)
        series = play_screen(app).series
        assert series is not None
        assert series.over
        assert series.wins[0] >= 2
        await ticks(pilot, clock, 3, BETWEEN_S)
        assert play_screen(app).match.sessions[0].seed == 5  # no fourth game


async def test_a_live_game_waits_for_the_first_key_and_then_for_nobody(tmp_path: Path) -> None:
    clock = ManualClock()
    app = PlayApp(seat, Setup("snake-solo", "human", seed=1, live=True), clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 4)
        session = play_screen(app).match.sessions[0]
        assert session.last == 0
        await press(pilot, "right")
        assert session.last == 0  # the key is kept for the tick
        await ticks(pilot, clock, 1)
        assert [turn.action for turn in session.episode.turns] == ["right"]
        await ticks(pilot, clock, 1)
        assert session.episode.turns[1].action is None  # the snake goes on by itself
        assert session.episode.turns[1].failure is None
        await press(pilot, "space")
        await ticks(pilot, clock, 3)
        assert session.last == 2
        await press(pilot, "up", "down")
        await ticks(pilot, clock, 1)
        assert session.episode.turns[2].action == "down"  # the last key counts


@pytest.mark.parametrize("dialog", ["escape", "question_mark", "g", "ctrl+p"])
async def test_a_dialog_stops_a_live_game_which_then_goes_on(dialog: str, tmp_path: Path) -> None:
    clock = ManualClock()
    app = PlayApp(seat, Setup("snake-solo", "human", seed=1, live=True), clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "right")
        await ticks(pilot, clock, 1)
        screen, session = play_screen(app), play_screen(app).match.sessions[0]
        await press(pilot, dialog)
        assert app.screen is not screen
        await ticks(pilot, clock, 40)
        assert (session.last, session.over) == (1, False)
        app.screen.dismiss()
        await settle(pilot)
        await ticks(pilot, clock, 1, 0.2)
        assert session.last == 1  # a whole step's time to look again
        await ticks(pilot, clock, 1, 0.2)
        assert session.last == 2


async def test_an_answer_that_comes_behind_a_dialog_is_played_when_that_is_closed(tmp_path: Path) -> None:
    clock, gate = ManualClock(), asyncio.Event()
    agents = {"slow": scripted("slow", answer("right"), gate=gate)}
    setup = Setup("snake-solo", "human", "slow", seed=1, live=True)
    app = PlayApp(agents.__getitem__, setup, clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test() as pilot:
        await until(lambda: play_screen(app).asking.people())
        await pilot.press("right")
        screen = play_screen(app)
        await until(lambda: screen.wanted)
        clock.tick(0.5)
        await until(lambda: not screen.asking.people())
        await pilot.press("question_mark")
        await until(lambda: app.screen is not screen)
        gate.set()
        await until(lambda: screen.match.ready)
        await settle(pilot)
        assert screen.match.last == 0
        await press(pilot, "escape")
        assert screen.match.last == 1


async def test_who_goes_on_into_the_wall_is_not_said_to_have_given_no_action(tmp_path: Path) -> None:
    clock = ManualClock()
    app = PlayApp(seat, Setup("snake-solo", "human", seed=1, live=True), clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "right")
        while not play_screen(app).match.over:
            await ticks(pilot, clock, 1)
        assert ": (on) lost" in str(app.screen.query_one(".status").render())


# ── records ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def record(tmp_path: Path) -> Path:
    file = tmp_path / "some" / "episodes.jsonl"
    for seed in range(4):
        for agent in ("optimal", "random"):
            match = play_plain(Setup("frozen-lake", agent, seed=seed), seat, quiet())
            append_episode(file, match.sessions[0].episode)
    return file


def quiet():
    from io import StringIO

    from rich.console import Console

    return Console(file=StringIO())


async def test_a_record_is_a_list_with_filters_and_a_next_episode(record: Path) -> None:
    records = Records.read(record.parent)
    app = PlayApp(seat, records=records, clock=ManualClock())
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, RecordsScreen)
        await press(pilot, "f")
        assert records.only == "lost"
        lost = records.listed()
        assert lost
        assert all(records.episodes[i].score == 0 for i in lost)
        await press(pilot, "enter")
        assert play_screen(app).match.sessions[0].episode.start_seed == records.episodes[lost[0]].start_seed
        if len(lost) > 1:
            await press(pilot, "x")
            assert records.place == lost[1]
            await press(pilot, "X")
        assert records.place == lost[0]
        await press(pilot, "tab")
        assert play_screen(app).match.cursor > 0  # to the end of the fall, or the first mistake
        await press(pilot, "q")
        assert isinstance(app.screen, RecordsScreen)


def test_an_episode_is_chosen_by_its_number(record: Path) -> None:
    records = Records.read(record)
    records.choose(3)
    assert records.episode.start_seed == 1
    with pytest.raises(UsageError, match="no episode 9"):
        records.choose(9)
    with pytest.raises(RecordError, match="no records"):
        Records.read(_empty(record))


def _empty(record: Path) -> Path:
    folder = record.parent / "nothing"
    folder.mkdir()
    return folder


def test_a_game_that_has_ended_has_the_place_that_the_high_scores_give_it(record: Path) -> None:
    """The end of a game ranked unfinished games by their return, and games of one return alike."""
    file = record.parent / "human.jsonl"
    (best, *_) = sorted(read_episodes(record), key=reached, reverse=True)
    by_hand = best.model_copy(update={"agents": {"player": "human"}})
    assert standing_by_hand(file, by_hand) == ""
    longer = by_hand.model_copy(update={"turns": [*by_hand.turns, by_hand.turns[-1]]})
    unfinished = by_hand.model_copy(update={"outcome": Outcome.PLAYING, "returns": {"player": 5.0}})
    shared = best.model_copy(update={"agents": {"player": "nano+human"}})
    other = by_hand.model_copy(update={"scenario": "snake"})
    for episode in (shared, other, longer):
        append_episode(file, episode)
    assert standing_by_hand(file, longer) == ""  # the only one of a person alone in this game
    for episode in (by_hand, unfinished):
        append_episode(file, episode)
    assert standing_by_hand(file, by_hand) == "place 1 of 3 by hand, the best +1"
    assert standing_by_hand(file, longer) == "place 2 of 3 by hand, the best +1"
    assert standing_by_hand(file, shared) == ""
    scores = Records.high_scores(file)
    places = [scores.episodes[i] for i in scores.listed() if scores.episodes[i].scenario == by_hand.scenario]
    assert places == [by_hand, longer, unfinished]


def test_two_apps_that_end_a_game_at_once_both_write_it_down(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one found the file locked, said so, and its game was lost."""
    file = record.parent / "human.jsonl"
    here, elsewhere = list(read_episodes(record))[:2]
    other = RecordFile(file)

    def other_goes_on(seconds: float) -> None:
        other.append(elsewhere)
        other.close()

    monkeypatch.setattr("msgrpo.tui.export.sleep", other_goes_on)
    append_episode(file, here)
    assert list(read_episodes(file)) == [elsewhere, here]


def test_a_record_that_stays_locked_is_an_error(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("msgrpo.tui.export.sleep", waits.append)
    (episode, *_) = read_episodes(record)
    with RecordFile(record), pytest.raises(RecordError, match="another process writes"):
        append_episode(record, episode)
    assert len(waits) == TRIES


@pytest.mark.parametrize("keys", [["left"] * 8, ["left", "q"]], ids=["finished", "broken off"])
async def test_the_screen_does_not_wait_for_another_app_that_writes(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = PlayApp(seat, Setup("frozen-lake", "human", seed=3), clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    said: list[str] = []
    app.notify = lambda message, **how: said.append(message)  # type: ignore[method-assign]
    other, left = RecordFile(app.by_hand), threading.Event()

    def waits(seconds: float) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert left.wait(PATIENCE_S)

    monkeypatch.setattr("msgrpo.tui.export.sleep", waits)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, *keys)
        assert said == []
    assert list(read_episodes(app.by_hand)) == []
    other.close()
    left.set()
    await until(lambda: said)
    assert said == [f"recorded in {app.by_hand}"]
    (episode,) = read_episodes(app.by_hand)
    assert len(episode.turns) == (1 if "q" in keys else 8)


async def test_high_scores_are_what_people_reached_and_the_best_first(record: Path, tmp_path: Path) -> None:
    plays = tmp_path / "plays"
    app = PlayApp(seat, clock=ManualClock(), runs=tmp_path, plays=plays)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "h")
        assert not isinstance(app.screen, RecordsScreen)  # nobody has played
        for episode in read_episodes(record):
            for who in ("human", "nano"):
                append_episode(app.by_hand, episode.model_copy(update={"agents": {"player": who}}))
        unfinished = {"agents": {"player": "human"}, "outcome": Outcome.PLAYING}
        append_episode(app.by_hand, max(read_episodes(record), key=reached).model_copy(update=unfinished))
        await press(pilot, "h")
        assert isinstance(app.screen, RecordsScreen)
        records = app.screen.records
        order = [records.episodes[i] for i in records.listed()]
        assert {spec for episode in order for spec in episode.agents.values()} == {"human"}
        assert order.pop().outcome is Outcome.PLAYING
        found = [(-reached(episode), len(episode.turns)) for episode in order]
        assert found == sorted(found) != sorted(found, reverse=True)
        await press(pilot, "enter", "x")
        assert records.place == records.listed()[1]  # the next one is the next best
        await press(pilot, "q", "b")
        assert records.listed() == sorted(records.listed())


async def test_a_list_of_the_best_is_read_from_the_best_one(record: Path, tmp_path: Path) -> None:
    """Of the high scores, enter watched the game that was played first."""
    app = PlayApp(seat, clock=ManualClock(), runs=tmp_path, plays=tmp_path / "plays")
    for episode in sorted(read_episodes(record), key=reached):
        append_episode(app.by_hand, episode.model_copy(update={"agents": {"player": "human"}}))
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "h")
        assert isinstance(app.screen, RecordsScreen)
        records, table = app.screen.records, app.screen.query_one(DataTable)
        assert (table.cursor_row, records.place) == (0, records.listed()[0])
        assert records.place != 0
        await press(pilot, "b", "down", "b")
        assert (table.cursor_row, records.place) == (0, records.listed()[0])


def test_a_setup_knows_its_mode() -> None:
    live = Setup("snake", "human", live=True)
    assert live.mode == "live"
    assert replace(live, live=False).mode == "play"
    assert isinstance(new_match(Setup("snake", "random"), seat).sessions[0], Session)


async def test_the_choices_of_the_start_screen_are_remembered(tmp_path: Path) -> None:
    memory = tmp_path / "state" / "choices.json"

    def app() -> PlayApp:
        return PlayApp(seat, clock=ManualClock(), runs=tmp_path, plays=tmp_path, memory=memory)

    first = app()
    async with first.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, *["down"] * 5, "right", "down", "s", "s", "plus", "enter")
        began = play_screen(first).setup
    assert (began.scenario, began.mode, began.seed, began.speed) == ("snake", "play", 2, 8.0)
    for damage in (None, "{", "[]", '{"games": "no-such-game", "seed": "-1", "speed": "fast"}'):
        if damage is not None:
            memory.write_text(damage)
        again = app()
        async with again.run_test(size=(100, 30)) as pilot:
            await settle(pilot)
            setup = again.screen.setup if isinstance(again.screen, StartScreen) else None
            assert setup is not None
            assert setup == (began if damage is None else Setup("frozen-lake", "nano:frozen-lake", "nano"))


def test_a_series_in_plain_text_plays_all_its_games_and_needs_two(tmp_path: Path) -> None:
    def play(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [*PROGRAM, "play", "frozen-lake", "--plain", "--best-of", "3"]
        return subprocess.run([*program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    done = play("--agent", "optimal", "--against", "random")
    assert done.returncode == 0, done.stderr
    assert "game 3 of 3: optimal 3 - random 0" in done.stdout
    alone = play("--agent", "optimal")
    assert alone.returncode == 2
    assert "msgrpo play frozen-lake --agent nano --against random --best-of 3" in alone.stderr


def test_who_leaves_a_game_in_plain_text_leaves_the_series(tmp_path: Path) -> None:
    """The next game began, and the one that was left counted as a draw."""
    program = [*PROGRAM, "play", "frozen-lake", "--plain", "--best-of", "3"]
    done = subprocess.run(
        [*program, "--agent", "human", "--against", "random"],
        cwd=tmp_path, input="q\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left before the end") == 1
    assert "drawn" not in done.stdout


def test_a_damaged_file_in_a_folder_is_left_out_and_told(record: Path) -> None:
    (record.parent / "broken.jsonl").write_text('{"a": 1}\n{}\n')
    records = Records.read(record.parent)
    assert len(records.episodes) == 8
    assert "1 file left out" in records.name
    with pytest.raises(RecordError, match="broken"):
        Records.read(record.parent / "broken.jsonl")


# ── what a review found ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_damaged_record_of_people_does_not_end_the_game(tmp_path: Path) -> None:
    (tmp_path / "human.jsonl").write_text('{"torn": \n{}\n')
    app = PlayApp(seat, Setup("frozen-lake", "human", seed=3), clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, *["left"] * 8)
        assert play_screen(app).match.over
        assert "recorded in" in " ".join(play_screen(app).notes)


def test_a_torn_line_is_cut_off_before_the_next_one(record: Path) -> None:
    whole = record.read_bytes()
    episode = next(read_episodes(record))
    record.write_bytes(whole + whole[:100])  # whoever wrote it was killed
    append_episode(record, episode)
    assert record.read_bytes() == whole + whole[: whole.index(b"\n") + 1]


@pytest.mark.parametrize("keys", [["left"] * 8, ["left", "q"]], ids=["finished", "broken off"])
async def test_a_record_of_people_that_cannot_be_written_is_told(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "human.jsonl").mkdir()
    app = PlayApp(seat, Setup("frozen-lake", "human", seed=3), clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    said: list[str] = []
    app.notify = lambda message, **how: said.append(message)  # type: ignore[method-assign]
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, *keys)
    assert said == [f"{tmp_path / 'human.jsonl'} cannot be opened: Is a directory"]


@pytest.mark.parametrize("setup", [Setup("frozen-lake", "human", "optimal"), Setup("snake-duel", "human", "optimal")])
async def test_nothing_says_what_is_best_before_the_person_has_chosen(setup: Setup, tmp_path: Path) -> None:
    app = PlayApp(seat, setup, clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = play_screen(app)
        assert screen.match.secret
        told = [
            worth(screen.match, screen.judging, i, hint=False, idle="", width=80)
            for i in range(len(screen.match.sessions))
        ]
        assert not any(told)
        hints = [
            worth(screen.match, screen.judging, i, hint=True, idle="", width=80)
            for i in range(len(screen.match.sessions))
        ]
        assert "best" in hints[0]  # the person's own
        assert "optimal" not in hints[0]
        assert not any(hints[1:])


async def test_a_move_within_the_error_of_a_search_is_not_called_best(tmp_path: Path) -> None:
    app = PlayApp(seat, Setup("snake", "human"), clock=ManualClock(), plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "up")
        screen = play_screen(app)
        (player,) = screen.match.sessions[0].players
        game, _ = screen.judging._found[0, 0, player]
        for up, error, says in (
            (1.0, 0.2, "up, perhaps as good as the best"),
            (1.0, 0.0, "up lost 0.10"),
            (1.1, 0.0, "up is best"),
        ):
            found = Judgement({"up": up, "down": 0.0, "left": 1.1, "right": 0.0}, {"up": error})
            screen.judging._found[0, 0, player] = game, Advice(found, ("left",) if up < 1.1 else ("up",), lost=False)
            assert f"last: {says}" in worth(screen.match, screen.judging, 0, hint=False, idle="", width=80)


async def test_a_duel_without_a_named_opponent_is_counted_by_agent() -> None:
    alone, named = (Series(Setup("snake-duel", "random", against), 4) for against in (None, "optimal"))
    for series in (alone, named):
        while not series.over:
            series.add(await finish(new_match(series.next(), seat)))
    assert (alone.wins, alone.differences) == (named.wins, named.differences)
    assert "optimal" in alone.score()


async def test_scrubbing_stops_a_live_game_and_it_goes_on(tmp_path: Path) -> None:
    clock = ManualClock()
    app = PlayApp(seat, Setup("snake-solo", "human", seed=1, live=True), clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "right")
        await ticks(pilot, clock, 2)
        session = play_screen(app).match.sessions[0]
        await press(pilot, "[")
        await ticks(pilot, clock, 1)
        assert session.last == 2  # nobody moves in the past
        await ticks(pilot, clock, 3)
        assert session.last > 2  # and back in the present the clock goes on


async def test_a_dialog_holds_the_next_game_up_and_restart_keeps_the_series(tmp_path: Path) -> None:
    clock = ManualClock()
    setup = Setup("frozen-lake", "optimal", "random", seed=3)
    app = PlayApp(seat, setup, games=2, clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 1)
        await press(pilot, "r")
        screen = play_screen(app)
        assert screen.series is not None
        assert screen.series.played == 0
        while not screen.match.over:
            await ticks(pilot, clock, 1)
        await press(pilot, "r", "x")  # counted: neither plays it again
        assert play_screen(app) is screen
        await press(pilot, "question_mark")
        await ticks(pilot, clock, 2, BETWEEN_S)
        assert screen in app.screen_stack
        await press(pilot, "escape")
        await ticks(pilot, clock, 1, BETWEEN_S)
        assert play_screen(app).match.sessions[0].seed == 4
        assert "game 2 of 2" in app.export_screenshot().replace("&#160;", " ")


def test_of_two_losers_nobody_is_quicker() -> None:
    setup = Setup("frozen-lake", "random", "optimal", seed=7)  # a hole beside the start
    match = walked(setup, ["right"], ["left"] * 8)
    assert [session.game.success for session in match.sessions] == [False, False]
    assert winner(match) is None


async def test_the_first_episode_can_be_chosen_and_odd_names_are_shown(record: Path) -> None:
    records = Records.read(record)
    records.choose(1)
    records.episodes[1] = records.episodes[1].model_copy(update={"agents": {"player": "a[/b] llama[red]x"}})
    app = PlayApp(seat, records=records, clock=ManualClock())
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        assert play_screen(app).replay is records
        await press(pilot, "q")
        await until(lambda: "llama[red]x" in app.export_screenshot().replace("&#160;", " "))  # drawn after the key


def broken(game: object, player: str) -> list[str]:
    raise ValueError("no idea")


@pytest.mark.parametrize(
    ("broken", "says"),
    [(broken, "ValueError: no idea"), (lambda game, player: Judgement({"up": 1.0}), "values ['up'], not each legal")],
)
async def test_a_judge_that_fails_is_told_and_the_game_goes_on(
    broken: Judge, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCENARIOS, "frozen-lake", replace(get_scenario("frozen-lake"), judge=broken))
    clock = ManualClock()
    app = PlayApp(seat, Setup("frozen-lake", "optimal", seed=3), clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await ticks(pilot, clock, 2)
        assert play_screen(app).judging.failed.startswith("no move is judged any more: the game frozen-lake")
        assert says in play_screen(app).judging.failed
        assert play_screen(app).match.last == 2


def test_where_the_reference_player_fails_the_judges_best_moves_are_recommended() -> None:
    lake = replace(get_scenario("frozen-lake"), reference=broken)
    advice = advise(lake, lake.new(3, 3), "player")
    assert advice.moves == tuple(advice.judgement.best)


async def test_brackets_in_names_are_brackets_everywhere(tmp_path: Path) -> None:
    """Titles, verdict and messages: nothing that a model or a file is called is taken as markup."""
    names = ("llama[red]x", "m[@click=app.quit]y")
    first, second = (f"endpoint:http://127.0.0.1:9/v1#{name}" for name in names)
    clock = ManualClock()
    setup = Setup("frozen-lake", first, second, seed=3)
    app = PlayApp(RandomAgent, setup, games=2, clock=clock, runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await settle(pilot)
        while not play_screen(app).match.over:
            await ticks(pilot, clock, 1)
        app.notify("no server: [/nope]")

        def text() -> str:
            return app.export_screenshot().replace("&#160;", " ")

        await until(lambda: "[/nope]" in text())
        for name in names:
            assert text().count(name) >= 4  # the app's title, both boxes, the verdict


async def test_the_temperature_chosen_on_the_start_screen_is_what_the_model_gets(tmp_path: Path) -> None:
    memory, agent = tmp_path / "memory.json", scripted("nano", answer("up"))
    memory.write_text('{"ways": "watch", "agents": "nano"}')
    app = PlayApp({"nano": agent}.__getitem__, clock=ManualClock(), runs=tmp_path, memory=memory)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "T", "T")
        assert "--temperature 0.5" in str(app.screen.query_one("#command").render())
        await press(pilot, "enter", "space", "n")
        screen = play_screen(app)
        assert screen.match.sessions[0].episode.settings["player"]["sampling"]["temperature"] == 0.5
        await press(pilot, "q", "t")
        assert "--temperature 0.7" in str(app.screen.query_one("#command").render())
    app = PlayApp({"nano": agent}.__getitem__, clock=ManualClock(), runs=tmp_path, memory=memory)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "--temperature 0.5" in str(app.screen.query_one("#command").render())  # of the game that was started


@pytest.mark.parametrize(("motion", "lit"), [("full", True), ("none", False)])
async def test_a_reward_lights_the_cell_up_where_the_app_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, motion: str, lit: bool
) -> None:
    monkeypatch.setattr("msgrpo.tui.widgets.board.FLASH_S", 60.0)
    clock = ManualClock()
    app = PlayApp(lambda spec: OptimalAgent(), Setup("frozen-lake", "optimal", seed=3), clock=clock, plays=tmp_path)
    app.animation_level = motion  # type: ignore[assignment]
    async with app.run_test() as pilot:
        await settle(pilot)
        board = app.screen.query_one(BoardView)
        while not play_screen(app).match.over:
            assert board._lit == frozenset()
            await ticks(pilot, clock, 1)
        assert ("won" in board._lit) is lit
        accent = app.screen.query_one(BoardView).get_component_rich_style("board--lit").bgcolor
        drawn = {
            segment.style.bgcolor
            for y in range(board.size.height)
            for segment in board.render_line(y)
            if segment.style
        }
        assert (accent in drawn) is lit

        monkeypatch.setattr("msgrpo.tui.widgets.board.FLASH_S", 0.01)
        board.flash(["won"])
        await until(lambda: not board._lit)


@pytest.mark.parametrize("motion", ["full", "none"])
async def test_bars_come_to_their_new_length_by_and_by_where_the_app_moves(
    monkeypatch: pytest.MonkeyPatch, motion: str
) -> None:
    ease_s = 1.0
    monkeypatch.setattr("msgrpo.tui.widgets.bars.EASE_S", ease_s)

    class Bars(App[None]):
        def compose(self) -> ComposeResult:
            yield ActionBars(0, "player", ("left", "right"))

    app = Bars()
    app.animation_level = motion  # type: ignore[assignment]
    async with app.run_test() as pilot:
        bars = app.query_one(ActionBars)
        bars.show({"left": 1.0, "right": 0.0}, None, legal=bars.actions, numbers={})
        while bars.eased < 1.0:
            await asyncio.sleep(ease_s / 20)
        await pilot.pause()
        lengths = []
        bars.show({"left": 0.0, "right": 1.0}, None, legal=bars.actions, numbers={})
        for _ in range(200):
            lengths.append(str(bars.render()).split("\n")[0].count("█"))
            if lengths[-1] == 0:
                break
            await asyncio.sleep(ease_s / 20)
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] == 0
        assert "100%" in str(bars.render()).split("\n")[1]  # the figure is the new one at once
        assert (len(set(lengths)) > 1) is (motion == "full")


def test_what_is_not_judged_yet_has_its_lines_already_so_that_the_screen_is_laid_out_once() -> None:
    """A line that came with each judgement and went with each move had the screen laid out anew twice a move."""
    session = Session(get_scenario("snake-solo"), {"snake1": RandomAgent()}, seed=1)
    match = Match([session])
    told: list[object] = []
    judging = Judging(match, told.append)
    assert worth(match, judging, 0, hint=False, idle="", width=80) == "now: …"
    session.answer("snake1", Decision("up"))
    match.commit()
    assert worth(match, judging, 0, hint=False, idle="", width=80) == "last: …\nnow: …"
    judging.failed = "no move is judged any more"
    assert worth(match, judging, 0, hint=False, idle="", width=80) == "no move is judged any more"
