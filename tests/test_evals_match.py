"""Matches: both seats, by hand; ratings against what they must be; and a match that was killed."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from msgrpo.agent import Decision, LanguageAgent, OnText, Sampling, View
from msgrpo.errors import EndpointError, GameFaultError, ModelError, MsgrpoError, RecordError, UsageError
from msgrpo.evals import cli, command, match
from msgrpo.evals.record import RecordFile
from msgrpo.evals.stats import ends
from msgrpo.evals.verify import verify
from msgrpo.game import Scenario
from msgrpo.games import SCENARIOS, get_scenario, outside
from msgrpo.models.loading import nano
from msgrpo.output import print_table
from msgrpo.references import OptimalAgent, RandomAgent
from tests.command_line import PROGRAM, run
from tests.evals_helpers import eval_here
from tests.train_helpers import in_any_order, recorded_batches

NIM = f"{Path(__file__).resolve().parents[1] / 'examples' / 'nim.py'}:scenario"
PAIR = ("optimal", "random")
AGENTS = {"optimal": OptimalAgent(), "random": RandomAgent()}


async def test_everybody_sits_on_both_seats_of_every_start(tmp_path: Path) -> None:
    """A loop runs, as in a notebook's cell: there a match was an error of asyncio."""
    scenario = get_scenario(NIM)
    records = match.play(scenario, AGENTS, [PAIR], 5, tmp_path)
    points, left_out = match.points_of(records[0][1], PAIR, scenario, 5)
    assert left_out == 0
    assert [len(both) for both in points.values()] == [2] * 5
    (result,), rated = match.report(scenario, records, 5, tmp_path)
    assert (result.wins + result.draws + result.losses, result.starts, rated) == (10, 5, [])
    assert result.score > 0.5  # of ten games, whose starts follow from where this file lies
    assert result.low <= result.score <= result.high
    assert verify(records[0][1]).episodes == 10
    assert json.loads((tmp_path / "match.json").read_text())["results"][0]["wins"] == result.wins


class Unheard(RandomAgent):
    closed = False

    def close(self) -> None:  # type: ignore[override]
        """It cannot be waited for."""
        self.closed = True


def test_an_agent_that_is_none_is_refused_and_a_folder_may_be_a_text(tmp_path: Path) -> None:
    """A close without `async` ended a match whose games had all been played."""
    scenario, out, unheard = get_scenario(NIM), str(tmp_path / "m"), Unheard()
    nobody: Any = "random"
    with pytest.raises(UsageError, match="'random' is the name of an agent"):
        match.play(scenario, AGENTS | {"random": nobody}, [PAIR], 2, out)
    assert not Path(out).exists()
    match.report(scenario, match.play(scenario, AGENTS | {"random": unheard}, [PAIR], 2, out), 2, out)
    assert unheard.closed
    assert (tmp_path / "m" / "match.json").is_file()


HIGH_LOW = """
from msgrpo.game import Game, Scenario

drawn = []

class HighLow(Game):
    actions, players = ("high", "low"), ("one", "two")

    def __init__(self, start_seed, chance_seed):
        super().__init__(1)
        drawn.append(start_seed)
        if start_seed > 400:
            raise ValueError("no start")
        self.start = start_seed

    def observe(self, player):
        return f"start {self.start}"

    def _advance(self, actions):
        return {"one": 1.0, "two": 0.0}

scenario = Scenario("hl", "hl", "Go.", 1, "[test]", HighLow, actions=HighLow.actions, players=HighLow.players)
"""


def test_a_match_begins_before_all_its_starts_are_drawn_and_keeps_what_it_has(tmp_path: Path) -> None:
    """Nothing was shown till then, and a start that cannot be looked at ended a match in which nobody had played."""
    (tmp_path / "hl.py").write_text(HIGH_LOW)
    scenario, agents = (
        get_scenario(f"{tmp_path / 'hl.py'}:scenario"),
        {"random": RandomAgent(), "other": RandomAgent("other")},
    )
    drawn = sys.modules[scenario.make.__module__].drawn  # type: ignore[attr-defined]
    after: list[int] = []

    def done(played: int, planned: int) -> None:
        after.append(max(drawn))

    with pytest.raises(GameFaultError, match="no start"):
        match.play(scenario, agents, [("random", "other")], 100, tmp_path / "m", done, concurrency=2)
    assert after[0] < 200 < after[-1]  # the first 128 are looked at in any case: are there few?
    records = match.records_of([("random", "other")], tmp_path / "m")
    (result,), _ = match.report(scenario, records, 100, tmp_path / "m")
    assert result.starts > 5
    assert result.starts + result.failed == 100


def test_a_start_that_cannot_be_looked_at_keeps_no_other_game_from_being_played(tmp_path: Path) -> None:
    """The games that were going on then were lost: all, where many go on at once. No other pairing began."""

    class Waiting(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            await asyncio.sleep(0)
            return await super().act(view)

    (tmp_path / "hl.py").write_text(HIGH_LOW)
    scenario, agents = get_scenario(f"{tmp_path / 'hl.py'}:scenario"), {name: Waiting(name) for name in "abc"}
    pairs = match.pairings([*agents], None)
    with pytest.raises(GameFaultError, match="no start"):
        match.play(scenario, agents, pairs, 100, tmp_path / "m", concurrency=1000)
    results, _ = match.report(scenario, match.records_of(pairs, tmp_path / "m"), 100, tmp_path / "m")
    assert len(results) == 3
    assert min(result.starts for result in results) > 50


def test_a_match_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """A torn last line and a missing episode: played again, and nothing twice."""
    scenario = get_scenario(NIM)
    ((_, file),) = match.play(scenario, AGENTS, [PAIR], 4, tmp_path)
    whole = file.read_text().splitlines()
    file.write_text("\n".join(whole[:5]) + "\n" + whole[5][:40])
    match.play(scenario, AGENTS, [PAIR], 4, tmp_path)
    again = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(again) == 8
    assert len({(one["start_seed"], one["chance_seed"], tuple(one["agents"].items())) for one in again}) == 8


def test_no_more_games_at_once_than_are_allowed(tmp_path: Path) -> None:
    class Counted(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            games.now += 1
            games.most = max(games.most, games.now)
            await asyncio.sleep(0)
            games.now -= 1
            return await super().act(view)

    both = {"random": Counted(), "other": Counted("other")}
    for allowed in (1, 3):
        games = SimpleNamespace(now=0, most=0)
        match.play(get_scenario(NIM), both, [("random", "other")], 4, tmp_path / str(allowed), concurrency=allowed)
        assert games.most == allowed


def test_two_matches_do_not_write_into_one_record(tmp_path: Path) -> None:
    scenario = get_scenario(NIM)
    ((_, file),) = match.play(scenario, AGENTS, [PAIR], 1, tmp_path)
    before = file.read_bytes()
    with RecordFile(file), pytest.raises(RecordError, match="another process writes"):
        match.play(scenario, AGENTS, [PAIR], 2, tmp_path)
    assert file.read_bytes() == before
    match.play(scenario, AGENTS, [PAIR], 2, tmp_path)
    assert len(file.read_text().splitlines()) == 4


def test_points_by_hand() -> None:
    result = match.result(PAIR, {0: [1.0, 0.0], 1: [0.5, 0.5], 2: [1.0, 1.0]}, failed=1)
    assert (result.wins, result.draws, result.losses, result.failed) == (3, 2, 1, 1)
    assert result.score == pytest.approx((0.5 + 0.5 + 1.0) / 3)


def test_ratings_of_two_are_their_log_odds() -> None:
    """30 points of 40, half a point more on each side: odds 30.5 to 10.5, in Elo 400 log10 of them, around 0."""
    found = match.bradley_terry(np.array([[0.0, 30.0], [10.0, 0.0]]))
    assert found[0] - found[1] == pytest.approx(400 * math.log10(30.5 / 10.5))
    assert found.sum() == pytest.approx(0.0, abs=1e-6)


def test_ratings_are_the_most_likely_ones() -> None:
    """At the maximum the gradient of the likelihood is 0: everybody's points are what their ratings predict."""
    wins = np.array([[0.0, 7.0, 9.0], [3.0, 0.0, 6.5], [1.0, 3.5, 0.0]])
    rating = np.exp(match.bradley_terry(wins) / match.ELO)
    smoothed = wins + 0.5 * (1 - np.eye(3))
    expected = rating[:, None] / (rating[:, None] + rating[None, :]) * (smoothed + smoothed.T)
    assert expected.sum(axis=1) == pytest.approx(smoothed.sum(axis=1), abs=1e-4)
    assert list(rating) == sorted(rating, reverse=True)


def test_a_round_robin_has_ratings_with_intervals() -> None:
    points = {("a", "b"): {i: [1.0, 0.5] for i in range(20)}, ("a", "c"): {i: [1.0, 1.0] for i in range(20)}}
    points |= {("b", "c"): {i: [float(i % 2), 1.0] for i in range(20)}}
    rated = match.ratings(["c", "a", "b"], points)
    assert [rating.agent for rating in rated] == ["a", "b", "c"]
    assert all(rating.low <= rating.elo <= rating.high for rating in rated)


def test_ratings_of_few_starts_have_the_interval_of_all_resamples() -> None:
    """Of six starts the quantiles are far out, and 200 resamples hardly came there: intervals were too narrow. Here
    all 462 ways to draw six of six starts, each as often as it comes, say what they are.
    """
    scores = {("a", "b"): [2, 2, 1, 2, 0.5, 2], ("a", "c"): [1, 2, 0, 2, 2, 2], ("b", "c"): [1, 1, 0.5, 2, 0, 1]}
    draws = [draw for draw in itertools.product(range(7), repeat=6) if sum(draw) == 6]
    wins = np.zeros((len(draws), 3, 3))
    for pair, own in scores.items():
        i, j = map("abc".index, pair)
        wins[:, i, j], wins[:, j, i] = draws @ np.array(own), draws @ (2 - np.array(own))
    often = np.array([math.factorial(6) / math.prod(map(math.factorial, draw)) / 6**6 for draw in draws])
    points = {pair: {n: [score / 2, score / 2] for n, score in enumerate(own)} for pair, own in scores.items()}
    rated = {rating.agent: rating for rating in match.ratings(["a", "b", "c"], points)}
    for i, agent in enumerate("abc"):
        elo = match.bradley_terry(wins, ~np.eye(3, dtype=bool))[:, i]
        order = np.argsort(elo)
        share = np.cumsum(often[order])  # of all resamples, up to each rating
        tail = ends(6)[0]
        lowest, low, high, highest = elo[order][
            np.searchsorted(share, [tail / 2, tail * 2, 1 - tail * 2, 1 - tail / 2])
        ]
        assert lowest - 1e-3 < rated[agent].low < low + 1e-3, agent
        assert high - 1e-3 < rated[agent].high < highest + 1e-3, agent


def test_the_command_plays_a_match_and_a_round_robin(tmp_path: Path) -> None:
    three = ["--episodes", "3", "--out", str(tmp_path)]
    done = run("eval", "optimal", "--opponent", "random", "--scenario", NIM, *three, "--json")
    (row,) = json.loads(done.stdout)["results"]
    assert (row["first"], row["second"], row["starts"]) == ("optimal", "random", 3)
    with pytest.raises(UsageError, match="a match needs two agents"):
        run("eval", "optimal", "--scenario", NIM, *three)
    with pytest.raises(UsageError, match="a match is for two"):
        run("eval", "random", "--opponent", "optimal", "--scenario", "snake", *three)


def test_a_resample_without_an_agents_starts_still_rates_it() -> None:
    """c met the others on one start of twenty: in most resamples it has no points at all, and none may be NaN."""
    points = {
        ("a", "b"): {i: [1.0, 0.5] for i in range(20)},
        ("a", "c"): {0: [1.0, 0.0]},
        ("b", "c"): {0: [0.0, 1.0]},
    }
    rated = match.ratings(["a", "b", "c"], points)
    assert all(math.isfinite(value) for rating in rated for value in (rating.elo, rating.low, rating.high))


def test_episodes_of_other_settings_or_rules_are_not_taken_for_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = get_scenario(NIM)
    ((_, file),) = match.play(scenario, AGENTS, [PAIR], 2, tmp_path)
    other = replace(scenario, rules="Other.")
    with monkeypatch.context() as changed:
        changed.setitem(outside._loaded, NIM, other)
        with pytest.raises(RecordError, match="other rules"):
            match.play(other, AGENTS, [PAIR], 2, tmp_path)

    class Colder(RandomAgent):
        def settings(self) -> dict[str, object]:
            return {"model": "random", "temperature": 0}

    with pytest.raises(RecordError, match="other settings of random"):
        match.play(scenario, {**AGENTS, "random": Colder()}, [PAIR], 2, tmp_path)
    assert len(file.read_text().splitlines()) == 4


def test_a_match_beside_an_evaluation_is_verified(tmp_path: Path) -> None:
    """Both seats of a start have its seeds; that is no episode played twice."""
    eval_here(tmp_path, agents=["random"], episodes=2)
    ((_, file),) = match.play(get_scenario("snake-duel"), AGENTS, [PAIR], 2, tmp_path)
    assert verify(file).episodes == 4


def test_the_endpoint_that_was_named_plays(tmp_path: Path) -> None:
    """Wrong: to leave it out and print another pairing's table."""
    named = ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--opponent", "random", "--retries", "0"]
    with pytest.raises(MsgrpoError, match=r"127\.0\.0\.1:9"):
        run("eval", *named, "--scenario", NIM, "--episodes", "1", "--out", str(tmp_path))


def test_a_pairing_without_a_result_costs_the_others_nothing_and_says_why(tmp_path: Path) -> None:
    """One dead server: nothing was shown of the other agents' games, nor what had failed."""
    nobody = "endpoint:http://127.0.0.1:9/v1#m"
    arguments = ["eval", "optimal", "random", nobody, "--json", "--scenario", NIM, "--episodes", "1"]
    command = [*PROGRAM, *arguments, "--retries", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (row,) = json.loads(done.stdout)["results"]
    assert (row["first"], row["second"], row["starts"]) == ("optimal", "random", 1)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    for first in ("optimal", "random"):
        assert f"no start of {first} against {nobody} was finished; the last failure: connection" in said
    assert "nothing answers at 127.0.0.1:9" in said


@pytest.mark.parametrize(
    "failure",
    [
        EndpointError("no quota", kind="quota", fatal=True, fix="the account has no quota left"),
        GameFaultError("no quota", fatal=True, fix="the account has no quota left"),  # as of a game that hangs
        ModelError("no quota", fix="the account has no quota left"),  # as of weights that are not finite
        UsageError("no quota", fix="the account has no quota left"),  # as of too many open files
    ],
)
def test_a_failure_that_ends_a_match_hides_no_result(
    failure: MsgrpoError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An account without quota kept from view what the others had played, in this start and before it."""

    class Broke(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            raise failure

    monkeypatch.setattr(command, "make_agent", lambda spec, *given, **more: AGENTS.get(spec) or Broke(spec))
    given: dict[str, Any] = {"scenarios": [NIM], "episodes": 1, "out": tmp_path}
    with pytest.raises(type(failure), match="no quota"):
        command.run_match(command.Options(agents=["optimal", "broke"], **given))
    command.run_match(command.Options(agents=[*PAIR], **given))
    _, results, _, missing = command.run_match(command.Options(agents=[*PAIR, "broke"], **given))
    assert [(one.first, one.second, one.starts) for one in results] == [(*PAIR, 1)]
    assert missing.splitlines() == [
        "no quota",
        "  the account has no quota left",
        "no start of optimal against broke was finished",
        "no start of random against broke was finished",
    ]


class Unable(RandomAgent):
    """As a DQN, which plays the boards of its training only."""

    def can_play(self, scenario: Scenario) -> bool:
        return False


@pytest.mark.parametrize(
    ("pairs", "given", "said"),
    [
        ([], {}, "pairs of two agents"),
        ([("random", "random")], {}, "pairs of two agents"),
        ([("random", "optimal", "best")], {}, "pairs of two agents"),
        ([PAIR, PAIR[::-1]], {}, "each pair once"),
        ([("random", "optimla")], {}, "no agent of this match has the spec 'optimla'"),
        ([("random", "best")], {}, "no agent of this match has the spec 'best'"),
        ([PAIR], {"concurrency": 0}, "concurrency is 0"),
        ([PAIR], {"starts": 0}, "starts is 0"),
        ([PAIR], {"starts": 1.5}, "starts is 1.5"),
        ([PAIR], {"agents": {"Random ": RandomAgent("Random ")}}, "'Random ' reads like another agent's name"),
        ([PAIR], {"agents": {"of-boards": Unable("of-boards")}}, "of-boards cannot play .*nim"),
        ([PAIR], {"scenario": in_any_order()}, "'in-any-order' does not lead to this scenario"),
        ([PAIR], {"scenario": "nim"}, "'nim' is no scenario"),
    ],
)
def test_what_no_match_can_be_is_refused_before_anything_is_written(
    pairs: list[tuple[str, str]], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Without a place for a game it waited for ever; games of an agent under another name counted for nobody; of no
    start, or by an agent that reads like another, it left a record that no command could read."""
    arguments = {"scenario": get_scenario(NIM), "starts": 1} | given
    arguments["agents"] = AGENTS | {"best": OptimalAgent()} | given.get("agents", {})
    with pytest.raises(UsageError, match=said):
        match.play(pairs=pairs, out=tmp_path / "m", **arguments)
    assert not (tmp_path / "m").exists()


def test_agents_that_no_result_connects_are_not_rated_together(tmp_path: Path) -> None:
    """Where a with b and c with d alone had results, all four stood on one scale: by where the iteration began."""
    assert match.are_linked([("a", "b"), ("c", "d"), ("b", "c")])
    assert not match.are_linked([("a", "b"), ("c", "d"), ("a", "e")])
    scenario = get_scenario(NIM)
    agents = {spec: RandomAgent(spec) for spec in "abcd"}
    records = match.play(scenario, agents, [("a", "b"), ("c", "d")], 1, tmp_path)
    results, rated = match.report(scenario, records, 1, tmp_path)
    assert len(results) == 2
    assert rated == []


def test_a_rating_from_equal_results_has_no_interval() -> None:
    """Where everybody always wins or loses, every resample is the same: an interval of width zero was printed."""
    always = {number: [1.0, 1.0] for number in range(4)}
    rated = match.ratings(["a", "b", "c"], {("a", "b"): always, ("a", "c"): always, ("b", "c"): always})
    assert [rating.agent for rating in rated] == ["a", "b", "c"]
    assert all(math.isnan(rating.low) and math.isnan(rating.high) for rating in rated)


def test_who_is_faster_does_not_decide_which_turns_are_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answered what waited by then: the rounding of a batch, and now and then an answer, was the clock's."""
    models = {name: nano() for name in ("one", "other")}
    agents = {name: LanguageAgent(name, model, Sampling(max_tokens=3)) for name, model in models.items()}

    scenario = in_any_order()
    monkeypatch.setitem(SCENARIOS, scenario.id, scenario)

    def played(slow: str) -> list[int]:
        with recorded_batches(models[slow]) as batches:
            match.play(scenario, agents, [("one", "other")], 12, tmp_path / slow)
        return batches

    assert played("one") == played("other")


def test_models_behind_urls_meet_where_torch_is_not_installed(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None  # as where it is not installed\n"
        "from pathlib import Path\n"
        "from msgrpo.evals import match\n"
        "from msgrpo.games import get_scenario\n"
        "from msgrpo.specs import make_agent\n"
        "pair = ('endpoint:http://127.0.0.1:9/v1#one', 'endpoint:http://127.0.0.1:9/v1#other')\n"
        "agents = {spec: make_agent(spec, endpoint={'retries': 0}) for spec in pair}\n"
        "match.play(get_scenario(sys.argv[1]), agents, [pair], 1, Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", program, NIM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_on_a_narrow_terminal_a_match_is_printed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 60 columns the names were gone, and at 40 a score of 0.625 was '0.'."""
    written = io.StringIO()
    narrow = Console(file=written, width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(cli, "print_table", partial(print_table, console=narrow))
    pairing = match.Result("first", "nano", 200, 100, 50, 50, 0, 0.625, 0.551, 0.699)
    cli._print_match("nim", [pairing], [], tmp_path, as_json=False)
    shown = written.getvalue().split()
    assert [word for word in ("nano", "200", "100", "50", "0.625", "[0.551,", "0.699]") if word not in shown] == []


def test_a_match_in_which_no_game_ends_says_so_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that answered nothing it said nothing, for half an hour; in a log it never said anything."""
    monkeypatch.setattr(match, "LOG_EVERY_S", 0.01)
    monkeypatch.setattr(command, "LOG_EVERY_S", 0.0)
    log = io.StringIO()
    monkeypatch.setattr(command, "err", Console(file=log, width=200))
    busy = "status 500: busy (retry 1 of 10)"

    class Waits(RandomAgent):
        model = SimpleNamespace(trouble=busy)

        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            for _ in range(500):
                if log.getvalue().count("\n") < 2:
                    await asyncio.sleep(0.01)
            return await super().act(view, on_text=on_text)

    agents = {"optimal": OptimalAgent(), "random": Waits()}
    monkeypatch.setattr(command.Options, "agent", lambda options, spec: agents[spec])
    command.run_match(command.Options([*PAIR], scenarios=[NIM], episodes=1, out=tmp_path))
    assert log.getvalue().splitlines()[:2] == [f"0/2 games · random: {busy}"] * 2
