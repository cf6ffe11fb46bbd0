from __future__ import annotations

import hashlib
import math

import pytest

from msgrpo.errors import UsageError
from msgrpo.evals.ranking import ranking
from msgrpo.evals.suites import PAPER, SUITE_VERSION, HeldOut, episode_seeds, suite
from msgrpo.game import split_of
from msgrpo.games import get_scenario
from tests.test_evals_reach import outcomes


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


def test_one_start_still_has_many_lucks() -> None:
    seeds = episode_seeds(get_scenario("frozen-lake-4x4"), 5)
    assert len({s.chance for s in seeds}) == 5


def test_the_seeds_of_a_version_never_change() -> None:
    text = repr([tuple(s) for id in PAPER for s in episode_seeds(get_scenario(id), 5)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert (SUITE_VERSION, digest) == (2, "57e9ddedf99c5820"), "seeds or texts changed: raise SUITE_VERSION"


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
