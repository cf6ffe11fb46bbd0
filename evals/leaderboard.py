"""Records → rows with intervals, paired differences, and the reasons not to believe them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel

from evals.record import Price, Run, records_in, run_of, seeds_of
from evals.stats import bootstrap_mean, detectable_difference, mcnemar_exact, paired_difference, wilson
from evals.suites import SUITE_VERSION, EpisodeSeeds, places_in_suite
from evals.verify import game_steps, verify
from msgrpo_agent.episode import Episode, Turn, read_episodes
from msgrpo_agent.errors import RecordError
from msgrpo_agent.game import Outcome
from msgrpo_agent.games import SCENARIOS, recorded_scenario
from msgrpo_agent.games.frozen_lake import FrozenLake
from msgrpo_agent.games.search import optimal_success
from msgrpo_agent.parse import ParseFailure

BOOTSTRAP_SEED = 0
CEILING_SIGMAS = 4.0  # a score this far above the exact optimum is a fault of the evaluation, not luck


@dataclass
class Series:
    """All recorded episodes of one agent in one scenario: one result for each pair of seeds, and the failures."""

    agent: str
    scenario: str
    settings: dict[str, Any]
    finished: dict[EpisodeSeeds, Episode] = field(default_factory=dict)
    failed: list[Episode] = field(default_factory=list)
    lines: dict[EpisodeSeeds, int] = field(default_factory=dict)  # where in its record each result stands, from 1
    price: Price | None = None
    asked: int | None = None  # episodes that the evaluation was to play; None where nothing says it
    interrupted: int = 0  # starts of the evaluation that did not come to their end
    left_out: dict[EpisodeSeeds, Episode] = field(default_factory=dict)  # results that `complete_beginning` took away
    unfinished: set[EpisodeSeeds] = field(default_factory=set)  # of the complete beginning: failed, without result

    @property
    def turns(self) -> Iterator[Turn]:
        """The turns of finished episodes."""
        return (turn for episode in self.finished.values() for turn in episode.turns)


class Row(BaseModel):
    """One agent in one scenario. Counts of answers are over finished episodes; tokens and cost are over all."""

    agent: str
    scenario: str
    episodes: int  # that count: the complete beginning of the suite
    asked: int | None = None  # that were to be played
    left_out: int = 0  # that ended and do not count, because earlier ones of the suite have not ended
    unfinished: int  # episodes that an endpoint failed and that have no result yet
    return_mean: float
    return_low: float
    return_high: float
    successes: int | None = None
    success_rate: float | None = None
    success_low: float | None = None
    success_high: float | None = None
    optimum: float | None = None  # the exact expected success of the best policy on these starts
    optimum_share: float | None = None
    steps_mean: float
    regret_mean: float | None = None  # what a move lost against the best one, over the moves that were judged
    judged: int = 0  # moves; fewer than `turns` where earlier episodes were played without --regret
    turns: int
    illegal: int  # answers with an action tag that holds no action of the game
    unparsed: int  # empty answers and answers without a tag
    truncated: int  # answers cut off by the token limit
    filtered: int
    failures: dict[str, int]  # failed attempts by kind: the endpoint's, never counted as moves
    retries: int
    prompt_tokens: int
    completion_tokens: int
    usage_missing: int  # answers for which the endpoint did not say its tokens
    cost_usd: float | None = None
    seconds_per_step: float | None = None  # of language models


class Pair(BaseModel):
    """a − b over the episodes that both finished."""

    scenario: str
    a: str
    b: str
    episodes: int
    difference: float
    low: float
    high: float
    mcnemar_p: float | None = None
    detectable: float | None = None  # the smallest difference that this n shows in 4 of 5 evaluations


class Leaderboard(BaseModel):
    suite_version: int
    rows: list[Row]
    pairs: list[Pair]
    notes: list[str]


def load(
    folders: Sequence[Path],
    *,
    agents: Sequence[str] | None = None,
    scenarios: Sequence[str] | None = None,
    mix: bool = False,
    check: bool = False,
) -> tuple[list[Series], list[str]]:
    """The plays recorded under `folders` (of certain agents and scenarios), and what a reader must know about them.

    Only the complete beginning of the suite counts. Raises RecordError for what cannot be true, and where suite
    versions, prompts or settings differ; with `mix` the latter becomes a note. `check` simulates every record first.
    """
    notes: list[str] = []
    plays: dict[tuple[str, str, str], Series] = {}
    versions: set[int] = set()
    twice = duels = 0
    for run, line, episode in _recorded(folders, check):
        if agents is not None and not set(agents).intersection(episode.agents.values()):
            continue
        if scenarios is not None and episode.scenario not in scenarios:
            continue
        if run:
            versions.add(run.suite_version)
        if len(episode.agents) != 1:
            duels += 1
            continue
        _check_consistent(episode)
        play = _play_of(episode, plays)
        if run is not None:
            play.price = run.prices.get(play.agent, play.price)
            asked = run.asked.get(play.agent, {}).get(play.scenario)
            play.asked = asked if play.asked is None else max(play.asked, asked or 0)
            play.interrupted = max(play.interrupted, run.interrupted(play.agent))
        if episode.error is not None:
            play.failed.append(episode)
        elif seeds_of(episode) in play.finished:
            twice += 1
        else:
            play.finished[seeds_of(episode)] = episode
            play.lines[seeds_of(episode)] = line
    for play in plays.values():
        foreign = complete_beginning(play)
        if foreign:
            said = f"{foreign} episodes of {play.agent} in {play.scenario} have seeds that belong to no suite"
            if versions == {SUITE_VERSION} and not mix:
                raise RecordError(f"{said}: nothing says how they were chosen", fix="leave them out, or say --mix")
            notes.append(f"{said}: nothing says how they were chosen.")
    if duels:
        notes.append(f"{duels} episodes of several players are left out: the table is of single ones.")
        if not plays:
            raise RecordError(f"nothing to compare: {notes[-1]}")
    if twice:
        notes.append(f"{twice} episodes were played more than once: the first result counts.")
    for difference in _differences(list(plays.values()), versions):
        if not mix:
            raise RecordError(f"these results do not mix: {difference}", fix="compare them apart, or say --mix")
        notes.append(f"MIXED: {difference}")
    return _labelled(list(plays.values())), notes


def complete_beginning(play: Series) -> int:
    """Keep the results up to the first episode of the suite that has not ended; return how many are of no suite.

    In an evaluation that was interrupted, short episodes have ended and long ones have not: all that ended would be
    a biased sample. An episode that the endpoint failed has ended, without a result; the table says how many. The
    order becomes the suite's, so that what ended first changes no interval and no replay. Foreign seeds stay.
    """
    failed = {seeds_of(episode) for episode in play.failed}
    places, foreign = places_in_suite(play.scenario, {*play.finished, *failed})
    taken = set(places.values())
    beginning = next(i for i in count() if i not in taken)
    kept = [(place, seeds) for seeds, place in places.items() if seeds in play.finished and place < beginning]
    others = sorted(seeds for seeds in foreign if seeds in play.finished)
    chosen = [*(seeds for _, seeds in sorted(kept)), *others]
    play.left_out = {seeds: episode for seeds, episode in play.finished.items() if seeds not in set(chosen)}
    play.unfinished = {seeds for seeds in failed - set(play.finished) if places.get(seeds, -1) < beginning}
    play.finished = {seeds: play.finished[seeds] for seeds in chosen}
    return len(foreign)


def _check_consistent(episode: Episode) -> None:
    """Raise RecordError for a result that its own turns deny: all that can be seen without playing it again."""
    if episode.error is not None:
        return
    scenario = recorded_scenario(episode.scenario)
    problem = None
    for player, total in episode.returns.items():
        rewards = sum(turn.reward for turn in episode.turns_of(player))
        if not math.isclose(total, rewards, abs_tol=1e-9):
            problem = f"says the return {total:g}, its rewards add up to {rewards:g}"
    if scenario.goal != (episode.success is not None) or episode.outcome is Outcome.PLAYING:
        problem = f"says success {episode.success} and outcome {episode.outcome}"
    elif scenario.goal and episode.success != (sum(episode.returns.values()) > 0):
        problem = f"says success {episode.success} with the return {sum(episode.returns.values()):g}"
    if game_steps(episode) > scenario.step_limit:
        problem = f"has {game_steps(episode)} steps, the limit is {scenario.step_limit}"
    if problem:
        raise RecordError(
            f"an episode of {episode.scenario} (start {episode.start_seed}) {problem}",
            fix="the record is damaged or was changed: msgrpo verify FILE",
        )


def _recorded(folders: Sequence[Path], check: bool) -> Iterator[tuple[Run | None, int, Episode]]:
    """Every episode below `folders`, each file once, with the `run.json` of its evaluation and its line."""
    files = [file for folder in folders for file in records_in([folder])]
    for file in dict.fromkeys(file.resolve() for file in files):
        run = run_of(file)
        if check:
            verify(file)
        for line, episode in enumerate(read_episodes(file), start=1):
            yield run, line, episode


def _play_of(episode: Episode, plays: dict[tuple[str, str, str], Series]) -> Series:
    recorded_scenario(episode.scenario)
    ((player, agent),) = episode.agents.items()
    settings = episode.settings.get(player, {})
    key = (agent, episode.scenario, repr(sorted(settings.items())))
    return plays.setdefault(key, Series(agent, episode.scenario, settings))


def _differences(plays: Sequence[Series], versions: set[int]) -> Iterator[str]:
    """What makes results incomparable."""
    if versions - {SUITE_VERSION}:
        yield f"suite versions {', '.join(map(str, sorted(versions | {SUITE_VERSION})))}"
    by_agent: dict[str, dict[str, None]] = defaultdict(dict)
    for play in plays:
        by_agent[play.agent][str(play.settings)] = None
    for agent, settings in by_agent.items():
        if len(settings) > 1:
            yield f"{agent} played with settings {' and '.join(settings)}"
    for what in ("template", "sampling"):
        values = {str(_effective(p.settings, what)): p.agent for p in plays if what in p.settings}
        if len(values) > 1:
            listed = "; ".join(f"{agent}: {value}" for value, agent in values.items())
            yield f"{what} differs between agents ({listed})"
    one_template = len({str(p.settings["template"]) for p in plays if "template" in p.settings}) == 1
    for scenario in sorted({play.scenario for play in plays}):
        here = [e for play in plays if play.scenario == scenario for e in play.finished.values()]
        hashes = {episode.versions["rules"] for episode in here if "rules" in episode.versions}
        if len(hashes) > 1 or hashes - {recorded_scenario(scenario).rules_hash}:
            yield f"the rules of {scenario} changed since, or between, these results ({', '.join(sorted(hashes))})"
        if one_template and len({prefix for episode in here for prefix in episode.prefix.values()}) > 1:
            yield f"the rules in the prompt of {scenario} changed between these results"


def _effective(settings: Mapping[str, Any], what: str) -> Any:
    """A setting as the endpoint got it: what an extra body says of the sampling wins."""
    body = settings.get("body")
    if what != "sampling" or not isinstance(body, dict) or not isinstance(settings[what], dict):
        return settings[what]
    said = {name: value for name, value in body.items() if name in settings[what] and value is not None}
    return settings[what] | said


def _labelled(plays: list[Series]) -> list[Series]:
    """Plays in the order of the registry; those of one agent with different settings get different names."""
    seen: Counter[tuple[str, str]] = Counter()
    for play in plays:
        seen[play.agent, play.scenario] += 1
        if (number := seen[play.agent, play.scenario]) > 1:
            play.agent = f"{play.agent} ({number})"
    order = {name: place for place, name in enumerate(SCENARIOS)}
    return sorted(
        (p for p in plays if p.finished or p.left_out or p.failed),
        key=lambda play: (order.get(play.scenario, len(order)), "" if play.scenario in order else play.scenario),
    )


def only(
    plays: Iterable[Series], wanted: Mapping[str, Sequence[EpisodeSeeds]], agents: Sequence[str]
) -> list[Series]:
    """The same plays, cut down to the agents and episodes that a run asked for, agents in that order."""
    chosen = [play for play in plays if play.agent in agents and play.scenario in wanted]
    for play in chosen:
        asked = set(wanted[play.scenario])
        play.finished = {seeds: episode for seeds, episode in play.finished.items() if seeds in asked}
        play.asked = len(asked)
        play.left_out = {seeds: episode for seeds, episode in play.left_out.items() if seeds in asked}
        play.unfinished &= asked
        play.failed = [episode for episode in play.failed if seeds_of(episode) in asked]
    return sorted(chosen, key=lambda play: (list(wanted).index(play.scenario), agents.index(play.agent)))


def build(plays: Sequence[Series], notes: Sequence[str] = ()) -> Leaderboard:
    """The leaderboard of `plays`. Raises RecordError where a score is above the exact optimum beyond noise."""
    played = [play for play in plays if play.finished]
    rows = [row_of(play) for play in played]
    pairs = [pair_of(a, b) for a, b in combinations(played, 2) if a.scenario == b.scenario]
    found = [*notes, *_notes(plays)]
    return Leaderboard(suite_version=SUITE_VERSION, rows=rows, pairs=[p for p in pairs if p], notes=found)


def _notes(plays: Sequence[Series]) -> Iterator[str]:
    for play in plays:
        if not play.finished:
            last = f"; the last: {play.failed[-1].error_message}" if play.failed else ""
            failures = ", ".join(f"{kind} {number}" for kind, number in _failures(play).items())
            short = f"{len(play.left_out)} ended, but not the first of the suite" if play.left_out else failures
            yield f"{play.agent} has no result that counts in {play.scenario}: {short}{last}"
        elif play.left_out:
            counted, others = len(play.finished), len(play.left_out)
            yield (
                f"{play.agent} in {play.scenario}: {counted + others} episodes have ended, and the first {counted} "
                f"of the suite count; short episodes end first, so the other {others} do not."
            )
        if play.unfinished and play.finished:
            yield f"{play.agent} in {play.scenario}: {_with_unfinished(play)}"
    interrupted = {play.agent: play.interrupted for play in plays if any(t.completion_tokens for t in play.turns)}
    for agent, starts in interrupted.items():
        if starts:
            yield (
                f"{agent}: {starts} starts were interrupted; tokens and cost lack the answers that were on "
                "their way, or in episodes that had not ended."
            )
    for scenario in sorted({play.scenario for play in plays}):
        sizes = {frozenset(play.finished) for play in plays if play.scenario == scenario and play.finished}
        if len(sizes) > 1:
            yield f"{scenario}: the agents finished different episodes; only the pairs compare like with like"
        seeds, drawn = {found.start for size in sizes for found in size}, recorded_scenario(scenario)
        boards = {drawn.start_key(seed) for seed in seeds}
        if len(boards) < len(seeds) and not drawn.one_start:
            yield f"{scenario}: the {len(seeds)} starts hold {len(boards)} different boards; the others are repeats"


def _with_unfinished(play: Series) -> str:
    """What the episodes without a result could change."""
    unfinished = len(play.unfinished)
    said = f"{unfinished} episodes have no result, because the endpoint failed"
    if not recorded_scenario(play.scenario).goal:
        return f"{said}; the return leaves them out."
    won, total = sum(bool(e.success) for e in play.finished.values()), len(play.finished) + unfinished
    return f"{said}; with them success would lie between {won / total:.1%} and {(won + unfinished) / total:.1%}."


def row_of(play: Series) -> Row:
    episodes = list(play.finished.values())
    returns = [return_of(episode) for episode in episodes]
    low, high = bootstrap_mean(returns, seed=BOOTSTRAP_SEED)
    turns = list(play.turns)
    spent = [turn for episode in [*episodes, *play.left_out.values(), *play.failed] for turn in episode.turns]
    answered = [turn for turn in turns if turn.answer is not None]
    regrets = [turn.regret for turn in turns if turn.regret is not None]
    row = Row(
        agent=play.agent,
        scenario=play.scenario,
        episodes=len(episodes),
        asked=play.asked,
        left_out=len(play.left_out),
        unfinished=len(play.unfinished),
        return_mean=fmean(returns),
        return_low=low,
        return_high=high,
        steps_mean=len(turns) / len(episodes),
        turns=len(turns),
        illegal=sum(turn.failure is ParseFailure.ILLEGAL for turn in turns),
        unparsed=sum(turn.failure in (ParseFailure.EMPTY, ParseFailure.NO_TAG) for turn in turns),
        truncated=sum(turn.finish_reason == "length" for turn in turns),
        filtered=sum(turn.finish_reason == "content_filter" for turn in turns),
        failures=_failures(play),
        retries=sum(turn.retries for turn in spent),
        prompt_tokens=sum(turn.prompt_tokens for turn in spent),
        completion_tokens=sum(turn.completion_tokens for turn in spent),
        usage_missing=sum(t.answer is not None and t.prompt_tokens + t.completion_tokens == 0 for t in spent),
        regret_mean=fmean(regrets) if regrets else None,
        judged=len(regrets),
        seconds_per_step=fmean(turn.latency_s for turn in answered) if answered else None,
    )
    if play.price is not None:
        dollars = row.prompt_tokens * play.price.prompt + row.completion_tokens * play.price.completion
        row.cost_usd = dollars / 1e6
    if recorded_scenario(play.scenario).goal:
        _add_success(row, episodes)
    return row


def return_of(episode: Episode) -> float:
    """The only player's undiscounted sum of environment rewards."""
    if list(episode.returns) != list(episode.agents) or not all(map(math.isfinite, episode.returns.values())):
        raise RecordError(
            f"an episode of {episode.scenario} (start {episode.start_seed}) has the returns {episode.returns}",
            fix="the record is damaged: msgrpo verify FILE",
        )
    return next(iter(episode.returns.values()))


def _failures(play: Series) -> dict[str, int]:
    return dict(sorted(Counter(str(episode.error) for episode in play.failed).items()))


def _add_success(row: Row, episodes: Sequence[Episode]) -> None:
    row.successes = sum(bool(episode.success) for episode in episodes)
    row.success_rate = row.successes / len(episodes)
    row.success_low, row.success_high = wilson(row.successes, len(episodes))
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


def pair_of(a: Series, b: Series) -> Pair | None:
    """The paired comparison of two plays; None where they share no finished episode."""
    shared = [seeds for seeds in a.finished if seeds in b.finished]
    if not shared:
        return None
    first, second = ([play.finished[seeds] for seeds in shared] for play in (a, b))
    success_a, success_b = ([bool(e.success) for e in episodes] for episodes in (first, second))
    difference = paired_difference([return_of(e) for e in first], [return_of(e) for e in second], seed=BOOTSTRAP_SEED)
    goal = recorded_scenario(a.scenario).goal
    return Pair(
        scenario=a.scenario,
        a=a.agent,
        b=b.agent,
        episodes=len(shared),
        difference=difference.mean,
        low=difference.low,
        high=difference.high,
        mcnemar_p=mcnemar_exact(success_a, success_b) if goal else None,
        detectable=detectable_difference(len(shared), difference.sd) if difference.sd > 0 else None,
    )
