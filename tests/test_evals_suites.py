from __future__ import annotations

import asyncio
import fcntl
import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msgrpo.contract import check_game
from msgrpo.episode import play_episode
from msgrpo.errors import GameFaultError, RecordError, UsageError
from msgrpo.evals import cli, progress, record
from msgrpo.evals.leaderboard import build
from msgrpo.evals.plays import load
from msgrpo.evals.ranking import ranking
from msgrpo.evals.run import evaluate
from msgrpo.evals.suites import PAPER, SUITE_VERSION, EpisodeSeeds, HeldOut, episode_seeds, places_in_suite, suite
from msgrpo.evals.tables import card
from msgrpo.evals.verify import verify
from msgrpo.game import Game, Outcome, split_of
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.references import OptimalAgent, RandomAgent
from tests.command_line import invoked
from tests.evals_helpers import rewritten
from tests.fake_server import FakeServer, Request, player, reply
from tests.test_evals_honest import played
from tests.test_evals_reach import outcomes
from tests.tui_helpers import answer, scripted


def test_paper_is_the_papers_four_and_every_suite_has_single_players_only() -> None:
    assert [s.id for s in suite("paper")] == list(PAPER)
    assert "snake-duel" not in {s.id for s in suite("all")}
    assert {s.id for s in suite("transfer")} > set(PAPER)


def test_unknown_suite_names_the_near_one() -> None:
    with pytest.raises(UsageError, match="did you mean paper"):
        suite("papr")


@pytest.mark.parametrize("split", ["val", "test"])
def test_starts_are_held_out_and_a_longer_list_begins_with_the_shorter(split: HeldOut) -> None:
    scenario = get_scenario("frozen-lake")
    seeds = episode_seeds(scenario, 30, split)
    assert episode_seeds(scenario, 10, split) == seeds[:10]
    assert all(split_of(scenario.start_key(s.start)) == split for s in seeds)
    assert len({s.chance for s in seeds} | {s.sampling for s in seeds}) == 60


def test_a_start_that_cannot_be_looked_at_hides_no_episode_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One episode of no suite among them, and they were in no table."""
    lake = get_scenario("frozen-lake")

    def make(start: int, chance: int) -> Game:
        if start == 200:
            raise ValueError("start 200")
        return lake.make(start, chance)

    monkeypatch.setitem(SCENARIOS, "odd", replace(lake, id="odd", make=make))
    first, other = episode_seeds(SCENARIOS["odd"], 1)[0], EpisodeSeeds(1, 2, 3)
    assert places_in_suite("odd", [first, other], 1) == ({first: 0}, {other})
    with pytest.raises(GameFaultError, match="start 200"):  # one that was played there is not called of no suite
        places_in_suite("odd", [first, other, EpisodeSeeds(200, 2, 3)], 1)


def test_where_no_start_can_be_looked_at_no_episode_is_called_of_no_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a file that the game reads is not there: a reader was told that nothing says how seeds were chosen."""

    def make(start: int, chance: int) -> Game:
        raise FileNotFoundError("maps.txt")

    monkeypatch.setitem(SCENARIOS, "odd", replace(get_scenario("frozen-lake"), id="odd", make=make))
    with pytest.raises(GameFaultError, match=r"maps\.txt"):
        places_in_suite("odd", [EpisodeSeeds(1, 2, 3)], 1)


def test_one_start_still_has_many_lucks() -> None:
    seeds = episode_seeds(get_scenario("frozen-lake-4x4"), 5)
    assert len({s.chance for s in seeds}) == 5


def test_the_seeds_of_a_version_never_change() -> None:
    text = repr([tuple(s) for id in PAPER for s in episode_seeds(get_scenario(id), 5)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (SUITE_VERSION, digest) == (2, "57e9ddedf99c5820"), "seeds or texts changed: raise SUITE_VERSION"


def test_the_games_of_a_version_never_change() -> None:
    """All that players are told, see and get, in two starts of every game of ours."""
    told: list[object] = []
    for scenario in SCENARIOS.values():
        choices = (*scenario.actions, None)
        for start, chance, _ in episode_seeds(scenario, 2):
            game = scenario.new(start, chance)
            told += [scenario.rules, scenario.step_limit]
            for step in range(12):
                told += [game.observe(player) for player in game.players]
                if game.outcome is Outcome.PLAYING:
                    moves = [choices[(start + step // 2 + seat) % 5] for seat in range(len(game.players))]
                    told += [game.step(dict(zip(game.players, moves, strict=True))), game.ending]
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    assert (SUITE_VERSION, digest) == (2, "f5165baccea84b3b"), "rules, starts or luck changed: raise SUITE_VERSION"


def test_of_few_starts_that_are_all_alike_the_overall_score_has_no_interval() -> None:
    """Its width was zero: one of two starts won in each game was "0.500 [0.500, 0.500]", on a rank of its own."""
    bracket = [outcomes([True] * 9, "optimal"), outcomes([False] * 9, "random")]
    rows = {row.agent: row for row in ranking([*bracket, outcomes([True] * 9, "a")])[0]}
    assert math.isnan(rows["a"].low)
    assert math.isnan(rows["a"].high)
    assert (rows["optimal"].low, rows["optimal"].high, rows["random"].low, rows["random"].high) == (1, 1, 0, 0)
    assert (rows["a"].rank, rows["a"].last_rank) == (1, 3)


def test_there_is_no_overall_score_where_few_starts_decide_that_there_is_a_way() -> None:
    """What was left of the resamples gave the interval; where none was left, the tables were a traceback."""
    plays = []
    for name in ("frozen-lake", "frozen-lake-slippery", "frozen-lake-big-slippery"):
        for agent, won in (("optimal", [True, False]), ("random", [False, False]), ("a", [False, True])):
            play = outcomes(won, agent)
            play.scenario = name
            plays.append(play)
    assert len(ranking(plays[:3])[0]) == 3
    assert ranking(plays) == ([], ["no overall score: whether optimal is better than random hangs on few starts"])


def test_a_card_says_whose_episodes_are_fewer(tmp_path: Path) -> None:
    """It said "20 episodes on 11 different boards" and "12 episodes on 6 different boards", not of which agents."""
    lake = get_scenario("frozen-lake-4x4")
    asyncio.run(evaluate([RandomAgent()], [lake], 3, tmp_path))
    asyncio.run(evaluate([OptimalAgent()], [lake], 2, tmp_path))
    board = build(*load([tmp_path]))
    said = card(board)
    assert "frozen-lake-4x4: 3 episodes on 1 board (random)." in said
    assert "frozen-lake-4x4: 2 episodes on 1 board (optimal)." in said
    board.rows[0].prompt = "none"  # of several prompts, with which
    assert r"(optimal \[none\])." in card(board)


def test_one_is_one_in_what_is_said(tmp_path: Path) -> None:
    """It said "the 20 starts hold 1 different boards", "1 episodes replay", "1 lines were removed"."""
    lake = get_scenario("frozen-lake-4x4")
    asyncio.run(evaluate([RandomAgent()], [lake], 2, tmp_path))
    plays, notes = load([tmp_path])
    assert "frozen-lake-4x4: 2 episodes on 1 board." in card(build(plays, notes))
    (file,) = tmp_path.rglob("*.jsonl")
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    said = verify(file).summary
    assert said.startswith("1 episode replays as recorded")
    assert "TAKEN OUT: 1 line was removed" in said
    alike, finished = replace(lake, one_start=False), plays[0].finished
    finished |= {EpisodeSeeds(start, 0, 0): next(iter(finished.values())) for start in (1, 2)}
    with pytest.MonkeyPatch.context() as known:
        known.setitem(SCENARIOS, lake.id, alike)
        assert any("starts hold 1 board; the others are repeats" in note for note in build(plays).notes)


def test_a_folder_may_be_given_alone_and_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Each letter of its name was taken for a folder; a missing record beside a run.json was an error of Python."""
    asyncio.run(evaluate([RandomAgent()], [get_scenario("frozen-lake")], 2, tmp_path, repeats=2))
    for folder in (tmp_path, str(tmp_path), [tmp_path]):
        (play,), _ = load(folder)
        assert len(play.finished) == 4
    with pytest.raises(RecordError, match=r"gone\.jsonl cannot be read"):
        verify(tmp_path / "random" / "gone.jsonl")
    with pytest.raises(RecordError, match=r"gone is neither a file nor a folder that can be read\n.* makes records"):
        load(tmp_path / "gone")


def test_the_starts_of_a_single_one_have_no_spread(tmp_path: Path) -> None:
    """It stood as 0.000, as if all starts were equally hard."""
    asyncio.run(evaluate([RandomAgent()], [get_scenario("frozen-lake")], 1, tmp_path, repeats=3))
    (row,) = build(*load(tmp_path)).rows
    assert row.spread_within is not None
    assert row.spread_between is None


@pytest.mark.parametrize(
    ("agents", "seed", "said"),
    [
        ({"player": "random"}, 0, "'random' is the name of an agent"),
        ({"player": RandomAgent}, 0, "RandomAgent is a class"),
        ({}, 0, r"the players of frozen-lake are player, and agents were given for \[\]"),
        ({"me": RandomAgent()}, 0, r"agents were given for \['me'\]"),
        ({"player": RandomAgent()}, -1, "start_seed: Input should be greater than or equal to 0"),
    ],
)
def test_who_can_play_no_episode_is_named(agents: dict[str, Any], seed: int, said: str) -> None:
    """These were errors of Python and pydantic; where a seat was empty, the game was said to be at fault."""
    playing = play_episode(get_scenario("frozen-lake"), agents, start_seed=seed, chance_seed=0, sampling_seed=0)
    with pytest.raises(UsageError, match=said):
        asyncio.run(playing)


def test_the_name_of_a_scenario_is_none() -> None:
    """Of an episode, and of the contract's check, it was an AttributeError."""
    name: Any = "snake"
    with pytest.raises(UsageError, match="'snake' is no scenario"):
        asyncio.run(play_episode(name, {"player": RandomAgent()}, start_seed=0, chance_seed=0, sampling_seed=0))
    with pytest.raises(UsageError, match="'snake' is no scenario"):
        check_game(name)


def test_losses_that_are_called_prompts_that_were_too_long_are_doubted(tmp_path: Path) -> None:
    """Relabelled so they left the score, and nothing said that longer prompts of the record had an answer."""
    played(tmp_path, scripted("nano", answer("up")), RandomAgent())
    (file,) = tmp_path.glob("nano/*.jsonl")
    assert verify(file).short == {}

    def relabelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lost = {"error": "context_length", "turns": [], "returns": {}, "success": None, "outcome": "playing"}
        return [rows[0], *({**row, **lost} for row in rows[1:])]

    rewritten(file, relabelled)
    assert verify(file).short == {"frozen-lake": 7}
    assert "DOUBTFUL: 7 episodes of frozen-lake lost by context_length" in verify(file).summary
    rewritten(file, lambda rows: rows[1:])  # nothing is left to hold them against
    assert verify(file).short == {}


async def test_verify_says_why_the_answer_that_it_asks_for_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that answered nothing it said nothing, for half an hour."""
    await evaluate([RandomAgent()], [get_scenario("frozen-lake")], 1, tmp_path)
    told: list[str] = []
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.01)
    monkeypatch.setattr(cli, "say", told.append)

    async def busy_once(request: Request, writer: asyncio.StreamWriter) -> None:
        for _ in range(500):
            if server.requests[1:] and not told:
                await asyncio.sleep(0.01)
        await (player if server.requests[1:] else reply(500, "busy"))(request, writer)

    async with FakeServer(then=busy_once) as server:
        name = f"endpoint:{server.url}#fake"
        done = await asyncio.to_thread(invoked, "verify", str(tmp_path), "--ask", "1", "--agent", name)
    assert done.exit_code == 0, done.output
    assert told[0] == f"{name}: status 500: busy (retry 1 of 10)"


async def test_who_holds_a_folder_without_end_is_not_waited_for_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an evaluation does that was stopped at that moment: the next one waited for it, and said nothing."""
    monkeypatch.setattr(record, "LOCKED_S", 0.1)
    with (tmp_path / ".run.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RecordError, match=r"run\.json\.lock for 0\.1 s: it may be stopped"):
            await evaluate([RandomAgent()], [get_scenario("frozen-lake")], 1, tmp_path)
    await evaluate([RandomAgent()], [get_scenario("frozen-lake")], 1, tmp_path)
