"""Playing an evaluation: the same episodes for every agent, any interruption survived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from evals.record import Record, changing_run, folder_name
from evals.suites import EpisodeSeeds, suite_seeds
from msgrpo_agent.agent import Agent
from msgrpo_agent.episode import Episode
from msgrpo_agent.errors import EndpointError, UsageError
from msgrpo_agent.game import Scenario
from msgrpo_agent.judge import add_regrets
from msgrpo_agent.rollout import play_episode

CONCURRENCY = 64  # episodes at once: enough to fill a server's or a model's batch
ATTEMPTS = 3  # an episode that failed this often by its own fault (one attempt a start) is given up
FEWEST_FAILURES, FAILURE_SHARE = 10, 0.25  # more failed episodes than both stop the run


@dataclass
class Progress:
    """Where a run is; `on_change` is called after each change. Times in seconds."""

    planned: int = 0
    found: int = 0  # finished by earlier starts
    done: int = 0
    failed: int = 0
    given_up: int = 0
    running: int = 0
    tokens: int = 0
    agent: Agent | None = None
    on_change: Callable[[Progress], None] = lambda progress: None
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    before: int = 0  # episodes that ended before the present agent began

    def __post_init__(self) -> None:
        self.began = self.clock()

    def begin(self, agent: Agent) -> None:
        """Another agent plays from now on: agents differ in speed, and the rate is the present one's."""
        self.agent, self.began, self.before = agent, self.clock(), self.done + self.failed
        self.on_change(self)

    @property
    def retrying(self) -> int:
        """Requests that wait for their next try."""
        return int(getattr(getattr(self.agent, "model", None), "retrying", 0))

    @property
    def left(self) -> int:
        return self.planned - self.found - self.done - self.failed - self.given_up

    @property
    def rate(self) -> float:
        """Episodes per second of the present agent."""
        return (self.done + self.failed - self.before) / max(self.clock() - self.began, 1e-9)

    def line(self) -> str:
        """One line for a log: what is done, running, retrying and failed, the rate and the time left."""
        parts = [f"{self.found + self.done}/{self.planned} episodes"]
        if self.agent is not None:
            parts.append(self.agent.spec)
        parts += [f"{self.running} running", f"{self.retrying} retrying", f"{self.failed} failed"]
        if self.given_up:
            parts.append(f"{self.given_up} given up")
        if self.tokens:
            parts.append(f"{self.tokens:,} tokens")
        if self.rate:
            parts.append(f"{self.rate:.2f} episodes/s")
            parts.append(f"{duration(self.left / self.rate)} left")
        return " · ".join(parts)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


@dataclass(frozen=True)
class _Job:
    scenario: Scenario
    seeds: EpisodeSeeds
    record: Record


def can_play(agent: Agent, scenario: Scenario) -> bool:
    """Whether an agent can play a scenario: a DQN knows the boards of its training only."""
    able = getattr(agent, "can_play", None)
    return True if able is None else bool(able(scenario))


async def evaluate(
    agents: Sequence[Agent],
    scenarios: Sequence[Scenario],
    episodes: int,
    out: Path,
    *,
    concurrency: int = CONCURRENCY,
    progress: Progress | None = None,
    max_failures: int | None = None,
    retry_failed: bool = False,
    regret: bool = False,
) -> None:
    """Play what is not finished yet, agent after agent, and append each episode to its record when it ends.

    An episode that an endpoint failed is recorded as that and tried again at the next start, up to ATTEMPTS; with
    `retry_failed` also beyond. With `regret` every move is judged, where the scenario has a judge. Raises
    EndpointError for a fatal failure or too many others (`max_failures`, or more than FEWEST_FAILURES and
    FAILURE_SHARE of what ended), UsageError where an agent can play nothing.
    """
    progress = progress or Progress()
    with ExitStack() as stack:
        plan: list[tuple[Agent, list[tuple[Scenario, Record]]]] = []
        with changing_run(out) as run:
            forgiven = run.forgiven
        for agent in agents:
            able = [scenario for scenario in scenarios if can_play(agent, scenario)]
            if not able:
                names = ", ".join(scenario.id for scenario in scenarios)
                raise UsageError(
                    f"{agent.spec} can play none of {names}", fix="choose the scenario it was trained on"
                )
            records = []
            for scenario in able:
                name = record_name(agent, scenario)
                record = Record(out / name, agent.settings(), forgiven=forgiven.get(name, 0))
                records.append((scenario, stack.enter_context(record)))
            progress.planned += episodes * len(able)
            plan.append((agent, records))
        for agent, records in plan:
            progress.begin(agent)
            _note_start(out, agent, records, episodes)
            jobs = (job for one in records for job in _open_jobs(*one, episodes, progress, retry_failed))
            try:
                await _play_all(agent, jobs, concurrency, progress, max_failures, regret)
            except EndpointError:
                _forgive(out, agent, records)
                raise
            with changing_run(out) as run:
                run.ended[agent.spec] = run.ended.get(agent.spec, 0) + 1


def record_name(agent: Agent, scenario: Scenario) -> str:
    """Where an agent's record of a scenario lies below the evaluation's folder."""
    return f"{folder_name(agent.spec)}/{folder_name(scenario.id)}.jsonl"


def _note_start(out: Path, agent: Agent, records: Sequence[tuple[Scenario, Record]], episodes: int) -> None:
    """Write down what is asked for, so that a table can say how much of it is there."""
    with changing_run(out) as run:
        asked = run.asked.setdefault(agent.spec, {})
        for scenario, _ in records:
            asked[scenario.id] = max(episodes, asked.get(scenario.id, 0))
        run.started[agent.spec] = run.started.get(agent.spec, 0) + 1


def _forgive(out: Path, agent: Agent, records: Sequence[tuple[Scenario, Record]]) -> None:
    """The endpoint failed as a whole, so no episode is to blame: failures until now use no attempts up."""
    with changing_run(out) as run:
        run.forgiven |= {record_name(agent, scenario): record.lines for scenario, record in records}


def _open_jobs(
    scenario: Scenario, record: Record, episodes: int, progress: Progress, retry_failed: bool
) -> Iterator[_Job | None]:
    """What is left to play, drawn when it is needed; None for each episode that is passed over."""
    for seeds in islice(suite_seeds(scenario), episodes):
        if seeds in record.finished:
            progress.found += 1
        elif record.failures[seeds] >= ATTEMPTS and not retry_failed:
            progress.given_up += 1
        else:
            yield _Job(scenario, seeds, record)
            continue
        yield None


async def _play_all(
    agent: Agent,
    jobs: Iterator[_Job | None],
    concurrency: int,
    progress: Progress,
    max_failures: int | None,
    regret: bool,
) -> None:
    """A fixed number of workers take jobs until there are none; the first error ends them all."""
    counts = [0, 0]  # ended, failed

    async def work() -> None:
        for job in jobs:
            if job is None:
                await asyncio.sleep(0)  # a million finished episodes must not hold up Ctrl-C
                continue
            episode = await _play(agent, job, progress, regret)
            counts[0] += 1
            counts[1] += episode.error is not None
            _stop_if_hopeless(agent, counts, episode, max_failures)

    workers = [asyncio.create_task(work()) for _ in range(min(concurrency, progress.planned))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _play(agent: Agent, job: _Job, progress: Progress, regret: bool) -> Episode:
    progress.running += 1
    progress.on_change(progress)
    try:
        episode = await play_episode(
            job.scenario,
            dict.fromkeys(job.scenario.players, agent),
            start_seed=job.seeds.start,
            chance_seed=job.seeds.chance,
            sampling_seed=job.seeds.sampling,
        )
        if regret and job.scenario.judge is not None:
            await add_regrets(job.scenario, episode)
    finally:
        progress.running -= 1
    job.record.append(episode)
    progress.tokens += sum(turn.prompt_tokens + turn.completion_tokens for turn in episode.turns)
    progress.done += episode.error is None
    progress.failed += episode.error is not None
    progress.on_change(progress)
    return episode


def _stop_if_hopeless(agent: Agent, counts: Sequence[int], episode: Episode, max_failures: int | None) -> None:
    ended, failed = counts
    most = max(FEWEST_FAILURES, FAILURE_SHARE * ended) if max_failures is None else max_failures
    if episode.error is not None and failed > most:
        raise EndpointError(
            f"{agent.spec}: {failed} of {ended} episodes failed, the last with {episode.error}: "
            f"{episode.error_message}",
            kind="too_many_failures",
            fatal=True,
            fix="see what is wrong with the endpoint, then start the same command again: finished episodes stay, and "
            "those that failed are played again",
        )
