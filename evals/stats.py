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
    """Percentile bootstrap interval of the mean. Values that are all equal give an interval of width zero."""
    means_R1 = resampled_means(_checked(values)[None], seed=seed, resamples=resamples)
    return _percentiles(means_R1, level)


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


def crossed_bootstrap(
    values_by_seed: Sequence[ArrayLike], *, seed: int, level: float = 0.95, resamples: int = 10_000
) -> Interval:
    """Interval of the mean over training seeds that were all evaluated on the same episodes.

    values_by_seed is a matrix V of shape (S seeds, n episodes), column i the same episode for every seed. Each
    resample draws n columns and S rows with replacement and takes the mean of V over both. The columns are drawn
    once for all rows: eight copies of one result say no more about the starts than one, and get its interval
    (`bootstrap_mean` with the same seed draws the same columns). Drawing episodes for each seed apart would call
    shared starts independent, and the interval would be too narrow. This is the bootstrap of Owen, "The pigeonhole
    bootstrap", Annals of Applied Statistics 1 (2007). With few seeds it is still too narrow on the side of the seeds.

    Raises ValueError without a seed, and where the seeds have different numbers of episodes.
    """
    values_SN = _by_seed(values_by_seed)
    by_seed_RS = resampled_means(values_SN, seed=seed, resamples=resamples)
    drawn_RS = np.random.default_rng([seed, 1]).integers(len(values_SN), size=by_seed_RS.shape)
    return _percentiles(np.take_along_axis(by_seed_RS, drawn_RS, axis=1).mean(axis=1), level)


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
    found = values_SN.mean(axis=1).var() * (1 - 1e-12)  # sums of the same numbers in another order differ by rounding
    spread = [generator.permuted(values_SN, axis=0).mean(axis=1).var() for _ in range(draws)]
    return float((1 + np.count_nonzero(np.array(spread) >= found)) / (1 + draws))


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


def _percentiles(means: NDArray[np.float64], level: float) -> Interval:
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)
