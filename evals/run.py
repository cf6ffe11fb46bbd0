"""Play an evaluation: the same episodes for every agent, resumable after any interruption."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from types import NoneType

from msgrpo.agent import Agent, LanguageAgent, answers_in_rounds
from msgrpo.episode import Episode, computed, few_collections, lost_by, new_episode, place_for, play_on
from msgrpo.errors import EndpointError, GameFaultError, MsgrpoError, UsageError, check_given
from msgrpo.evals.budget import Budget
from msgrpo.evals.failures import ATTEMPTS, Failures
from msgrpo.evals.partial import Partial
from msgrpo.evals.progress import EvalProgress
from msgrpo.evals.record import Command, Record, changing_run, folder_name
from msgrpo.evals.request import (
    CHUNK,
    Elsewhere,
    EvalRequest,
    check_asked,
    check_folder,
    check_repeatable,
    playable_by,
)
from msgrpo.evals.suites import CONCURRENCY, EpisodeSeeds, HeldOut, check_counts, suite_seeds
from msgrpo.game import Game, Scenario
from msgrpo.judge import add_regrets
from msgrpo.limits import games_code
from msgrpo.specs import checked_names

_END = object()


@dataclass(frozen=True)
class _Job:
    scenario: Scenario
    seeds: EpisodeSeeds
    record: Record
    partial: Partial


@dataclass(frozen=True)
class _Part:
    """What an agent plays in one scenario: its record, by its name below the folder, and its unfinished episodes."""

    scenario: Scenario
    name: str
    record: Record
    partial: Partial


async def evaluate(
    agents: Collection[Agent],
    scenarios: Collection[Scenario],
    episodes: int,
    out: Path | str,
    *,
    concurrency: int = CONCURRENCY,
    progress: EvalProgress | None = None,
    max_failures: int | None = None,
    retry_failed: bool = False,
    regret: bool = False,
    repeats: int = 1,
    split: HeldOut = "test",
    budget: Budget | None = None,
    command: str = "",
    names: Mapping[str, str] | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    """Play what is not finished yet, agent after agent, and append each episode to its record when it ends.

    An episode that an endpoint failed is recorded as that and tried again at the next start, up to ATTEMPTS; with
    `retry_failed` also beyond. With `regret` every move is judged, where the scenario has a judge. Each start is
    played `repeats` times; all starts of a folder are those of one `split`. Where `budget` is used up, no further
    episode begins; `command` and `names` (of agents, for tables) stand in `run.json`; `elsewhere` plays in other
    processes. Raises EndpointError for a fatal failure or too many others (`max_failures`, or more than
    FEWEST_FAILURES and FAILURE_SHARE of what ended), GameFaultError, once all else is played, for games whose own
    code failed so often, or took too long three times, or whose starts cannot be looked at, UsageError where an
    agent is none (`check_agent`) or can play nothing, two agents or scenarios share a name, a name, a number or the
    split makes no sense, or `out` holds another split.
    """
    budget = budget or Budget()
    check_given("budget", budget, Budget, fix="msgrpo.evals.budget.Budget(tokens=100_000)")
    if not isinstance(max_failures, (Integral, NoneType)):
        raise UsageError(f"max_failures is {max_failures!r}, no whole number", fix="a number of episodes")
    check_counts(episodes=episodes, repeats=repeats, concurrency=concurrency)
    check_asked(agents, scenarios, split, command)
    called = checked_names(names or {}, [agent.spec for agent in agents])
    check_repeatable(scenarios)
    able = [(agent, playable_by(agent, scenarios)) for agent in agents]
    request = EvalRequest(
        Path(out), episodes, repeats, split, concurrency, retry_failed, regret, max_failures, budget, elsewhere,
        progress or EvalProgress(),
    )  # fmt: skip
    faults: list[GameFaultError] = []  # of games that keep nobody from the others
    hung: set[str] = set()  # scenarios that no agent plays any more
    with ExitStack() as stack:
        plan = _opened(stack, request, able, called)
        _note_command(request, called, command)
        for agent, parts in plan:
            await _play_agent(agent, parts, request, Failures(agent.spec, request.max_failures, faults, hung))
    if faults:
        raise GameFaultError("; ".join(dict.fromkeys(fault.message for fault in faults)), fix=faults[0].fix)


def _opened(
    stack: ExitStack, request: EvalRequest, able: Sequence[tuple[Agent, Sequence[Scenario]]], called: dict[str, str]
) -> list[tuple[Agent, list[_Part]]]:
    """What each agent plays, with its records, open until the stack ends. Refuse what the folder cannot hold too."""
    with changing_run(request.out) as run:
        check_folder(run, able, request, called)
        forgiven = run.forgiven
    plan = []
    for agent, playable in able:
        parts = []
        for scenario in playable:
            name = f"{folder_name(agent.spec)}/{folder_name(scenario.id)}.jsonl"
            record = stack.enter_context(Record(request.out / name, agent.settings(), forgiven=forgiven.get(name, 0)))
            _count_before(agent, record, request.progress)
            parts.append(_Part(scenario, name, record, Partial(record.path, agent.settings(), record.recorded)))
        plan.append((agent, parts))
    request.progress.planned += request.plays * sum(len(parts) for _, parts in plan)
    return plan


async def _play_agent(agent: Agent, parts: Sequence[_Part], request: EvalRequest, failures: Failures) -> None:
    """All that one agent plays."""
    progress = request.progress
    progress.begin(agent, request.plays * len(parts))
    _note_start(agent, parts, request)
    jobs = chain.from_iterable(
        failures.until_given_up(part.scenario.id, _open_jobs(part, request, failures)) for part in parts
    )
    ended = False
    try:
        if request.elsewhere is not None:
            await _play_elsewhere(agent, jobs, request.elsewhere, request, failures)
        else:
            with few_collections():
                await _play_all(agent, jobs, request, failures)
        ended = not progress.stopped
    except EndpointError:
        _forgive(request.out, parts)
        raise
    finally:
        for part in parts:
            part.partial.close(ended=ended)
        _note_lines(request.out, parts, failures.given_up)
    progress.kept_out += [(agent.spec, part.scenario.id) for part in parts if not part.record.lines]
    with changing_run(request.out) as run:
        run.ended[agent.spec] = run.ended.get(agent.spec, 0) + 1


def _count_before(agent: Agent, record: Record, progress: EvalProgress) -> None:
    """Count what earlier starts have played."""
    for read, written in record.tokens:
        progress.pay_before(read, written, agent.spec)
    progress.look(*record.largest, agent.spec)
    progress.spoken += len(record.finished) if isinstance(agent, LanguageAgent) else 0


def _note_command(request: EvalRequest, called: dict[str, str], command: str) -> None:
    """Nothing was refused, so the run is recorded from here on."""
    with changing_run(request.out) as run:
        run.split = request.split
        run.names |= called
        run.prices |= request.progress.prices
        if command:
            run.commands.append(Command(at=datetime.now(UTC).isoformat(timespec="seconds"), line=command))


def _note_start(agent: Agent, parts: Sequence[_Part], request: EvalRequest) -> None:
    """Record what is asked for, so that a table can say how much of it is there."""
    with changing_run(request.out) as run:
        of_agent = run.asked.setdefault(agent.spec, {})
        for part in parts:
            run.note_lines(part.name, part.record.lines)
            id = part.scenario.id
            of_agent[id] = max(request.plays, of_agent.get(id, 0))
            again = run.repeats.setdefault(agent.spec, {})
            again[id] = max(request.repeats, again.get(id, 1))
        run.at_once[agent.spec] = max(request.at_once, run.at_once.get(agent.spec, 0))
        run.started[agent.spec] = run.started.get(agent.spec, 0) + 1


def _note_lines(out: Path, parts: Sequence[_Part], given_up: Collection[str]) -> None:
    """How long each record is; all failures of a game that was given up are forgiven."""
    with changing_run(out) as run:
        for part in parts:
            run.note_lines(part.name, part.record.lines)
            if part.scenario.id in given_up:
                run.forgiven[part.name] = part.record.lines


def _forgive(out: Path, parts: Sequence[_Part]) -> None:
    """Forgive all failures so far: the endpoint failed as a whole, so they use up no episode's attempts."""
    with changing_run(out) as run:
        run.forgiven |= {part.name: part.record.lines for part in parts}


def _open_jobs(part: _Part, request: EvalRequest, failures: Failures) -> Iterator[_Job | None]:
    """Yield what is left to play, drawn when it is needed; None for each episode that is finished or given up."""
    record = part.record
    for seeds in islice(suite_seeds(part.scenario, request.split, request.repeats), request.plays):
        job = None
        if seeds in record.finished:
            request.progress.finished_before += 1
        elif record.failures[seeds] >= ATTEMPTS and not request.retry_failed:
            request.progress.given_up += 1
            failures.count_given_up(part.scenario.id)
        else:
            job = _Job(part.scenario, seeds, record, part.partial)
        yield job


async def _play_all(agent: Agent, jobs: Iterator[_Job | None], request: EvalRequest, failures: Failures) -> None:
    """A fixed number of workers take jobs until there are none; the first error ends them all."""
    progress = request.progress
    speaks = isinstance(agent, LanguageAgent)  # other agents cost nothing
    places = min(request.concurrency, progress.planned)
    first: list[_Job | None] = []
    for job in islice(jobs, places):  # a start is looked for among many: not all in one go, which holds up the loop
        first.append(job)
        await asyncio.sleep(0)
    jobs = chain(first, jobs)
    admission = asyncio.Lock()  # episodes begin in the suite's order, also where they wait for room in the budget

    async def admitted() -> object:
        async with admission:
            if progress.stopped and speaks:
                return _END
            job = next(jobs, _END)
            if isinstance(job, _Job) and speaks and not await request.budget.room(progress, job.scenario.step_limit):
                return _END
            return job

    async def work() -> None:
        while (job := await admitted()) is not _END:
            if not isinstance(job, _Job) or job.scenario.id in failures.hung:
                await asyncio.sleep(0)  # let Ctrl-C through, also while a million finished episodes are skipped
                continue
            try:
                episode = await _play(agent, job, request)
                failures.count(episode, job.record.failures[job.seeds])
            except GameFaultError as fault:  # a fatal one: the game took too long too often
                failures.give_up(job.scenario.id, fault)

    workers = [asyncio.create_task(work()) for _ in range(places)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _play(agent: Agent, job: _Job, request: EvalRequest) -> Episode:
    progress = request.progress
    progress.running += 1
    progress.steps_open += job.scenario.step_limit
    progress.on_change(progress)
    try:
        episode = await play_one(
            agent,
            job.scenario,
            job.seeds,
            request.regret,
            begin=partial(job.partial.take_up, job.seeds),
            after_step=partial(_after_step, job, progress),
        )
    finally:
        progress.running -= 1
        progress.steps_open -= job.scenario.step_limit
        progress.changed.set()
    _ended(agent, job, episode, progress)
    return episode


async def play_one(
    agent: Agent,
    scenario: Scenario,
    seeds: EpisodeSeeds,
    regret: bool,
    begin: Callable[[Game, Episode], None] = lambda game, episode: None,
    after_step: Callable[[Episode], None] = lambda episode: None,
) -> Episode:
    """Play one episode of an evaluation to its end; `begin` may bring it to where it was interrupted."""
    agents = dict.fromkeys(scenario.players, agent)
    episode = new_episode(scenario, agents, *seeds)
    async with place_for(scenario):
        try:
            game = await computed(scenario, scenario.new, seeds.start, seeds.chance)
            with games_code(scenario.id):
                begin(game, episode)
        except GameFaultError as fault:
            lost_by(episode, fault)
        else:
            await play_on(game, episode, scenario, agents, after_step=after_step)
    if regret and scenario.judge is not None and episode.error is None:
        # how long it is judged must not decide with which turns the next episode's are a batch
        await add_regrets(scenario, episode, aside=not answers_in_rounds(agent))
    return episode


def _ended(agent: Agent, job: _Job, episode: Episode, progress: EvalProgress) -> None:
    """Record an episode."""
    job.record.append(episode)
    progress.pay(*job.record.tokens[-1], agent.spec)
    progress.spoken += isinstance(agent, LanguageAgent) and episode.error is None
    progress.done += episode.error is None
    progress.failed += episode.error is not None
    progress.on_change(progress)


async def _play_elsewhere(
    agent: Agent, jobs: Iterator[_Job | None], elsewhere: Elsewhere, request: EvalRequest, failures: Failures
) -> None:
    """Chunks go out as places come free; episodes are recorded in the suite's order."""
    progress = request.progress
    open_jobs = (job for job in jobs if job is not None)
    running: deque[tuple[list[_Job], asyncio.Future[list[Episode | MsgrpoError]]]] = deque()

    def begin_some() -> None:
        while len(running) < elsewhere.at_once and (chunk := list(islice(open_jobs, CHUNK))):
            given = [(job.scenario.id, job.seeds) for job in chunk]
            running.append((chunk, asyncio.ensure_future(elsewhere.play(agent.spec, given, request.regret))))
        progress.running = sum(len(chunk) for chunk, _ in running)
        progress.on_change(progress)

    try:
        begin_some()
        while running:
            chunk, coming = running[0]
            await coming
            running.popleft()
            for job, episode in _record_all(agent, chunk, coming, progress, failures):
                failures.count(episode, job.record.failures[job.seeds])
            begin_some()
    finally:
        for chunk, coming in running:  # what came while an earlier chunk was waited for
            if coming.done() and not coming.cancelled() and coming.exception() is None:
                with suppress(MsgrpoError):  # another is on its way out
                    _record_all(agent, chunk, coming, progress, failures)
            coming.cancel()
        await asyncio.gather(*(coming for _, coming in running), return_exceptions=True)


def _record_all(
    agent: Agent,
    chunk: Sequence[_Job],
    played: asyncio.Future[list[Episode | MsgrpoError]],
    progress: EvalProgress,
    failures: Failures,
) -> list[tuple[_Job, Episode]]:
    """Record what of a chunk was played; then raise what ended the rest of it."""
    ended, faults = [], []
    for job, episode in zip(chunk, played.result(), strict=True):
        if isinstance(episode, GameFaultError):
            failures.give_up(job.scenario.id, episode)
        elif isinstance(episode, MsgrpoError):
            faults.append(episode)
        else:
            _ended(agent, job, episode, progress)
            ended.append((job, episode))
    if faults:
        raise faults[0]
    return ended


def _after_step(job: _Job, progress: EvalProgress, episode: Episode) -> None:
    """Keep the answered turns, and update the largest answer seen."""
    job.partial.add(job.seeds, episode)
    turn = episode.turns[-1]
    progress.look(turn.prompt_tokens, turn.completion_tokens, next(iter(episode.agents.values())))
