"""Watching a run learn: what training writes, what is read of it, the screen; on a real run of a real nano."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from msgrpo import run_log
from msgrpo.episode import play_episode
from msgrpo.errors import MsgrpoError, RecordError, RunError, UsageError
from msgrpo.evals.suites import episode_seeds
from msgrpo.games import get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.run_log import GroupRow, Member, Scene, Update
from msgrpo.tui import launch
from msgrpo.tui.app import PlayApp
from msgrpo.tui.learning import SIGNS, Learning, sign
from msgrpo.tui.screens.learn import FILM_SPEED, LOOK_S, LearnScreen
from msgrpo.tui.session import Session
from msgrpo.tui.still import _words, still
from msgrpo.tui.theme import DAY, NIGHT
from msgrpo.tui.widgets.board import BoardView
from msgrpo.tui.widgets.keyline import KeyLine
from msgrpo.tui.widgets.learning import Groups, turns
from msgrpo.tui.widgets.options import Options
from tests.command_line import PROGRAM
from tests.tui_helpers import NARROWEST, ManualClock, keys_of, press, settle, until

ROOT = Path(__file__).parents[1]
TINY = (
    "groups=3",
    "group_size=6",
    "select=aaw(keep=3)",
    "minibatches=2",
    "evaluation=4(every=1)",
    "checkpoint_every=1",
)


def command(*arguments: str) -> list[str]:
    return [*PROGRAM, *arguments]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("learning") / "run"
    settings = [part for setting in TINY for part in ("--set", setting)]
    subprocess.run(
        command("train", "frozen-lake", "--steps", "3", "--out", str(out), *settings),
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True,
    )  # fmt: skip
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


# ── what training writes ─────────────────────────────────────────────────────────────────────────────────────


def test_each_update_is_written_with_its_groups_and_a_few_whole_episodes(trained: Path) -> None:
    assert run_log.steps(trained) == [1, 2, 3]
    for step in (1, 2, 3):
        update = run_log.read_update(trained, step)
        assert update.step == step
        assert len(update.groups) == 3
        for row in update.groups:
            assert len(row.members) == 6
            assert sum(member.kept for member in row.members) == (0 if row.flat else 3)
            assert sum(member.advantage for member in row.members) == pytest.approx(0, abs=1e-4)
            whole = [member.advantage for member in row.members if member.sample is not None]
            advantages = [member.advantage for member in row.members]
            assert (max(whole), min(whole)) == (max(advantages), min(advantages))
            for member in row.members:
                if member.sample is not None:
                    sample = update.samples[member.sample]
                    own = sample.episode.turns_of(sample.player)
                    assert sample.episode.start_seed == row.start_seed
                    assert len(sample.credits) == len(own)
                    assert sum(turn.paid + turn.shaping for turn in own) == pytest.approx(member.total)
                    if member.kept:  # credit=episode: the whole advantage on every turn
                        assert sample.credits == [pytest.approx(member.advantage)] * len(own)


def test_the_same_starts_are_played_before_and_after_with_the_same_luck(trained: Path) -> None:
    steps = run_log.scenes(trained)
    assert (steps[0], steps[-1]) == (0, 3)
    played = [
        [(one.start_seed, one.chance_seed, one.sampling_seed) for one in run_log.read_scene(trained, step).episodes]
        for step in steps
    ]
    wanted = episode_seeds(get_scenario("frozen-lake"), 3, "val")
    assert played == [[tuple(seeds) for seeds in wanted]] * len(steps)
    first, last = (run_log.read_scene(trained, step).episodes[0] for step in (0, 3))
    assert (first.turns[0].model, last.turns[0].model) == ("policy-v000000", "policy-v000003")


def test_a_long_film_keeps_its_ends_and_every_second_scene(tmp_path: Path) -> None:
    for step in range(run_log.MOST_SCENES + 1):
        run_log.write_scene(tmp_path, Scene(step=step, episodes=[]))
    assert run_log.scenes(tmp_path) == [*range(0, run_log.MOST_SCENES + 1, 2)]
    run_log.forget_after(tmp_path, 6)
    assert run_log.scenes(tmp_path) == [0, 2, 4, 6]
    with pytest.raises(RecordError, match=r"000007\.json cannot be read"):
        run_log.read_scene(tmp_path, 7)


def test_old_updates_are_thinned_out_and_resuming_forgets_what_comes_again(tmp_path: Path) -> None:
    for step in range(1, run_log.LATEST + 31):
        run_log.write_update(tmp_path, Update(step=step, groups=[], samples=[]))
    kept = run_log.steps(tmp_path)
    assert kept == [10, 20, 30, *range(31, run_log.LATEST + 31)]
    run_log.forget_after(tmp_path, 40)
    assert run_log.steps(tmp_path) == [10, 20, *range(30, 41)]
    assert not list((tmp_path / run_log.UPDATES).glob("*.partial"))


def test_a_damaged_update_and_a_folder_without_a_run_are_told(run: Path, tmp_path: Path) -> None:
    (run / run_log.UPDATES / "000003.json").write_text("{")
    with pytest.raises(RecordError, match=r"000003\.json is no update"):
        run_log.read_update(run, 3)
    with pytest.raises(UsageError, match="holds no training run"):
        Learning.of(tmp_path)
    (run / run_log.CONFIG).write_text("[]")
    with pytest.raises(UsageError, match="no settings"):
        Learning.of(run)


# ── what is read of it ───────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_walked_through(trained: Path) -> None:
    run = Learning.of(trained)
    assert run.over
    assert "3 of 3 updates · over" in run.title()
    assert [step for step, *_ in run.evaluations] == [0, 1, 2, 3]
    assert all(low <= mean <= high for _, mean, low, high in run.evaluations)
    assert (run.step, run.following) == (3, True)
    run.move(-1)
    assert (run.step, run.following) == (2, False)
    assert not run.look()  # nothing new, and it stays where it is
    assert run.step == 2
    run.move(99)
    assert (run.step, run.following) == (3, True)
    session = run.session()
    assert isinstance(session, Session)
    assert session.episode.start_seed == run.row.start_seed if run.row else False
    first = run.shown
    run.move_sample()
    assert run.shown is not first
    run.move_group(1)
    assert run.group == 1


def test_a_run_that_goes_on_is_followed(run: Path) -> None:
    rows = (run / run_log.METRICS).read_text().splitlines(keepends=True)
    last = run / run_log.UPDATES / "000003.json"
    held = last.read_text()
    last.unlink()
    (run / "summary.json").unlink()
    (run / run_log.METRICS).write_text("".join(row for row in rows if json.loads(row)["step"] < 3))
    (run / run_log.LOCK).unlink()  # as on another machine
    watched = Learning.of(run)
    assert watched.step == 2
    assert watched.state().endswith("left")
    last.write_text(held)
    (run / run_log.METRICS).write_text("".join(rows))
    assert watched.look()
    assert watched.step == 3
    old = time.time() - 10_000
    os.utime(run / run_log.METRICS, (old, old))
    (run / run_log.CONFIG).write_text(json.dumps(json.loads((run / run_log.CONFIG).read_text()) | {"steps": 9}))
    assert Learning.of(run).state().startswith("stopped? wrote nothing for 2:46 h")


def test_a_run_that_was_stopped_or_killed_is_said_to_be(run: Path) -> None:
    """By the lock of its process, which ends with it; a run of another machine's is judged by its silence."""
    (run / "summary.json").unlink()
    program = "import sys, time; from pathlib import Path; from msgrpo import run_log\n"
    program += "with run_log.alone(Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    training = subprocess.Popen([sys.executable, "-c", program, str(run)], stdout=subprocess.PIPE)
    assert training.stdout is not None
    with training.stdout as said:
        said.readline()
        assert run_log.goes_on(run) is True
        assert Learning.of(run).state() == "the last evaluation is being played"  # for minutes it was: 0 s left
        training.kill()
        training.wait()
    assert run_log.goes_on(run) is False
    assert (
        Learning.of(run).state() == "stopped: --resume goes on"
    )  # the command needs --out, and what a person has to allow
    (run / run_log.LOCK).write_text("another machine")  # a copy, as of a folder that is synchronised
    assert run_log.goes_on(run) is None
    (run / run_log.LOCK).unlink()
    assert run_log.goes_on(run) is None


@pytest.mark.parametrize("gone", [".", run_log.METRICS])
def test_of_a_run_that_is_removed_under_its_watcher_what_was_read_last_stays(run: Path, gone: str) -> None:
    """It was said to play its first update, without a curve; and the app ended where a part was still there."""
    watched = Learning.of(run)
    rows, scenes = watched.rows, len(watched.film)
    shutil.rmtree(run) if gone == "." else (run / gone).unlink()
    assert watched.state() == "its folder is gone"
    assert not watched.look()
    assert (watched.rows, len(watched.film), watched.step) == (rows, scenes, 3)


def test_who_looks_at_a_run_keeps_nobody_from_training(tmp_path: Path) -> None:
    with run_log.alone(tmp_path):
        pass
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            run_log.goes_on(tmp_path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with run_log.alone(tmp_path):
                assert run_log.goes_on(tmp_path) is True
    finally:
        over.set()
        looking.join()


def test_a_disk_that_knows_no_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_log.alone(tmp_path):
        assert run_log.goes_on(tmp_path) is None


def test_signs() -> None:
    members = [Member(total=0, advantage=a, kept=kept) for a in (1, -1, 0) for kept in (True, False)]
    assert "".join(map(sign, members)) == "▲△▼▽•·"
    assert GroupRow(scenario="s", start_seed=1, player="p", members=members[4:]).flat


# ── the screen ───────────────────────────────────────────────────────────────────────────────────────────────


def shown(app: PlayApp) -> str:
    return app.export_screenshot().replace("&#160;", " ")


async def test_the_screen_shows_curve_groups_episode_and_credit(trained: Path) -> None:
    clock = ManualClock()
    app = PlayApp(lambda spec: pytest.fail(f"{spec} was made"), run=Learning.of(trained), clock=clock)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, LearnScreen)
        text = shown(app)
        for word in ("success", "in validation", "update 3", "advantage", "KL", "playing"):
            assert word in text, word
        hints = screen.hints()
        assert screen.query_one(KeyLine).fitting(NARROWEST)[-1] == hints[-1]
        await press(pilot, "left", "n", "n")
        assert screen.run.step == 2
        assert isinstance(screen.session, Session)
        assert screen.session.cursor == min(2, screen.session.last)
        await press(pilot, "home", "tab", "down")
        assert (screen.run.step, screen.run.group) == (1, 1)
        await press(pilot, "end", "space")
        assert isinstance(screen.session, Session)
        assert screen.session.last > 0
        before = screen.session.cursor
        clock.tick(1.0)
        await settle(pilot)
        assert screen.session.cursor != before


async def test_the_turn_that_is_shown_stays_in_sight_on_a_small_screen(trained: Path) -> None:
    """At 80x24 there is room for three turns: the last ones, with the reward, were never seen."""
    app = PlayApp(lambda spec: RandomAgent(), run=Learning.of(trained), clock=ManualClock())
    async with app.run_test(size=(NARROWEST, 24)) as pilot:
        await settle(pilot)
        screen = app.screen
        assert isinstance(screen, LearnScreen)
        await press(pilot, "home")
        for key in ["tab", "down"] * 6:
            assert isinstance(screen.session, Session)
            if screen.session.last < 6:
                await press(pilot, key)
        assert screen.session.last >= 6
        for step in range(1, screen.session.last + 1):
            await press(pilot, "n")
            assert f"▸{step:>3}" in shown(app)


async def test_what_the_signs_of_the_curve_mean_is_read_whole_on_a_usual_terminal(trained: Path) -> None:
    app = PlayApp(lambda spec: RandomAgent(), run=Learning.of(trained), clock=ManualClock())
    async with app.run_test(size=(NARROWEST, 24)) as pilot:
        await settle(pilot)
        box = app.screen.query_one("#progress")
        room = box.size.width + box.styles.padding.width - 2  # a blank and a line stand on each side, in the border
        assert cell_len(str(box.border_subtitle)) <= room


async def test_of_a_mixture_it_is_said_whose_game_alone_is_evaluated(run: Path) -> None:
    """The points stood on the curve of the training score, which is of all its games."""
    settings = json.loads((run / run_log.CONFIG).read_text()) | {"scenario": "frozen-lake@0.7,snake"}
    (run / run_log.CONFIG).write_text(json.dumps(settings))
    watched, console = Learning.of(run), Console(file=io.StringIO())
    app = PlayApp(lambda spec: RandomAgent(), run=watched, clock=ManualClock())
    async with app.run_test(size=(NARROWEST, 24)) as pilot:
        await settle(pilot)
        assert app.screen.query_one("#progress").border_title == "success   ┼ frozen-lake alone"
    launch.print_run(watched, console)
    assert "after 1 update: success of frozen-lake alone" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_before_the_first_update_the_foot_names_only_keys_that_do_something(film: Learning) -> None:
    """It named six that did nothing."""
    run = film.folder
    shutil.rmtree(run / run_log.UPDATES)
    (run / run_log.METRICS).write_text("")
    for step in run_log.scenes(run)[1:]:
        (run / run_log.FILM / f"{step:06d}.json").unlink()
    for named in ("space film ", ""):
        app = PlayApp(lambda spec: pytest.fail(spec), run=Learning.of(run), clock=ManualClock())
        async with app.run_test(size=(120, 40)) as pilot:
            await settle(pilot)
            assert keys_of(app) == f"{named}e save ? help q leave"
            if named:
                await press(pilot, "space")
                assert keys_of(app).startswith("space pause tab other start g groups n step")
        shutil.rmtree(run / run_log.FILM, ignore_errors=True)


async def test_evaluations_without_an_interval_are_shown_all_the_same(run: Path) -> None:
    """Those of a few equal returns, of which nobody can say more."""
    rows = run_log.read_rows(run)
    for row in rows:
        if row["kind"] == "eval":
            row |= {"score": "return", "return": 0.25, "return_low": None, "return_high": None}
    (run / run_log.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    watched, text = Learning.of(run), io.StringIO()
    assert watched.evaluations == [(step, 0.25, None, None) for step in range(4)]
    launch.print_run(watched, Console(file=text))
    assert "after 3 updates: return 0.250 [no interval]" in text.getvalue()
    app = PlayApp(lambda spec: pytest.fail(f"{spec} was made"), run=watched, clock=ManualClock())
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert shown(app).count("┼") >= 4  # the axes may cross in one, too


def test_a_run_of_ones_own_game_names_the_option_that_shows_its_boards(run: Path) -> None:
    """The reason was shown, and not the command that helps."""
    for file in [*(run / run_log.UPDATES).iterdir(), *(run / run_log.FILM).iterdir()]:
        file.write_text(file.read_text().replace('"scenario":"frozen-lake"', '"scenario":"my_game.py:scenario"'))
    shown = Learning.of(run)
    for shown.filming in (False, True):
        assert f"msgrpo --allow my_game.py:scenario play --run {run}" in str(shown.session())
    with pytest.raises(UsageError, match="msgrpo --allow my_game"):  # it was: film=0, or damaged
        still(shown.film)


@pytest.mark.parametrize("always", [0.0, 1e20])
async def test_a_run_that_always_got_the_same_return_has_a_curve(run: Path, always: float) -> None:
    """One in which nothing was won yet, in a game without a goal, ended the app: its axis had no height."""
    rows = [json.loads(line) for line in (run / run_log.METRICS).read_text().splitlines()]
    for row in rows:
        row |= {
            "score": "return",
            "return": always,
            "return_low": None,
            "return_high": None,
            "rollout/return": always,
        }
    (run / run_log.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    app = PlayApp(lambda spec: pytest.fail(f"{spec} was made"), run=Learning.of(run), clock=ManualClock())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "┼" in shown(app)


async def test_the_curve_takes_the_colours_of_another_theme(trained: Path) -> None:
    """The line at the update that is shown stayed pale by day."""
    app = PlayApp(lambda spec: pytest.fail(f"{spec} was made"), run=Learning.of(trained), clock=ManualClock())
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        curve = app.screen.query_one("#curve")
        for theme, other in ((NIGHT, DAY), (DAY, NIGHT)):
            drawn = {
                part.style.color.name
                for strip in curve.render_lines(curve.size.region)
                for part in strip
                if part.style and part.style.color
            }
            for name in ("primary", "success", "foreground"):
                assert getattr(theme, name) in drawn
                assert getattr(other, name) not in drawn
            await press(pilot, "ctrl+t")


@pytest.mark.parametrize(
    ("kept", "credits_", "says"),
    [
        (True, [-0.5, -0.5], "the update learnt from it; every turn's credit is -0.500"),
        (False, [-0.5, -0.5], "left out by the selection (its credit would have been -0.500)"),
        (False, [-0.5, 0.25], "left out by the selection (the credits are those that it would have had)"),
    ],
)
def test_an_episode_that_was_left_out_is_not_said_to_have_credit(
    kept: bool, credits_: list[float], says: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Learning.of(trained)
    session, member, sample = run.session(), run.member, run.shown
    assert isinstance(session, Session)
    assert member is not None
    assert sample is not None
    own = sample.episode.turns_of(sample.player)
    assert len(own) >= 2
    given = [credits_[0], *credits_[1:] * (len(own) - 1)]
    monkeypatch.setattr(Learning, "member", member.model_copy(update={"kept": kept}))
    monkeypatch.setattr(Learning, "shown", sample.model_copy(update={"credits": given}))
    assert turns(run, session).plain.split("\n")[0].endswith(f"; {says}")


async def test_a_new_update_appears_while_it_is_watched(run: Path) -> None:
    last = run / run_log.UPDATES / "000003.json"
    held = last.read_text()
    last.unlink()
    clock = ManualClock()
    app = PlayApp(lambda spec: pytest.fail(f"{spec} was made"), run=Learning.of(run), clock=clock)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(lambda: "update 2" in shown(app) and clock.calls)
        last.write_text(held)
        clock.tick(LOOK_S)
        await until(lambda: "update 3" in shown(app))
        last.write_text("{")  # damaged under its hands: said, and the app goes on
        await press(pilot, "left", "right")
        assert app.is_running


def test_its_plain_twin(trained: Path) -> None:
    done = subprocess.run(
        command("play", "--run", str(trained), "--plain"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "3 of 3 updates · over" in done.stdout
    for updates in ("0 updates", "1 update", "2 updates"):
        assert f"after {updates}: success" in done.stdout
    assert "▲" in done.stdout
    nothing = command("play", "--run", str(trained.parent), "--plain")
    wrong = subprocess.run(nothing, cwd=ROOT, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "holds no training run" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_broken_newest_update_costs_the_groups_and_not_the_curve(run: Path) -> None:
    (run / run_log.UPDATES / "000003.json").write_text("{")
    watched = Learning.of(run)
    assert len(watched.evaluations) == 4
    assert "is no update" in str(watched.session())
    watched.move(-1)
    assert watched.step == 2


async def test_why_nothing_is_shown_stays_on_the_screen(run: Path) -> None:
    """A message that goes away left a finished run with `no groups yet`."""
    for file in (run / run_log.UPDATES).glob("*.json"):
        file.write_text("{")
    app = PlayApp(lambda spec: pytest.fail(spec), run=Learning.of(run), clock=ManualClock())
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        app.clear_notifications()
        await settle(pilot)
        assert "is no update" in str(app.screen.query_one(Groups).render())
        assert "no groups yet" not in shown(app)


async def test_a_finished_run_without_its_updates_is_not_said_to_begin(run: Path) -> None:
    for file in (run / run_log.UPDATES).glob("*.json"):
        file.unlink()
    app = PlayApp(lambda spec: pytest.fail(spec), run=Learning.of(run), clock=ManualClock())
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        assert "holds no update" in str(app.screen.query_one(Groups).render())
        assert "not over yet" not in str(app.screen.query_one(BoardView).text)
        assert app.screen.query_one("#episode").border_title == "no update"
        await press(pilot, "question_mark")
        first = next(line for line in str(app.screen.query_one(".help Static").render()).splitlines() if line)
        assert first.startswith("A run that learns")


def test_who_only_looks_at_damaged_metrics_is_not_sent_to_train_again(run: Path) -> None:
    (run / run_log.METRICS).write_text("{\n{}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl:1 is damaged") as refused:
        Learning.of(run)
    assert "--out" not in str(refused.value)


async def test_of_several_runs_one_is_chosen(run: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("first\x1b[2J", "second"):
        shutil.copytree(run, runs / name)
    app = PlayApp(lambda spec: pytest.fail(spec), clock=ManualClock(), runs=runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await press(pilot, "w")
        assert str(app.screen.query_one(Options).options[1].prompt).strip() == "first\ufffd[2J"
        await press(pilot, "f", "enter")
        assert isinstance(app.screen, LearnScreen)
        assert app.screen.run.folder == runs / "first\x1b[2J"


def test_run_and_replay_are_one_or_the_other(trained: Path) -> None:
    both = command("play", "--run", str(trained), "--replay", str(trained / "transcripts.jsonl"), "--plain")
    done = subprocess.run(both, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "give one of them" in done.stderr) == (2, True)
    played = command("play", "--run", str(trained), "--step", "--plain")
    done = subprocess.run(played, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "is only shown" in done.stderr) == (2, True)
    file = command("play", "--run", str(trained / "transcripts.jsonl"), "--plain")
    done = subprocess.run(file, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "--replay" in done.stderr) == (2, True)


# ── the film ─────────────────────────────────────────────────────────────────────────────────────────────────


def filmed(run: Path, *, scenario: str = "frozen-lake", steps: tuple[int, ...] = (0, 1, 3)) -> Path:
    """The run with a film in which the start is played at random at first, and then as well as can be."""
    game = get_scenario(scenario)
    for step in steps:
        agent = OptimalAgent() if step > 1 else RandomAgent()
        episodes = [
            asyncio.run(play_episode(game, {"player": agent}, start_seed=start, chance_seed=luck, sampling_seed=step))
            for start, luck, _ in episode_seeds(game, 3, "val")
        ]
        run_log.write_scene(run, Scene(step=step, episodes=episodes))
    return run


@pytest.fixture
def film(run: Path) -> Learning:
    return Learning.of(filmed(run))


def test_a_start_that_a_fault_of_the_game_took_out_of_one_scene_is_missing_there_alone(film: Learning) -> None:
    """The next start stood in its place."""
    folder, scenes = film.folder, film.film
    whole = run_log.read_scene(folder, 1)
    lost, second = whole.episodes[:2]
    run_log.write_scene(folder, Scene(step=1, episodes=whole.episodes[1:]))
    seen = []
    for _ in range(3):
        seen.append([one if isinstance(one, str) else one.start_seed for _, one in scenes.results()])
        scenes.move_start()
    assert ["this start was not played to its end" in map(str, row) for row in seen].count(True) == 1
    for row in seen:
        seeds = {one for one in row if isinstance(one, int)}
        assert len(seeds) == 1
        assert (len(row) == row.count(*seeds)) == (seeds != {lost.start_seed})
    assert second.start_seed in {row[1] for row in seen}


async def test_space_plays_the_film_on_one_board_beside_the_growing_curve(film: Learning) -> None:
    clock = ManualClock()
    app = PlayApp(lambda spec: pytest.fail(f"{spec} was made"), run=film, clock=clock)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "space")
        screen = app.screen
        assert isinstance(screen, LearnScreen)
        starts, curve = set(), []
        while screen.pace.playing:
            assert isinstance(screen.session, Session)
            starts.add(screen.session.seed)
            curve.append((screen.run.film.step, screen.run.updates_shown))
            clock.tick(1 / FILM_SPEED)
            await pilot.pause()
        assert len(starts) == 1
        assert all(step == shown for step, shown in curve)
        assert sorted({step for step, _ in curve}) == [0, 1, 3]
        text = shown(app)
        for word in ("after 3 updates", "★", "×", "missed", "goal reached"):
            assert word in text, word
        await press(pilot, "left")  # paused: the end of the scene before, on the same board
        assert (screen.run.film.step, screen.session.live) == (1, True)
        assert "after 1 update" in shown(app)
        await press(pilot, "tab")
        assert screen.session.seed not in starts
        await press(pilot, "g")
        assert not screen.run.filming
        assert "update 3" in shown(app)


async def test_space_plays_a_film_again_whose_last_scene_cannot_be_shown(film: Learning) -> None:
    """As any other film; it stood at its end for good."""
    (film.folder / run_log.FILM / "000003.json").write_text("{")
    clock = ManualClock()
    app = PlayApp(lambda spec: pytest.fail(spec), run=Learning.of(film.folder), clock=clock)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "space")
        screen = app.screen
        assert isinstance(screen, LearnScreen)
        while screen.pace.playing:
            clock.tick(1 / FILM_SPEED)
            await pilot.pause()
        assert screen.run.film.step == 3
        await press(pilot, "space")
        assert (screen.run.film.step, screen.pace.playing) == (0, True)


async def test_e_saves_the_screen_and_six_scenes(film: Learning, tmp_path: Path) -> None:
    plays = tmp_path / "plays"
    app = PlayApp(lambda spec: pytest.fail(spec), run=film, clock=ManualClock(), plays=plays)
    async with app.run_test(size=(120, 40)) as pilot:
        await press(pilot, "e")
        await until(lambda: (plays / "run-film.svg").is_file() and (plays / "run-after-3.svg").is_file())
    assert sorted(file.name for file in plays.iterdir()) == ["run-after-3.svg", "run-film.svg"]
    app = PlayApp(lambda spec: pytest.fail(spec), run=film, clock=ManualClock(), plays=plays)
    async with app.run_test(size=(120, 40)) as pilot:  # nothing is written over
        await press(pilot, "e")
        await until(lambda: (plays / "run-film-2.svg").is_file() and (plays / "run-after-3-2.svg").is_file())
    text = "".join(ElementTree.parse(plays / "run-film.svg").getroot().itertext())
    assert "after 0 updates" in text
    assert "after 1 update" in text
    assert "after 3 updatesgoal reached" in text


async def test_the_command_for_a_film_can_be_pasted(film: Learning, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    shutil.copytree(film.folder, folder)
    app = PlayApp(
        lambda spec: pytest.fail(spec), run=Learning.of(folder), clock=ManualClock(), plays=tmp_path / "plays"
    )
    async with app.run_test(size=(120, 40)) as pilot:
        await press(pilot, "e")
        await until(lambda: list(app._notifications))
        (note,) = app._notifications
    assert f"msgrpo play --run '{folder}' --record film.gif" in note.message


def test_a_film_is_recorded_without_a_terminal_and_what_has_none_is_refused_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msgrpo.tui.launch.has_screen", lambda: False)
    monkeypatch.setattr("msgrpo.tui.screens.learn.FILM_SPEED", 60.0)
    said = Console(file=io.StringIO(), width=200)

    def record(name: str) -> Path:
        file = tmp_path / name
        launch.start(
            lambda spec: pytest.fail(spec), None,
            replay=None, episode=None, run=run, games=1, plain=False, record=file, console=said,
        )  # fmt: skip
        return file

    filmed(run, steps=(0, 3))
    cast = record("film.cast").read_text()
    for words in ("after 0 updates", "after 3 updates", "goal reached"):
        assert words in cast
    assert "after 3 updates" in record("film.svg").read_text()
    with pytest.raises(UsageError, match=r"none of \.gif, \.cast and \.svg"):
        record("film.png")
    shutil.rmtree(run / run_log.FILM)
    with pytest.raises(UsageError, match="keeps no film"):
        record("film.cast")
    assert "six scenes" not in (wrote := said.file.getvalue())  # type: ignore[attr-defined]
    assert "scenes of the run" in wrote  # of which there are two


HOSTILE = {
    "film/000003.json": [b"{", b'{"step": 3, "episodes": []}', b'{"step": -1, "episodes": [7]}'],
    "updates/000003.json": [
        b'{"step": 3, "groups": [], "samples": []}',
        b'{"step": 3, "groups": [{"scenario": "s", "start_seed": 1, "player": "p", "members": '
        b'[{"total": 1, "advantage": 1, "kept": true, "sample": 9}]}], "samples": []}',
        b"\xff\xfe",
    ],
    "config.json": [
        b'{"steps": "x", "scenario": "s"}',
        b'{"steps": 3, "scenario": "\\u001b[31mX", "base": "\\u001b]0;evil"}',
    ],
    "metrics.jsonl": [
        b'{"step": 1}\n{"kind": "train", "step": 1}\n',
        b'{"kind": "train", "step": 0, "update/kl": null, "time/total": "long"}\n',
        b'{"kind": "eval", "step": 0, "score": "\\u001b[2Jscore"}\n',
        b"\xff\n{}\n",
    ],
    "updates/\u00b2.json": [b"{}"],
}


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, many in HOSTILE.items() for one in many])
async def test_a_foreign_run_folder_is_shown_or_refused_and_never_ends_the_app(
    run: Path, name: str, content: bytes
) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content)
    try:
        watched = Learning.of(run)
    except MsgrpoError as error:
        refused = str(error)
    else:
        refused = ""
        await shown_and_walked(watched)
    assert "\x1b" not in refused


async def shown_and_walked(watched: Learning) -> None:
    assert "\x1b" not in watched.title() + watched.score
    clock, plays = ManualClock(), watched.folder / "plays"
    app = PlayApp(lambda spec: pytest.fail(f"{spec} was made"), run=watched, clock=clock, plays=plays)
    async with app.run_test(size=(80, 24)) as pilot:
        await press(pilot, "down", "up", "tab", "left", "n", "right", "end", "space", "right", "tab", "e", "n")
        assert app.is_running


def test_a_still_of_a_game_without_a_board_says_where_words_are_left_out() -> None:
    few = _words("two lines\nof words")
    assert "…" not in few
    many = _words("\n".join([*["short"] * 8, "x" * 50, "the tenth"]))
    assert (many.count(">short<"), many.count(">…<"), many.count("<text")) == (8, 1, 9)
    assert f">{'x' * 23}…<" in _words("x" * 50)


def test_every_sign_of_the_plain_twin_is_explained_in_words() -> None:
    """It is what a screen reader gets: triangles without a legend."""
    members = [Member(total=0, advantage=a, kept=kept) for a in (-1, 0, 1) for kept in (True, False)]
    assert {sign(member) for member in members} == set("▲△▼▽•·")
    assert all(mark in SIGNS for mark in map(sign, members))
    for words in ("better", "worse", "equal", "learnt", "did not see"):
        assert words in SIGNS
