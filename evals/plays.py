"""Reads records as the plays of each agent in each scenario: what counts, and what does not mix."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from msgrpo.episode import Episode, Turn, read_episodes
from msgrpo.errors import RecordError, check_given, nearest
from msgrpo.evals.record import (
    Price,
    Run,
    check_names,
    folder_name,
    read_run,
    records_in,
    run_of,
    seeds_of,
    taken_out,
)
from msgrpo.evals.suites import CONCURRENCY, SUITE_VERSION, EpisodeSeeds, HeldOut, places_in_suite
from msgrpo.evals.verify import COMPUTED, game_steps, removed, verify, was_left
from msgrpo.game import Outcome
from msgrpo.games import SCENARIOS, recorded_scenario
from msgrpo.prompt import PromptTemplate
from msgrpo.specs import as_read, imitates
from msgrpo.text import counted, printable

PORT = re.compile(r"^(endpoint:https?://(?:\[[^\]]*\]|[^/:#]+)):\d+")
SOUND_FROM = 2  # a prefix of this many times the episodes at once is no longer biased by their lengths
PROMPT = ("template", "prompt")  # the settings that say how a model is asked


@dataclass
class Play:
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
    left_out: dict[EpisodeSeeds, Episode] = field(default_factory=dict)  # results beyond the counted prefix
    unfinished: set[EpisodeSeeds] = field(default_factory=set)  # failed episodes within the counted prefix
    repeats: int = 1  # episodes from each start
    at_once: int = 0  # episodes that were played at once, where that is known
    split: HeldOut = "test"  # whose starts
    name: str = ""  # the agent's name in tables
    runs: list[Run] = field(default_factory=list)  # the evaluations that it is from

    @property
    def label(self) -> str:
        """What tables call the agent: its given name, or the spec, without a port where it had several."""
        return self.name or self.agent

    @property
    def prompt(self) -> str:
        """What the agent's prompt template is called; empty for agents that read none."""
        if "template" not in self.settings:
            return ""
        prompt = self.settings.get("prompt")
        return printable(str(prompt.get("name", "?"))) if isinstance(prompt, dict) else PromptTemplate().name

    @property
    def is_biased(self) -> bool:
        """Whether an interrupted evaluation has ended so few episodes that their mean is biased.

        The counted prefix ends before the first unfinished episode, which is a long one. In simulations that bias is
        gone from about twice as many episodes as are played at once.
        """
        ended = len(self.finished) + len(self.unfinished)
        # a budget ends a run without leaving episodes unfinished
        short = self.asked is not None and ended < self.asked and self.interrupted > 0
        broken_off = bool(self.left_out) or short
        return broken_off and ended < SOUND_FROM * (self.at_once or CONCURRENCY)

    @property
    def by_start(self) -> dict[int, list[Episode]]:
        """The finished episodes of each start, in the suite's order."""
        episodes: dict[int, list[Episode]] = {}
        for seeds, episode in self.finished.items():
            episodes.setdefault(seeds.start, []).append(episode)
        return episodes

    @property
    def score(self) -> float:
        """The mean score of an episode: success where there is a goal, else the return."""
        return fmean(episode.score for episode in self.finished.values())

    @property
    def turns(self) -> Iterator[Turn]:
        """The turns of finished episodes."""
        return (turn for episode in self.finished.values() for turn in episode.turns)


def load(
    folders: Sequence[Path | str] | Path | str,
    *,
    agents: Collection[str] | str | None = None,
    scenarios: Collection[str] | str | None = None,
    mix: bool = False,
    by_prompt: bool = False,
    check: bool = False,
) -> tuple[list[Play], list[str]]:
    """The plays recorded under `folders` (of certain agents and scenarios), and what a reader must know about them.

    Only the counted prefix of the suite counts (`keep_counted_prefix`). Raises RecordError for
    what cannot be true, and where suite versions, prompts or settings differ; with `mix` the latter becomes a note,
    with `by_prompt` prompts may differ. `check` simulates every record first.
    """
    paths = [Path(folder) for folder in ([folders] if isinstance(folders, (Path, str)) else folders)]
    agents, scenarios = _names("agents", agents), _names("scenarios", scenarios)
    notes: list[str] = []
    read = _Read(agents, scenarios, _without_ports(paths))
    for run, line, episode in _recorded(paths, check, notes):
        read.take(run, line, episode)
    plays = list(read.plays.values())
    for play in plays:
        if foreign := keep_counted_prefix(play):
            episodes = counted(foreign, "episode")
            warning = f"the seeds of {episodes} of {play.agent} in {play.scenario} belong to no suite"
            if read.versions == {SUITE_VERSION} and not mix:
                raise RecordError(f"{warning}: nothing says how they were chosen", fix="leave them out, or say --mix")
            notes.append(f"{warning}: nothing says how they were chosen.")
    notes += _silent(paths, agents, scenarios, read.seen)
    for number, which in (
        (read.duels, "of several players; the table is of single ones"),
        (read.left, "that a person left before the end"),
    ):
        if number:
            notes.append(f"left out: {counted(number, 'episode')} {which}.")
            if not plays:
                raise RecordError(f"nothing to compare: {notes[-1]}")
    if read.twice:
        played = counted(read.twice, "episode", "was", "were")
        notes.append(f"{played} played more than once: the first result counts.")
    for difference in map(printable, _differences(plays, read.versions, by_prompt=by_prompt)):
        if not mix:
            raise RecordError(f"these results do not mix: {difference}", fix="compare them apart, or say --mix")
        notes.append(f"MIXED: {difference}")
    return _labelled(plays, by_prompt=by_prompt), notes


@dataclass
class _Read:
    """The plays of the agents and scenarios that were asked for (None: all), and what was met while reading them."""

    agents: Collection[str] | None
    scenarios: Collection[str] | None
    elsewhere: Mapping[str, str]  # see `_without_ports`
    plays: dict[tuple[str, ...], Play] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)  # of the suite
    seen: set[tuple[str, str]] = field(default_factory=set)  # agents and scenarios of all episodes
    twice: int = 0  # episodes whose result is there already
    duels: int = 0  # episodes of several players
    left: int = 0  # episodes that a person left before the end

    def take(self, run: Run | None, line: int, episode: Episode) -> None:
        """Add an episode to its play, where it was asked for. `line` is its line in the record."""
        self.seen.update((spec, episode.scenario) for spec in episode.agents.values())
        if self.agents is not None and not set(self.agents).intersection(episode.agents.values()):
            return
        if self.scenarios is not None and episode.scenario not in self.scenarios:
            return
        if run is not None:
            self.versions.add(run.suite_version)
        if was_left(episode):
            self.left += 1
            return
        if len(episode.agents) != 1:
            self.duels += 1
            return
        check_consistent(episode)
        play = _play_of(episode, run.split if run else "test", self.plays, self.elsewhere)
        if run is not None:
            (spec,) = episode.agents.values()  # as this run called it: an endpoint may have been on another port
            _add_run(play, run, spec)
        seeds = seeds_of(episode)
        if episode.error is not None:
            play.failed.append(episode)
        elif seeds in play.finished:
            self.twice += 1
        else:
            play.finished[seeds], play.lines[seeds] = episode, line


def _names(what: str, given: Collection[str] | str | None) -> Collection[str] | None:
    """The names that a caller asks for; None for all. Raises UsageError for what are none."""
    if given is None:
        return None
    names = [given] if isinstance(given, str) else given
    check_given(what, names, Collection, fix=f"{what}=[…], each by its name")
    for name in names:
        check_given(f"one of the {what}", name, str, fix="each is given by its name")
    return names


def _add_run(play: Play, run: Run, spec: str) -> None:
    """Take up what the `run.json` of an evaluation says of the agent, which it calls `spec`."""
    asked = run.asked.get(spec, {}).get(play.scenario)
    play.price = run.prices.get(spec, play.price)
    play.asked = asked if play.asked is None else max(play.asked, asked or 0)
    play.interrupted = max(play.interrupted, run.interrupted(spec))
    play.repeats = max(play.repeats, run.repeats.get(spec, {}).get(play.scenario, 1))
    play.name = run.names.get(spec, play.name)
    play.at_once = max(play.at_once, run.at_once.get(spec, 0))
    if run not in play.runs:
        play.runs.append(run)


def _silent(
    folders: Sequence[Path],
    agents: Collection[str] | None,
    scenarios: Collection[str] | None,
    seen: Set[tuple[str, str]],
) -> Iterator[str]:
    """Name each agent and scenario that was asked for and has no episode, so that none is silently missing.

    `seen` are the agents and scenarios of all episodes that were read.
    """
    known = set(seen)
    files = list(_files(folders))
    below = [folder.resolve() for folder in folders]
    roots = {*below, *(parent for file in files for parent in list(file.parents)[:2])}
    for root in sorted(root for root in roots if root.is_dir()):
        run = read_run(root)
        for spec, asked in run.asked.items() if run else ():
            for scenario, episodes in asked.items():
                known.add((spec, scenario))
                wanted = (agents is None or spec in agents) and (scenarios is None or scenario in scenarios)
                own = root / folder_name(spec)
                covered = any(own.is_relative_to(folder) or folder.is_relative_to(own) for folder in below)
                if wanted and covered and (spec, scenario) not in seen:
                    record = own / f"{folder_name(scenario)}.jsonl"
                    gone = "" if record.is_file() else ", and there is no record of it"
                    none = f"none of {counted(episodes, 'episode')} of {printable(scenario)}{gone}"
                    yield f"{printable(spec)} has ended {none}"
    # An agent that did not come to play has an empty record: its name is no misspelling.
    begun = ({file.parent.name for file in files}, {file.stem for file in files})
    for what, names, place in (("agent", agents, 0), ("scenario", scenarios, 1)):
        there = {both[place] for both in known}
        for name in (name for name in names or () if name not in there):
            hint = "" if folder_name(name) in begun[place] else f"; {nearest(name, there)}"
            yield printable(f"no episode here is of the {what} {name!r}{hint}")


def keep_counted_prefix(play: Play) -> int:
    """Count only episodes up to the first unfinished one, and return how many episodes are of no suite.

    Later episodes would bias the mean towards short games, which end first. An episode that the endpoint failed has
    ended without a result; the table says how many. The episodes take the suite's order, so that intervals and
    replays do not depend on which ended first. Episodes of no suite stay.
    """
    failed = {seeds_of(episode) for episode in play.failed}
    places, foreign = places_in_suite(play.scenario, {*play.finished, *failed}, play.repeats, play.split)
    taken = set(places.values())
    beginning = next(i for i in count() if i not in taken)
    beginning -= beginning % play.repeats  # a start counts with all its episodes
    kept = [(place, seeds) for seeds, place in places.items() if seeds in play.finished and place < beginning]
    others = sorted(seeds for seeds in foreign if seeds in play.finished)
    chosen = [*(seeds for _, seeds in sorted(kept)), *others]
    counted = set(chosen)
    play.left_out = {seeds: episode for seeds, episode in play.finished.items() if seeds not in counted}
    play.unfinished = {seeds for seeds in failed - set(play.finished) if places.get(seeds, -1) < beginning}
    play.finished = {seeds: play.finished[seeds] for seeds in chosen}
    return len(foreign)


def check_consistent(episode: Episode) -> None:
    """Raise RecordError if a result contradicts its own turns, as far as that shows without playing it again."""
    if episode.error is not None:
        return
    scenario = recorded_scenario(episode.scenario)
    problem = None if set(episode.returns) == set(scenario.players) else f"has returns of {list(episode.returns)}"
    for player, total in episode.returns.items():
        rewards = sum(turn.reward for turn in episode.turns_of(player))
        if not math.isclose(total, rewards, abs_tol=1e-9):
            problem = f"says the return {total:g}, its rewards add up to {rewards:g}"
    if scenario.goal != (episode.success is not None) or episode.outcome is Outcome.PLAYING:
        problem = f"says success {episode.success} and outcome {episode.outcome}"
    if game_steps(episode) > scenario.step_limit:
        problem = f"has {game_steps(episode)} steps, the limit is {scenario.step_limit}"
    for player, spec in episode.agents.items():
        if spec in COMPUTED and ("template" in episode.settings.get(player, {}) or speaks(episode, player)):
            problem = f"says that {spec} has played, and holds answers in words"
        if imitates(spec):
            problem = f"says that {spec!r} has played, which reads like another agent's name"
    if problem:
        raise RecordError(
            f"an episode of {episode.scenario} (start {episode.start_seed}) {problem}",
            fix="the record is damaged or was changed: msgrpo verify FILE",
        )


def speaks(episode: Episode, player: str) -> bool:
    """Whether a player's turns hold text answers."""
    return any(turn.answer is not None for turn in episode.turns_of(player))


def _recorded(folders: Sequence[Path], check: bool, notes: list[str]) -> Iterator[tuple[Run | None, int, Episode]]:
    """Every episode below `folders`, each file once, with the `run.json` of its evaluation and its line.

    With `check` each file is simulated first, and what cannot be checked of it is added to `notes`.
    """
    for file in _files(folders):
        run = run_of(file)
        if run is not None:
            check_names(run)
        if not check and (gone := taken_out(file)):
            notes.append(f"{file.name} of {file.parent.name}: {removed(gone)}")
        if check and (verified := verify(file)).remarks:
            notes.append(f"{file.name} of {file.parent.name}: {'; '.join(verified.remarks)}")
        for line, episode in enumerate(read_episodes(file), start=1):
            yield run, line, episode


def _files(folders: Sequence[Path]) -> Iterable[Path]:
    """The records below `folders`, each once."""
    return dict.fromkeys(file.resolve() for folder in folders for file in records_in([folder]))


def _play_of(
    episode: Episode, split: HeldOut, plays: dict[tuple[str, ...], Play], elsewhere: Mapping[str, str]
) -> Play:
    recorded_scenario(episode.scenario)
    ((player, agent),) = episode.agents.items()
    settings = episode.settings.get(player, {})
    label = elsewhere.get(agent, agent)
    key = (label, episode.scenario, split, repr(sorted(settings.items())))
    name = label if label != agent else ""
    return plays.setdefault(key, Play(agent, episode.scenario, settings, name=name, split=split))


def _without_ports(folders: Sequence[Path]) -> dict[str, str]:
    """Map each endpoint to its name in tables and notes: one that had several ports is one agent, without a port.

    Where one evaluation has two of them that differ in the port alone, they are two.
    """
    runs = {run.model_dump_json(): run for file in _files(folders) if (run := run_of(file))}.values()
    names = {spec: PORT.sub(r"\1", spec) for run in runs for spec in run.asked}
    apart = {
        spec for run in runs for spec in run.asked if [names[other] for other in run.asked].count(names[spec]) > 1
    }
    ports = Counter(names.values())
    return {spec: spec if spec in apart or ports[name] == 1 else name for spec, name in names.items()}


def _differences(plays: Sequence[Play], versions: set[int], *, by_prompt: bool) -> Iterator[str]:
    """What makes results incomparable; with `by_prompt` the prompts do not."""
    if versions - {SUITE_VERSION}:
        yield f"suite versions {', '.join(map(str, sorted(versions | {SUITE_VERSION})))}"
    if len(splits := sorted({play.split for play in plays})) > 1:
        yield f"starts of the splits {' and '.join(splits)}"
    by_agent: dict[str, dict[str, None]] = defaultdict(dict)
    for play in plays:
        without_prompt = {key: value for key, value in play.settings.items() if key not in PROMPT}  # it comes below
        by_agent[play.agent][str(without_prompt)] = None
    for agent, settings in by_agent.items():
        if len(settings) > 1:
            yield f"{agent} played with settings {' and '.join(settings)}"
    for what in ("sampling",) if by_prompt else ("template", "sampling"):
        values = {str(_effective(p.settings, what)): p.agent for p in plays if what in p.settings}
        if len(values) > 1:
            listed = "; ".join(f"{agent}: {value}" for value, agent in values.items())
            fix = "; msgrpo leaderboard FOLDER --by prompt puts them into a column" if what == "template" else ""
            yield f"{what} differs between agents ({listed}){fix}"
    one_template = len({str(p.settings["template"]) for p in plays if "template" in p.settings}) == 1
    for scenario in sorted({play.scenario for play in plays}):
        here = [e for play in plays if play.scenario == scenario for e in play.finished.values()]
        hashes = {episode.versions["rules"] for episode in here if "rules" in episode.versions}
        if len(hashes) > 1 or hashes - {recorded_scenario(scenario).rules_hash}:
            yield f"the rules of {scenario} changed since, or between, these results ({', '.join(sorted(hashes))})"
        if one_template and len({prefix for episode in here for prefix in episode.prefix.values()}) > 1:
            yield f"the rules in the prompt of {scenario} changed between these results"


def _effective(settings: Mapping[str, Any], what: str) -> Any:
    """A setting as the endpoint got it: the extra body overrides the sampling settings."""
    body = settings.get("body")
    if what != "sampling" or not isinstance(body, dict) or not isinstance(settings[what], dict):
        return settings[what]
    given = {name: value for name, value in body.items() if name in settings[what] and value is not None}
    return settings[what] | given


def _labelled(plays: list[Play], *, by_prompt: bool) -> list[Play]:
    """Plays in the order of the registry; those of one agent with different settings get different names."""
    seen: Counter[tuple[str, ...]] = Counter()
    if len({play.split for play in plays}) > 1:
        for play in plays:
            play.name = f"{play.label} ({play.split})"
    for play in plays:
        key = (play.agent, play.scenario, play.split, *([play.prompt] if by_prompt else []))
        seen[key] += 1
        if (number := seen[key]) > 1:
            play.agent = f"{play.agent} ({number})"
            play.name = f"{play.name} ({number})" if play.name else ""
    agents: dict[tuple[str, str], set[str]] = defaultdict(set)  # by their names, as a reader takes them
    for play in plays:
        agents[as_read(play.label), play.scenario].add(play.agent)
    for play in [play for play in plays if len(agents[as_read(play.label), play.scenario]) > 1]:
        play.name = f"{play.label} ({play.agent})"  # a name that two agents have identifies neither
    order = {name: place for place, name in enumerate(SCENARIOS)}
    return sorted(
        (p for p in plays if p.finished or p.left_out or p.failed),
        key=lambda play: (order.get(play.scenario, len(order)), "" if play.scenario in order else play.scenario),
    )


def only(
    plays: Iterable[Play], wanted: Mapping[str, Sequence[EpisodeSeeds]], agents: Sequence[str], number: int
) -> list[Play]:
    """The same plays, cut down to the agents and episodes that a run asked for, agents in that order.

    A run asks for a `number` of episodes of each scenario, of which `wanted` lacks those that could not be drawn.
    """
    chosen = [play for play in plays if play.agent in agents and play.scenario in wanted]
    for play in chosen:
        asked = set(wanted[play.scenario])
        play.finished = {seeds: episode for seeds, episode in play.finished.items() if seeds in asked}
        play.asked = number
        play.left_out = {seeds: episode for seeds, episode in play.left_out.items() if seeds in asked}
        play.unfinished &= asked
        play.failed = [episode for episode in play.failed if seeds_of(episode) in asked]
    return sorted(chosen, key=lambda play: (list(wanted).index(play.scenario), agents.index(play.agent)))
