"""The table, against values worked out by hand, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from msgrpo import output
from msgrpo.agent import ParseFailure
from msgrpo.episode import Episode, Turn, read_episodes
from msgrpo.errors import RecordError, UsageError
from msgrpo.evals import command, page, tables
from msgrpo.evals.leaderboard import build
from msgrpo.evals.match import Result
from msgrpo.evals.plays import Play, keep_counted_prefix, load, only
from msgrpo.evals.progress import EvalProgress
from msgrpo.evals.record import Price, changing_run, folder_name, seeds_of
from msgrpo.evals.rows import pair_of, row_of
from msgrpo.evals.stats import detectable_difference
from msgrpo.evals.suites import episode_seeds, places_in_suite
from msgrpo.evals.verify import Verified, first_difference, verify
from msgrpo.game import Outcome
from msgrpo.games import get_scenario
from msgrpo.games.search import optimal_success
from msgrpo.prompt import PromptTemplate
from tests.command_line import PROGRAM, ended, invoked, run
from tests.evals_helpers import SCENARIO, eval_aside, eval_here, rewritten, suite_episode, write
from tests.fake_server import FakeServer

SEEDS = episode_seeds(get_scenario(SCENARIO), 8)
THIS = PromptTemplate().hash
SETTINGS = {"model": "m", "template": "t", "sampling": {"temperature": 1.0}}


def episode(i: int, success: bool, **fields: Any) -> Episode:
    turn = Turn(
        step=0, player="player", state="s", answer="<action>up</action>", action="up", prompt_tokens=1000,
        completion_tokens=50, latency_s=0.5, finish_reason="stop", reward=float(success),
    )  # fmt: skip
    return suite_episode(i, [turn], **({"settings": {"player": SETTINGS}} | fields))


def play(successes: list[bool], agent: str = "a", **fields: Any) -> Play:
    found = [episode(i, success, agent=agent, **fields) for i, success in enumerate(successes)]
    return Play(agent, SCENARIO, SETTINGS, {seeds_of(e): e for e in found})


def test_a_row_by_hand() -> None:
    chances = [optimal_success(get_scenario(SCENARIO).new(s.start, 0)) for s in SEEDS[:4]]  # type: ignore[arg-type]
    assert chances == [1.0] * 4
    one = play([True, False, True, True])
    turns = [
        Turn(step=0, player="player", state="s", answer="", failure=ParseFailure.EMPTY, finish_reason="length"),
        Turn(
            step=1, player="player", state="s", answer="x", failure=ParseFailure.ILLEGAL, retries=2, regret=0.1,
            finish_reason="content_filter",
        ),
        Turn(
            step=2, player="player", state="s", answer="x", failure=ParseFailure.NOT_NOW, regret=0.5,
            finish_reason="content_filter", prompt_tokens=7,
        ),
        Turn(step=3, player="player", state="s", action="up"),  # a person's
    ]  # fmt: skip
    one.finished[SEEDS[1]].turns += turns
    one.failed = [episode(1, False, error="timeout"), episode(4, False, error="timeout", turns=[])]
    one.failed[0].turns[0].retries = 1
    keep_counted_prefix(one)
    one.price = Price(prompt=2, completion=10)
    (row,) = build([one]).rows
    assert (row.episodes, row.successes, row.success_rate, row.optimum_share) == (4, 3, 0.75, 0.75)
    assert (row.turns, row.illegal, row.unparsed, row.truncated, row.filtered, row.retries) == (8, 2, 1, 1, 2, 3)
    assert (row.regret_mean, row.judged) == (pytest.approx(0.3), 2)
    assert (row.failures, row.unfinished) == ({"timeout": 2}, 1)
    # four finished turns and the one turn of a failed attempt: its tokens are paid as well
    assert (row.prompt_tokens, row.completion_tokens, row.usage_missing) == (5007, 250, 2)
    assert row.cost_usd == pytest.approx(5007 * 2e-6 + 250 * 10e-6)
    assert row.seconds_per_step == pytest.approx(4 * 0.5 / 7)
    assert row.steps_mean == 2.0


def test_pairs_are_over_shared_episodes_only() -> None:
    a, b = play([True, True, True, False, True]), play([False, False, True, False], "b")
    (pair,) = build([a, b]).pairs
    assert (pair.episodes, pair.difference) == (4, 0.5)
    assert pair.mcnemar_p == pytest.approx(2 * 0.25)
    assert pair.detectable == pytest.approx(detectable_difference(4, math.sqrt(1 / 3)))  # of 1, 1, 0, 0
    assert any("different episodes" in note for note in build([a, b]).notes)
    alike = pair_of(a, play([True, True], "c"))
    assert alike is not None
    assert alike.detectable is None
    b.asked, b.interrupted = 100, 1  # its few episodes are the short ones
    assert b.is_biased
    assert pair_of(a, b) is pair_of(b, a) is None
    row = row_of(b)
    assert all(map(math.isnan, (row.return_low, row.return_high, row.success_low or 0, row.success_high or 0)))


def test_a_score_above_the_exact_optimum_is_an_error() -> None:
    too_good = [episode(i, True, scenario="frozen-lake-slippery") for i in range(8)]
    two = Play("a", "frozen-lake-slippery", SETTINGS, {seeds_of(e): e for e in too_good[:2]})
    chances = [optimal_success(get_scenario(two.scenario).new(s.start, 0)) for s in two.finished]  # type: ignore[arg-type]
    assert row_of(two).optimum == pytest.approx(sum(chances) / 2)  # two of two may be luck
    hundred = {seeds_of(e)._replace(chance=k): e for e in too_good for k in range(100)}
    with pytest.raises(RecordError, match="more than the exact optimum"):
        build([Play("a", "frozen-lake-slippery", SETTINGS, hundred)])
    won = [episode(i, i < 91, scenario="frozen-lake-4x4") for i in range(100)]
    most = Play("a", "frozen-lake-4x4", SETTINGS, {seeds_of(e): e for e in won})
    assert row_of(most).successes == 91 == int(74.42 + 4 * (100 * 0.7442 * 0.2558) ** 0.5)
    won[91].success = True
    with pytest.raises(RecordError, match="more than the exact optimum"):
        row_of(most)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"template": "other"}, "template differs"),
        ({"sampling": {"temperature": 0.0}}, "sampling differs"),
    ],
)
def test_results_with_other_prompts_or_settings_do_not_mix(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path / "x", [episode(0, True)])
    write(tmp_path / "y", [episode(0, True, agent="b", settings={"player": SETTINGS | change})])
    with pytest.raises(RecordError, match=says):
        load([tmp_path / "x", tmp_path / "y"])
    plays, notes = load([tmp_path / "x", tmp_path / "y"], mix=True)
    assert len(plays) == 2
    assert says in notes[0]


def test_one_agent_with_two_settings_becomes_two_rows(tmp_path: Path) -> None:
    for model in ("m", "n"):
        write(tmp_path, [episode(0, True, settings={"player": SETTINGS | {"model": model}})])
    with pytest.raises(RecordError, match="with settings"):
        load([tmp_path])
    plays, _ = load([tmp_path], mix=True)
    assert [p.agent for p in plays] == ["a", "a (2)"]


def test_other_suite_versions_do_not_mix(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write(tmp_path / name, [episode(0, True)])
        with changing_run(tmp_path / name):
            pass
    (tmp_path / "y" / "run.json").write_text('{"suite_version": 0, "prices": {}}')
    with pytest.raises(RecordError, match="suite versions 0, 2"):
        load([tmp_path / "x", tmp_path / "y"])


def test_other_rules_in_the_prompt_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path, [episode(0, True, prefix={"player": "p"}), episode(1, True, prefix={"player": "q"})])
    with pytest.raises(RecordError, match="rules in the prompt of frozen-lake changed"):
        load([tmp_path])


def test_results_of_different_days_merge_and_doubles_count_once(tmp_path: Path) -> None:
    write(tmp_path / "x", [episode(0, True), episode(1, False)])
    write(tmp_path / "y", [episode(1, True), episode(2, True)])
    plays, notes = load([tmp_path / "x", tmp_path / "y"])
    assert [e.success for e in plays[0].finished.values()] == [True, False, True]
    assert "1 episode was played more than once" in notes[0]


def test_a_folder_without_records(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no records \(\.jsonl\)"):
        load([tmp_path])


def test_an_agent_that_finished_nothing_is_named() -> None:
    failed = Play("a", SCENARIO, SETTINGS, {}, [episode(0, False, error="connection")])
    board = build([failed])
    assert board.rows == []
    assert "no result that counts" in board.notes[0]
    assert "connection" in board.notes[0]


def test_texts_say_the_same() -> None:
    board = build([play([True, False, True]), play([False] * 3, "b|c")])
    assert "| a | 3 | +0.667" in tables.markdown(board)
    assert "b\\|c" in tables.markdown(board)
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(board))))
    assert [row["successes"] for row in rows] == ["2", "0"]
    console = Console(width=80, record=True, file=io.StringIO())
    for part in tables.terminal(board):
        console.print(part)
    text = console.export_text()
    assert "66.7% [20.8%, 93.9%]" in text
    assert max(map(len, text.splitlines())) <= 80


# ── the commands ──


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """Both references, three episodes of two games each."""
    eval_here(tmp_path, agents=["random", "optimal"], episodes=3, scenarios=[SCENARIO, "snake"])
    return tmp_path


def test_eval_writes_every_table(evaluated: Path) -> None:
    board = json.loads((evaluated / "leaderboard.json").read_text())
    assert [(r["agent"], r["scenario"], r["episodes"]) for r in board["rows"]] == [
        ("optimal", SCENARIO, 3),  # the best first
        ("random", SCENARIO, 3),
        ("optimal", "snake", 3),
        ("random", "snake", 3),
    ]
    for ending in ("md", "csv", "html"):
        assert (evaluated / f"leaderboard.{ending}").stat().st_size > 100


def test_eval_prints_json_of_what_was_asked_for(evaluated: Path) -> None:
    result = run("eval", "optimal", "--episodes", "2", "--scenario", SCENARIO, "--out", str(evaluated), "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["agent"], row["episodes"], row["success_rate"]) == ("optimal", 2, 1.0)


def test_another_agents_settings_in_the_folder_do_not_matter(evaluated: Path) -> None:
    for name, temperature in (("b", 0.0), ("c", 1.0)):
        write(evaluated / name, [episode(0, True, agent=name, settings={"player": {"sampling": temperature}})])
    with pytest.raises(RecordError, match="sampling differs"):
        run("leaderboard", str(evaluated))
    eval_here(evaluated, agents=["random"], episodes=2)


def test_progress_on_a_terminal_and_in_a_log() -> None:
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=100, file=io.StringIO(), record=True)
        progress = EvalProgress(planned=4, finished_before=1)
        with command.shown(progress, console):
            progress.done = 2
        assert "3/4 episodes · 0 running · 0 retrying · 0 failed" in console.export_text()


def test_leaderboard_and_verify(evaluated: Path, tmp_path: Path) -> None:
    board = json.loads(run("leaderboard", str(evaluated), "--out", str(tmp_path / "all"), "--json").stdout)
    assert len(board["rows"]) == 4
    assert (tmp_path / "all" / "leaderboard.html").is_file()
    assert run("verify", str(evaluated)).stdout.count("3 episodes replay") == 4


def test_leaderboard_leaves_duels_out_and_says_so(evaluated: Path, tmp_path: Path) -> None:
    """`plays/human.jsonl` of the app holds whatever was played, duels too."""
    duel = recorded(evaluated).model_copy(update={"scenario": "snake-duel", "agents": {"a": "human", "b": "nano"}})
    played = tmp_path / "plays"
    played.mkdir()
    (played / "human.jsonl").write_text(duel.model_dump_json() + "\n")
    with pytest.raises(RecordError, match="nothing to compare: left out: 1 episode of several players"):
        load([played])
    plays, notes = load([evaluated])  # the same folder, and what lies below it
    assert len(plays) == 4
    assert notes == ["left out: 1 episode of several players; the table is of single ones."]


def test_a_folder_above_finds_versions_prices_and_no_training_files(evaluated: Path, tmp_path: Path) -> None:
    above = tmp_path / "above"
    shutil.copytree(evaluated, above / "run" / "eval", ignore=shutil.ignore_patterns("above"))
    (above / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with changing_run(above / "run" / "eval") as card:
        card.prices["random"] = Price(prompt=1, completion=2)
    plays, _ = load([above])
    assert {play.price is not None for play in plays if play.agent == "random"} == {True}
    card = json.loads((above / "run" / "eval" / "run.json").read_text())
    (above / "run" / "eval" / "run.json").write_text(json.dumps(card | {"suite_version": 0}))
    with pytest.raises(RecordError, match="suite versions 0"):
        load([above])


def test_the_order_of_the_lines_changes_nothing(tmp_path: Path) -> None:
    episodes = [episode(i, i % 3 == 0) for i in range(8)]
    write(tmp_path / "a", episodes)
    write(tmp_path / "b", episodes[::-1])
    one, other = (load([tmp_path / name])[0] for name in ("a", "b"))
    assert build(one) == build(other)
    shown, others = (re.sub(r'"line":\d+', "", page.html(build(plays), plays)) for plays in (one, other))
    assert shown == others  # but for the line of the record, by which `msgrpo play --replay` finds the episode


def test_a_file_is_read_once_and_finds_its_suite_version(evaluated: Path) -> None:
    record = evaluated / "random" / f"{SCENARIO}.jsonl"
    plays, notes = load([record, evaluated / "random", record])
    assert ([len(play.finished) for play in plays], notes) == ([3, 3], [])
    card = json.loads((evaluated / "run.json").read_text())
    (evaluated / "run.json").write_text(json.dumps(card | {"suite_version": 0}))
    for folder in (record, evaluated / "random"):
        with pytest.raises(RecordError, match="suite versions 0"):
            load([folder])


def test_weights_that_changed_between_scenarios_do_not_mix(tmp_path: Path) -> None:
    settings = [{"player": {"model": "m", "weights": weights}} for weights in ("a", "b")]
    write(tmp_path, [episode(0, True, settings=settings[0])])
    write(tmp_path, [episode(0, True, scenario="frozen-lake-slippery", settings=settings[1])])
    with pytest.raises(RecordError, match="a played with settings"):
        load([tmp_path])


def test_a_body_that_changes_the_sampling_does_not_mix(tmp_path: Path) -> None:
    write(tmp_path, [episode(0, True)])
    body = {"player": SETTINGS | {"model": "n", "body": {"temperature": 0.0}}}
    write(tmp_path, [episode(0, True, agent="b", settings=body)])
    with pytest.raises(RecordError, match="sampling differs"):
        load([tmp_path])


def test_a_failure_that_ends_everything_is_told_in_the_servers_words(tmp_path: Path) -> None:
    write(tmp_path, [episode(0, True, error="bad_request", error_message="no such parameter", turns=[])])
    with pytest.raises(RecordError, match="no such parameter"):
        command.merge([tmp_path], None)


def test_tables_are_whole_or_as_they_were(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (evaluated / "leaderboard.html").read_text()
    plays, _ = load([evaluated])
    board = build(plays[:1])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        command.write_tables(board, plays[:1], evaluated)
    assert (evaluated / "leaderboard.html").read_text() == before
    assert not list(evaluated.glob(".*.part"))


def test_pairs_are_a_table_for_machines_too(evaluated: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((evaluated / "pairs.csv").read_text())))
    assert [(row["scenario"], row["a"], row["b"]) for row in rows] == [
        (scenario, "optimal", "random") for scenario in (SCENARIO, "snake")
    ]


def test_a_goal_in_another_game_has_a_success_and_no_optimum(
    monkeypatch: pytest.MonkeyPatch, evaluated: Path
) -> None:
    monkeypatch.setattr("msgrpo.evals.rows.exact_optimum", lambda episode: None)
    row = next(row for row in build(load([evaluated])[0]).rows if row.agent == "optimal")
    assert (row.success_rate, row.optimum, row.optimum_share) == (1.0, None, None)


def recorded(evaluated: Path) -> Episode:
    return next(read_episodes(evaluated / "random" / f"{SCENARIO}.jsonl"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: setattr(e.turns[0], "state", "x"), "saw another state"),
        (lambda e: setattr(e.turns[0], "reward", 0.5), "reward 0.5"),
        (lambda e: setattr(e, "returns", {"player": 1.0}), "returns"),
        (lambda e: e.turns.pop(), "ends after step"),
        (lambda e: e.turns.append(e.turns[0]), "step 0"),
        (lambda e: setattr(e, "agents", {"snake1": "random"}), "players"),
        (lambda e: (e.prefix.update(player="p"), e.settings["player"].update(template=THIS)), "prompt of player"),
        (lambda e: e.settings["player"].update(template="t"), "should have a prompt and an answer"),
        (lambda e: setattr(e.turns[0], "answer", "<action>up</action>"), "should not have"),
        (lambda e: setattr(e, "error", "timeout"), "it says that it failed"),
    ],
)
def test_verify_names_the_first_difference(evaluated: Path, change: Any, says: str) -> None:
    changed = recorded(evaluated)
    assert first_difference(changed) is None
    change(changed)
    assert says in str(first_difference(changed))
    write(evaluated / "changed", [changed])
    with pytest.raises(RecordError, match="does not replay"):
        verify(evaluated / "changed" / "r.jsonl")


def test_verify_knows_the_suites_episodes_and_takes_each_once(evaluated: Path) -> None:
    record = evaluated / "random" / f"{SCENARIO}.jsonl"
    assert verify(record).episodes == 3
    good = recorded(evaluated)
    write(evaluated / "twice", [good, good])
    with pytest.raises(RecordError, match="episode 2 is episode 1 once more"):
        verify(evaluated / "twice" / "r.jsonl")
    write(evaluated / "chosen", [good.model_copy(update={"sampling_seed": 1, "agents": {"player": "somebody"}})])
    with pytest.raises(RecordError, match="seeds that are not the suite's"):
        verify(evaluated / "chosen" / "r.jsonl")


def test_verify_says_which_prompts_it_cannot_check(tmp_path: Path, evaluated: Path) -> None:
    other = recorded(evaluated)
    other.agents["player"] = "nano"
    other.settings["player"]["template"] = "another version's"
    other.prefix["player"] = "p"
    for turn in other.turns:
        turn.answer = f"<action>{turn.action}</action>"
    write(tmp_path, [other])
    assert verify(tmp_path / "r.jsonl").unchecked_prompts == 1
    told = invoked("verify", str(tmp_path))
    assert "could not be checked" in told.stdout
    assert (told.exit_code, "missing: 1 earlier episode" in told.stdout) == (1, True)
    other.turns[0].answer = "<action>none</action>"
    assert "now None" in str(first_difference(other))


def test_verify_counts_what_was_asked_for_and_is_not_there(evaluated: Path) -> None:
    rewritten(evaluated / "random" / f"{SCENARIO}.jsonl", lambda rows: rows[:-1])
    told = invoked("verify", str(evaluated))
    assert (told.exit_code, f"1 episode of {SCENARIO} asked for and not there" in told.stdout) == (1, True)


def test_a_person_may_have_taken_over(evaluated: Path) -> None:
    mixed = recorded(evaluated)
    mixed.agents["player"] = "nano+human"
    mixed.settings["player"] = {"model": "nano+human", "parts": {"nano": SETTINGS, "human": {}}}
    mixed.turns[0].answer = f"<action>{mixed.turns[0].action}</action>"
    assert first_difference(mixed) is None


def test_a_game_that_a_person_left_replays_and_has_no_result(evaluated: Path, tmp_path: Path) -> None:
    """The app keeps it, and everything that read its file called it damaged or changed."""
    best = next(read_episodes(evaluated / "optimal" / f"{SCENARIO}.jsonl"))
    ended = best.model_copy(update={"agents": {"player": "human"}, "settings": {"player": {}}})
    left = ended.model_copy(update={"turns": ended.turns[:1], "outcome": Outcome.PLAYING, "success": False})
    left.returns = {"player": left.turns[0].reward}
    write(tmp_path / "plays", [ended, left])
    assert "1 of them left by a person before the end" in verify(tmp_path / "plays" / "r.jsonl").summary
    board = command.merge([tmp_path / "plays"], None)
    assert (board.rows[0].agent, board.rows[0].episodes) == ("human", 1)
    assert "left out: 1 episode that a person left before the end." in board.notes
    left.agents = {"player": "a"}
    assert "the record ends after step 1" in str(first_difference(left))


def test_a_failed_episode_replays_up_to_its_failure(evaluated: Path) -> None:
    failed = next(read_episodes(evaluated / "optimal" / f"{SCENARIO}.jsonl"))
    failed.turns, failed.agents = failed.turns[:1], {"player": "a"}
    failed.outcome, failed.success, failed.returns = Outcome.PLAYING, False, {"player": 0.0}
    failed.error, failed.error_message = "timeout", "no answer in time"
    assert first_difference(failed) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema_version": 99}, "schema_version"),
        ({"of_tomorrow": 1}, "of_tomorrow: this name is not known here"),  # it may say that the result is another
        ({"turns": [{"step": 0, "player": "player", "state": "", "of_tomorrow": 1}]}, "turns.0.of_tomorrow"),
        ({"start_seed": -1}, "start_seed"),
        ({"scenario": "tetris"}, "episode 1 does not replay: no scenario"),
    ],
)
def test_impossible_records_are_named(changes: dict[str, Any], says: str, evaluated: Path, tmp_path: Path) -> None:
    line = json.loads(recorded(evaluated).model_dump_json()) | changes
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RecordError, match=says):
        verify(tmp_path / "r.jsonl")
    (tmp_path / "r.jsonl").write_text("")
    assert verify(tmp_path / "r.jsonl").summary == "no episode has ended yet"  # the evaluation has opened it
    (tmp_path / "run.json").unlink()
    with pytest.raises(RecordError, match="holds no episode"):
        verify(tmp_path / "r.jsonl")


@pytest.mark.parametrize("returns", [{}, {"player": 0.0, "other": 1.0}, {"player": float("nan")}])
def test_returns_that_cannot_be_are_no_score(returns: dict[str, float], evaluated: Path) -> None:
    plays, _ = load([evaluated])
    next(iter(plays[0].finished.values())).returns = returns
    with pytest.raises(RecordError, match="has the returns"):
        build(plays)


def unfinished_run(out: Path, ended: Sequence[int], asked: int, **fields: Any) -> Path:
    """The record of an evaluation of which only these episodes (places in the suite) have ended."""
    with changing_run(out) as run:
        run.asked["a"] = {SCENARIO: asked}
        run.started["a"] = 1
    write(out / "a", [episode(i, i % 2 == 0, **fields) for i in ended])
    return out


def test_only_the_keep_counted_prefix_of_the_suite_counts(tmp_path: Path) -> None:
    """Short episodes end first: what an interruption leaves is no fair sample."""
    board = command.merge([unfinished_run(tmp_path, [0, 1, 2, 5, 7], 8)], None)
    (row,) = board.rows
    assert (row.episodes, row.asked, row.left_out, row.successes) == (3, 8, 2, 2)
    assert "5 episodes have ended, and the first 3 of the suite count" in board.notes[0]
    assert tables.cells(row)[1] == "3 of 8"
    assert any("1 start was interrupted" in note for note in board.notes)


def test_what_is_left_out_is_paid_for_and_what_has_a_result_is_not_unfinished(tmp_path: Path) -> None:
    out = unfinished_run(tmp_path, [0, 1, 4, 5], 8)
    write(out / "a", [episode(5, False, error="server_error"), episode(2, False, error="server_error")])
    write(out / "a", [episode(7, False, error="server_error")])
    (row,) = command.merge([out], None).rows
    assert (row.episodes, row.left_out, row.unfinished) == (2, 2, 1)  # 2 failed; 5 was played again; 7 is beyond
    assert row.prompt_tokens == 7 * 1000


def test_folders_of_one_agent_merge_in_any_order(tmp_path: Path) -> None:
    one, other = unfinished_run(tmp_path / "x", [0, 1], 2), unfinished_run(tmp_path / "y", [0, 1, 2, 3], 8)
    boards = [command.merge(folders, None) for folders in ([one, other], [other, one])]
    assert [row.asked for board in boards for row in board.rows] == [8, 8]
    with changing_run(one) as run:
        run.started["a"], run.at_once["a"] = 3, 40
    for folders in ([one, other], [other, one]):
        ((found,), _) = load(folders)
        assert (found.interrupted, found.at_once) == (3, 40)


def test_an_interruption_is_told_once_for_all_scenarios(tmp_path: Path) -> None:
    out = unfinished_run(tmp_path, [0], 1)
    write(out / "b", [episode(0, True, scenario="frozen-lake-slippery")])
    board = command.merge([out], None)
    assert len(board.rows) == 2
    assert sum("interrupted; tokens" in note for note in board.notes) == 1


def test_chosen_episodes_are_no_result(tmp_path: Path) -> None:
    """Four wins of a whole record: neither verify nor the leaderboard takes them for a score."""
    out = unfinished_run(tmp_path, [2, 4, 6], 8)
    with pytest.raises(RecordError, match="3 ended, but not the first of the suite"):
        command.merge([out], None)


def test_verify_names_the_most_frequent_errors_and_counts_the_others() -> None:
    verified = Verified(episodes=22, failed=Counter({"timeout": 2, **{f"error-{i}": 1 for i in range(20)}}))
    assert "22 of them without a result: 2 timeout, 1 error-0, " in verified.summary
    assert verified.summary.endswith(", 15 of other kinds")


def test_verify_names_gaps_failures_and_foreign_seeds(evaluated: Path, tmp_path: Path) -> None:
    third = list(read_episodes(evaluated / "random" / f"{SCENARIO}.jsonl"))[2]
    places, _ = places_in_suite(SCENARIO, [seeds_of(third)], 1)
    gaps = places[seeds_of(third)]
    write(tmp_path / "gaps", [third])
    assert verify(tmp_path / "gaps" / "r.jsonl").missing == ({SCENARIO: gaps} if gaps else {})
    lost = third.model_copy(
        update={"error": "server_error", "turns": [], "outcome": Outcome.PLAYING, "agents": {"player": "a"}}
    )
    write(tmp_path / "lost", [lost])
    assert "1 of them without a result: 1 server_error" in verify(tmp_path / "lost" / "r.jsonl").summary
    write(
        tmp_path.parent / f"{tmp_path.name}-own",
        [third.model_copy(update={"sampling_seed": 5, "agents": {"player": "a"}})],
    )
    assert verify(tmp_path.parent / f"{tmp_path.name}-own" / "r.jsonl").foreign == 1


def test_who_had_a_teacher_is_said() -> None:
    """A policy that was told the best moves is no evidence of what returns teach."""
    taught, other = play([True, False] * 4), play([True, False] * 4, agent="b")
    taught.settings = SETTINGS | {"teacher": "optimal(weight=1.0)\x1b[2J"}
    (note,) = [note for note in build([taught, other]).notes if "teacher" in note]
    assert note.startswith("a was trained with a teacher, optimal(weight=1.0)")
    assert "\x1b" not in note


def test_of_a_failure_of_megabytes_a_terminal_gets_the_beginning() -> None:
    """A record's own words about a failure stood whole in a note below the table."""
    won = play([True, True])
    won.failed = [episode(2, False, error="server_error", error_message="down " * 600_000)]
    keep_counted_prefix(won)
    board = build([won])
    shown = "".join(part.plain for part in tables.terminal(board) if isinstance(part, Text))
    assert "server_error: down down" in shown
    assert "characters in all)" in shown
    assert len(shown) < 10_000


def test_losses_that_became_failures_are_in_the_notes() -> None:
    won, lost = play([True, True]), [episode(i, False, error="server_error") for i in range(2, 8)]
    won.failed = lost
    keep_counted_prefix(won)
    note = next(note for note in build([won]).notes if "no result" in note)
    assert "6 episodes have no result" in note
    assert "between 25.0% and 100.0%" in note


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"returns": {"player": 1.0}, "success": True}, "rewards add up to 0"),
        ({"returns": {"player": 0.05}}, "rewards add up to 0"),
        ({"turns": [Turn(step=i, player="player", state="s") for i in range(9)]}, "has 9 steps, the limit is 8"),
        ({"agents": {"player": "optimal"}, "settings": {}}, "holds answers in words"),
        (
            {"agents": {"player": "optimal"}, "turns": [Turn(step=0, player="player", state="s")]},
            "holds answers in words",
        ),
        ({"success": None}, "says success None"),
        ({"outcome": Outcome.PLAYING}, "outcome playing"),
    ],
)
def test_results_that_their_turns_deny_are_refused(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    write(tmp_path, [episode(0, False).model_copy(update=fields)])
    with pytest.raises(RecordError, match=says):
        load([tmp_path])


def test_an_episode_may_use_every_step_and_its_line_is_known(tmp_path: Path) -> None:
    turns = [Turn(step=i, player="player", state="s") for i in range(8)]
    write(tmp_path, [episode(0, False, turns=turns), episode(1, True)])
    (found,), _ = load([tmp_path])
    assert found.lines == {SEEDS[0]: 1, SEEDS[1]: 2}
    found.unfinished = {SEEDS[2]}
    (first,) = only([found], {SCENARIO: SEEDS[:1]}, ["a"], 1)
    assert (list(first.finished), first.asked, first.unfinished) == ([SEEDS[0]], 1, set())


def test_seeds_of_no_suite_are_refused_in_an_evaluation_and_named_elsewhere(tmp_path: Path) -> None:
    chosen = episode(0, True, sampling_seed=1)
    write(tmp_path / "own", [chosen])
    assert "belong to no suite" in load([tmp_path / "own"])[1][0]
    with changing_run(tmp_path / "run"):
        pass
    write(tmp_path / "run" / "a", [chosen])
    with pytest.raises(RecordError, match="belong to no suite"):
        load([tmp_path / "run"])


def test_leaderboard_verify_plays_every_episode_again(evaluated: Path, tmp_path: Path) -> None:
    """Whoever reads the tables is told whether it did."""
    run("leaderboard", str(evaluated), "--verify", "--out", str(tmp_path))
    assert "Every episode was simulated again" in (tmp_path / "card.md").read_text()
    record = evaluated / "random" / f"{SCENARIO}.jsonl"
    lines = record.read_text().splitlines()
    lines[0] = lines[0].replace('"state":"Step 1', '"state":"Step 7', 1)
    record.write_text("\n".join(lines) + "\n")
    run("leaderboard", str(evaluated), "--out", str(tmp_path))  # the sums are right
    assert "The results stand as they were recorded" in (tmp_path / "card.md").read_text()
    with pytest.raises(RecordError, match="does not replay"):
        run("leaderboard", str(evaluated), "--verify")


@given(st.text(alphabet=st.sampled_from("a|<>&*_[]()`\\\n!\x1b")))
def test_no_name_breaks_a_markdown_table(name: str) -> None:
    (line,) = [line for line in tables.markdown(build([play([True], f"x{name}")])).splitlines() if "| x" in line]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == len(tables.SCORES) + len(tables.ANSWERS) + 1
    assert "<" not in line
    assert not re.search(r"(?<!\\)\[", line)


def test_the_page_counts_episodes_as_replay_does(evaluated: Path) -> None:
    plays, _ = load([evaluated])
    for play in plays:
        file = evaluated / folder_name(play.agent) / f"{play.scenario}.jsonl"
        episodes = list(read_episodes(file))
        for seeds, line in play.lines.items():
            assert seeds_of(episodes[line - 1]) == seeds


def test_sigterm_ends_an_evaluation_as_ctrl_c_does(tmp_path: Path) -> None:
    arguments = ["eval", "random", "--scenario", SCENARIO, "--episodes", "1000000", "--out", str(tmp_path)]
    with ended(subprocess.Popen([*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True)) as child:
        record = tmp_path / "random" / f"{SCENARIO}.jsonl"
        while not record.is_file() or record.stat().st_size < 1000:
            time.sleep(0.05)
        child.terminate()
        _, said = child.communicate(timeout=120)
    assert child.returncode == 130
    assert "start the same command again" in said


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"endpoint": "http://h/v1"}, "belong together"),
        ({"suite": "paper", "scenarios": ["snake"]}, "do not go together"),
        ({"quick": True, "episodes": 3}, "do not go together"),
        ({"scenarios": ["snake-duel"]}, "several players"),
        ({"price": "cheap"}, "IN,OUT"),
        ({"price": "nan,-5"}, "IN,OUT"),
        ({"timeout_s": 0.0}, "0.0 is no number of seconds"),
        ({"timeout_s": float("nan")}, "nan is no number of seconds"),
        ({"endpoint": "", "model": ""}, "is empty"),
        ({"body": '{"a": NaN}'}, "NaN is no JSON number"),
        ({"temperature": float("inf")}, "temperature"),
        ({"body": "{"}, "no JSON"),
        ({"body": "[]"}, "no JSON object"),
        ({"headers": ["x"]}, "NAME=VALUE"),
        ({"headers": ["a=1", "a=2"]}, "one header twice: a, a"),
        ({"top_p": 0.0}, "top_p"),
        ({"agents": ["rndom"]}, "no agent is named"),
        ({"suite": "papr"}, "no suite is named"),
    ],
)
def test_wrong_options_are_named_before_anything_is_written(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        eval_here(tmp_path / "out", **({"agents": ["random"], "scenarios": []} | fields))
    assert not (tmp_path / "out").exists()


def test_who_plays_without_agents() -> None:
    assert command.Options().specs() == ["nano", "random", "optimal"]
    served = command.Options(endpoint="http://h/v1", model="m")
    assert served.specs() == ["endpoint:http://h/v1#m", "random", "optimal"]
    assert command.Options(agents=["random", "random"]).specs() == ["random"]


async def test_an_endpoint_has_a_price_and_a_cost(tmp_path: Path) -> None:
    async with FakeServer() as server:
        board = await eval_aside(
            tmp_path, agents=["random"], endpoint=server.url, model="fake", price="1,2", episodes=2,
            body='{"min_p": 0.1}', headers=["x-a=b"],
        )  # fmt: skip
    row = next(row for row in board.rows if row.agent.startswith("endpoint:"))
    assert row.cost_usd == pytest.approx((row.prompt_tokens + 2 * row.completion_tokens) / 1e6)
    assert row.prompt_tokens == 100 * row.turns > 0
    assert all(r.body["min_p"] == 0.1 and r.headers["x-a"] == "b" for r in server.requests)
    episodes = list(read_episodes(tmp_path / folder_name(row.spec) / f"{SCENARIO}.jsonl"))
    assert all(e.settings["player"]["body"] == {"min_p": 0.1} for e in episodes)


def test_another_nano_is_another_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from msgrpo.models import loading

    eval_here(tmp_path, agents=["nano"], episodes=2)
    monkeypatch.setattr(loading, "_digest", lambda file: "other weights")
    with pytest.raises(RecordError, match="other weights"):
        eval_here(tmp_path, agents=["nano"], episodes=3)


def test_an_episode_that_failed_before_its_first_step_has_no_score() -> None:
    """It was a division by zero, for who takes means over a record."""
    with pytest.raises(RecordError, match=r"frozen-lake from start \d+ has no score: game_fault"):
        _ = suite_episode(0, [], error="game_fault", success=None, returns={}).score


def test_in_a_narrow_terminal_a_table_breaks_no_word() -> None:
    """At 60 columns `illegal` stood there as `illega` and `l`, beside a column of which half was free."""
    board = build([play([True, False] * 40, "adapter:fl"), play([False] * 80, "b")])
    console = Console(width=60, file=io.StringIO(), force_terminal=True, color_system=None)
    for part in [
        *tables.terminal(board),
        tables.match_table("spiel:pig", [Result("a", "b", 4, 3, 1, 4, 0, 0.4, 0, 1)]),
    ]:
        output.print_table(part, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    heads = {
        word
        for head in (*tables.SCORES, *tables.ANSWERS, *tables.PAIR_COLUMNS)
        for word in head.replace("/", "/ ").split()
    }
    assert [word for word in heads | {"adapter:fl", "80,000/", "[39.3%,"} if word not in shown] == []
    assert max(map(len, shown.splitlines())) <= 60


def test_a_table_that_just_fits_is_as_in_a_wide_terminal() -> None:
    """Its widest column lost a sign's width, and its last word a line, though all had room."""

    def shown(width: int) -> str:
        console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
        output.print_table(tables.table("", ("agent", "n"), [["nano:frozen-lake", "20"]]), console)
        written: str = console.file.getvalue()  # type: ignore[attr-defined]
        return written

    wide = shown(200)
    assert shown(max(map(len, wide.splitlines()))) == wide


@pytest.mark.parametrize(
    "command_line",
    ["leaderboard lost", "view lost --html x.html", "leaderboard empty", "export empty --to inspect --out x"],
)
def test_where_nothing_has_a_result_the_command_that_plays_on_is_named(
    command_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said only that nothing is there, and of a failure without a message `context_length: None`."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "lost", [episode(0, False, error="context_length")])
    write(tmp_path / "empty", [])
    refused = invoked(*command_line.split()).exception
    assert isinstance(refused, RecordError)
    assert "msgrpo eval" in str(refused.fix)
    assert "None" not in refused.message
