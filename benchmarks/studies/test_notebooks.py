"""The arithmetic of the research notebooks in this folder; `make test` does not run them:

python -m pytest benchmarks/studies
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

from msgrpo.agent import Agent
from msgrpo.episode import play_episode
from msgrpo.evals.stats import crossed_interval
from msgrpo.game import Outcome
from msgrpo.games import get_scenario
from msgrpo.prompt import make_template
from msgrpo.references import OptimalAgent, RandomAgent

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def notebooks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    monkeypatch.syspath_prepend(here.parent)
    monkeypatch.syspath_prepend(here)


@pytest.fixture
def luck(notebooks_can_be_imported: None) -> Any:
    return importlib.import_module("luck")


def drawn(answers: float, luck: float, both: float, size: int, generator: np.random.Generator) -> np.ndarray:
    rows, columns = generator.normal(0, answers, (size, 1)), generator.normal(0, luck, (1, size))
    found: np.ndarray = rows + columns + generator.normal(0, both, (size, size))
    return found


def test_the_parts_of_a_spread_by_hand(luck: Any) -> None:
    """Rows of 0 and 1, columns of 0 and 2: variances 1/2 and 2, and nothing left."""
    assert luck.components(np.array([[0.0, 2.0], [1.0, 3.0]])) == pytest.approx([0.5, 2.0, 0.0])
    # a group of which one luck alone pays, and one answer alone uses it: MS of rows, columns and rest are all 1/4
    assert luck.components(np.array([[1.0, 0.0], [0.0, 0.0]])) == pytest.approx([0.0, 0.0, 0.25])


def test_the_parts_are_unbiased_and_their_shares_have_intervals(luck: Any) -> None:
    generator = np.random.default_rng(0)
    squares = [drawn(1.0, 2.0, 0.5, 6, generator) for _ in range(2000)]
    found = luck.measured(squares)
    assert list(found["variance"].values()) == pytest.approx([1.0, 4.0, 0.25], rel=0.08)
    for name, share in (("sampling", 1.0), ("luck", 4.0), ("both", 0.25)):
        low, high = found["share"][name]["interval"]
        assert low <= share / 5.25 <= high


def test_of_few_starts_the_ends_lie_further_out(luck: Any) -> None:
    """The interval of 20 starts is that of `evals.stats.ends`; it was the plain percentiles', too narrow."""
    generator = np.random.default_rng(0)
    squares = [drawn(1.0, 2.0, 0.5, 6, generator) for _ in range(20)]
    means = np.array([luck.components(one) for one in squares])[
        luck.stream(0, "luck-bootstrap").integers(20, size=(luck.DRAWS, 20))
    ].mean(1)
    low, high = np.quantile(means[:, 1] / means.sum(1), [0.025, 0.975])
    found = luck.measured(squares)["share"]["luck"]["interval"]
    assert found[0] < low < high < found[1]


def test_apples_of_few_seeds_have_students_interval(notebooks_can_be_imported: None, tmp_path: Path) -> None:
    """The notebook bootstrapped three seeds, which is too narrow."""
    apples: Any = importlib.import_module("apples")
    pays, costs = np.random.default_rng(0).normal(size=(2, 3, 60)) + np.array([[[0.0], [1.0], [2.0]]])
    assert apples.measured(pays)["interval"] == crossed_interval(pays.tolist(), seed=0)
    read = {"snake": {"arm": pays, "other": 0 * pays}, "snake-poison-apple": {"arm": costs, "other": 0 * costs}}
    with patch.object(apples, "read", lambda records: read), patch("sys.argv", ["apples", *map(str, (
        "--records", tmp_path, "--against", "other", "--result", tmp_path / "apples.json",
    ))]):  # fmt: skip
        apples.main()
    (row, _) = json.loads((tmp_path / "apples.json").read_text())["rows"]
    expected = list(crossed_interval((pays - costs).tolist(), seed=0))
    assert row["more_where_they_pay"]["interval"] == row["against"]["other"]["more_where_they_pay"]["interval"]
    assert row["more_where_they_pay"]["interval"] == expected


def test_a_model_is_asked_as_it_was_trained_unless_a_prompt_is_named(
    notebooks_can_be_imported: None, tmp_path: Path
) -> None:
    """`zero_shot.py` asked an adapter and a taught base with the usual prompt."""
    zero_shot: Any = importlib.import_module("zero_shot")
    for given, template in (([], None), (["--prompt", "none"], make_template("none"))):
        arguments = ["zero_shot", "base:taught", "--result", str(tmp_path / "result.json"), *given]
        made = Mock(side_effect=KeyError)
        with patch("sys.argv", arguments), patch.object(zero_shot, "make_agent", made), pytest.raises(KeyError):
            zero_shot.main()
        assert made.call_args.kwargs["template"] == template


def test_taking_the_means_for_the_parts_would_be_wrong(luck: Any) -> None:
    """The named wrong variant: the variance of the columns' means holds a part of what is left as well."""
    generator = np.random.default_rng(1)
    squares = [drawn(0.0, 0.0, 1.0, 6, generator) for _ in range(2000)]
    wrong = np.mean([one.mean(0).var(ddof=1) for one in squares])
    assert wrong == pytest.approx(1 / 6, rel=0.1)
    assert np.mean([luck.components(one)[1] for one in squares]) == pytest.approx(0.0, abs=0.02)


@pytest.fixture
def fatal(notebooks_can_be_imported: None) -> Any:
    return importlib.import_module("fatal")


@pytest.mark.parametrize("agent", [RandomAgent(), OptimalAgent()], ids=["random", "optimal"])
def test_what_killed_is_the_last_turn_of_an_episode_that_ended_early(fatal: Any, agent: Agent) -> None:
    snake, ends, found = get_scenario("snake"), set(), Counter[str]()
    for start in range(12):
        episode = asyncio.run(
            play_episode(snake, {"snake1": agent}, start_seed=start, chance_seed=0, sampling_seed=0)
        )
        kinds = [one.kind for one in fatal.seen(snake, episode)]
        died = episode.outcome is Outcome.TERMINATED
        assert [kind == "fatal" for kind in kinds] == [False] * (len(kinds) - 1) + [died]
        ends.add(died)
        found.update(kinds)
    assert (agent.spec == "random") in ends
    share = found["nearer"] / found.total()
    assert share > 0.8 if agent.spec == "optimal" else share < 0.6


@pytest.fixture
def told(notebooks_can_be_imported: None) -> Any:
    return importlib.import_module("told")


def test_who_is_told_says_its_own_words_and_the_action_that_follows_from_them(told: Any) -> None:
    config = told.make_config(given={"scenario": "snake", "groups": 1, "group_size": 6, "select": "all"})
    policy, starts = told.Policy(config), [(get_scenario("snake"), 0)]
    episodes = asyncio.run(told.Playing(told.Players(config), 0, told.load("nano"), config.sampling, starts).play())
    turns = [turn for episode in episodes for turn in episode.turns]
    samples = list(told.told(policy, episodes, {"apple": 1.0}, False, 0))
    assert len(samples) == len(turns)  # every thought of these can be read
    same = 0
    for turn, sample in zip(turns, samples, strict=True):
        text, (own, _, _) = policy.tokenizer.decode(list(sample.answer_ids)), turn.answer.partition("<action>")
        words, action = told.Words.read(own), text.partition("<action>")[2].partition("<")[0]
        assert text == f"{own}<action>{action}</action>"
        assert sum(sample.weights) == 3 == sum(sample.weights[-3:])
        safe = [name for name, (_, seen) in words.beside.items() if seen not in told.DEADLY]
        assert action in safe or not safe
        if action == turn.action:
            same += 1
            said = turn.completion.token_ids
            assert sample.answer_ids == said[: len(sample.answer_ids)]  # as nano itself would write it
    assert 0 < same < len(turns)


def test_on_slippery_ice_one_is_told_where_fewest_holes_are_slid_into_whatever_the_chances_say(told: Any) -> None:
    config = told.make_config(given={"scenario": "frozen-lake-slippery", "groups": 1, "group_size": 12})
    policy, starts = told.Policy(config), [(get_scenario("frozen-lake-slippery"), 0)]
    episodes = asyncio.run(told.Playing(told.Players(config), 0, told.load("nano"), config.sampling, starts).play())
    ahead = 0
    for sample in told.told(policy, episodes, {"goal": 1.0}, True, 0):
        text = policy.tokenizer.decode(list(sample.answer_ids))
        words, action = (
            told.Words.read(text.partition("<action>")[0]),
            text.partition("<action>")[2].partition("<")[0],
        )
        holes = {}
        for name in ("up", "down", "left", "right"):
            sides = ("left", "right") if name in ("up", "down") else ("up", "down")
            holes[name] = sum(words.beside[slide][1] == "hole" for slide in (name, *sides))
        assert holes[action] == min(holes.values())
        ahead += words.chances is not None
    assert ahead  # some of these thoughts name chances, which nano says wrongly


def test_danger_and_bites_by_hand(told: Any) -> None:
    def turn(right: str, way: str, action: str) -> SimpleNamespace:
        words = f"at (2,2) up (2,3) free down (2,1) body left (1,2) free right (3,2) {right}. apple (4,2){way}."
        return SimpleNamespace(answer=f"{words}<action>{action}</action>", action=action)

    safe = [turn("free", " right", "right"), turn("free", " right", "down")]  # it bites itself, not lured there
    lured = [turn("body", " right", "right"), turn("body", " right", "up"), turn("body", " right up", "down")]
    unread = SimpleNamespace(answer="<action>up</action>", action="up")
    assert told.bites([SimpleNamespace(turns=safe + lured + [unread])]) == pytest.approx(
        {"danger": 3 / 5, "bites": 2 / 3}
    )


@pytest.fixture
def credit_truth(notebooks_can_be_imported: None) -> Any:
    return importlib.import_module("credit_truth")


def lake_of(credit_truth: Any, policy: np.ndarray, number: int = 0) -> Any:
    """A validation start of the slippery lake, with the same policy in every state."""

    class Fixed(credit_truth.Lake):  # type: ignore[misc]
        async def _ask(self, *_: Any) -> np.ndarray:
            return policy.copy()

    scenario = get_scenario("frozen-lake-slippery")
    start = next(islice(scenario.starts("val"), number, None))
    return asyncio.run(Fixed.of(None, scenario, start, 1))


def test_the_exact_gradient_is_the_derivative_of_the_exact_value(credit_truth: Any) -> None:
    """The policy gradient theorem, against differences: a softmax's logits in a few states, moved one by one."""
    lake = lake_of(credit_truth, np.array([0.1, 0.3, 0.2, 0.25, 0.15]))
    start, exact = (lake.origin.state, 0), lake.exact_gradient().reshape(-1, 5)

    def value() -> float:
        for state in sorted(lake.policy, key=lambda state: -state[1]):
            lake.q[state] = np.array([lake._worth(state, action) for action in credit_truth.ACTIONS])
        return float(lake.value(start))

    for state in [*list(lake.policy)[:4], *list(lake.policy)[20:24]]:
        before = lake.policy[state]
        for i in range(5):
            moved = []
            for shift in (1e-4, -1e-4):
                weights = before * np.exp(shift * np.eye(5)[i])
                lake.policy[state] = weights / weights.sum()
                moved.append(value())
            lake.policy[state] = before
            assert (moved[0] - moved[1]) / 2e-4 == pytest.approx(exact[lake.rows[state], i], abs=1e-7)


def test_what_a_credit_says_of_a_state_is_no_bias_of_its_direction(credit_truth: Any) -> None:
    """The wrong variant compares turns: there an offset of the state looks like an error that no episode mends."""
    lake = lake_of(credit_truth, np.array([0.1, 0.3, 0.2, 0.25, 0.15]))
    generator = credit_truth.stream(0, "test")
    groups = [[lake.episode(generator) for _ in range(16)] for _ in range(150)]
    offset = {state: 0.3 * np.cos(3 * i) for i, state in enumerate(lake.policy)}
    credits = {
        "exact": [[[lake.advantage(s) for s in steps] for steps in group] for group in groups],
        "offset": [[[lake.advantage(s) + offset[s.state] for s in steps] for steps in group] for group in groups],
        "wrong": [[[-lake.advantage(s) for s in steps] for steps in group] for group in groups],
    }
    gradients = {
        name: np.array([lake.gradient(*each) for each in zip(groups, of_groups, strict=True)])
        for name, of_groups in credits.items()
    }
    of_both = credit_truth.Gradients(
        np.tile(lake.exact_gradient(), 2),
        {name: np.concatenate([one, 3 * one[::-1]], axis=1) for name, one in gradients.items()},
        [slice(0, 5 * len(lake.rows)), slice(5 * len(lake.rows), None)],
    )
    weighted = of_both.scores("exact", 1)  # the second start has three times the weight that it should have
    assert (weighted["within"], weighted["limit"]) == pytest.approx((1.0, 4 / math.sqrt(20)), abs=0.01)
    whole = credit_truth.Gradients(lake.exact_gradient(), gradients, [slice(None)])
    found = {name: whole.scores(name, 1) for name in credits}
    assert found["exact"]["limit"] == pytest.approx(1.0, abs=0.01)
    assert found["offset"]["limit"] == pytest.approx(1.0, abs=0.1)
    assert found["offset"]["direction"] < 0.5 < found["exact"]["direction"]
    assert found["offset"]["variance"] > 10 * found["exact"]["variance"]
    assert found["wrong"]["limit"] == pytest.approx(-1.0, abs=0.01)
    assert found["exact"]["limit_error"] < 0.01 < found["offset"]["limit_error"] < 0.2
    left_out = [
        credit_truth._expected(np.delete(gradients["offset"], k, 0), lake.exact_gradient())[1] for k in range(150)
    ]
    assert found["offset"]["limit_error"] == pytest.approx(math.sqrt(149 * np.var(left_out)))
    truth, said = (np.array([x for g in credits[name] for e in g for x in e]) for name in ("exact", "offset"))
    assert credit_truth._of_turns(said, truth)["correlation"] < 0.5


def test_the_better_the_values_the_closer_the_credit_of_a_game_of_chance(credit_truth: Any) -> None:
    """A head that is shown the exact values does nearly what they do; one that is shown nothing, no better than
    returns.
    """
    policy = np.array([0.1, 0.35, 0.25, 0.3, 0.0])  # no penalty, which would be seen without values
    lakes = [lake_of(credit_truth, policy, number) for number in range(4)]
    found = {}
    for shown in ("values", "nothing"):
        for lake in lakes:
            lake.hidden = {
                s: torch.tensor([lake.value(s) if shown == "values" else 1.0]).double() for s in lake.policy
            }
        scores = credit_truth.compared(lakes, 24, 24 * 40, seed=0)
        found[shown] = {name: scores[name]["direction"] for name in credit_truth.COMPARED}
    assert (
        found["values"]["true 0.0 by update"]
        == found["nothing"]["true 0.0 by update"]
        > 2 * found["values"]["episode"]
    )
    assert found["values"]["true 0.0 by update"] > found["values"]["true 0.5 by update"] > found["values"]["episode"]
    assert found["values"]["critic 0.0 by update"] == pytest.approx(found["values"]["true 0.0 by update"], rel=0.25)
    assert found["nothing"]["critic 0.0 by update"] < 0.7 * found["values"]["critic 0.0 by update"]
    assert found["values"]["lambda"] == found["nothing"]["lambda"]


def test_a_turn_without_advantage_is_silent() -> None:
    silent = importlib.import_module("silent").silent
    found = silent([[1.0, 0.0], [-1.0, 0.0, 0.5], [0.0] * 10])
    assert (found["episodes"], found["turns"]) == (3, 15)
    assert found["silent"] == pytest.approx(12 / 15)
    assert found["by_turn"] == pytest.approx([1 / 3, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0])
