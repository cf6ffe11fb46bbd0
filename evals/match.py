"""Matches: agents against each other in games of two players, both seats equally often on the same starts.

Every start is played twice, with the seats swapped and the same luck, so what a seat or a start is worth cancels. A
result is a win, a draw or a loss by the return. Of several agents everybody meets everybody; their ratings are
Bradley-Terry's, P(i beats j) = r_i / (r_i + r_j), a draw half a win for each, on the scale of Elo (400 points are
odds of ten to one) around a mean of 0. Intervals are bootstraps over starts (`stats.py`); ratings
draw the starts once for all pairings.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from msgrpo.agent import Agent, LanguageAgent, answer_in_turn
from msgrpo.episode import Episode, few_collections, play_episode, read_episodes
from msgrpo.errors import GameFaultError, RecordError, UsageError, nearest
from msgrpo.evals.progress import LOG_EVERY_S
from msgrpo.evals.record import MATCHES, RecordFile, as_recorded, failure_of, folder_name, seeds_of
from msgrpo.evals.request import can_play, why_not
from msgrpo.evals.stats import ends, resampled_means, share_interval
from msgrpo.evals.suites import CONCURRENCY, EpisodeSeeds, check_counts, check_scenario, suite_seeds
from msgrpo.evals.verify import first_difference
from msgrpo.files import replace_json
from msgrpo.game import Scenario
from msgrpo.loops import run_async
from msgrpo.specs import check_agents

RESAMPLES = 4000  # of ratings
ELO = 400 / math.log(10)
Done = Callable[[int, int], None]  # (games played, games planned): after each game, and while none ends
Names = tuple[str, str]  # the two agents of a pairing, the first of whom its result speaks of
GameKey = tuple[EpisodeSeeds, tuple[tuple[str, str], ...]]  # a game's seeds, and who had which seat


@dataclass(frozen=True)
class Result:
    """One pairing, from the first agent's side; `score` is (wins + draws / 2) / n with its interval."""

    first: str
    second: str
    starts: int
    wins: int
    draws: int
    losses: int
    failed: int  # starts that are left out, because one of their games has no result
    score: float
    low: float
    high: float

    @property
    def bounds(self) -> tuple[float, float]:
        """The score if every start that is left out had been lost, and if it had been won."""
        whole = self.starts + self.failed
        return self.score * self.starts / whole, (self.score * self.starts + self.failed) / whole


@dataclass(frozen=True)
class Rating:
    agent: str
    elo: float
    low: float
    high: float


def play(
    scenario: Scenario,
    agents: Mapping[str, Agent],
    pairs: Sequence[Names],
    starts: int,
    out: Path | str,
    done: Done = lambda played, planned: None,
    concurrency: int = CONCURRENCY,
) -> list[tuple[Names, Path]]:
    """Play what is missing of every pairing, and return each one's record.

    Raises UsageError for a game that has not two players, an agent that is none, and pairings that cannot be;
    RecordError for a record that another process writes to or that other rules or settings made; EndpointError for a
    fatal failure; GameFaultError, once all else is played, for a start that cannot be looked at.
    """
    check_scenario(scenario)
    if len(scenario.players) != 2:
        raise UsageError(f"{scenario.id} has {len(scenario.players)} players; a match is for two")
    check_counts(starts=starts, concurrency=concurrency)
    _check_asked(scenario, agents, pairs)
    answer_in_turn(agent.model for agent in agents.values() if isinstance(agent, LanguageAgent))
    records = records_of(pairs, Path(out))
    with few_collections():
        run_async(_play_all(scenario, agents, records, starts, done, concurrency))
    return records


def records_of(pairs: Sequence[Names], out: Path) -> list[tuple[Names, Path]]:
    """Each pairing with its record."""
    return [(pair, out / MATCHES / f"{folder_name('-vs-'.join(pair))}.jsonl") for pair in pairs]


def _check_asked(scenario: Scenario, agents: Mapping[str, Agent], pairs: Sequence[Names]) -> None:
    """Refuse, before anything is written, what a caller from Python may ask for and no match can be."""
    check_agents(agents.values())
    if unable := [agent for agent in agents.values() if not can_play(agent, scenario)]:
        why = why_not(unable[0])
        raise UsageError(
            f"{unable[0].spec} cannot play {scenario.id}: {why}", fix="choose other agents for this game"
        )
    if len({frozenset(pair) for pair in pairs}) < max(1, len(pairs)) or any(len({*pair}) != 2 for pair in pairs):
        raise UsageError(f"a match is of pairs of two agents, each pair once, not of {list(pairs)}")
    known = [name for name, agent in agents.items() if agent.spec == name]
    if strange := next((name for pair in pairs for name in pair if name not in known), None):
        raise UsageError(f"no agent of this match has the spec {strange!r}", fix=nearest(strange, known))


async def _play_all(
    scenario: Scenario,
    agents: Mapping[str, Agent],
    records: Sequence[tuple[Names, Path]],
    starts: int,
    done: Done,
    concurrency: int,
) -> None:
    played, planned = 0, 2 * starts * len(records)
    faults: list[GameFaultError] = []  # they keep no other game from being played

    def left_to_play() -> Iterator[tuple[GameKey, RecordFile]]:
        """The games without a result; a start is drawn when its first game begins."""
        nonlocal played
        for pair, record, finished in opened:
            try:
                for game in _games(pair, scenario, starts):
                    if game in finished:
                        played += 1
                    else:
                        yield game, record
            except GameFaultError as fault:
                faults.append(fault)

    async def play_some(games: Iterator[tuple[GameKey, RecordFile]]) -> None:
        nonlocal played
        for (seeds, seated), record in games:
            episode = await play_episode(
                scenario,
                {player: agents[spec] for player, spec in seated},
                start_seed=seeds.start,
                chance_seed=seeds.chance,
                sampling_seed=seeds.sampling,
            )
            record.append(episode)
            played += 1
            done(played, planned)

    async def say_on() -> None:
        while True:
            await asyncio.sleep(LOG_EVERY_S)
            done(played, planned)

    with ExitStack() as records_open:
        opened = []
        for pair, file in records:
            record = records_open.enter_context(RecordFile(file))
            opened.append((pair, record, _finished(file, pair, scenario, agents)))
        games = left_to_play()
        saying = asyncio.create_task(say_on())
        try:
            await asyncio.gather(*(play_some(games) for _ in range(min(concurrency, planned))))
        finally:
            saying.cancel()
            for agent in agents.values():
                closing: object = agent.close()
                if inspect.isawaitable(closing):  # one that is not has closed it already
                    await closing
    if faults:
        raise faults[0]


def _finished(file: Path, pair: Names, scenario: Scenario, agents: Mapping[str, Agent]) -> set[GameKey]:
    """The games of a record that have a result. Raises RecordError for what cannot be of this match."""
    finished = set[GameKey]()
    for episode in read_episodes(file):
        _check_same(episode, scenario, agents, pair, file)
        if (difference := first_difference(episode)) is not None:
            raise RecordError(f"{file}: the start {episode.start_seed} does not replay: {difference}")
        if episode.error is None:
            if _key(episode) in finished:
                raise RecordError(f"{file} holds one game twice: start {episode.start_seed}")
            finished.add(_key(episode))
    return finished


def _games(pair: Names, scenario: Scenario, starts: int) -> Iterator[GameKey]:
    """The games of a pairing: of each start two, one after the other, with the seats swapped in the second."""
    for seeds in islice(suite_seeds(scenario, "test", 1), starts):
        for order in (pair, pair[::-1]):
            yield seeds, tuple(zip(scenario.players, order, strict=True))


def _key(episode: Episode) -> GameKey:
    """An episode's identity within a match."""
    return seeds_of(episode), tuple(episode.agents.items())


def _check_same(episode: Episode, scenario: Scenario, agents: Mapping[str, Agent], pair: Names, file: Path) -> None:
    """Raise RecordError for an episode that was played under other rules or by agents with other settings."""
    rules = episode.versions.get("rules", scenario.rules_hash)
    for what, recorded, now in (
        ("scenario", episode.scenario, scenario.id),
        ("rules", rules, scenario.rules_hash),
        ("agents", sorted(episode.agents.values()), sorted(pair)),
        *(
            (f"settings of {spec}", episode.settings.get(player), as_recorded(agents[spec].settings()))
            for player, spec in episode.agents.items()
            if spec in agents
        ),
    ):
        if recorded != now:
            raise RecordError(
                f"{file} holds episodes with other {what}: {recorded}, now {now}",
                fix="choose another --out for these",
            )


def points_of(file: Path, pair: Names, scenario: Scenario, starts: int) -> tuple[dict[int, list[float]], int]:
    """The first agent's points by the number of the start, two for each that counts; and how many starts do not."""
    finished = {_key(episode): episode for episode in read_episodes(file) if episode.error is None}
    points_by_start: dict[int, list[float]] = {}
    games = _games(pair, scenario, starts)
    with suppress(GameFaultError):  # a start that cannot be looked at has not been played
        for number, both in enumerate(zip(games, games, strict=True)):
            if all(game in finished for game in both):
                points_by_start[number] = [_points(finished[game], i) for i, game in enumerate(both)]
    return points_by_start, starts - len(points_by_start)


def _points(episode: Episode, seat: int) -> float:
    """1 for a win of whoever sits on `seat`, ½ for a draw, 0 for a loss."""
    values = list(episode.returns.values())
    own, other = values[seat], values[1 - seat]
    return 0.5 if own == other else float(own > other)


def result(pair: Names, points: Mapping[int, Sequence[float]], failed: int) -> Result:
    """The result of a pairing of which one start or more was finished."""
    single = [value for both in points.values() for value in both]
    means = np.array([sum(both) / 2 for both in points.values()])
    low, high = share_interval(means)
    return Result(
        *pair,
        starts=len(points),
        wins=single.count(1.0),
        draws=single.count(0.5),
        losses=single.count(0.0),
        failed=failed,
        score=float(means.mean()),
        low=float(low),
        high=float(high),
    )


def bradley_terry(wins: NDArray[np.float64], met: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Ratings (in Elo, mean 0) that make wins[i, j], the points of i against j, most likely; of several such tables,
    wins[…, i, j], those of each.

    Minorisation-maximisation (Hunter 2004): r_i ← W_i / Σ_j n_ij / (r_i + r_j), with half a point added to both sides
    of every pairing that was played (`met`; without: those that have points), so that who never lost has a finite
    rating, and who is in no draw of a resample has one at all.
    """
    met = (wins + wins.swapaxes(-1, -2)) > 0 if met is None else met
    wins = wins + 0.5 * met
    games, total = wins + wins.swapaxes(-1, -2), wins.sum(axis=-1)
    rating = np.ones(total.shape)
    for _ in range(10_000):
        updated = total / (games / (rating[..., :, None] + rating[..., None, :])).sum(axis=-1)
        updated /= np.exp(np.log(updated).mean(axis=-1, keepdims=True))
        if np.abs(np.log(updated / rating)).max() < 1e-10:
            break
        rating = updated
    return np.asarray(ELO * np.log(updated))


def ratings(agents: Sequence[str], points: Mapping[Names, Mapping[int, Sequence[float]]]) -> list[Rating]:
    """The rating of each agent, the highest first; resamples draw the starts once for all pairings."""
    starts = sorted({number for of in points.values() for number in of})
    places, points_SN = list[tuple[int, int]](), list[list[float]]()  # of i against j, by the start
    for pair, of in points.items():
        i, j = map(agents.index, pair)
        both = [of.get(number, ()) for number in starts]  # nothing where a start is left out
        places += [(i, j), (j, i)]
        points_SN += [[sum(own) for own in both], [len(own) - sum(own) for own in both]]

    def rated(totals_RS: NDArray[np.float64]) -> NDArray[np.float64]:
        wins_RAA = np.zeros((len(totals_RS), len(agents), len(agents)))
        wins_RAA[:, rows, columns] = totals_RS
        return bradley_terry(wins_RAA, met)

    met = np.zeros((len(agents), len(agents)), dtype=bool)
    rows, columns = np.array(places).T
    met[rows, columns] = True
    values_SN = np.array(points_SN)
    best = rated(values_SN.sum(axis=1)[None])[0]
    drawn = rated(len(starts) * resampled_means(values_SN, seed=0, resamples=RESAMPLES))
    low, high = (
        np.quantile(drawn, ends(len(starts)), axis=0) if len(starts) > 1 else np.full((2, len(agents)), np.nan)
    )
    if (high - low < 1e-6).all():  # every resample is the same: nothing says how far off it is
        low, high = np.full((2, len(agents)), np.nan)
    estimates = [Rating(agent, *map(float, (best[i], low[i], high[i]))) for i, agent in enumerate(agents)]
    return sorted(estimates, key=lambda rating: -rating.elo)


def are_linked(pairs: Sequence[Names]) -> bool:
    """Whether the pairings lead from each of their agents to every other, if by way of others."""
    reached, left = set(pairs[0]), list(pairs[1:])
    while near := [pair for pair in left if reached & set(pair)]:
        reached.update(*near)
        left = [pair for pair in left if pair not in near]
    return not left


def report(
    scenario: Scenario, records: Sequence[tuple[Names, Path]], starts: int, out: Path | str
) -> tuple[list[Result], list[Rating]]:
    """The results of all pairings that have one, and ratings of three agents and more; both also go to match.json.

    There are no ratings where the results leave groups of agents that did not meet: nothing compares these.
    Raises UsageError where no pairing has a result.
    """
    out = Path(out)
    points_of_pair = {pair: points_of(file, pair, scenario, starts) for pair, file in records}
    points_of_pair = {pair: found for pair, found in points_of_pair.items() if found[0]}
    if not points_of_pair:
        raise UsageError(no_result(records), fix="the same command goes on")
    results = [result(pair, points, failed) for pair, (points, failed) in points_of_pair.items()]
    agents = list(dict.fromkeys(agent for pair in points_of_pair for agent in pair))
    comparable = len(agents) > 2 and are_linked(list(points_of_pair))
    rated = ratings(agents, {pair: points for pair, (points, _) in points_of_pair.items()}) if comparable else []
    content = {
        "scenario": scenario.id,
        "rules": scenario.rules_hash,
        "starts": starts,
        "results": list(map(asdict, results)),
        "ratings": list(map(asdict, rated)),
    }
    try:
        replace_json(out / "match.json", content)
    except OSError as error:
        raise RecordError(f"{out / 'match.json'} cannot be written: {error.strerror}") from error
    return results, rated


def no_result(records: Sequence[tuple[Names, Path]]) -> str:
    """Says of each of these pairings that it has no result, and how its last game failed."""
    sentences = []
    for (first, second), file in records:
        failures = [episode for episode in read_episodes(file) if episode.error is not None]
        why = f"; the last failure: {failure_of(failures[-1])}" if failures else ""
        sentences.append(f"no start of {first} against {second} was finished{why}")
    return "\n".join(sentences)


def pairings(agents: Sequence[str], opponent: str | None) -> list[Names]:
    """The pairings: each agent against the opponent, or all against all. Raises UsageError where there is none."""
    pairs = (
        [(agent, opponent) for agent in agents if agent != opponent] if opponent else list(combinations(agents, 2))
    )
    if not pairs:
        raise UsageError("a match needs two agents", fix="msgrpo eval A --opponent B, or several agents")
    return pairs
