"""Against values worked out by hand, closed forms, and simulated coverage."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from msgrpo.evals.rows import row_of
from msgrpo.evals.stats import (
    FEW_EPISODES,
    FEW_SEEDS,
    _studentised,
    bootstrap_mean,
    crossed_bootstrap,
    crossed_interval,
    detectable_difference,
    ends,
    few_seeds_interval,
    mcnemar_exact,
    paired_difference,
    resampled_means,
    seeds_alike,
    share_interval,
    wilson,
)
from tests.test_evals_leaderboard import play


def test_wilson_by_hand() -> None:
    # p = 0.7, n = 10, z² = 3.8415: centre (0.7 + 0.19207)/1.38415, half 1.95996·√(0.021 + 0.0096037)/1.38415
    low, high = wilson(7, 10)
    assert low == pytest.approx(0.39678, abs=1e-5)
    assert high == pytest.approx(0.89221, abs=1e-5)


def test_wilson_has_width_at_the_edges() -> None:
    assert wilson(0, 20)[0] == 0.0
    assert 0.1 < wilson(0, 20)[1] < 0.2
    assert wilson(20, 20)[1] == 1.0


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_estimate_and_is_symmetric(case: tuple[int, int]) -> None:
    k, n = case
    low, high = wilson(k, n)
    assert 0 <= low <= k / n + 1e-12
    assert k / n - 1e-12 <= high <= 1
    assert wilson(n - k, n) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 3), (4, 3)])
def test_wilson_refuses_what_is_no_proportion(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        wilson(k, n)


def test_bootstrap_agrees_with_the_normal_interval_on_many_values() -> None:
    values = np.random.default_rng(3).normal(2.0, 1.5, size=400)
    low, high = bootstrap_mean(values, seed=0)
    half = 1.96 * values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)


def test_bootstrap_is_a_function_of_its_seed() -> None:
    values = np.random.default_rng(4).normal(size=30)
    assert bootstrap_mean(values, seed=1) == bootstrap_mean(values, seed=1)
    assert bootstrap_mean(values, seed=1, resamples=101) != bootstrap_mean(values, seed=2, resamples=101)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [[1.0]]])
def test_bootstrap_refuses_what_has_no_mean(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        bootstrap_mean(values, seed=0)


def test_pairing_sees_what_separate_intervals_hide() -> None:
    common = np.random.default_rng(5).normal(0, 3, size=100)
    a, b = common + 0.5, common
    difference = paired_difference(a, b, seed=0)
    assert difference.mean == pytest.approx(0.5)
    assert difference.low > 0.4
    shuffled = paired_difference(a, np.random.default_rng(6).permutation(b), seed=0)  # the wrong variant: unpaired
    assert shuffled.low < 0 < shuffled.high


def test_mcnemar_by_hand() -> None:
    # 5 pairs won by a alone, 1 by b alone: p = 2·(1 + 6)/2⁶
    a = [True] * 5 + [False] + [True] * 10
    b = [False] * 5 + [True] + [True] * 10
    assert mcnemar_exact(a, b) == pytest.approx(14 / 64)
    assert mcnemar_exact(b, a) == mcnemar_exact(a, b)
    assert mcnemar_exact([True, False], [True, False]) == 1.0


def test_detectable_difference_reproduces_the_published_plan() -> None:
    # p = .5, correlation .5 and 80 % power: 20 points at 50 episodes, 10 at 200, 4.4 at 1000
    assert detectable_difference(50) == pytest.approx(0.198, abs=1e-3)
    assert detectable_difference(200) == pytest.approx(0.099, abs=1e-3)
    assert detectable_difference(1000) == pytest.approx(0.0443, abs=1e-4)


def test_a_detectable_difference_is_detected_four_times_in_five() -> None:
    generator = np.random.default_rng(0)
    n, trials = 100, 4000
    drawn = generator.normal(detectable_difference(n, sd=2.0), 2.0, size=(trials, n))
    z = drawn.mean(axis=1) / (2.0 / math.sqrt(n))
    assert (z > 1.96).mean() == pytest.approx(0.8, abs=0.03)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=60), st.integers(1, 9), st.integers(0, 5))
def test_copies_of_one_result_say_no_more_than_one(values: list[float], copies: int, seed: int) -> None:
    means = resampled_means(np.array([values]), seed=seed, resamples=300)
    one = tuple(np.quantile(means, ends(len(values))))
    assert crossed_bootstrap([values] * copies, seed=seed, resamples=300) == pytest.approx(one, abs=1e-9)


def test_drawing_starts_for_each_seed_apart_would_be_too_narrow() -> None:
    """The named wrong variant: eight copies of 60 wins in 200, starts drawn anew for each copy."""
    result = np.repeat([1.0, 0.0], [60, 140])
    low, high = crossed_bootstrap([result] * 8, seed=0)
    generator = np.random.default_rng(0)
    apart = np.mean([generator.choice(result, size=(2000, 200)).mean(axis=1) for _ in range(8)], axis=0)
    wrong_low, wrong_high = np.quantile(apart, [0.025, 0.975])
    assert (low, high) == pytest.approx((0.24, 0.365), abs=0.01)
    assert wrong_high - wrong_low < 0.4 * (high - low)


def test_seeds_that_were_evaluated_on_different_episodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\] episodes"):
        crossed_bootstrap([[1.0, 0.0], [1.0]], seed=0)
    with pytest.raises(ValueError, match="the same ones"):
        crossed_bootstrap([], seed=0)


@given(st.integers(1, 300), st.data())
def test_wilson_is_scipys(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    theirs = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson(successes, n) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_mcnemar_is_the_binomial_test_of_the_discordant_pairs(pairs: list[tuple[bool, bool]]) -> None:
    a, b = zip(*pairs, strict=True)
    only_a, only_b = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
    theirs = binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert mcnemar_exact(a, b) == pytest.approx(theirs)


def test_bootstrap_is_scipys_percentile_interval() -> None:
    values = np.random.default_rng(3).normal(0, 1, size=80)
    theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1).confidence_interval
    assert bootstrap_mean(values, seed=0, resamples=20_000) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_the_interval_is_wider_where_training_seeds_differ() -> None:
    generator = np.random.default_rng(1)
    groups = [generator.normal(m, 0.1, size=50) for m in (0.1, 0.5, 0.9, 0.4)]
    low, high = crossed_bootstrap(groups, seed=0, resamples=2000)
    pooled = bootstrap_mean(np.concatenate(groups), seed=0)  # the wrong variant: episodes as if independent
    assert high - low > 3 * (pooled[1] - pooled[0])
    assert low < np.mean([g.mean() for g in groups]) < high


# ── found by mutation ──


def test_levels_of_90_percent_by_hand() -> None:
    # z = 1.64485, z² = 2.70554: centre (0.7 + 0.135277)/1.270554, half 1.64485·√(0.021 + 0.0067639)/1.270554;
    # (1.64485 + 1.28155)·2/√16 for a power of 90 %
    assert wilson(7, 10, level=0.9) == pytest.approx((0.44170, 0.87312), abs=1e-5)
    assert detectable_difference(16, sd=2.0, level=0.9, power=0.9) == pytest.approx(1.46320, abs=1e-5)
    assert detectable_difference(1, sd=1.0) == pytest.approx(1.95996 + 0.84162, abs=1e-5)


def test_a_difference_by_hand() -> None:
    """a − b is 1, 2, 6: mean 3, and 14 / 2 its variance; one pair has none."""
    found = paired_difference([2.0, 2.0, 5.0], [1.0, 0.0, -1.0], seed=3, level=0.5, resamples=700)
    assert found.mean == pytest.approx(3.0)
    assert found.sd == pytest.approx(math.sqrt(7))
    assert (found.low, found.high) == bootstrap_mean([1.0, 2.0, 6.0], seed=3, level=0.5, resamples=700)
    assert (found.low, found.high) != bootstrap_mean([1.0, 2.0, 6.0], seed=3, resamples=700)
    assert paired_difference([3.0, 5.0], [1.0, 1.0], seed=0).sd == pytest.approx(math.sqrt(2))
    one = paired_difference([2.0], [0.5], seed=0)
    assert one.mean == 1.5
    assert all(map(math.isnan, (one.low, one.high, one.sd)))


def test_what_is_not_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="2 and 1 values are no pairs"):
        paired_difference([1.0, 2.0], [1.0], seed=0)
    for a, b in (([True, False], [True]), ([True], [True, False])):
        with pytest.raises(ValueError, match=f"{len(a)} and {len(b)} outcomes are no pairs"):
            mcnemar_exact(a, b)
    for n in (0, -1):
        with pytest.raises(ValueError, match="at least one pair"):
            detectable_difference(n)


@pytest.mark.parametrize("values", [[math.inf], [1.0, -math.inf], 3.0, [[1.0], [2.0]]])
def test_bootstrap_refuses_infinity_and_tables(values: object) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        bootstrap_mean(values, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("resamples", [1, 499, 500, 501, 1200])
def test_the_interval_is_that_of_exactly_as_many_resamples(resamples: int) -> None:
    """Drawn anew here, in one piece: the parts that save memory neither repeat nor add or lose a draw."""
    values = np.random.default_rng(7).normal(size=60)
    generator = np.random.default_rng(5)
    means = [values[generator.integers(60, size=60)].mean() for _ in range(resamples)]
    for level in (0.95, 0.5):
        expected = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
        assert bootstrap_mean(values, seed=5, level=level, resamples=resamples) == pytest.approx(tuple(expected))
        assert crossed_bootstrap([values], seed=5, level=level, resamples=resamples) == pytest.approx(tuple(expected))


def test_seeds_that_are_alike_by_hand() -> None:
    """Two seeds and three starts: of the eight ways to deal out the results, two are as far apart."""
    assert seeds_alike([[0, 0, 0], [1, 1, 1]], seed=0) == pytest.approx(2 / 8, abs=0.02)
    # what is hard about a start stays with it; the wrong variant, dealing out over all starts, would say 2/3
    assert seeds_alike([[0, 100], [1, 101]], seed=0) == pytest.approx(1 / 2, abs=0.02)
    assert seeds_alike([[0.0, 1.0, 0.3]] * 8, seed=0, draws=100) == 1.0
    assert seeds_alike([[0.0, 1.0]], seed=0, draws=100) == 1.0
    with pytest.raises(ValueError, match=r"\[2, 1\] episodes"):
        seeds_alike([[1.0, 0.0], [1.0]], seed=0)


def test_alike_seeds_have_any_p_and_others_a_small_one() -> None:
    generator = np.random.default_rng(0)
    chances = generator.uniform(size=40)
    drawn = [generator.uniform(size=(6, 40)) < chances for _ in range(60)]
    found = [seeds_alike(list(one.astype(float)), seed=i, draws=200) for i, one in enumerate(drawn)]
    assert 0.35 < float(np.mean(found)) < 0.65
    assert float(np.mean(np.array(found) < 0.1)) < 0.25
    better = [list((generator.uniform(size=40) < chances + 0.2 * (s % 2)).astype(float)) for s in range(8)]
    assert seeds_alike(better, seed=0, draws=1000) < 0.05


def test_crossed_draws_seeds_and_episodes() -> None:
    """Two seeds, one all 0 and one all 1: the mean is 0, 1/2 or 1 with 1/4, 1/2, 1/4, whatever the episodes."""
    table = [[0.0] * 5, [1.0] * 5]
    assert crossed_bootstrap(table, seed=0) == (0.0, 1.0)
    assert crossed_bootstrap(table, seed=0, level=0.4) == (0.5, 0.5)


def test_crossed_is_a_function_of_its_seed() -> None:
    table = np.random.default_rng(4).normal(size=(3, 8))
    found = [crossed_bootstrap(table, seed=seed, resamples=200) for seed in (1, 1, 2)]  # type: ignore[arg-type]
    assert found[0] == found[1] != found[2]
    assert all(type(bound) is float for bound in found[0])


def test_rows_and_columns_are_drawn_apart() -> None:
    """One where seed and episode have the same number: drawn with the same luck, the mean could not be 0.

    numpy's generators of 5, [5] and [5, 0] are the same; of [5, 1] is another.
    """
    assert crossed_bootstrap([[1.0, 0.0], [0.0, 1.0]], seed=5) == (0.0, 1.0)


def test_which_seeds_are_drawn_depends_on_the_seed() -> None:
    """Rows that are constant: only their draw is seen."""
    rows = [[float(i)] * 4 for i in range(7)]
    assert len({crossed_bootstrap(rows, seed=seed, resamples=3) for seed in range(8)}) > 2


def test_all_intervals_have_ten_thousand_resamples_unless_told() -> None:
    values = np.random.default_rng(4).normal(size=300)
    zeros = np.zeros(300)
    given = bootstrap_mean(values, seed=0, resamples=10_000)
    assert bootstrap_mean(values, seed=0) == given
    assert crossed_bootstrap([values], seed=0) == pytest.approx(given, abs=1e-12)
    assert paired_difference(values, zeros, seed=0) == paired_difference(values, zeros, seed=0, resamples=10_000)


def test_wilson_ends_exactly_at_0_and_1() -> None:
    for n in range(1, 1000):
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0


def test_few_values_move_the_quantiles_outwards_by_hand() -> None:
    """n = 20: t of 19 degrees of freedom is 2.0930, √(20/19) is 1.0260: 2.1474 standard deviations, 1.588 %."""
    assert ends(20) == pytest.approx([0.015880, 0.984120], abs=1e-5)
    assert ends(50) == ends(1000) == pytest.approx([0.025, 0.975])
    assert ends(49) == pytest.approx([0.021100, 0.978900], abs=1e-5)
    assert ends(2)[0] < 1e-12


def test_the_correction_for_few_values_ends_at_fifty() -> None:
    """Values with a long tail, for which the studentised interval is another one."""
    values = np.exp(np.random.default_rng(0).normal(size=50))
    low, high = np.quantile(resampled_means(values[None], seed=0, resamples=10_000), [0.025, 0.975])
    assert bootstrap_mean(values, seed=0) == (low, high)
    low, high = np.quantile(resampled_means(values[None, :49], seed=0, resamples=10_000), ends(49))
    assert bootstrap_mean(values[:49], seed=0)[1] > high


def test_the_studentised_interval_is_that_of_a_slow_loop() -> None:
    """t* = (mean of a resample − mean) / (its s / √n), and the ends are the mean less t* · s / √n."""
    values = [0.0, 0.5, 1.0, 4.0, 9.0]
    n, average = len(values), fmean(values)
    t = []
    for drawn in np.random.default_rng(7).integers(n, size=(400, n)).tolist():
        resample = [values[i] for i in drawn]
        if len(set(resample)) > 1:
            t.append((fmean(resample) - average) / (stdev(resample) / math.sqrt(n)))
    low, high = np.quantile(t, [0.05, 0.95]) * stdev(values) / math.sqrt(n)
    found = _studentised(np.array(values), 7, 0.9, 400)
    assert found == pytest.approx((average - high, average - low))


def test_the_p_of_alike_seeds_counts_the_data_itself_and_ties() -> None:
    """No order of 100 draws is as far apart as the one given: 1 of 101. Every order of one start is as far apart as
    any other, though their sums differ in the last digit.
    """
    assert seeds_alike([[1.0] * 30, [0.0] * 30], seed=0, draws=100) == 1 / 101
    for last in range(3, 10):
        assert seeds_alike([[0.1], [0.2], [last / 10]], seed=0, draws=30) == 1


def test_one_start_says_nothing_of_others() -> None:
    assert all(map(math.isnan, crossed_bootstrap([[float(seed % 2)] for seed in range(9)], seed=0)))


def test_from_eight_seeds_on_they_are_drawn_too() -> None:
    values = [[float((row * column) % 3) for column in range(60)] for row in range(1, 9)]
    assert crossed_interval(values, seed=0) == crossed_bootstrap(values, seed=0)
    assert crossed_interval(values[:7], seed=0) == few_seeds_interval(np.array(values[:7]))
    assert crossed_interval(values[:1], seed=0) == bootstrap_mean(values[0], seed=0)


def test_a_share_has_no_end_outside_0_and_1_and_none_of_width_zero() -> None:
    assert share_interval([1.0] * 3) == wilson(3, 3)
    assert share_interval([0.0] * 3) == wilson(0, 3)
    low, high = share_interval([1.0, 1.0, 1.0, 1.0, 0.5])
    assert 0 <= low < high <= 1


def test_a_few_equal_values_have_no_interval() -> None:
    """A bootstrap of equal values has width zero, and says so with certainty: of 20 starts with a success in 20, as
    of any rare thing, it held the truth in 67 of 100 experiments; where an interval is given it now holds it in 95.
    Looked for: all that calls these functions (tables, pairs, retellings, studies, validation, doctor, series of the
    app, matches), and Elo, whose resamples are equal where everybody always wins.
    """
    nothing = (math.nan, math.nan)
    for few in ([0.0] * 20, [0.3] * 2, [0.1 + 0.2, 0.3, 0.3]):
        assert bootstrap_mean(few, seed=0) == pytest.approx(nothing, nan_ok=True)
    assert bootstrap_mean([1.0] * FEW_EPISODES, seed=0) == (1.0, 1.0)
    assert share_interval([0.5] * 4) == pytest.approx(nothing, nan_ok=True)
    for equal in (np.ones((3, 200)), np.zeros((8, 20))):
        assert crossed_interval(list(equal), seed=0) == pytest.approx(nothing, nan_ok=True)
    assert crossed_interval(list(np.ones((FEW_SEEDS, FEW_EPISODES))), seed=0) == (1.0, 1.0)
    generator, held, given_at_all = np.random.default_rng(3), 0, 0
    for number in range(300):
        low, high = bootstrap_mean(generator.random(20) < 0.05, seed=number, resamples=300)
        given_at_all += low <= high
        held += low <= 0.05 <= high
    assert 150 < given_at_all < 250
    assert held >= 0.95 * given_at_all


@pytest.mark.parametrize("success", [True, False])
def test_where_each_return_is_the_success_both_are_equally_uncertain(success: bool) -> None:
    """Of 50 equal returns and more the mean had an interval of no width, beside the wide one of the success."""
    row = row_of(play([success] * 50))
    assert (row.return_low, row.return_high) == (row.success_low, row.success_high) == wilson(50 * success, 50)
    half = row_of(play([True, False] * 25))
    assert (half.return_low, half.return_high) != (half.success_low, half.success_high)
