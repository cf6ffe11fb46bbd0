"""Makes the rows of a table and the paired differences, with intervals, from what was played."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev, pvariance

from pydantic import BaseModel

from msgrpo.agent import ParseFailure
from msgrpo.episode import Episode
from msgrpo.errors import RecordError
from msgrpo.evals.plays import Play
from msgrpo.evals.stats import (
    Difference,
    bootstrap_mean,
    detectable_difference,
    mcnemar_exact,
    paired_difference,
    share_interval,
    wilson,
)
from msgrpo.evals.suites import EpisodeSeeds, HeldOut
from msgrpo.games import recorded_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.games.retold import SIGN
from msgrpo.games.search import optimal_success

BOOTSTRAP_SEED = 0
CEILING_SIGMAS = 4.0  # a score this far above the exact optimum is a fault of the evaluation, not luck


class Row(BaseModel):
    """One agent in one scenario. Counts of answers are over finished episodes; tokens and cost are over all."""

    agent: str  # its name in tables
    spec: str  # its name on the command line
    prompt: str = ""  # what its template is called; empty for agents that read none
    scenario: str
    split: HeldOut = "test"  # whose starts
    episodes: int  # episodes that count: the suite's first ones up to the first unfinished one
    boards: int  # different boards among their starts
    repeats: int = 1  # episodes from each start
    asked: int | None = None  # episodes that were asked for
    left_out: int = 0  # ended episodes that do not count, because earlier ones of the suite have not ended
    unfinished: int  # episodes that an endpoint failed and that have no result yet
    return_mean: float
    return_low: float
    return_high: float
    successes: int | None = None
    success_rate: float | None = None
    success_low: float | None = None
    success_high: float | None = None
    pass_at_k: float | None = None  # of starts played k = repeats > 1 times: the share that succeeded at least once
    pass_hat_k: float | None = None  # and the share that succeeded every time (pass^k)
    spread_within: float | None = None  # standard deviation of the score among the episodes of a start, pooled
    spread_between: float | None = None  # and among the starts' means
    optimum: float | None = None  # the exact expected success of the best policy on these starts
    optimum_share: float | None = None
    steps_mean: float
    regret_mean: float | None = None  # mean loss of a move against the best one, over the judged moves
    judged: int = 0  # moves; fewer than `turns` where earlier episodes were played without --regret
    turns: int
    illegal: int  # answers with an action tag that holds no action of the game, or none of this position
    unparsed: int  # empty answers and answers without a tag
    truncated: int  # answers cut off by the token limit
    filtered: int
    failures: dict[str, int]  # failed attempts by kind: the endpoint's, never counted as moves
    retries: int
    prompt_tokens: int
    completion_tokens: int
    usage_missing: int  # answers for which the endpoint did not say its tokens
    cost_usd: float | None = None
    seconds_per_step: float | None = None  # seconds of language models


class Pair(BaseModel):
    """a − b over the episodes that both finished."""

    scenario: str
    a: str
    b: str
    episodes: int  # episodes that both finished; with repeats the interval is over their starts
    difference: float
    low: float
    high: float
    mcnemar_p: float | None = None
    detectable: float | None = None  # the smallest difference that this n shows in 4 of 5 evaluations


class Retelling(BaseModel):
    """What other words do to an agent: its score in them minus that in the plain game, over the same episodes."""

    agent: str
    prompt: str = ""
    scenario: str  # the plain one
    telling: str
    starts: int
    plain: float
    score: float
    difference: float
    low: float
    high: float


def row_of(play: Play) -> Row:
    """The row of a play that has finished episodes. Intervals are over starts."""
    episodes = list(play.finished.values())
    returns = [return_of(episode) for episode in episodes]
    by_start = [fmean(map(return_of, group)) for group in play.by_start.values()]
    low, high = bootstrap_mean(by_start, seed=BOOTSTRAP_SEED)
    scenario = recorded_scenario(play.scenario)
    turns = list(play.turns)
    spent = [turn for episode in [*episodes, *play.left_out.values(), *play.failed] for turn in episode.turns]
    answered = [turn for turn in turns if turn.answer is not None]
    regrets = [turn.regret for turn in turns if turn.regret is not None]
    row = Row(
        agent=play.label,
        spec=play.agent,
        prompt=play.prompt,
        scenario=play.scenario,
        split=play.split,
        episodes=len(episodes),
        boards=len({scenario.start_key(start) for start in play.by_start}),
        repeats=play.repeats,
        asked=play.asked,
        left_out=len(play.left_out),
        unfinished=len(play.unfinished),
        return_mean=fmean(returns),
        return_low=low,
        return_high=high,
        steps_mean=len(turns) / len(episodes),
        turns=len(turns),
        illegal=sum(turn.failure in (ParseFailure.ILLEGAL, ParseFailure.NOT_NOW) for turn in turns),
        unparsed=sum(turn.failure in (ParseFailure.EMPTY, ParseFailure.NO_TAG) for turn in turns),
        truncated=sum(turn.finish_reason == "length" for turn in turns),
        filtered=sum(turn.finish_reason == "content_filter" for turn in turns),
        failures=failures(play),
        retries=sum(turn.retries for turn in spent),
        prompt_tokens=sum(turn.prompt_tokens for turn in spent),
        completion_tokens=sum(turn.completion_tokens for turn in spent),
        usage_missing=sum(t.answer is not None and t.prompt_tokens + t.completion_tokens == 0 for t in spent),
        regret_mean=fmean(regrets) if regrets else None,
        judged=len(regrets),
        seconds_per_step=fmean(turn.latency_s for turn in answered) if answered else None,
    )
    if play.price is not None:
        row.cost_usd = play.price.of(row.prompt_tokens, row.completion_tokens)
    if scenario.goal:
        _add_success(row, episodes, play)
    if play.repeats > 1:
        _add_spread(row, play)
    if play.is_biased:
        row.return_low = row.return_high = math.nan
        if row.success_rate is not None:
            row.success_low = row.success_high = math.nan
    return row


def _add_spread(row: Row, play: Play) -> None:
    """Over the starts of which every episode has a result: of fewer than k, nothing is known of k."""
    groups = [[episode.score for episode in group] for group in play.by_start.values() if len(group) == play.repeats]
    if not groups:
        return
    row.spread_within = fmean(pvariance(group) for group in groups) ** 0.5
    row.spread_between = pstdev([fmean(group) for group in groups]) if len(groups) > 1 else None
    if row.success_rate is not None:
        row.pass_at_k = fmean(max(group) for group in groups)
        row.pass_hat_k = fmean(min(group) for group in groups)


def return_of(episode: Episode) -> float:
    """The only player's undiscounted sum of environment rewards."""
    if list(episode.returns) != list(episode.agents) or not all(map(math.isfinite, episode.returns.values())):
        raise RecordError(
            f"an episode of {episode.scenario} (start {episode.start_seed}) has the returns {episode.returns}",
            fix="the record is damaged: msgrpo verify FILE",
        )
    return next(iter(episode.returns.values()))


def failures(play: Play) -> dict[str, int]:
    return dict(sorted(Counter(str(episode.error) for episode in play.failed).items()))


def _add_success(row: Row, episodes: Sequence[Episode], play: Play) -> None:
    row.successes = sum(bool(episode.success) for episode in episodes)
    row.success_rate = row.successes / len(episodes)
    row.success_low, row.success_high = wilson(row.successes, len(episodes))
    if play.repeats > 1:  # Wilson's interval takes episodes for independent
        means = [fmean(bool(episode.success) for episode in group) for group in play.by_start.values()]
        row.success_low, row.success_high = share_interval(means)
    if row.success_rate in (0.0, 1.0) and row.return_low == row.return_high == row.success_rate:
        row.return_low, row.return_high = row.success_low, row.success_high  # it is the same number of each episode
    chances = [chance for episode in episodes if (chance := exact_optimum(episode)) is not None]
    if len(chances) < len(episodes):
        return
    row.optimum = fmean(chances)
    row.optimum_share = row.success_rate / row.optimum if row.optimum else None
    spread = math.sqrt(sum(p * (1 - p) for p in chances))
    if row.successes > sum(chances) + CEILING_SIGMAS * spread + 1e-9:
        raise RecordError(
            f"{row.agent} succeeded in {row.successes} of {row.episodes} episodes of {row.scenario}, more than the "
            f"exact optimum {sum(chances):.1f} allows",
            fix="luck does this less than once in ten thousand evaluations: msgrpo verify FILE says whether the "
            "episodes replay and which of the suite are missing; if it finds nothing, please report it",
        )


def exact_optimum(episode: Episode) -> float | None:
    """The best policy's probability of success from the start of `episode`; None where it is not known."""
    scenario = recorded_scenario(episode.scenario)
    game = recorded_scenario(scenario.plain or scenario.id).new(episode.start_seed, 0)
    return optimal_success(game) if isinstance(game, FrozenLake) else None


def pair_of(a: Play, b: Play) -> Pair | None:
    """The paired comparison of two plays; None where they share no finished episode or one is biased."""
    shared = [seeds for seeds in a.finished if seeds in b.finished]
    if not shared or a.is_biased or b.is_biased:
        return None
    first, second = ([play.finished[seeds] for seeds in shared] for play in (a, b))
    success_a, success_b = ([bool(e.success) for e in episodes] for episodes in (first, second))
    difference = _paired(shared, [return_of(e) for e in first], [return_of(e) for e in second])
    goal = recorded_scenario(a.scenario).goal and a.repeats == b.repeats == 1
    return Pair(
        scenario=a.scenario,
        a=a.label,
        b=b.label,
        episodes=len(shared),
        difference=difference.mean,
        low=difference.low,
        high=difference.high,
        mcnemar_p=mcnemar_exact(success_a, success_b) if goal else None,
        detectable=detectable_difference(len({s.start for s in shared}), difference.sd)
        if difference.sd > 0
        else None,
    )


def _paired(shared: Sequence[EpisodeSeeds], first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of the means of each start."""
    groups: dict[int, tuple[list[float], list[float]]] = {}
    for seeds, first_score, second_score in zip(shared, first, second, strict=True):
        a, b = groups.setdefault(seeds.start, ([], []))
        a.append(first_score)
        b.append(second_score)
    ours, theirs = zip(*((fmean(a), fmean(b)) for a, b in groups.values()), strict=True)
    return paired_difference(ours, theirs, seed=BOOTSTRAP_SEED)


def retellings(plays: Sequence[Play]) -> list[Retelling]:
    """Each retelling that an agent played, against the plain game."""
    compared = []
    for retold in plays:
        scenario = recorded_scenario(retold.scenario)
        same = (p for p in plays if (p.label, p.prompt, p.scenario) == (retold.label, retold.prompt, scenario.plain))
        plain = next(same, None)
        shared = [seeds for seeds in retold.finished if plain and seeds in plain.finished]
        if plain is None or not shared or retold.is_biased or plain.is_biased:
            continue
        scores = [[play.finished[seeds].score for seeds in shared] for play in (retold, plain)]
        difference = _paired(shared, *scores)
        compared.append(
            Retelling(
                agent=retold.label,
                prompt=retold.prompt,
                scenario=plain.scenario,
                telling=retold.scenario.removeprefix(f"{plain.scenario}{SIGN}"),
                starts=len({seeds.start for seeds in shared}),
                plain=fmean(scores[1]),
                score=fmean(scores[0]),
                difference=difference.mean,
                low=difference.low,
                high=difference.high,
            )
        )
    return compared
