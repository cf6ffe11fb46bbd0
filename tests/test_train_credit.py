"""Credit by hand: each estimator on one small group, and beside it the wrong one that it could be taken for."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.episode import Turn
from msgrpo.game import Outcome
from msgrpo.games import SCENARIOS
from msgrpo.train.groups import Group, PerTurn, Step, Trajectories
from msgrpo.train.msgrpo import composite_returns, group_advantages
from msgrpo.train.rivals import RIVALS, choose
from msgrpo.train.rivals.contract import Credit
from msgrpo.train.rivals.critic import Critic
from msgrpo.train.rivals.discounted import generalized_advantages, returns_to_go
from msgrpo.train.update import scaled_by_update
from tests.train_helpers import learner

START = None  # no estimator here looks at the state in which a group began
CREDITS = sorted({*RIVALS["credit"]} - {"simulated"})  # that one needs a game: test_train_simulated.py

# Two episodes part at s1: `up` pays 1 at the next step, `down` nothing; before it one got 2 by luck.
GROUP = [
    [Step("s0", "up", 0.0), Step("s1", "up", 0.0), Step("s2", "up", 1.0)],
    [Step("s0", "up", 2.0), Step("s1", "down", 0.0)],
]


def credit(name: str, group: Trajectories = GROUP, values: PerTurn | None = None, **settings: object) -> PerTurn:
    """What an estimator says of one group; of a critic's, with these values or without any. λ is 1 unless given."""
    taken = type(choose("credit", name)).model_fields
    given = {"lam": 1.0, **settings}
    spec = ", ".join(f"{key}={value}" for key, value in given.items() if key in taken)
    chosen = choose("credit", f"{name}({spec})")
    if isinstance(chosen, Critic):
        return chosen.of_values(group, values or [[0.0] * len(one) for one in group])
    turns = [
        [Turn(step=t, player="p", state=str(s.state), action=s.action, reward=s.reward) for t, s in enumerate(one)]
        for one in group
    ]
    returns_G = composite_returns(
        [[step.reward for step in one] for one in group], [[0.0] * len(one) for one in group]
    )
    whole = Group(START, turns, returns_G, group_advantages(returns_G))  # type: ignore[arg-type]
    assert isinstance(chosen, Credit)
    return chosen.of_groups([whole], learner())[0]


def test_returns_to_go_are_discounted_from_the_last_turn_back() -> None:
    assert returns_to_go(GROUP, 0.5) == [[0.25, 0.5, 1.0], [2.0, 0.0]]
    assert returns_to_go(GROUP, 0.5) != [[0.25, 0.25, 0.25], [2.0, 2.0]]  # wrong: the whole return everywhere


def test_episode_puts_the_whole_return_on_every_turn() -> None:
    assert credit("episode") == [[-1.0] * 3, [1.0] * 2]  # C = 1 and 2; no discount
    assert credit("episode") != [[-1.0] * 3, [1.0, -1.0]]  # wrong: the turn after the reward has less


def test_to_go_forgets_what_was_paid_before() -> None:
    """R = 1, 1, 1 and 2, 0: mean 1, standard deviation √(2/5)."""
    unit = math.sqrt(5 / 2)
    assert credit("to-go") == [pytest.approx([0.0, 0.0, 0.0]), pytest.approx([unit, -unit])]
    bessel = math.sqrt(2)  # wrong: divided by the number of turns less one
    assert credit("to-go")[1] != pytest.approx([bessel, -bessel])


def test_state_adds_the_advantage_among_turns_in_the_same_state() -> None:
    """In s0 R = 1 and 2, in s1 1 and 0; s2 was met once."""
    assert credit("state") == [[-2.0, 0.0, -1.0], [2.0, 0.0]]
    assert credit("state", weight=0.5) == [[-1.5, -0.5, -1.0], [1.5, 0.5]]
    assert credit("state")[0] != [-2.0, -2.0, -1.0]  # wrong: turns are compared by their number's whole return


def test_state_action_shares_what_an_action_brought() -> None:
    """s0: both went up, so nothing; s1: 1 and 0 around 1/2; scaled by the root of the mean square, √(2 · ¼ / 5)."""
    unit = 0.5 / math.sqrt(0.1)
    assert credit("state-action") == [pytest.approx([0.0, unit, 0.0]), pytest.approx([0.0, -unit])]
    assert credit("state-action")[1][0] != credit("state")[1][0]  # wrong: luck after the same action counts as skill


@pytest.mark.parametrize("name", ["state-action", "lambda"])
def test_rounding_is_no_advantage(name: str) -> None:
    """Equal returns of ten millions and a tenth: their means differ from them by rounding alone."""
    flat = [[Step("s0", "up", 1e7 + 0.1)] for _ in range(22)]
    assert credit(name, group=flat) == [[0.0]] * 22
    back = [[Step("s0", "up", 1e8 + 0.1), Step("s1", "up", -1e8 - 0.1)] for _ in range(22)]  # which adds up to 0
    assert credit(name, group=back) == [[0.0, 0.0]] * 22


def test_where_nothing_was_paid_the_rounding_of_a_value_is_no_advantage() -> None:
    assert credit("critic", [[Step("s", "up", 0.0)]] * 2, values=[[1e-12], [0.0]]) == [[0.0], [0.0]]


def test_lambda_is_the_tabular_error_at_0_and_the_return_to_go_less_its_value_at_1() -> None:
    """V = 1.5, 0.5, 1. δ = −1, ½, 0 and 1, −½; the sums at λ = 1 are −½, ½, 0 and ½, −½."""
    root = math.sqrt((1 + 0.25 + 0 + 1 + 0.25) / 5)
    near = [[-1 / root, 0.5 / root, 0.0], [1 / root, -0.5 / root]]
    assert credit("lambda", lam=0.0) == [pytest.approx(one) for one in near]
    root = math.sqrt(4 * 0.25 / 5)
    far = [[-0.5 / root, 0.5 / root, 0.0], [0.5 / root, -0.5 / root]]
    assert credit("lambda", lam=1.0) == [pytest.approx(one) for one in far]
    assert credit("lambda", lam=0.0)[0][2] != pytest.approx((1 - 1 + 1) / root)  # wrong: a value after the end


def test_critic_is_lambda_with_the_values_that_it_is_given() -> None:
    """The values of `lambda`'s table give what `lambda` gives; without any, λ = 1 is the return to go."""
    table = {"s0": 1.5, "s1": 0.5, "s2": 1.0}
    values = [[table[str(s.state)] for s in one] for one in GROUP]
    for lam in (0.0, 0.5, 1.0):
        assert credit("critic", lam=lam, values=values) == credit("lambda", lam=lam)
    root = math.sqrt((1 + 1 + 1 + 4 + 0) / 5)
    assert credit("critic") == [pytest.approx([1 / root] * 3), pytest.approx([2 / root, 0])]
    assert credit("critic", values=values) != credit("critic")


def test_of_the_whole_update_a_start_weighs_by_what_is_at_stake_in_it() -> None:
    """A start where one of four fails, and one where half do: C − mean C, by the root of the mean square of both."""
    groups = [[[Step("s", "up", float(won))] for won in group] for group in ((1, 1, 1, 0), (1, 1, 0, 0))]
    raw = [credit("episode", group=group, scale="update") for group in groups]
    assert raw[0] == [pytest.approx([value]) for value in (0.25, 0.25, 0.25, -0.75)]
    root = math.sqrt((3 / 16 + 9 / 16 + 4 * 0.25) / 8)
    common = scaled_by_update(raw)
    assert common[0] == [pytest.approx([value / root]) for value in (0.25, 0.25, 0.25, -0.75)]
    assert common[1] == [pytest.approx([value / root]) for value in (0.5, 0.5, -0.5, -0.5)]
    by_group = [credit("episode", group=group) for group in groups]  # wrong there: both starts weigh the same
    assert sum(value**2 for (value,) in by_group[0]) == pytest.approx(sum(value**2 for (value,) in by_group[1]))
    assert sum(value**2 for (value,) in common[0]) < 0.8 * sum(value**2 for (value,) in common[1])
    assert scaled_by_update([[[0.0]]]) == [[[0.0]]]
    assert scaled_by_update([]) == []


@pytest.mark.parametrize("name", ["episode", "to-go", "state-action", "lambda", "critic"])
def test_undivided_credit_is_the_divided_one_in_units_of_reward(name: str) -> None:
    """Ten times the rewards: ten times the credit, where divided it is the same; and both point the same way."""
    richer = [[Step(s.state, s.action, 10 * s.reward) for s in one] for one in GROUP]
    raw, ten, unit = credit(name, scale="update"), credit(name, group=richer, scale="update"), credit(name)
    flat = [(a, b, c) for one in zip(raw, ten, unit, strict=True) for a, b, c in zip(*one, strict=True)]
    assert [b for _, b, _ in flat] == pytest.approx([10 * a for a, _, _ in flat])
    factors = {round(a / c, 9) for a, _, c in flat if c}
    assert len(factors) == 1
    assert factors.pop() > 0


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("to-go", [[-0.5, -0.25, 0.25], [1.25, -0.75]]),
        ("state", [[-1.375, -0.25, -0.5], [1.375, 0.25]]),
        ("state-action", [[0.0, 0.25, 0.0], [0.0, -0.25]]),
        ("lambda", [[-0.875, 0.25, 0.0], [0.875, -0.25]]),
        ("critic", [[-0.875, 0.25, 0.0], [0.875, -0.25]]),
    ],
)
def test_a_discount_of_one_half_by_hand(name: str, by_hand: PerTurn) -> None:
    """R = ¼, ½, 1 and 2, 0, whose mean is ¾; V = 9/8 in s0, ¼ in s1, 1 in s2. A_j is not discounted: ∓½."""
    values = [[1.125, 0.25, 1.0], [1.125, 0.25]]
    assert credit(name, values=values, gamma=0.5, scale="update") == by_hand
    assert credit(name, values=values, gamma=1.0, scale="update") != by_hand


def test_state_undivided_adds_differences_of_returns() -> None:
    """C = 1 and 2; in s0 R = 1 and 2, in s1 1 and 0: each less its mean."""
    assert credit("state", scale="update") == [[-1.0, 0.0, -0.5], [1.0, 0.0]]


steps = st.builds(
    Step, st.sampled_from("abc"), st.sampled_from(["up", "down", None]), st.sampled_from([-1.0, 0.0, 1.0])
)
groups = st.lists(st.lists(steps, min_size=1, max_size=6), min_size=2, max_size=6)


@given(groups, st.sampled_from(CREDITS), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.9]))
def test_every_turn_has_a_finite_credit(group: Trajectories, name: str, gamma: float, lam: float) -> None:
    credits = credit(name, group, gamma=gamma, lam=lam)
    assert [len(one) for one in credits] == [len(one) for one in group]
    assert all(math.isfinite(value) for one in credits for value in one)


@given(groups, st.sampled_from(CREDITS), st.sampled_from([2.0, 10.0]))
def test_a_currency_changes_nothing(group: Trajectories, name: str, rate: float) -> None:
    """Rewards in cents give the credit of rewards in euros."""
    richer = [[Step(step.state, step.action, rate * step.reward) for step in one] for one in group]
    for one, other in zip(credit(name, group=group), credit(name, group=richer), strict=True):
        assert one == pytest.approx(other)


@given(groups, st.sampled_from([0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 99))
def test_generalized_advantages_are_their_sum(group: Trajectories, gamma: float, lam: float, seed: int) -> None:
    """Σ_k (γλ)^k δ_t+k, term by term, with values drawn at random; at λ = 1 it is R − V."""
    draw = random.Random(seed)
    values = [[draw.uniform(-1, 1) for _ in one] for one in group]
    found = generalized_advantages(group, values, gamma, lam)
    for one, of_episode, advantages, togo in zip(group, values, found, returns_to_go(group, gamma), strict=True):
        deltas = [
            step.reward + gamma * after - value
            for step, value, after in zip(one, of_episode, [*of_episode[1:], 0.0], strict=True)
        ]
        for t, advantage in enumerate(advantages):
            assert advantage == pytest.approx(sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])))
            if lam == 1:
                assert advantage == pytest.approx(togo[t] - of_episode[t])


@given(groups, st.sampled_from(CREDITS), st.randoms(use_true_random=False))
def test_another_order_of_the_episodes_is_another_order_of_their_credits(
    group: Trajectories, name: str, chance: random.Random
) -> None:
    order = chance.sample(range(len(group)), len(group))
    before, after = credit(name, group), credit(name, [group[j] for j in order])
    for j, one in zip(order, after, strict=True):
        assert one == pytest.approx(before[j])


@given(groups, st.sampled_from(sorted({*CREDITS} - {"critic"})), st.integers(-5, 5), st.sampled_from([0.0, 0.9, 1.0]))
def test_a_bonus_for_all_at_the_end_changes_nothing(group: Trajectories, name: str, bonus: int, lam: float) -> None:
    """Without a discount; a critic would have to learn of the bonus first."""
    paid = [[*one[:-1], replace(one[-1], reward=one[-1].reward + bonus)] for one in group]
    for one, other in zip(credit(name, group, lam=lam), credit(name, paid, lam=lam), strict=True):
        assert one == pytest.approx(other)


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=2, max_size=8))
def test_of_one_turn_from_one_state_all_that_look_at_no_action_say_the_same(rewards: list[float]) -> None:
    """A game of one turn is GRPO; `state` counts the one comparison twice."""
    group = [[Step("s", "up", reward)] for reward in rewards]
    alike = [value for (value,) in credit("episode", group)]
    for name in ("to-go", "lambda"):
        assert [value for (value,) in credit(name, group)] == pytest.approx(alike)
    assert [value for (value,) in credit("state", group)] == pytest.approx([2 * value for value in alike])
    assert not any(value for (value,) in credit("state-action", group))  # all went up


@given(groups)
def test_where_no_state_is_met_twice_state_is_episode_and_state_action_says_nothing(group: Trajectories) -> None:
    lonely = [[Step((j, t), s.action, s.reward) for t, s in enumerate(one)] for j, one in enumerate(group)]
    for one, other in zip(credit("state", group=lonely), credit("episode", group=lonely), strict=True):
        assert one == pytest.approx(other)
    assert not any(value for one in credit("state-action", group=lonely) for value in one)


@pytest.mark.parametrize("id", sorted(SCENARIOS))
def test_equal_prompts_are_equal_moments(id: str) -> None:
    """A state names its step, so turns in the same state have as much of the game before them."""
    game = SCENARIOS[id].new(0, 0)
    seen = set()
    while game.outcome is Outcome.PLAYING and game.steps < 12:
        state = game.observe(game.players[0])
        assert state not in seen
        assert f"Step {game.steps + 1} of {game.step_limit}" in state
        seen.add(state)
        game.step(dict.fromkeys(game.players))
