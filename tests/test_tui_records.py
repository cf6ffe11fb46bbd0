"""`msgrpo view`: the list of a record's episodes: filters, words, agents, two side by side; as text and as a page."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from textual.widgets import DataTable, DirectoryTree, Static

from msgrpo.errors import MsgrpoError, RecordError, UsageError
from msgrpo.evals.record import records_in
from msgrpo.evals.run import evaluate
from msgrpo.games import get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.tui import launch
from msgrpo.tui.app import PlayApp
from msgrpo.tui.match import Match
from msgrpo.tui.records import Records
from msgrpo.tui.screens.dialogs import RecordTree
from msgrpo.tui.screens.records import RecordsScreen
from msgrpo.tui.session import Session
from msgrpo.tui.widgets.keyline import KeyLine
from tests.command_line import run, run_here
from tests.tui_helpers import ManualClock, answer, play_screen, press, scripted, settle, until

LAKE = get_scenario("frozen-lake")
AGENTS = {
    "random": RandomAgent(),
    "optimal": OptimalAgent(),
    "nano": scripted("nano", answer("up", "a hole is near.")),
}


@pytest.fixture
async def evaluated(tmp_path: Path) -> Path:
    out = tmp_path / "eval"
    await evaluate(
        [scripted("nano", answer("down", "no danger."), answer("right", "a hole is near."))], [LAKE], 4, out
    )
    await evaluate([OptimalAgent()], [LAKE], 4, out, regret=True)
    return out


def title(app: PlayApp) -> str:
    return str(app.screen.query_one("#title", Static).render())


def test_two_agents_with_one_short_name_are_told_apart(evaluated: Path) -> None:
    """Side by side, too: the titles of both were seed-0."""
    episodes = Records.read(evaluated).episodes
    specs = ["adapter:runs/a/seed-0", "adapter:runs/b/seed-0", "adapter:runs/b/seed-1"]
    renamed = [e.model_copy(update={"agents": {"player": spec}}) for e, spec in zip(episodes, specs, strict=False)]
    records = Records("three", renamed)
    assert [records.line(place)[2] for place in range(3)] == ["a/seed-0", "b/seed-0", "seed-1"]
    match = Match([Session.replay(episode, "play") for episode in renamed[:2]])
    match.seat_people()
    assert [session.title("player") for session in match.sessions] == ["a/seed-0", "b/seed-0"]


def test_columns_that_say_nothing_are_left_out_and_ends_are_words(evaluated: Path) -> None:
    records = Records.read(evaluated)
    names, lines = records.table()
    assert ("lost a move" in names, "invalid" in names) == (True, False)  # what the optimal agent lost was judged
    assert {line[names.index("end")] for line in lines.values()} <= {"goal", "lost", "out of steps"}
    records.agent = next(spec for spec in (e.agents["player"] for e in records.episodes) if spec != "optimal")
    assert records.table()[0] == ["#", "scenario", "who", "return", "end", "steps", "seed"]


async def test_filters_words_and_agents_narrow_the_list(evaluated: Path) -> None:
    app = PlayApp(AGENTS.__getitem__, records=Records.read(evaluated), clock=ManualClock())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        table = app.screen.query_one(DataTable)
        scenario = next(column for column in table.columns.values() if str(column.label) == "scenario")
        assert (scenario.width, scenario.auto_width) == (len("frozen-lake"), False)  # not cut until it is measured
        assert table.row_count == 8
        await press(pilot, "a")
        assert "nano" in title(app)
        assert table.row_count == 4
        await press(pilot, "slash", *"HOLE", "enter")
        assert "“HOLE”" in title(app)
        found = [e for e in Records.read(evaluated).episodes if any("hole" in (t.answer or "") for t in e.turns)]
        assert table.row_count == len(found) > 0
        await press(pilot, "slash", "enter", "a", "a")  # no words, everybody
        assert table.row_count == 8
        await press(pilot, "f")
        assert 0 < table.row_count < 8


async def test_two_agents_on_one_start_stand_side_by_side(evaluated: Path) -> None:
    app = PlayApp(AGENTS.__getitem__, records=Records.read(evaluated), clock=ManualClock())
    async with app.run_test(size=(120, 36)) as pilot:
        await settle(pilot)
        await press(pilot, "down", "c")
        match = play_screen(app).match
        assert len(match.sessions) == 2
        one, other = (session.episode for session in match.sessions)
        assert (one.start_seed, one.chance_seed) == (other.start_seed, other.chance_seed)
        assert {*one.agents.values(), *other.agents.values()} == {"nano", "optimal"}
        await press(pilot, "right", "right")
        assert [session.cursor for session in match.sessions] == [min(2, session.last) for session in match.sessions]
        await press(pilot, "q")
        assert isinstance(app.screen, RecordsScreen)


@pytest.mark.parametrize("dialog", [["question_mark", "escape"], ["slash", "escape"], ["ctrl+p", "escape"]])
async def test_the_row_stays_when_a_dialog_is_closed(dialog: list[str], evaluated: Path) -> None:
    """It was the first one again."""
    app = PlayApp(AGENTS.__getitem__, records=Records.read(evaluated), clock=ManualClock())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "down", "down", *dialog)
        assert app.screen.query_one(DataTable).cursor_row == 2
        await press(pilot, "enter", "x", "q")  # the episode that was looked at last
        assert app.screen.query_one(DataTable).cursor_row == 3


async def test_the_list_names_its_keys_and_a_click_on_one_does_what_it_says(evaluated: Path) -> None:
    """Enter was not named, neither at the foot nor in the help, which left out b as well."""
    records = Records.read(evaluated)
    app = PlayApp(AGENTS.__getitem__, records=records, clock=ManualClock())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        line = app.screen.query_one(KeyLine)
        assert [hint.key for hint in line.fitting(80)] == ["enter", "f", "a", "/", "b", "c", "?", "q"]
        await press(pilot, "question_mark")
        words = app.export_screenshot().replace("&#160;", " ")
        assert "watch the chosen episode" in words
        assert "the best first" in words
        await press(pilot, "escape", "down")
        await pilot.click(line, offset=(2, 0))
        await settle(pilot)
        assert play_screen(app).replay is records
        assert records.place == 1


async def test_a_title_without_room_ends_with_a_sign_that_it_goes_on(evaluated: Path) -> None:
    """What did not fit stood on a second line, which is not shown."""
    records = Records.read(evaluated)
    app = PlayApp(AGENTS.__getitem__, records=records, clock=ManualClock())
    async with app.run_test(size=(50, 24)) as pilot:
        await settle(pilot)
        for keys in ((), ("enter",)):
            await press(pilot, *keys)
            line = app.screen._compositor.render_strips()[0].text.rstrip()
            assert line.startswith(" msgrpo   ")
            assert line.endswith("…")


async def test_home_and_end_go_to_the_first_and_the_last_row(evaluated: Path) -> None:
    """They did nothing."""
    app = PlayApp(AGENTS.__getitem__, records=Records.read(evaluated), clock=ManualClock())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "end")
        assert app.screen.query_one(DataTable).cursor_row == 7
        await press(pilot, "enter")
        assert "next" not in {hint.words for hint in play_screen(app).hints()}
        await press(pilot, "x")
        assert [note.message for note in app._notifications] == ["This is the last episode of the list."]
        await press(pilot, "X")
        assert "next" in {hint.words for hint in play_screen(app).hints()}
        await press(pilot, "q", "home")
        assert app.screen.query_one(DataTable).cursor_row == 0
        await press(pilot, "enter", "X")
        assert [note.message for note in app._notifications] == ["This is the first episode of the list."]


async def test_a_list_without_a_line_says_so_and_can_be_filled_again(evaluated: Path) -> None:
    """It showed the names of the columns alone."""
    records = Records.read(evaluated)
    app = PlayApp(AGENTS.__getitem__, records=records, clock=ManualClock())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "slash", *"zebra", "enter")
        assert "No episode is left." in str(app.screen.query_one("#none", Static).render())
        assert not app.screen.query_one(DataTable).display
        await press(pilot, "enter", "c", "slash", "enter", "down", "enter")
        assert play_screen(app).replay is records
        assert records.place == 1


async def test_a_message_goes_with_the_screen_that_it_was_on(evaluated: Path, tmp_path: Path) -> None:
    """What was wrong with one path stood over the list of the next one."""
    app = PlayApp(AGENTS.__getitem__, clock=ManualClock(), runs=tmp_path, plays=tmp_path / "plays")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.open_records(tmp_path / "nowhere")
        await until(lambda: list(app._notifications))
        app.open_records(evaluated)
        await settle(pilot)
        assert isinstance(app.screen, RecordsScreen)
        assert not list(app._notifications)
        await press(pilot, "end", "enter", "x")
        assert list(app._notifications)
        await press(pilot, "q")
        assert not list(app._notifications)


async def test_an_episode_without_a_partner_is_said(evaluated: Path) -> None:
    records = Records.read(evaluated / "optimal")
    app = PlayApp(AGENTS.__getitem__, records=records, clock=ManualClock())
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "c")
        assert isinstance(app.screen, RecordsScreen)


async def test_the_row_stays_after_no_partner_was_found_for_another_one(evaluated: Path) -> None:
    """A dialog that was closed put the list back to the row that had no partner."""
    app = PlayApp(AGENTS.__getitem__, records=Records.read(evaluated / "optimal"), clock=ManualClock())
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        await press(pilot, "down", "c", "down", "question_mark", "escape")
        assert app.screen.query_one(DataTable).cursor_row == 2


@pytest.mark.parametrize("late_s", [0, 0.3])
async def test_a_record_is_looked_for_where_records_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Whenever the tree is read for the first time: that closed what had been opened before."""
    real = DirectoryTree.watch_path

    async def watch_path(tree: DirectoryTree) -> None:
        await asyncio.sleep(late_s)
        await real(tree)

    monkeypatch.setattr(DirectoryTree, "watch_path", watch_path)
    for folder in ("a_source_folder", "runs/eval\x1b[2J", "plays"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "plays" / "human.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    app = PlayApp(AGENTS.__getitem__, clock=ManualClock(), runs=tmp_path, plays=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await press(pilot, "o")
        tree = app.screen.query_one(RecordTree)

        def folders() -> dict[str, list[str]]:
            return {str(node.label): [str(child.label) for child in node.children] for node in tree.root.children}

        await until(lambda: tree.cursor_node is not None and str(tree.cursor_node.label) == "plays")
        await until(lambda: all(folders()[name] for name in ("plays", "runs")))
        assert str(tree.root.label) == tmp_path.name  # it was "."
        assert folders() == {"a_source_folder": [], "plays": ["human.jsonl"], "runs": ["eval\ufffd[2J"]}


def test_a_folder_whose_name_drives_a_terminal_is_listed_by_what_of_it_can_be_read(
    evaluated: Path, tmp_path: Path
) -> None:
    """`view` showed it as it was: the terminal had another title, or another colour."""
    folder = evaluated.rename(tmp_path / "x\x1b]0;title\x07")
    assert Records.read(folder).name == str(tmp_path / "x\ufffd]0;title\ufffd")


def listed(*arguments: str) -> str:
    return str(run("view", *arguments).output)


async def test_without_a_terminal_the_list_is_text(evaluated: Path) -> None:
    assert listed(str(evaluated)).count("frozen-lake") == 8
    only = listed(str(evaluated), "--agent", "optimal", "--only", "won")
    assert only.count("│ frozen-lake") == 4
    assert "nano" not in only
    assert listed(str(evaluated), "--words", "no such words").count("│ frozen-lake") == 0
    assert "0.000" in only  # what moves lost, where it was judged


async def test_a_folder_whose_name_looks_like_markup_is_read(evaluated: Path, tmp_path: Path) -> None:
    """What is said while a recording is written ended the program for such a name, and the recording was lost."""
    folder = Path(shutil.copytree(evaluated, tmp_path / "a[" / "b]"))
    assert listed(str(folder)).count("frozen-lake") == 8


@pytest.mark.parametrize("arguments", [["--only", "wn"], ["--agent", "nobody"]])
async def test_a_filter_that_there_is_not_is_refused(evaluated: Path, arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        listed(str(evaluated), *arguments)


async def test_an_agent_is_found_by_the_name_that_the_list_shows(tmp_path: Path) -> None:
    """The list showed `fl`, and --agent fl was refused."""
    nano = scripted("adapter:runs/fl", answer("down"))
    await evaluate([nano, OptimalAgent()], [LAKE], 2, tmp_path)
    assert "│ fl " in listed(str(tmp_path))
    assert listed(str(tmp_path), "--agent", "fl") == listed(str(tmp_path), "--agent", "adapter:runs/fl")
    assert listed(str(tmp_path), "--agent", "fl").count("│ frozen-lake") == 2
    with pytest.raises(UsageError) as refused:
        listed(str(tmp_path), "--agent", "fll")
    assert "fl" in str(refused.value.fix)


async def test_two_endpoints_with_one_model_are_told_apart_in_a_narrow_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 80 columns both were endpoint:http://127.…"""
    monkeypatch.setenv("COLUMNS", "80")
    specs = [f"endpoint:http://127.0.0.1:{port}/v1#Qwen/Qwen2.5-3B-Instruct" for port in (8000, 8001)]
    await evaluate([scripted(spec, answer("down")) for spec in specs], [LAKE], 2, tmp_path)
    text = listed(str(tmp_path))
    assert [text.count(f"127.0.0.1:{port}/v1#") for port in (8000, 8001)] == [2, 2]


async def test_the_command_that_shows_a_game_from_outside_is_given_whole(
    evaluated: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its advice ended in … after the name of the game."""
    file = records_in([evaluated])[0]
    file.write_text(file.read_text().replace('"scenario":"frozen-lake"', '"scenario":"my_game.py:scenario"'))
    arguments = ["play", "--replay", str(file), "--episode", "2", "--plain"]
    assert run_here(monkeypatch, *arguments) == 2
    assert f"msgrpo --allow my_game.py:scenario {' '.join(arguments)}\n" in capsys.readouterr().err
    app = PlayApp(lambda spec: AGENTS[spec], records=Records.read(file), clock=ManualClock())
    async with app.run_test() as pilot:
        await settle(pilot)
        await press(pilot, "enter")
        (said,) = [note.message for note in app._notifications]
    assert said.endswith(f"msgrpo --allow my_game.py:scenario play --replay {file}")


async def test_the_page_holds_as_many_episodes_as_asked_for(evaluated: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    listed(str(evaluated), "--html", str(file), "--episodes", "2")
    text = file.read_text()
    data = json.loads(text.split('id="plays">')[1].split("</script>")[0])
    assert [len(play["episodes"]) for play in data] == [2, 2]
    with pytest.raises(MsgrpoError, match="cannot be written"):
        listed(str(evaluated), "--html", str(tmp_path / "nowhere" / "page.html"))


def test_of_records_without_a_result_no_page_is_written(tmp_path: Path) -> None:
    """It was an empty one, and the command ended well."""
    (tmp_path / "r.jsonl").write_text('{"cut off')
    with pytest.raises(RecordError, match="no result to show"):
        listed(str(tmp_path), "--html", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


def test_a_list_in_a_pipe_is_not_cut_to_a_terminals_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console = Console(file=io.StringIO(), width=40)
    file = tmp_path / "r.jsonl"
    from msgrpo.episode import new_episode

    file.write_text(
        new_episode(
            get_scenario("snake-poison-apple-and-banana"), {"snake1": RandomAgent()}, 1, 1, 1
        ).model_dump_json()
        + "\n"
    )
    launch.browse(AGENTS.__getitem__, Records.read(file), plain=True, console=console)
    assert isinstance(console.file, io.StringIO)
    assert "snake-poison-apple-and-banana" in console.file.getvalue()


async def test_mistakes_are_not_looked_for_where_no_move_was_judged(evaluated: Path) -> None:
    """The table was empty, as if there had been none."""
    assert len(launch.filtered(evaluated, "mistakes", "", "", best=False).episodes) == 8
    alone = next(folder for folder in evaluated.iterdir() if folder.name.startswith("nano"))
    with pytest.raises(UsageError, match=r"no move of .* was judged"):
        launch.filtered(alone, "mistakes", "", "", best=False)


async def test_the_folder_of_a_training_run_shows_its_transcripts(evaluated: Path, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    recorded = next(evaluated.rglob("*.jsonl")).read_bytes()
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    (run / "transcripts.jsonl").write_bytes(recorded)
    assert len(Records.read(run).episodes) == 4
    with pytest.raises(RecordError) as refused:  # a leaderboard counts no training
        records_in([run])
    assert f"msgrpo view '{run}'" in str(refused.value)
