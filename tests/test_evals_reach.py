"""Ranking, repeats, budgets, resumed turns, prompts in a column, names, and how a table came about."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from msgrpo.agent import Agent, Completion, Decision, OnText, View
from msgrpo.episode import Episode, new_episode, play_on, read_episodes
from msgrpo.errors import RecordError, UsageError
from msgrpo.evals import command, tables
from msgrpo.evals.leaderboard import Leaderboard, build
from msgrpo.evals.partial import Partial
from msgrpo.evals.plays import Play, load
from msgrpo.evals.progress import EvalProgress
from msgrpo.evals.ranking import ranking
from msgrpo.evals.record import changing_run, read_run, seeds_of
from msgrpo.evals.rows import pair_of, retellings, row_of
from msgrpo.evals.stats import share_interval
from msgrpo.evals.suites import EpisodeSeeds, episode_seeds, places_in_suite
from msgrpo.evals.verify import verify
from msgrpo.games import get_scenario
from msgrpo.prompt import PromptTemplate
from msgrpo.references import RandomAgent
from tests.command_line import PROGRAM
from tests.evals_helpers import SCENARIO, eval_aside, eval_here, seeded, write
from tests.fake_server import FakeServer, Request, chat, player, reply
from tests.test_evals_leaderboard import SETTINGS, episode
from tests.test_evals_leaderboard import play as outcomes
from tests.test_evals_run import LAKE, Counting, evaluate, lines, served
from tests.train_helpers import InAnyOrder, in_any_order

# ── ranking ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_shares_are_the_way_from_random_to_the_reference() -> None:
    plays = [
        outcomes([True] * 40, "optimal"),
        outcomes([True] * 4 + [False] * 36, "random"),
        outcomes([True] * 22 + [False] * 18, "half"),
    ]
    rows, notes = ranking(plays)
    assert notes == []
    assert [row.agent for row in rows] == ["optimal", "half", "random"]
    assert [row.share for row in rows] == pytest.approx([1, (22 / 40 - 0.1) / 0.9, 0])
    assert rows[1].low < rows[1].share < rows[1].high
    assert (rows[0].low, rows[0].high, rows[2].low, rows[2].high) == (1, 1, 0, 0)
    assert [(row.rank, row.last_rank) for row in rows] == [(1, 1), (2, 2), (3, 3)]


def test_agents_that_differ_by_chance_share_their_ranks() -> None:
    draw = random.Random(1)
    near = [[draw.random() < p for _ in range(40)] for p in (0.5, 0.55)]
    plays = [outcomes([True] * 40, "optimal"), outcomes([False] * 40, "random")]
    rows, _ = ranking([*plays, outcomes(near[0], "a"), outcomes(near[1], "b")])
    assert {row.agent: (row.rank, row.last_rank) for row in rows} == {
        "optimal": (1, 1), "a": (2, 3), "b": (2, 3), "random": (4, 4),
    }  # fmt: skip


def test_the_interval_is_that_of_an_independent_bootstrap() -> None:
    draw = random.Random(2)
    high, low, mine = ([draw.random() < p for _ in range(40)] for p in (0.9, 0.2, 0.6))
    rows, _ = ranking([outcomes(high, "optimal"), outcomes(low, "random"), outcomes(mine, "mine")])
    generator, shares = np.random.default_rng(7), []
    for _ in range(4000):
        chosen = generator.integers(40, size=40)
        top, bottom, middle = (fmean(np.array(one)[chosen]) for one in (high, low, mine))
        shares.append((middle - bottom) / (top - bottom))
    row = next(row for row in rows if row.agent == "mine")
    assert (row.low, row.high) == pytest.approx(np.quantile(shares, [0.025, 0.975]), abs=0.02)


def test_what_cannot_be_ranked_is_said() -> None:
    assert ranking([outcomes([True], "a"), outcomes([False], "b")]) == ([], [])  # no references
    same = [outcomes([True] * 5, name) for name in ("optimal", "random", "a")]
    assert ranking(same)[0] == []
    assert "no better than random" in ranking(same)[1][0]
    lone = outcomes([True], "a")
    lone.finished = {EpisodeSeeds(99, 99, 99): episode for episode in lone.finished.values()}
    apart = [outcomes([True], "optimal"), outcomes([False], "random"), lone]
    assert "no start that all have played" in ranking(apart)[1][0]


def test_the_share_is_over_the_starts_that_all_have_played() -> None:
    """optimal is better over all its episodes, and not on the three that the third agent has played as well."""
    plays = [
        outcomes([False, False, False, True, True], "optimal"),
        outcomes([False] * 5, "random"),
        outcomes([True, False, False], "a"),
    ]
    rows, notes = ranking(plays)
    assert rows == []
    assert "on the starts that all have played" in notes[0]


def in_slippery(play: Play) -> Play:
    """The same play, on the slippery lake."""
    scenario = get_scenario("frozen-lake-slippery")
    seeds = episode_seeds(scenario, len(play.finished))
    played = [e.model_copy(update={"scenario": scenario.id}) for e in play.finished.values()]
    return Play(play.agent, scenario.id, play.settings, dict(zip(seeds, played, strict=True)))


def test_a_scenario_that_does_not_count_leaves_the_others_score_as_it_is() -> None:
    """One start of a scenario that was left out took the overall score away, five of them made its interval wider."""
    first = [outcomes([True] * 40, "optimal"), outcomes([False] * 40, "random"), outcomes([True, False] * 20, "a")]
    alone, _ = ranking(first)
    for n in (1, 5):
        rows, notes = ranking([*first, *(in_slippery(outcomes([False] * n, play.agent)) for play in first)])
        assert rows == alone
        assert notes == [
            "frozen-lake-slippery is not in the overall score: optimal is no better than random on the starts that "
            "all have played"
        ]


def test_a_scenario_without_its_references_is_left_out_by_name() -> None:
    """Nothing said that the overall score was of one scenario of two."""
    first = [outcomes([True] * 40, "optimal"), outcomes([False] * 40, "random"), outcomes([True, False] * 20, "a")]
    rows, notes = ranking([*first, in_slippery(first[2])])
    assert rows == ranking(first)[0]
    assert notes == ["frozen-lake-slippery is not in the overall score: no result of random and optimal"]


def test_references_keep_their_place_under_any_name() -> None:
    plays = [outcomes([True] * 9, "optimal"), outcomes([False] * 9, "random"), outcomes([True, False] * 4, "a")]
    plays[0].name = "the search player"
    assert [row.agent for row in ranking(plays)[0]] == ["the search player", "a", "random"]


def test_a_board_is_sorted_and_has_its_overall_score() -> None:
    plays = [
        outcomes([False] * 20, "random"),
        outcomes([True] * 10 + [False] * 10, "a"),
        outcomes([True] * 20, "optimal"),
    ]
    board = build(plays)
    assert [row.agent for row in board.rows] == ["optimal", "a", "random"]
    assert "| 2 | a |" in tables.markdown(board).replace("\\", "")


# ── splits ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_validation_starts_have_a_folder_and_a_table_of_their_own(tmp_path: Path) -> None:
    """Settings are chosen on them; a table that mixed them with the test starts would be of neither."""
    val, test = tmp_path / "val", tmp_path / "test"
    await evaluate([Counting()], [LAKE], 5, val, split="val")
    await evaluate([Counting()], [LAKE], 3, test)
    assert {seeds_of(e) for e in lines(val)} == set(episode_seeds(LAKE, 5, "val"))
    assert not {LAKE.start_key(e.start_seed) for e in lines(val)} & {
        LAKE.start_key(e.start_seed) for e in lines(test)
    }
    assert verify(val / "counting" / f"{SCENARIO}.jsonl").remarks == []
    for split, folder in (("test", val), ("val", test)):
        with pytest.raises(UsageError, match=f"not of {split}"):
            await evaluate([Counting()], [LAKE], 5, folder, split=split)
    (test / "run.json").rename(tmp_path / "run.json")  # lost: its episodes are still there
    with pytest.raises(UsageError, match="not of val"):
        await evaluate([Counting()], [LAKE], 5, test, split="val")
    (tmp_path / "run.json").rename(test / "run.json")
    (play,), notes = load([val])
    board = build([play], notes)
    assert [(row.split, row.episodes) for row in board.rows] == [("val", 5)]
    assert "val split" in board.made[0]
    assert any("on which settings are chosen" in note for note in board.notes)
    with pytest.raises(RecordError, match="splits test and val"):
        load([val, test])
    mixed, notes = load([val, test], mix=True)
    assert {(play.label, len(play.finished)) for play in mixed} == {("counting (val)", 5), ("counting (test)", 3)}


async def test_matches_and_a_trainings_files_have_no_split_that_another_could_mix_with(tmp_path: Path) -> None:
    for name in ("match/a-vs-b.jsonl", "my-run/metrics.jsonl", "my-run/transcripts.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    await evaluate([Counting()], [LAKE], 1, tmp_path, split="val")
    assert read_run(tmp_path).split == "val"  # type: ignore[union-attr]


async def test_a_record_of_validation_starts_cannot_pass_for_one_of_the_test(tmp_path: Path) -> None:
    await evaluate([Counting()], [LAKE], 5, tmp_path, split="val")
    with changing_run(tmp_path) as run:
        run.split = "test"
    with pytest.raises(RecordError, match="not the suite's"):
        verify(tmp_path / "counting" / f"{SCENARIO}.jsonl")
    with pytest.raises(RecordError, match="belong to no suite"):
        load([tmp_path])


# ── repeats ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_repeats_extend_what_was_played_once_and_share_its_starts(tmp_path: Path) -> None:
    agent = Counting()
    await evaluate([agent], [LAKE], 5, tmp_path)
    await evaluate([agent], [LAKE], 5, tmp_path, repeats=3)
    assert len(agent.begun) == 15
    seeds = episode_seeds(LAKE, 5, repeats=3)
    assert {seeds_of(e) for e in lines(tmp_path)} == set(seeds)
    assert seeds[::3] == episode_seeds(LAKE, 5)
    assert len(set(seeds)) == 15
    assert len({s.start for s in seeds}) == 5
    assert places_in_suite(SCENARIO, seeds, 3) == ({s: i for i, s in enumerate(seeds)}, set())
    assert verify(tmp_path / "counting" / f"{SCENARIO}.jsonl").missing == {}
    (play,), notes = load([tmp_path])
    assert (play.repeats, len(play.finished), play.asked) == (3, 15, 15)
    assert not any("belong to no suite" in note for note in notes)


@pytest.mark.parametrize(
    ("first", "then"), [((20, 1), (4, 3)), ((4, 3), (4, 1)), ((4, 3), (8, 2))], ids=["fewer starts", "once", "fewer"]
)
async def test_repeats_that_would_leave_results_out_are_refused(
    tmp_path: Path, first: tuple[int, int], then: tuple[int, int]
) -> None:
    await evaluate([Counting()], [LAKE], first[0], tmp_path, repeats=first[1])
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(UsageError, match="would leave some of that out"):
        await evaluate([Counting()], [LAKE], then[0], tmp_path, repeats=then[1])
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def repeated(results: list[list[bool]], agent: str = "a") -> Play:
    seeds = episode_seeds(LAKE, len(results), repeats=len(results[0]))
    flat = [ok for group in results for ok in group]
    found = [episode(0, ok, agent=agent, **seeded(s)) for ok, s in zip(flat, seeds, strict=True)]
    return Play(agent, SCENARIO, SETTINGS, {seeds_of(e): e for e in found}, repeats=len(results[0]))


def test_pass_at_k_and_pass_hat_k_by_hand() -> None:
    row = row_of(repeated([[True, True], [True, False], [False, False], [False, True]]))
    assert (row.success_rate, row.pass_at_k, row.pass_hat_k) == (0.5, 0.75, 0.25)
    assert (row.episodes, row.steps_mean) == (8, 1.0)
    assert (row.success_low, row.success_high) == share_interval([1, 0.5, 0, 0.5])
    assert row.spread_within == pytest.approx((2 * 0.25 / 4) ** 0.5)
    assert row.spread_between == pytest.approx(np.std([1, 0.5, 0, 0.5]))


def test_a_start_of_which_an_episode_failed_says_nothing_of_pass_at_k() -> None:
    """Its one success counted as two of two, and as a start that never varies."""
    play = repeated([[True, True], [True, False], [False, False]])
    lost = play.finished.pop(list(play.finished)[1])
    play.failed.append(lost.model_copy(update={"error": "server_error", "returns": {}}))
    row, others = row_of(play), row_of(repeated([[True, False], [False, False]]))
    assert (row.pass_at_k, row.pass_hat_k) == (0.5, 0.0)
    assert (row.return_mean, row.success_rate) == (0.4, 0.4)  # of episodes
    assert (row.spread_within, row.spread_between) == (others.spread_within, others.spread_between)
    play.finished = dict(list(play.finished.items())[:1])
    assert (row_of(play).pass_at_k, row_of(play).pass_hat_k) == (None, None)


def test_episodes_of_one_start_are_no_news_for_the_interval() -> None:
    """Ten equal episodes of each start get the interval of one each."""
    once, often = (row_of(repeated([[ok] * k for ok in [True, False] * 10])) for k in (1, 10))
    assert (often.return_low, often.return_high) == (once.return_low, once.return_high)
    assert often.success_high - often.success_low > 0.3  # type: ignore[operator]
    pair = pair_of(repeated([[True] * 10] * 20), repeated([[ok] * 10 for ok in [True, False] * 10], "b"))
    alone = pair_of(repeated([[True]] * 20), repeated([[ok] for ok in [True, False] * 10], "b"))
    assert pair is not None
    assert alone is not None
    assert (pair.low, pair.high, pair.mcnemar_p) == (alone.low, alone.high, None)
    assert pair.detectable == alone.detectable
    mixed = pair_of(repeated([[True]] * 20), repeated([[ok] * 10 for ok in [True, False] * 10], "b"))
    assert mixed is not None
    assert (mixed.episodes, mixed.mcnemar_p) == (20, None)


def test_a_start_without_all_its_episodes_does_not_count(tmp_path: Path) -> None:
    with changing_run(tmp_path) as run:
        run.asked["a"], run.repeats["a"] = {SCENARIO: 6}, {SCENARIO: 2}
    seeds = episode_seeds(LAKE, 3, repeats=2)[:5]  # the third start was played once
    write(tmp_path / "a", [episode(0, True, **seeded(s)) for s in seeds])
    (play,), _ = load([tmp_path])
    assert (len(play.finished), len(play.left_out)) == (4, 1)


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_run_ends_before_it_costs_more_than_its_budget(tmp_path: Path) -> None:
    """110 tokens an answer: the records stay below the limit, and the beginning of the suite is complete."""
    async with FakeServer() as server:

        async def start(limit: int) -> Leaderboard:
            served = {"endpoint": server.url, "model": "fake", "max_tokens_total": limit}
            return await eval_aside(tmp_path, agents=["random"], episodes=60, concurrency=8, **served)

        board = await start(15_000)
        spent = 110 * len(server.requests)
        assert 10_000 < spent <= 15_000
        assert any("--max-tokens-total 15000: no further episode begins" in note for note in board.notes)
        row = next(row for row in board.rows if row.spec.startswith("endpoint:"))
        assert row.episodes + row.left_out == len(lines(tmp_path, row.spec)) > 0
        assert row.left_out == 0
        await start(15_000)
        assert 110 * len(server.requests) <= 15_000  # earlier starts count
        await start(30_000)
        assert 15_000 < 110 * len(server.requests) <= 30_000


async def test_episodes_begin_in_the_suites_order_while_others_wait_for_room() -> None:
    """A worker that waits for room keeps its place: nobody with a later episode gets ahead of it."""
    from msgrpo.evals.failures import Failures
    from msgrpo.evals.run import _Job, _play_all

    class Slow:
        """Room comes after a while, and to whoever asks later at once."""

        asked = 0

        async def room(self, progress: EvalProgress, steps: int) -> bool:
            Slow.asked += 1
            await asyncio.sleep(0.05 if Slow.asked == 1 else 0)
            return True

    begun: list[int] = []
    first = episode_seeds(LAKE, 6)

    class Record:
        tokens = [(0, 0)]  # noqa: RUF012
        failures = Counter[EpisodeSeeds]()  # noqa: RUF012

        def append(self, episode: Episode) -> None:
            """Kept nowhere."""

    class Begun:
        def take_up(self, seeds: EpisodeSeeds, game: object, episode: Episode) -> None:
            begun.append(first.index(seeds))

        def add(self, seeds: EpisodeSeeds, episode: Episode) -> None:
            """Kept nowhere."""

    async with FakeServer() as server:
        agent, progress = served(server), EvalProgress()
        progress.planned = 6
        jobs = iter([_Job(LAKE, seeds, Record(), Begun()) for seeds in first])  # type: ignore[arg-type]
        asked = SimpleNamespace(concurrency=6, regret=False, budget=Slow(), progress=progress)
        await _play_all(agent, jobs, asked, Failures(agent.spec, None, [], set()))  # type: ignore[arg-type]
        await agent.close()
    assert begun == list(range(6))


async def test_a_budget_that_nobody_can_keep_ends_the_run(tmp_path: Path) -> None:
    """The server counts no tokens: one episode is tried, and the table says why no other was."""

    async def silent(request: Request, writer: asyncio.StreamWriter) -> None:
        await reply(200, chat("<action>down</action>") | {"usage": None})(request, writer)

    async with FakeServer(then=silent) as server:
        served = {"endpoint": server.url, "model": "fake", "max_tokens_total": 50}
        board = await eval_aside(tmp_path, agents=["random"], episodes=20, **served)
    assert len(server.requests) <= LAKE.step_limit
    assert any("does not count its tokens" in note for note in board.notes)


@pytest.mark.parametrize(("scenario", "limit"), [("frozen-lake", 1), ("snake", 12_000), ("frozen-lake", 3000)])
async def test_long_episodes_do_not_go_beyond_the_budget(tmp_path: Path, scenario: str, limit: int) -> None:
    """Short episodes end first, and what they took says nothing about the long ones."""
    async with FakeServer() as server:
        served = {"endpoint": server.url, "model": "fake", "max_tokens_total": limit}
        board = await eval_aside(tmp_path, scenarios=[scenario], episodes=40, **served)
    steps = get_scenario(scenario).step_limit
    assert 0 < 110 * len(server.requests) <= max(limit, steps * 110)  # the first episode is let through
    assert {row.agent for row in board.rows} >= {"random", "optimal"}  # who costs nothing plays on


async def test_a_finished_run_says_nothing_of_its_budget(tmp_path: Path) -> None:
    async with FakeServer() as server:
        for limit in (None, 1):
            served = {"endpoint": server.url, "model": "fake", "max_tokens_total": limit}
            board = await eval_aside(tmp_path, episodes=3, **served)
    assert not any("no further episode" in note for note in board.notes)


def test_a_budget_in_money_needs_prices() -> None:
    with pytest.raises(UsageError, match="--max-cost needs the price"):
        command.Options(max_cost=1.0).budget()
    assert command.Options(max_cost=1.0, price="1,2").budget().cost == 1.0


async def test_the_rate_of_requests_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def waiting(seconds: float) -> None:
        waits.append(seconds)

    from msgrpo.agent import Sampling
    from msgrpo.models import endpoint
    from msgrpo.prompt import Prompt

    now = time.monotonic()
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter))
    async with FakeServer() as server:
        model = endpoint.EndpointModel(server.url, "fake", rate=60, sleep=waiting)
        await asyncio.gather(*(model.complete(Prompt("a", str(i)), Sampling(), i) for i in range(4)))
        await model.close()
    assert waits == pytest.approx([1, 2, 3])


def test_the_line_of_progress_says_what_the_rest_will_take() -> None:
    progress = EvalProgress(clock=lambda: 1.0)
    progress.planned = 20
    progress.begin(Counting(), 10)
    progress.done, progress.tokens, progress.cost = 4, 400, 2.0
    assert "about 600 tokens and $3.00 to go" in progress.line()


async def test_the_line_of_progress_says_why_there_is_no_answer_and_for_how_long(tmp_path: Path) -> None:
    """Of requests that had run out of time and were asked again it said "0 retrying", for half an hour."""
    said: list[str] = []
    seconds = itertools.count(0, 50)
    progress = EvalProgress(clock=lambda: float(next(seconds)), on_change=lambda now: said.append(now.line()))

    async def busy_once(request: Request, writer: asyncio.StreamWriter) -> None:
        progress.on_change(progress)
        await (player if server.requests[1:] else reply(500, "busy"))(request, writer)

    async with FakeServer(then=busy_once) as server:
        agent = served(server)
        await evaluate([agent], [LAKE], 1, tmp_path, progress=progress)
        await agent.close()
    waited = [
        line for line in said if "1 retrying: status 500: busy (retry 1 of 10) · 0 failed · no answer for" in line
    ]
    assert len(waited) == 1
    assert "no answer for" not in said[0]
    assert "0 retrying · 0 failed · " in said[-1]


# ── turns that were answered before a kill ───────────────────────────────────────────────────────────────────


async def test_a_killed_evaluation_asks_for_no_answer_twice(tmp_path: Path) -> None:
    """A real process, killed in mid-episode: what was answered and kept is not asked again, and the result is the
    uninterrupted one's."""
    async with FakeServer() as server:
        arguments = ["--scenario", "snake", "--episodes", "6", "--concurrency", "6"]
        program = [*PROGRAM, "eval", "--endpoint", server.url, "--model", "fake"]
        program += ["--name", f"endpoint:{server.url}#fake=served", *arguments, "--out"]

        async def finish(out: Path) -> None:
            done = await asyncio.to_thread(subprocess.run, [*program, str(out)], capture_output=True, timeout=120)
            assert done.returncode == 0, done.stderr.decode()

        child = subprocess.Popen([*program, str(tmp_path / "killed")], stderr=subprocess.DEVNULL)
        while len(server.requests) < 20 and child.poll() is None:
            await asyncio.sleep(0.005)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        asked = len(server.requests)
        begun = [*(tmp_path / "killed").rglob("*.turns")]
        assert begun  # it was killed in mid-episode
        await finish(tmp_path / "killed")
        again = len(server.requests) - asked
        assert not [*(tmp_path / "killed").rglob("*.turns")]
        before = len(server.requests)
        await finish(tmp_path / "whole")
        whole = len(server.requests) - before

    def played(name: str) -> dict[object, list[object]]:
        found = [e for file in (tmp_path / name).rglob("snake.jsonl") for e in read_episodes(file)]
        return {seeds_of(e): [(t.answer, t.reward) for t in e.turns] for e in found if "endpoint" in str(e.agents)}

    assert played("killed") == played("whole")
    assert whole <= asked + again <= whole + 6  # of each of the six episodes at most the answer that was on its way
    for file in (tmp_path / "killed").rglob("snake.jsonl"):
        assert verify(file).missing == {}


async def test_what_a_player_is_paid_while_others_move_is_in_an_episode_that_was_interrupted(tmp_path: Path) -> None:
    """A step is written when it is played, and what comes later for its mover was lost with the interruption."""

    class Pays(InAnyOrder):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            return {player: float(player not in actions) for player in self.players}

    class Says(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            return Decision("up", completion=Completion("<action>up</action>", "stop"))

    scenario, seeds = replace(in_any_order(), make=Pays), EpisodeSeeds(0, 11, 0)  # they move in turn at first
    agents: dict[str, Agent] = dict.fromkeys(scenario.players, Says())
    whole, record = new_episode(scenario, agents, *seeds), tmp_path / "r.jsonl"
    writer = Partial(record, {}, set())

    def written(one: Episode) -> None:
        if one.turns[-1].step < 4:
            writer.add(seeds, one)

    await play_on(scenario.new(0, 11), whole, scenario, agents, after_step=written)
    writer.close(ended=False)
    for _ in range(2):  # interrupted again, before another answer came, it is written anew
        again, game, partial = new_episode(scenario, agents, *seeds), scenario.new(0, 11), Partial(record, {}, set())
        partial.take_up(seeds, game, again)
        assert len(again.turns) == 4
        partial._begin()
        partial.close(ended=False)
        await play_on(game, again, scenario, agents)
        assert [turn.late for turn in again.turns] == [turn.late for turn in whole.turns]
    assert [turn.late for turn in whole.turns[:3]] == [1, 1, 2]


async def test_turns_under_other_settings_and_damaged_lines_are_not_taken_up(tmp_path: Path) -> None:
    record, settings, seeds = tmp_path / "r.jsonl", {"model": "m"}, episode_seeds(LAKE, 1)[0]
    async with FakeServer() as server:
        agent = served(server)
        whole = new_episode(LAKE, {"player": agent}, *seeds)
        writer = Partial(record, settings, set())
        game = LAKE.new(seeds.start, seeds.chance)
        await play_on(game, whole, LAKE, {"player": agent}, after_step=lambda e: writer.add(seeds, e))
        writer.close(ended=False)
        await agent.close()

    def taken(said: dict[str, str] = settings, *done: EpisodeSeeds) -> int:
        found = new_episode(LAKE, {}, *seeds)
        Partial(record, said, set(done)).take_up(seeds, LAKE.new(seeds.start, seeds.chance), found)
        return len(found.turns)

    assert taken() == len(whole.turns) > 2
    assert taken(settings, seeds) == taken({"model": "other"}, seeds) == 0
    with pytest.raises(RecordError, match="under other settings"):
        taken({"model": "other"})
    Partial(record, settings, set()).close(ended=True)  # of an evaluation of fewer episodes
    assert taken() == len(whole.turns)
    text = record.with_suffix(".turns").read_text()
    record.with_suffix(".turns").write_text(text[: len(text) - 20])
    assert taken() == len(whole.turns) - 1
    record.with_suffix(".turns").write_text(text.replace("Step 2", "Step 9"))
    assert taken() == 1
    record.with_suffix(".turns").write_text("\x00")
    assert taken() == 0


# ── names, ports, prompts, provenance ────────────────────────────────────────────────────────────────────────


async def test_a_server_on_another_port_is_the_same_agent(tmp_path: Path) -> None:
    for name, episodes in (("x", 3), ("y", 5)):
        async with FakeServer() as server:
            await eval_aside(tmp_path / name, endpoint=server.url, model="fake", episodes=episodes)
    board = command.merge([tmp_path / "x", tmp_path / "y"], None)
    row = next(row for row in board.rows if row.spec.startswith("endpoint:"))
    assert (row.agent, row.episodes) == ("endpoint:http://127.0.0.1/v1#fake", 5)
    alone = command.merge([tmp_path / "x"], None)
    row = next(row for row in alone.rows if row.spec.startswith("endpoint:"))
    assert row.agent == row.spec  # with its port, as it was typed: no other port is meant as well


async def test_what_each_port_was_asked_counts(tmp_path: Path) -> None:
    """Price, number, repeats and name are looked up under the name that the agent had in its own evaluation."""
    for name, episodes, repeats in (("x", 2, 1), ("y", 3, 2)):
        async with FakeServer() as server:
            spec = f"endpoint:{server.url}#fake"
            said = {"names": [f"{spec}=Named"], "price": "1,1"} if name == "y" else {}
            await eval_aside(tmp_path / name, agents=[spec], episodes=episodes, repeats=repeats, **said)
    for order in ("xy", "yx"):
        (play,), _ = load([tmp_path / name for name in order])
        assert (play.label, play.asked, play.repeats, len(play.finished)) == ("Named", 6, 2, 6)
        assert play.price is not None


def test_the_table_says_whom_a_given_name_means(tmp_path: Path) -> None:
    """Only the card did: on the terminal a reader took the name for a model of its own."""
    board = eval_here(tmp_path, agents=["random", "optimal"], episodes=2, names=["random=mine"])
    console = Console(width=80, file=io.StringIO())
    console.print(*tables.terminal(board))
    assert "note: mine is the agent random" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "optimal is the agent" not in str(board.notes)


async def test_a_refused_command_leaves_nothing(tmp_path: Path) -> None:
    async with FakeServer() as server:
        spec = f"endpoint:{server.url}#fake"
        await eval_aside(tmp_path, agents=[spec], episodes=2)
        before, more = read_run(tmp_path), {"temperature": 0.3, "price": "500,500", "names": [f"{spec}=Cool"]}
        with pytest.raises(RecordError, match="other settings"):
            await eval_aside(tmp_path, agents=[spec], episodes=2, **more)
        assert read_run(tmp_path) == before


def test_an_evaluation_that_is_refused_for_its_last_agent_says_nothing_of_progress(tmp_path: Path) -> None:
    """Those before it counted as planned, so "0/2 episodes" stood above the error."""
    eval_here(tmp_path, agents=["nano"], episodes=2)
    written = io.StringIO()
    options = command.Options(
        agents=["random", "nano"], scenarios=[SCENARIO], episodes=2, out=tmp_path, temperature=0.5
    )
    with pytest.raises(RecordError, match="other settings"):
        command.run(options, Console(file=written))
    assert "0/2" not in written.getvalue()


async def test_an_agent_that_can_play_nothing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """It left a folder with an empty record of the agent before it, and a run.json that asks for nothing."""

    class Unable(Counting):
        def can_play(self, scenario: object) -> bool:
            return False

    with pytest.raises(UsageError, match="can play none"):
        await evaluate([Counting(), Unable(spec="unable")], [LAKE], 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_an_agent_without_an_episode_is_named(tmp_path: Path) -> None:
    async with FakeServer() as server:
        agents = [f"endpoint:{server.url}#{model}" for model in ("a", "b")]
        board = await eval_aside(tmp_path, agents=agents, episodes=2, max_tokens_total=1)
    assert f"{agents[1]} has ended none of 2 episodes of {SCENARIO}" in board.notes
    assert board.silent == [f"{agents[1]} in {SCENARIO}"]  # with which msgrpo eval ends with 2: it ended with 0


def test_repeats_are_each_agents_own(tmp_path: Path) -> None:
    for agent, repeats in (("random", 1), ("optimal", 2)):
        eval_here(tmp_path, agents=[agent], episodes=3, repeats=repeats)
    assert [verify(file).missing for file in sorted(tmp_path.rglob("*.jsonl"))] == [{}, {}]


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ('"returns":{"player":0.0}', '"returns":{}', "has returns of"),
        ('"late":0.0', '"late":NaN', "finite"),
        ('"latency_s":0.0', '"latency_s":NaN', "finite"),
    ],
)
def test_a_record_that_cannot_be_true_is_refused(tmp_path: Path, was: str, now: str, says: str) -> None:
    eval_here(tmp_path, agents=["random"], episodes=4)
    (file,) = tmp_path.rglob("*.jsonl")
    text = file.read_text()
    assert was in text
    file.write_text(text.replace(was, now, 1))
    with pytest.raises(RecordError, match=says):
        load([tmp_path])


async def test_two_servers_of_one_evaluation_stay_two(tmp_path: Path) -> None:
    async with FakeServer() as one, FakeServer() as other:
        agents = [f"endpoint:{server.url}#fake" for server in (one, other)]
        board = await eval_aside(tmp_path, agents=agents, episodes=2)
    assert sorted(row.agent for row in board.rows) == sorted(agents)


def test_names_are_checked() -> None:
    def called(*names: str) -> dict[str, str]:
        return command.Options(agents=["random", "optimal"], names=names).called()

    assert called("random=dice") == {"random": "dice"}
    assert called("random=two\nlines  here") == {"random": "two lines here"}
    for wrong in (
        ("dice",),
        ("randm=x",),
        ("random=",),
        ("random=optimal",),
        ("random=x", "optimal=x"),
        ("random= \n",),
        ("random=a", "random=b"),  # the first was passed over
    ):
        with pytest.raises(UsageError):
            called(*wrong)


def test_prompts_stand_in_a_column_where_that_is_asked_for(tmp_path: Path) -> None:
    templates = [PromptTemplate(), PromptTemplate(name="none", instructions="{rules}{state}")]
    for template in templates:
        settings = {"player": {"model": "m", **template.settings}}
        write(tmp_path / template.name, [episode(i, True, settings=settings) for i in (0, 1)])
    with pytest.raises(RecordError, match="--by prompt"):
        command.merge([tmp_path], None)
    board = command.merge([tmp_path], None, by_prompt=True)
    assert sorted((row.agent, row.prompt) for row in board.rows) == [("a", "brief"), ("a", "none")]
    assert {tables.cells(row)[0] for row in board.rows} == {"a", "a [none]"}
    assert {board.pairs[0].a, board.pairs[0].b} == {"a, brief", "a, none"}
    assert all(template.hash in " ".join(board.made) for template in templates)  # every prompt is told
    write(tmp_path / "other", [episode(i, False, agent="b") for i in (0, 1)])  # both pairs were named a, b
    others = {(pair.a, pair.b) for pair in command.merge([tmp_path], None, by_prompt=True).pairs}
    assert {("a, brief", "b"), ("a, none", "b")} < others


def test_one_name_for_two_agents_is_no_name(tmp_path: Path) -> None:
    for agent, folder in (("a", "x"), ("b", "y")):
        with changing_run(tmp_path / folder) as run:
            run.names[agent], run.asked[agent] = "mine", {SCENARIO: 2}
        write(tmp_path / folder / agent, [episode(i, True, agent=agent) for i in (0, 1)])
    board = command.merge([tmp_path], None)
    assert sorted(row.agent for row in board.rows) == ["mine (a)", "mine (b)"]


@pytest.mark.parametrize("query", ["?api_key=x", "?sig=x&a=b", "?accessToken=x"])
def test_a_secret_in_the_url_is_refused(query: str) -> None:
    from msgrpo.models.endpoint import EndpointModel

    with pytest.raises(UsageError, match="would stand in folder names"):
        EndpointModel(f"http://h/v1{query}", "m")
    EndpointModel("http://h/v1?api-version=2024-10-21", "m")


@pytest.mark.parametrize(
    "options",
    [
        {"repeats": 2},
        {"max_cost": 1.0},
        {"max_tokens_total": 5},
        {"names": ["random=x"]},
        {"regret": True},
        {"price": "1,2"},
        {"max_failures": 0},
        {"retry_failed": True},
        {"split": "val"},
    ],
)
def test_a_match_refuses_what_it_does_not_have(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="a match has no --"):
        command.Options(agents=["random"], opponent="optimal", **options).check_match()  # type: ignore[arg-type]


async def test_a_card_says_how_the_table_came_about_and_keeps_secrets(tmp_path: Path) -> None:
    line = command.line_of(["eval", "--header", "authorization=Bearer sk-1", "--header=x-key=sk-2", "--out", "a b"])
    assert line == "msgrpo eval --header 'authorization=…' '--header=x-key=…' --out 'a b'"
    async with FakeServer() as server:
        spec = f"endpoint:{server.url}#fake"
        said = {"line": line, "names": [f"{spec}=mine"], "prompt": "none"}
        await eval_aside(tmp_path, endpoint=server.url, model="fake", episodes=3, **said)
    card = (tmp_path / "card.md").read_text().replace("\\", "")
    rows = json.loads((tmp_path / "leaderboard.json").read_text())["rows"]
    mine = next(row for row in rows if row["agent"] == "mine")
    assert (mine["spec"], mine["prompt"]) == (spec, "none")
    for said in (
        "test split: frozen-lake", f"mine: {spec}; prompt none", "temperature 1.0", "answered by fake", "gymnasium ",
        "on 3 different boards", line,
    ):  # fmt: skip
        assert said in card, said
    assert "sk-" not in card + (tmp_path / "run.json").read_text()
    run = read_run(tmp_path)
    assert run is not None
    assert run.commands[0].at.startswith(str(time.gmtime().tm_year))


def test_an_endpoint_says_which_model_answered() -> None:
    from msgrpo.models.endpoint_answers import checked, completion

    body = chat("hello") | {"model": "gpt\x1b[31m-x", "system_fingerprint": "fp_1"}
    found: Completion = completion(checked(body), 0.0, 0, ())
    assert found.model is not None
    assert found.model.endswith("fp_1")
    assert completion(checked(chat("x") | {"model": 7, "system_fingerprint": None}), 0.0, 0, ()).model in (None, "7")


def test_a_retelling_is_compared_over_what_both_finished_by_the_same_agent_and_prompt() -> None:
    told = replace(repeated([[False, False], [True, False], [False, False]]), scenario=f"{SCENARIO}~stones")
    plain = repeated([[True, True], [True, False], [True, True], [False, False]])
    for one in told.finished.values():
        one.scenario = told.scenario
    for play, places in ((told, [4, 5]), (plain, [1])):
        for seeds in [list(play.finished)[place] for place in places]:
            del play.finished[seeds]
    asked = repeated([[False, True]] * 3)
    asked.settings = SETTINGS | PromptTemplate(name="none", instructions="{rules}{state}").settings
    (row,) = retellings([repeated([[True, False]] * 3, "b"), asked, plain, told])
    assert (row.agent, row.scenario, row.telling, row.starts) == ("a", SCENARIO, "stones", 2)
    assert (row.plain, row.score, row.difference) == (2 / 3, 1 / 3, -0.5)
    assert row_of(told).optimum == row_of(plain).optimum == 1
    for biased in (plain, told):
        biased.asked, biased.interrupted = 100, 1
        assert retellings([plain, told]) == []
        biased.interrupted = 0


async def test_a_retelling_is_compared_with_the_plain_game(tmp_path: Path) -> None:
    told = get_scenario(f"{SCENARIO}~stones")
    await evaluate([Counting()], [LAKE, told], 8, tmp_path)
    plays, _ = load([tmp_path])
    board = build(plays)
    (row,) = board.retellings
    assert (row.scenario, row.telling, row.starts, row.difference) == (SCENARIO, "stones", 8, 0)
    assert all(map(math.isnan, (row.low, row.high)))  # the same dice: of eight equal differences there is none
    assert "frozen-lake~stones" in tables.markdown(board).replace("\\", "")
