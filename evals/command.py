"""`msgrpo eval` and `msgrpo leaderboard`: options become agents and scenarios, these play, and tables come of it."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress as RichProgress

from msgrpo.agent import Agent, Sampling
from msgrpo.errors import (
    EndpointError,
    GameFaultError,
    ModelError,
    MsgrpoError,
    RecordError,
    RunError,
    UsageError,
    first_fault,
)
from msgrpo.evals import leaderboard, match, page, plays, tables
from msgrpo.evals.budget import Budget
from msgrpo.evals.options import Given
from msgrpo.evals.progress import LOG_EVERY_S, EvalProgress, shown, ticking, trouble_of
from msgrpo.evals.record import Price, folder_name
from msgrpo.evals.request import Elsewhere, can_play, why_not
from msgrpo.evals.run import evaluate
from msgrpo.evals.suites import CONCURRENCY, DEFAULT, QUICK, EpisodeSeeds, suite, suite_seeds
from msgrpo.files import replace_text
from msgrpo.game import Scenario
from msgrpo.games import get_scenario, recorded_scenario
from msgrpo.models.endpoint import RETRIES, Timeouts
from msgrpo.output import err
from msgrpo.prompt import as_given, json_object
from msgrpo.ray_cluster import connected
from msgrpo.signals import ending_as_interrupt
from msgrpo.specs import checked_names, cut_short, make_agent
from msgrpo.text import counted, printable

REFERENCES = ["random", "optimal"]
# What ends an evaluation or a match that has begun.
ENDING = (EndpointError, GameFaultError, ModelError, RunError, UsageError)


@dataclass
class Options(Given):
    """The options of the command line, and what they mean. The checks are made when they are asked for."""

    line: str = ""  # the command itself, for the record

    def budget(self) -> Budget:
        if self.max_cost is not None and self.price is None:
            raise UsageError("--max-cost needs the price of a token", fix="--price 0.15,0.60")
        return Budget(self.max_tokens_total, self.max_cost)

    def called(self) -> dict[str, str]:
        """The agents' names in tables, from --name."""
        specs, names = self.specs(), dict[str, str]()
        for given in self.names:
            spec, equals, name = given.rpartition("=")
            if not equals:
                raise UsageError(
                    f"--name {given!r} is not AGENT=NAME", fix=f"--name {shlex.quote(f'{specs[0]}=mine')}"
                )
            if spec in names:
                raise UsageError(f"--name calls {spec} both {names[spec]!r} and {name!r}", fix="leave one of them")
            names[spec] = name
        return checked_names(names, specs)

    def is_match(self) -> bool:
        """Whether agents play against each other: an opponent is named, or the game has several players."""
        games = [get_scenario(name) for name in self.scenarios]
        return self.opponent is not None or (len(games) == 1 and len(games[0].players) > 1)

    def check_match(self) -> None:
        """Raise UsageError for options that a match does not have."""
        given = {
            "--regret": self.regret,
            "--repeats": self.repeats > 1,
            "--split": self.split != "test",
            "--name": self.names,
            "--max-tokens-total": self.max_tokens_total,
            "--max-cost": self.max_cost,
            "--price": self.price,
            "--max-failures": self.max_failures is not None,
            "--retry-failed": self.retry_failed,
            "--ray": self.ray is not None,
        }
        refused = [name for name, value in given.items() if value]
        if refused:
            raise UsageError(f"a match has no {', '.join(refused)}: only its results count", fix="leave them out")

    def check_ray(self) -> None:
        """Raise UsageError for bounds of the whole evaluation, which workers apart cannot keep together."""
        given = {
            "--max-tokens-total": self.max_tokens_total,
            "--max-cost": self.max_cost,
            "--rate": self.rate,
            "--concurrency": self.concurrency,
        }
        refused = [name for name, value in given.items() if value is not None]
        if refused:
            raise UsageError(
                f"--ray has no {', '.join(refused)}: workers do not know of each other", fix="leave it out"
            )

    def served(self) -> list[str]:
        """The endpoint's model as an agent, where one is named."""
        if (self.endpoint is None) != (self.model is None):
            raise UsageError("--endpoint and --model belong together")
        if "" in (self.endpoint, self.model):
            raise UsageError(f"--endpoint {self.endpoint!r} --model {self.model!r}: one of them is empty")
        return [f"endpoint:{self.endpoint}#{self.model}"] if self.endpoint else []

    def specs(self) -> list[str]:
        """Every agent once. Without any: nano, or the endpoint, between the references that there are."""
        served = self.served()
        if self.agents:
            return list(dict.fromkeys([*self.agents, *served]))
        known = any(scenario.reference for scenario in self.chosen())
        return [*(served or ["nano"]), *(REFERENCES if known else REFERENCES[:1])]

    def chosen(self) -> list[Scenario]:
        if self.scenarios and self.suite:
            raise UsageError("--suite and --scenario do not go together")
        if not self.scenarios:
            return suite(self.suite or "paper")
        scenarios = [get_scenario(name) for name in dict.fromkeys(self.scenarios)]
        for scenario in scenarios:
            if len(scenario.players) > 1:
                raise UsageError(f"{scenario.id} has several players: the table is of single ones")
        return scenarios

    def count(self) -> int:
        if self.quick and self.episodes:
            raise UsageError("--quick and --episodes do not go together")
        return QUICK if self.quick else self.episodes or DEFAULT

    def sampling(self) -> Sampling:
        try:
            return Sampling(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens)
        except ValidationError as error:
            raise UsageError(first_fault(error, "sampling")) from error

    def agent(self, spec: str) -> Agent:
        """The agent of this name, as the options say that agents are asked and reached."""
        return make_agent(
            spec,
            self.sampling(),
            endpoint=self.endpoint_arguments(),
            **as_given(self.prompt, self.chat),
        )

    def prices(self) -> Price | None:
        if self.price is None:
            return None
        try:
            prompt, completion = map(float, self.price.split(","))
            return Price(prompt=prompt, completion=completion)
        except ValueError as error:
            raise UsageError(
                f"--price {self.price!r} is not IN,OUT, two numbers from 0 on", fix="--price 0.15,0.60"
            ) from error

    def endpoint_arguments(self) -> dict[str, Any]:
        """Further arguments of EndpointModel."""
        for header in self.headers:
            if "=" not in header:
                raise UsageError(f"--header {header!r} is not NAME=VALUE")
        headers = dict(header.split("=", 1) for header in self.headers)
        if len(headers) < len(self.headers):  # their values may be secret
            raise UsageError(f"--header names one header twice: {', '.join(h.split('=')[0] for h in self.headers)}")
        return {
            "body": json_object("--body", self.body, '{"min_p": 0.1}') if self.body else {},
            "headers": headers,
            "retries": RETRIES if self.retries is None else self.retries,
            "timeouts": self.timeouts(),
            "rate": self.rate,
        }

    def timeouts(self) -> Timeouts:
        usual, given = Timeouts(), self.timeout_s
        return usual if given is None else Timeouts(min(usual.connect_s, given), given, given)


def run(options: Options, console: Console = err) -> leaderboard.Leaderboard:
    """Play what is missing, write all tables into the folder, and return the board of what was asked for.

    What ends the evaluation before its end (a wrong key, a game that hangs) hides no result: the board says it as
    `fatal`, and it is raised where there is nothing to show.
    """
    scenarios, episodes, specs = options.chosen(), options.count(), options.specs()
    agents = [options.agent(spec) for spec in specs]
    prices, budget, called = options.prices(), options.budget(), options.called()
    planned = f"{', '.join(map(printable, specs))} on {', '.join(scenario.id for scenario in scenarios)}"
    begun = f"{planned}, {counted(episodes, 'start')} each → {options.out}"
    console.print(begun, soft_wrap=True, markup=False, highlight=False)
    short = cut_short(specs, options.max_tokens)
    for sentence in short:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    progress = EvalProgress(prices={spec: prices for spec in specs if prices and spec.startswith("endpoint:")})
    fatal: MsgrpoError | None = None
    try:
        with cluster(options) as elsewhere, shown(progress, console), ending_as_interrupt():
            playing = evaluate(
                agents,
                scenarios,
                episodes,
                options.out,
                concurrency=options.concurrency or CONCURRENCY,
                progress=progress,
                max_failures=options.max_failures,
                retry_failed=options.retry_failed,
                regret=options.regret,
                repeats=options.repeats,
                split=options.split,
                budget=budget,
                command=options.line,
                names=called,
                elsewhere=elsewhere,
            )
            asyncio.run(_play(playing, agents, progress))
    except KeyboardInterrupt:
        console.print("finished episodes are kept; start the same command again to go on", soft_wrap=True)
        raise
    except ENDING as error:
        if not progress.planned:  # nothing has begun
            raise
        fatal = error
    folders = [options.out / folder_name(spec) for spec in specs]
    # what has been played is shown, also where the agents were asked differently: the table says so
    playable = [scenario.id for scenario in scenarios if any(can_play(agent, scenario) for agent in agents)]
    played, notes = plays.load(folders, agents=specs, scenarios=playable, mix=True)
    number = episodes * options.repeats
    chosen = plays.only(played, _seeds_asked(scenarios, options, number), specs, number)
    notes += [
        *_not_played(agents, scenarios, called),
        *short,
        *(_without_regret(scenarios, chosen) if options.regret else ()),
        *_left_to_play(progress),
    ]
    if fatal is not None:
        notes.append(f"not all was played: {fatal.message}")
    board = leaderboard.build(chosen, notes)
    if fatal is not None:
        if not board.rows:
            raise fatal
        board.fatal = str(fatal)
    board.silent += [f"{printable(called.get(spec, spec))} in {scenario}" for spec, scenario in progress.kept_out]
    write_tables(board, chosen, options.out)
    again = " with --retry-failed" if progress.given_up else ""
    leaderboard.check_result(board, f"remove the cause, then start the same command again{again}")
    return board


def _seeds_asked(scenarios: Sequence[Scenario], options: Options, number: int) -> dict[str, list[EpisodeSeeds]]:
    """The seeds of the episodes that were asked for, by scenario, as far as its starts can be looked at."""
    asked = defaultdict[str, list[EpisodeSeeds]](list)
    for scenario in scenarios:
        with suppress(GameFaultError):  # `fatal` says so
            for seeds in islice(suite_seeds(scenario, options.split, options.repeats), number):
                asked[scenario.id].append(seeds)
    return asked


def _not_played(agents: Sequence[Agent], scenarios: Sequence[Scenario], called: Mapping[str, str]) -> Iterator[str]:
    """Which agents cannot play which scenarios, and why."""
    for agent in agents:
        for scenario in scenarios:
            if not can_play(agent, scenario):
                yield f"{printable(called.get(agent.spec, agent.spec))} is not in {scenario.id}: {why_not(agent)}."


def _without_regret(scenarios: Sequence[Scenario], chosen: Sequence[plays.Play]) -> Iterator[str]:
    """Where --regret has nothing to show."""
    for scenario in scenarios:
        if scenario.judge is None:
            yield f"{scenario.id} has no judge: nothing says what a move lost."
    for play in chosen:
        has_judge = recorded_scenario(play.scenario).judge is not None
        if play.finished and has_judge and all(turn.regret is None for turn in play.turns):
            yield f"{play.label} in {play.scenario}: no move was judged: the judge failed, or the episodes are older."


def _left_to_play(progress: EvalProgress) -> Iterator[str]:
    """What another start of the command would play."""
    if progress.given_up:
        given_up = counted(progress.given_up, "episode", "was", "were")
        yield f"{given_up} given up after three failures: --retry-failed plays on."
    if progress.stopped:
        yield f"{progress.stopped}; the same command with a larger budget goes on."


@contextmanager
def cluster(options: Options) -> Iterator[Elsewhere | None]:
    """While this is open, what plays on the Ray cluster that the options name; None where they name none."""
    if options.ray is None:
        yield None
        return
    options.check_ray()
    with connected(options.ray):
        from msgrpo.evals.on_ray import OnRay

        yield OnRay(options.agent)


def run_match(options: Options) -> tuple[str, list[match.Result], list[match.Rating], str]:
    """Play what is missing of a match or a round robin. Returns the scenario, the results, the ratings, and a text on
    what is missing: pairings without a result, and the fatal failure that ended the match, where one did.
    """
    if len(options.scenarios) != 1:
        raise UsageError("a match is played in one game", fix="--scenario spiel:connect_four")
    scenario, starts = get_scenario(options.scenarios[0]), options.count()
    specs = [*options.agents, *options.served()] or ["optimal", "random"]
    pairs = match.pairings(list(dict.fromkeys(specs)), options.opponent)
    records = match.records_of(pairs, options.out)
    agents = {spec: options.agent(spec) for spec in dict.fromkeys(chain(*pairs))}
    for sentence in cut_short(agents, options.max_tokens):
        err.print(sentence, soft_wrap=True, markup=False, highlight=False)
    fatal = ""
    with RichProgress(console=err, transient=True) as bar, ending_as_interrupt():
        task, last = bar.add_task("games", total=None), time.monotonic()

        def tell(played: int, planned: int) -> None:
            nonlocal last
            bar.update(task, completed=played, total=planned)
            waits = [
                f"{printable(spec)}: {trouble}" for spec, agent in agents.items() if (trouble := trouble_of(agent))
            ]
            if (waits or not err.is_terminal) and time.monotonic() - last >= LOG_EVERY_S:
                last = time.monotonic()
                line = " · ".join([f"{played}/{planned} games", *waits])
                err.print(line, soft_wrap=True, markup=False, highlight=False)

        try:
            match.play(
                scenario,
                agents,
                pairs,
                starts,
                options.out,
                tell,
                options.concurrency or CONCURRENCY,
            )
        except ENDING as error:  # what has a result is shown nevertheless
            fatal = str(error)
            begun = all(file.is_file() for _, file in records)
            if not begun or not any(match.points_of(file, pair, scenario, starts)[0] for pair, file in records):
                raise
    results, rated = match.report(scenario, records, starts, options.out)
    have = {(one.first, one.second) for one in results}
    missing = match.no_result([record for record in records if record[0] not in have])
    return scenario.id, results, rated, "\n".join(filter(None, (fatal, missing)))


def line_of(arguments: Sequence[str]) -> str:
    """The command line for the record, without the values of headers, which may be secret."""
    shown, hide = ["msgrpo"], False
    for argument in arguments:
        option, name = ("--header=", argument[9:]) if argument.startswith("--header=") else ("", argument)
        secret = (option or hide) and "=" in name
        shown.append(f"{option}{name.partition('=')[0]}=…" if secret else argument)
        hide = argument == "--header"
    return printable(shlex.join(shown))


async def _play(playing: Coroutine[object, object, None], agents: Sequence[Agent], progress: EvalProgress) -> None:
    """Play to the end while the display is refreshed, then close the agents."""
    ticker = asyncio.create_task(ticking(progress))
    try:
        await playing
    finally:
        ticker.cancel()
        for agent in agents:
            await agent.close()


def merge(
    folders: Sequence[Path], out: Path | None, *, mix: bool = False, by_prompt: bool = False, check: bool = False
) -> leaderboard.Leaderboard:
    """One board over the records of `folders`; with `check` every episode is simulated again first."""
    played, notes = plays.load(folders, mix=mix, by_prompt=by_prompt, check=check)
    board = leaderboard.build(played, notes)
    leaderboard.check_result(board)
    board.made.append(
        "Every episode was simulated again before it counted."
        if check
        else "The results stand as they were recorded: leaderboard --verify simulates every episode again."
    )
    if out is not None:
        write_tables(board, played, out)
    return board


def write_tables(board: leaderboard.Leaderboard, played: Sequence[plays.Play], out: Path) -> None:
    """Write all tables; each file is complete or as it was before."""
    texts = {
        "leaderboard.json": board.model_dump_json(indent=2) + "\n",
        "leaderboard.md": tables.markdown(board),
        "card.md": tables.card(board),
        "leaderboard.csv": tables.csv_text(board),
        "pairs.csv": tables.csv_pairs(board),
        "leaderboard.html": page.html(board, played),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_text(out / name, text)
    except OSError as error:
        raise RecordError(f"the tables cannot be written to {out}: {error.strerror}") from error
