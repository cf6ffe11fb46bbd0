"""One number an agent: how far it comes from random play to the reference player, over all scenarios.

In a scenario the share is (score − random's) / (reference's − random's), with success as the score where there is a
goal and the return elsewhere; the overall score is the mean share. All three are means over the same starts, and one
bootstrap draws the starts for all agents at once, so that the interval is that of paired differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from msgrpo.evals.plays import Play
from msgrpo.evals.stats import FEW_EPISODES, ends, resampled_means
from msgrpo.games import recorded_scenario

RESAMPLES, LEVEL, SEED = 4000, 0.95, 0
Key = tuple[str, str]  # (label, prompt) of an agent
LOW, HIGH = "random", "optimal"  # the agents between which a share is measured


class Overall(BaseModel):
    """`rank` is the first place that the agent may have, `last_rank` the last: a difference counts where its
    interval excludes 0."""

    agent: str
    prompt: str = ""
    share: float
    low: float
    high: float
    rank: int
    last_rank: int
    scenarios: int


def ranking(plays: Sequence[Play]) -> tuple[list[Overall], list[str]]:
    """The agents that played every scenario that can be ranked, the best first; and what was left out."""
    tables, brackets, without = _tables([play for play in plays if play.finished and not play.is_biased])
    agents = [key for key in (tables[0][1] if tables else {}) if all(key in table for _, table in tables)]
    missing = {key for _, table in tables for key in table} - set(agents)
    notes = [f"{label} is not in the overall score: it has not played every scenario" for label, _ in sorted(missing)]
    if len(agents) < 3 or not set(brackets) <= set(agents):
        return [], notes
    notes += without
    low, high = map(agents.index, brackets)
    shares = [(scenario, _shares(table, agents, low, high, [SEED, i])) for i, (scenario, table) in enumerate(tables)]
    counted = {scenario: share for scenario, share in shares if not isinstance(share, str)}
    notes += [f"{scenario} is not in the overall score: {why}" for scenario, why in shares if isinstance(why, str)]
    if not counted:
        return [], notes
    share_A = np.mean([means for means, _ in counted.values()], axis=0)
    draws_RA = np.mean([drawn for _, drawn in counted.values()], axis=0)
    draws_RA = draws_RA[~np.isnan(draws_RA).any(axis=1)]
    starts = (
        set.intersection(*(set(table[key].by_start) for key in agents))
        for scenario, table in tables
        if scenario in counted
    )
    fewest = min(map(len, starts))
    if fewest < 2:
        notes.append("no overall score: from one start nothing says how far apart the agents are")
        return [], notes
    if 2 * len(draws_RA) < RESAMPLES:
        notes.append(f"no overall score: whether {HIGH} is better than {LOW} hangs on few starts")
        return [], notes
    rows = [
        _overall(key, i, share_A, draws_RA, ends_of_scale=(low, high), starts=fewest, scenarios=len(counted))
        for i, key in enumerate(agents)
    ]
    return sorted(rows, key=lambda row: -row.share), notes


def _tables(plays: Sequence[Play]) -> tuple[list[tuple[str, dict[Key, Play]]], tuple[Key, Key], list[str]]:
    """Of each scenario that can be ranked its plays by agent; who the agents LOW and HIGH are there; and why other
    scenarios cannot be ranked.
    """
    tables, without, brackets = list[tuple[str, dict[Key, Play]]](), list[str](), ((LOW, ""), (HIGH, ""))
    for scenario in dict.fromkeys(play.scenario for play in plays):
        if recorded_scenario(scenario).plain:
            continue  # retellings are compared with the plain game, in a table of their own
        here = {(play.label, play.prompt): play for play in plays if play.scenario == scenario}
        by_spec = {play.agent: key for key, play in here.items()}
        if lacking := [spec for spec in (LOW, HIGH) if spec not in by_spec]:
            without.append(f"{scenario} is not in the overall score: no result of {' and '.join(lacking)}")
            continue
        tables.append((scenario, here))
        brackets = by_spec[LOW], by_spec[HIGH]
    return tables, brackets, without


def _overall(
    key: Key,
    i: int,
    share_A: NDArray[np.float64],
    draws_RA: NDArray[np.float64],
    *,
    ends_of_scale: tuple[int, int],
    starts: int,
    scenarios: int,
) -> Overall:
    """The row of agent i: its share, and the places that it may have by its differences from the others."""

    def interval(draws_R: NDArray[np.float64], *, fixed: bool) -> list[float]:
        """Of few starts that are all alike there is none, as in `stats.bootstrap_mean`, unless the scale says it."""
        alike = starts < FEW_EPISODES and not fixed and np.ptp(draws_R) < 1e-12
        return [math.nan, math.nan] if alike else [float(end) for end in np.quantile(draws_R, ends(starts, LEVEL))]

    apart = [
        interval(draws_RA[:, i] - draws_RA[:, j], fixed={i, j} == set(ends_of_scale)) for j in range(len(share_A))
    ]
    low, high = interval(draws_RA[:, i], fixed=i in ends_of_scale)
    return Overall(
        agent=key[0],
        prompt=key[1],
        share=float(share_A[i]),
        low=low,
        high=high,
        rank=1 + sum(upper < 0 for _, upper in apart),
        last_rank=len(share_A) - sum(lower > 0 for lower, _ in apart),
        scenarios=scenarios,
    )


def _shares(
    table: Mapping[Key, Play], agents: Sequence[Key], low: int, high: int, seed: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | str:
    """(shares of shape (agents,), their bootstrap draws of shape (resamples, agents)) of one scenario.

    Or why there are none: the reference is no better than random on the starts that all have played, or there is no
    such start.
    """
    scores = [_by_start(table[key]) for key in agents]
    shared = sorted(set.intersection(*map(set, scores)))
    if not shared:
        return "there is no start that all have played"
    values_AN = np.array([[score[start] for start in shared] for score in scores])
    means_A = values_AN.mean(axis=1)
    if means_A[high] <= means_A[low]:
        return f"{HIGH} is no better than {LOW} on the starts that all have played"
    means_RA = resampled_means(values_AN, seed=seed, resamples=RESAMPLES)
    span_R = means_RA[:, high] - means_RA[:, low]
    span_R = np.where(span_R > 0, span_R, np.nan)
    return (
        (means_A - means_A[low]) / (means_A[high] - means_A[low]),
        (means_RA - means_RA[:, [low]]) / span_R[:, None],
    )


def _by_start(play: Play) -> dict[int, float]:
    return {start: fmean(episode.score for episode in episodes) for start, episodes in play.by_start.items()}
