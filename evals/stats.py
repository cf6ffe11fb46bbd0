"""Intervals and comparisons: pure functions of numbers, every random one with a seed.

Success (0 or 1) has a Wilson interval, a return a bootstrap interval. Two agents that played the same episodes
are compared by their paired differences, never by whether their intervals overlap. Wilson and McNemar are written out
here, a few lines each, so that the base install needs no scipy; the tests compare them with scipy's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]
FEW_EPISODES = 50  # below this number of values a bootstrap is corrected
FEW_SEEDS = 8  # below this number of seeds Student's quantiles are used
_AT_ONCE = 2_000_000  # episodes drawn at once: keeps a bootstrap over any number of them at a few dozen megabytes


@dataclass(frozen=True)
class Difference:
    """Mean of a − b over paired episodes, its interval, and the standard deviation of one difference."""

    mean: float
    low: float
    high: float
    sd: float


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion: (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Inside [0, 1] and sensible at 0 and n successes, where the textbook p ± z·se is not. Raises ValueError for
    n < 1 or successes outside 0…n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} is no proportion")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else (centre - half) / scale  # exact where rounding would leave 1e-18
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


def bootstrap_mean(values: ArrayLike, *, seed: int, level: float = 0.95, resamples: int = 10_000) -> Interval:
    """Bootstrap interval of the mean: percentile, and of fewer than FEW_EPISODES values corrected.

    Of few values the percentile interval is too narrow (of 20 it covers in 90 % instead of 95 % of all experiments).
    There it is widened twice and the wider end is taken: the quantiles are moved outwards by Student's t and the
    missing 1/(n − 1) (Hesterberg, "What teachers should know about the bootstrap", 2015, §5.3), and the studentised
    bootstrap allows for skew. `docs/results/intervals.md` has the coverage. One value has no interval, and fewer than
    FEW_EPISODES that are all equal have none: (nan, nan). A bootstrap knows no other value than those, and of 20 rare
    successes it would call zero certain in every third experiment.
    """
    checked = _checked(values)
    if len(checked) == 1 or (len(checked) < FEW_EPISODES and _equal(checked)):
        return math.nan, math.nan
    means_R1 = resampled_means(checked[None], seed=seed, resamples=resamples)
    low, high = (float(end) for end in np.quantile(means_R1, ends(len(checked), level)))
    if len(checked) >= FEW_EPISODES:
        return low, high
    studentised = _studentised(checked, seed, level, resamples)
    return min(low, studentised[0]), max(high, studentised[1])


def share_interval(values: ArrayLike) -> Interval:
    """Interval of a mean of values in [0, 1], each of a start: `bootstrap_mean` within these bounds.

    Where all are 0, or all are 1, the bootstrap knows no other value, and Wilson's interval of the starts is taken.
    """
    checked = _checked(values)
    if checked.min() == checked.max() and checked[0] in (0.0, 1.0):
        return wilson(int(checked.sum()), len(checked))
    low, high = bootstrap_mean(checked, seed=0)
    return (low, high) if math.isnan(low) else (max(0.0, low), min(1.0, high))


def _equal(values: NDArray[np.float64]) -> bool:
    """Whether all values are equal, up to rounding: nothing says how far others would lie from them."""
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def ends(n: int, level: float = 0.95) -> list[float]:
    """The two quantiles of a bootstrap over n units: (1 ∓ level) / 2, of few units moved outwards."""
    if n >= FEW_EPISODES or n < 2:
        return [0.5 - level / 2, 0.5 + level / 2]
    tail = NormalDist().cdf(-student_quantile(0.5 + level / 2, n - 1) * math.sqrt(n / (n - 1)))
    return [tail, 1 - tail]


def _studentised(values: NDArray[np.float64], seed: int, level: float, resamples: int) -> Interval:
    """mean − t* · se, with the quantiles t* of (mean of a resample − mean) / its standard error."""
    n = len(values)
    drawn_RN = values[np.random.default_rng(seed).integers(n, size=(resamples, n))]
    sd_R = drawn_RN.std(axis=1, ddof=1)
    t_R = (drawn_RN.mean(axis=1) - values.mean())[sd_R > 0] / sd_R[sd_R > 0]  # in units of √n
    if not len(t_R):
        return float(values.mean()), float(values.mean())
    low, high = np.quantile(t_R, [0.5 - level / 2, 0.5 + level / 2]) * values.std(ddof=1)
    return float(values.mean() - high), float(values.mean() - low)


def student_quantile(p: float, df: int) -> float:
    """The p-quantile of Student's t with df degrees of freedom, by bisection of its distribution function.

    P(|T| ≤ t) is a finite sum in θ = atan(t / √df) (Abramowitz and Stegun 26.7.3 and 26.7.4). Raises ValueError for
    p outside (½, 1) or df < 1.
    """
    if not 0.5 < p < 1 or df < 1:
        raise ValueError(f"no quantile {p} of Student's t with {df} degrees of freedom")
    low, high = 0.0, 1.0
    while _student_within(high, df) < 2 * p - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, df) < 2 * p - 1 else (low, middle)
    return high


def _student_within(t: float, df: int) -> float:
    """P(|T| ≤ t)."""
    theta = math.atan(t / math.sqrt(df))
    if df == 1:
        return 2 * theta / math.pi
    square = math.cos(theta) ** 2
    term = math.cos(theta) if df % 2 else 1.0
    total = term
    for k in range(2 + df % 2, df - 1, 2):
        term *= square * (k - 1) / k
        total += term
    whole = math.sin(theta) * total
    return 2 / math.pi * (theta + whole) if df % 2 else whole


def resampled_means(
    values_SN: NDArray[np.float64], *, seed: int | Sequence[int], resamples: int
) -> NDArray[np.float64]:
    """The mean of every row in every resample: (resamples, S). A resample draws n columns, once for all rows.

    values_SN has the shape (S series, n episodes), column i the same start in all of them.
    """
    generator, n = np.random.default_rng(seed), values_SN.shape[1]
    means, rows = np.empty((resamples, len(values_SN))), max(1, _AT_ONCE // n)
    for start in range(0, resamples, rows):
        chosen_KN = generator.integers(n, size=(min(rows, resamples - start), n))
        for i, row in enumerate(values_SN):
            means[start : start + rows, i] = row[chosen_KN].mean(axis=1)
    return means


def paired_difference(
    a: ArrayLike, b: ArrayLike, *, seed: int, level: float = 0.95, resamples: int = 10_000
) -> Difference:
    """a − b episode by episode, with the bootstrap interval of its mean. `a[i]` and `b[i]` share start and luck."""
    first, second = _checked(a), _checked(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values are no pairs")
    difference = first - second
    low, high = bootstrap_mean(difference, seed=seed, level=level, resamples=resamples)
    sd = float(difference.std(ddof=1)) if len(difference) > 1 else math.nan
    return Difference(float(difference.mean()), low, high, sd)


def mcnemar_exact(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Two-sided exact p of McNemar's test on paired successes.

    Only the discordant pairs count: with n₁ pairs won by a alone and n₂ by b alone, under "no difference" n₁ is
    Binomial(n₁ + n₂, 1/2), and p = min(1, 2·P(X ≤ min(n₁, n₂))). 1.0 without a discordant pair.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} outcomes are no pairs")
    only_a = sum(bool(x) and not y for x, y in zip(a, b, strict=True))
    only_b = sum(bool(y) and not x for x, y in zip(a, b, strict=True))
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / (1 << n))


def detectable_difference(n: int, sd: float = 0.5, *, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest true mean of n paired differences that is found with `power`: (z_{α/2} + z_power)·sd/√n.

    `sd` is that of one paired difference. 0.5 is that of two successes at p = 0.5 whose correlation is 0.5: a
    plan's value, before there is data; about 10 points for 200 episodes and 20 for 50.
    """
    if n < 1:
        raise ValueError("a difference needs at least one pair")
    normal = NormalDist()
    z = normal.inv_cdf(0.5 + level / 2) + normal.inv_cdf(power)
    return z * sd / math.sqrt(n)


def crossed_interval(values_by_seed: Sequence[ArrayLike], *, seed: int, resamples: int = 10_000) -> Interval:
    """Interval of the mean over training seeds that were all evaluated on the same episodes.

    values_by_seed is a matrix V of shape (S seeds, n episodes). From FEW_SEEDS seeds on it is `crossed_bootstrap`;
    of fewer `few_seeds_interval`; of one seed it speaks of the starts alone. Values of few seeds or starts that are
    all equal have no interval (nan, nan), as in `bootstrap_mean`. Raises ValueError as they do.
    """
    values_SN = _by_seed(values_by_seed)
    if min(len(values_SN) / FEW_SEEDS, values_SN.shape[1] / FEW_EPISODES) < 1 < len(values_SN) and _equal(values_SN):
        return math.nan, math.nan
    if len(values_SN) == 1:
        return bootstrap_mean(values_SN[0], seed=seed, resamples=resamples)
    if len(values_SN) < FEW_SEEDS:
        return few_seeds_interval(values_SN)
    return crossed_bootstrap(list(values_SN), seed=seed, resamples=resamples)


def few_seeds_interval(values_SN: NDArray[np.float64]) -> Interval:
    """Student's 95 % interval of the mean of V, shape (S seeds, n episodes), for two-way random effects.

        mean ± √(max(t²_{S−1} · MS_seeds + t²_{n−1} · max(0, MS_starts − MS_rest), t²_{n−1} · MS_rest) / (S · n))

    MS are the mean squares of the two-way table without replication, whose expectations give Var(mean) =
    (E MS_seeds + E MS_starts − E MS_rest) / (S n). Each part has the quantile of its own degrees of freedom: the few
    seeds that there are do not pretend to know how far seeds lie apart. `docs/results/intervals.md` has its coverage.
    It is never narrower than where neither seed nor start matters: two seeds with the same mean, which failed at
    different starts, would otherwise have an interval of width zero.
    """
    seeds, n = values_SN.shape
    mean = float(values_SN.mean())
    rows_S, columns_N = values_SN.mean(axis=1), values_SN.mean(axis=0)
    if n == 1:
        return math.nan, math.nan
    ms_seeds = n * float(((rows_S - mean) ** 2).sum()) / (seeds - 1)
    ms_starts = seeds * float(((columns_N - mean) ** 2).sum()) / (n - 1)
    rest_SN = values_SN - rows_S[:, None] - columns_N + mean
    ms_rest = float((rest_SN**2).sum()) / ((seeds - 1) * (n - 1))
    t_seeds, t_starts = (student_quantile(0.975, count - 1) for count in (seeds, n))
    spread = max(t_seeds**2 * ms_seeds + t_starts**2 * max(0.0, ms_starts - ms_rest), t_starts**2 * ms_rest)
    half = math.sqrt(spread / (seeds * n))
    return mean - half, mean + half


def crossed_bootstrap(
    values_by_seed: Sequence[ArrayLike], *, seed: int, level: float = 0.95, resamples: int = 10_000
) -> Interval:
    """Interval of the mean over training seeds that were all evaluated on the same episodes.

    values_by_seed is a matrix V of shape (S seeds, n episodes), column i the same episode for every seed. Each
    resample draws n columns and S rows with replacement and takes the mean of V over both. The columns are drawn
    once for all rows: eight copies of one result say no more about the starts than one, and get its interval
    (`bootstrap_mean` with the same seed draws the same columns). Drawing episodes for each seed apart would call
    shared starts independent, and the interval would be too narrow. This is the bootstrap of Owen, "The pigeonhole
    bootstrap", Annals of Applied Statistics 1 (2007). With few seeds it is too narrow: `crossed_interval`.

    Raises ValueError without a seed, and where the seeds have different numbers of episodes.
    """
    values_SN = _by_seed(values_by_seed)
    if values_SN.shape[1] == 1:
        return math.nan, math.nan
    by_seed_RS = resampled_means(values_SN, seed=seed, resamples=resamples)
    drawn_RS = np.random.default_rng([seed, 1]).integers(len(values_SN), size=by_seed_RS.shape)
    means_R = np.take_along_axis(by_seed_RS, drawn_RS, axis=1).mean(axis=1)
    low, high = np.quantile(means_R, ends(values_SN.shape[1], level))
    return float(low), float(high)


def seeds_alike(values_by_seed: Sequence[ArrayLike], *, seed: int, draws: int = 10_000) -> float:
    """p: how often training seeds of one and the same quality would have means as far apart as these.

    values_by_seed is V of shape (S, n) as in `crossed_bootstrap`. If the seeds are alike, the S results of a start
    could as well stand in any other order, so each draw deals them out anew, start by start (what is hard about a
    start stays with it), and p = (1 + draws whose S means vary at least as much) / (1 + draws). It is a permutation
    test and assumes nothing of the values. 1 with a single seed.

    Raises ValueError as `crossed_bootstrap` does.
    """
    values_SN = _by_seed(values_by_seed)
    generator = np.random.default_rng(seed)
    # sums of the same numbers in another order differ by rounding
    spread_of_means = values_SN.mean(axis=1).var() * (1 - 1e-12)
    spread = [generator.permuted(values_SN, axis=0).mean(axis=1).var() for _ in range(draws)]
    return float((1 + np.count_nonzero(np.array(spread) >= spread_of_means)) / (1 + draws))


def _by_seed(values_by_seed: Sequence[ArrayLike]) -> NDArray[np.float64]:
    rows = [_checked(values) for values in values_by_seed]
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"the seeds have {[len(row) for row in rows]} episodes; all need the same ones")
    return np.stack(rows)


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0 or not np.isfinite(array).all():
        raise ValueError(f"expected a list of finite numbers, not {values!r}")
    return array
