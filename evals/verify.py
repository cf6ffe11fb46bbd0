"""Verification: a record's games are played again from their seeds and actions, without any model."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice, product
from pathlib import Path
from typing import Any

from msgrpo.agent import Agent, LanguageAgent, parse_action, recorded_sampling
from msgrpo.episode import (
    GAME_FAULT,
    MAKES_RECORDS,
    Episode,
    Turn,
    check_end,
    observation_of,
    outcome_of,
    read_episodes,
    replay,
    success_of,
    versions,
    view_of,
    waiting,
)
from msgrpo.errors import GameError, GameFaultError, MsgrpoError, RecordError
from msgrpo.evals.record import (
    MATCHES,
    RUN_FILE,
    Run,
    folder_name,
    read_run,
    run_of,
    seeds_of,
    taken_out,
)
from msgrpo.evals.suites import SUITE_VERSION, EpisodeSeeds, places_in_suite
from msgrpo.game import AnyText, Game, Outcome, Scenario
from msgrpo.games import recorded_scenario
from msgrpo.games.outside import on_server
from msgrpo.judge import regrets
from msgrpo.limits import games_code
from msgrpo.prompt import PromptTemplate, recorded_template
from msgrpo.references import OptimalAgent, RandomAgent
from msgrpo.specs import imitates, is_language_model
from msgrpo.text import counted

# The players whose every move follows from the game and the seeds: verifying plays them again.
COMPUTED: dict[str, RandomAgent | OptimalAgent] = {"random": RandomAgent(), "optimal": OptimalAgent()}
KINDS = 6  # of errors that are named: a record from elsewhere may have one of its own in each episode
MOST_TRIED = 1000  # moves after which a game is looked at for its recorded fault


def removed(lines: int) -> str:
    """In words."""
    return f"{counted(lines, 'line', 'was', 'were')} removed after being written"


@dataclass
class Verified:
    """What a record holds, and what of it could not be checked."""

    episodes: int = 0
    unchecked_prompts: int = 0  # episodes whose prompt is another version's
    failed: Counter[str] = field(default_factory=Counter)  # episodes without a result, by what they say of it
    misjudged: int = 0  # episodes with a regret that is not what the judge says now
    foreign: int = 0  # finished episodes with seeds of no suite
    missing: dict[str, int] = field(default_factory=dict)  # scenario -> episodes of the suite that have no line
    unplayed: dict[str, int] = field(default_factory=dict)  # scenario -> episodes that were asked for and are missing
    faultless: dict[str, int] = field(default_factory=dict)  # scenario -> lost by a fault that the game does not have
    short: dict[str, int] = field(default_factory=dict)  # scenario -> prompts called too long that others outdo
    twice: int = 0  # lines that repeat an episode
    computed: int = 0  # turns of players whose every move follows from the seeds, played again
    outdated: int = 0  # episodes of a reference player of another version
    taken_out: int = 0  # lines that were written and are gone, or were until they were played again
    starts: int = 0  # starts of a match of which one seat has no line
    left: int = 0  # games that a person left before the end

    @property
    def is_complete(self) -> bool:
        """Whether everything that was asked for is there, once."""
        return not (self.missing or self.unplayed or self.faultless or self.twice or self.starts)

    @property
    def summary(self) -> str:
        """The findings as one sentence."""
        if not self.episodes:
            return "; ".join(["no episode has ended yet", *self.remarks])
        again = f" ({self.computed} moves of random and optimal were played again)" if self.computed else ""
        return "; ".join(
            [f"{counted(self.episodes, 'episode', 'replays', 'replay')} as recorded{again}", *self.remarks]
        )

    @property
    def remarks(self) -> list[str]:
        """Each finding that a reader of a table must know."""
        parts = []
        if self.unchecked_prompts:
            parts.append(f"the prompts of {self.unchecked_prompts} are of another version and could not be checked")
        if self.misjudged:
            parts.append(f"REGRETS: those of {self.misjudged} are not what the judge says now")
        if self.failed:
            named = dict(self.failed.most_common(KINDS))
            why = ", ".join(f"{count} {error}" for error, count in named.items())
            if others := self.failed.total() - sum(named.values()):
                why += f", {others} of other kinds"
            parts.append(f"{self.failed.total()} of them without a result: {why}")
        if self.left:
            parts.append(f"{self.left} of them left by a person before the end")
        if self.outdated:
            parts.append(f"played by the reference of another version, and not played again: {self.outdated}")
        if self.foreign:
            parts.append(f"the seeds of {self.foreign} belong to no suite, so nothing says how they were chosen")
        if self.twice:
            parts.append(f"TWICE: {counted(self.twice, 'line', 'repeats', 'repeat')} an episode")
        if self.taken_out:
            parts.append(f"TAKEN OUT: {removed(self.taken_out)}")
        if self.starts:
            parts.append(f"INCOMPLETE: {counted(self.starts, 'start')} of the match with one seat only")
        for scenario, count in self.missing.items():
            parts.append(f"INCOMPLETE: missing: {counted(count, 'earlier episode')} of the suite's {scenario}")
        for scenario, count in self.unplayed.items():
            parts.append(f"INCOMPLETE: {counted(count, 'episode')} of {scenario} asked for and not there")
        for scenario, count in self.faultless.items():
            lost = f"{counted(count, 'episode')} of {scenario} lost by a fault of the game, which fails there no more"
            parts.append(f"INCOMPLETE: {lost}: msgrpo eval with --retry-failed plays on")
        for scenario, count in self.short.items():
            lost = f"{counted(count, 'episode')} of {scenario} lost by context_length"
            parts.append(f"DOUBTFUL: {lost}, though prompts that are as long or longer were answered")
        return parts


def verify(path: Path | str) -> Verified:
    """Play every episode of a record again from its seeds and actions.

    Raises RecordError at the first difference in a prompt, state, parsed action, reward, outcome or return, and in
    an evaluation's record for an episode that is not the suite's, or finished twice. What nothing can check is
    counted: gaps in the suite (episodes may have been left out), foreign seeds, and failures of the endpoint; and so
    are regrets that the judge does not find again, since a better judge would find others, and faults of a game that
    does not fail again, since it may have been mended.
    """
    path = Path(path)
    verified, run = Verified(taken_out=taken_out(path)), run_of(path)
    finished: dict[str, dict[EpisodeSeeds, int]] = {}
    failed: dict[str, dict[EpisodeSeeds, Episode]] = {}
    agents: set[str] = set()
    pairs: Counter[tuple[str, EpisodeSeeds]] = Counter()  # of a match: both seats of a start
    longest = Counter[tuple[str, ...]]()  # the scenario, its agents -> characters of a state that has an answer
    seen: dict[object, int] = {}  # a match plays each start with the seats swapped, too
    for number, episode in enumerate(read_episodes(path), start=1):
        verified.episodes = number
        agents.update(episode.agents.values())
        _check_replay(path, number, episode)
        _count_unchecked(verified, episode)
        played = episode.scenario, *episode.agents.values()
        longest[played] = max([longest[played], *(len(t.state) for t in episode.turns if t.answer is not None)])
        if was_left(episode):
            verified.left += 1
            continue
        if episode.error is not None:
            failed.setdefault(episode.scenario, {})[seeds_of(episode)] = episode
            continue
        pairs[episode.scenario, seeds_of(episode)] += len(episode.agents) > 1
        before = seen.setdefault((episode.scenario, seeds_of(episode), *episode.agents.items()), number)
        finished.setdefault(episode.scenario, {}).setdefault(seeds_of(episode), number)
        verified.twice += before != number
        if run is not None and before != number:
            raise RecordError(f"{path}: episode {number} is episode {before} once more")
    if path.parent.name == MATCHES:
        verified.starts = sum(number == 1 for number in pairs.values())
    elif run is None:
        verified.twice = 0  # a record that is no evaluation may repeat episodes: a person may play a game again
    if not verified.episodes and (run is None or path.stat().st_size):
        raise RecordError(f"{path} holds no episode", fix=MAKES_RECORDS)
    for scenario in {**finished, **failed}:
        numbers = finished.get(scenario, {})
        lost = {seeds: one for seeds, one in failed.get(scenario, {}).items() if seeds not in numbers}
        verified.failed.update(str(one.error) for one in lost.values())
        if faultless := sum(one.error == GAME_FAULT and not _fails_again(one) for one in lost.values()):
            verified.faultless[scenario] = faultless
        too_long = [one for one in lost.values() if one.error == "context_length"]
        if short := sum(_is_no_longer(one, longest[scenario, *one.agents.values()]) for one in too_long):
            verified.short[scenario] = short
        places, wrong = _count_gaps(verified, run, agents, scenario, {*numbers, *lost}), 0
        if run is not None and run.suite_version == SUITE_VERSION:
            wrong = min((number for seeds, number in numbers.items() if seeds not in places), default=0)
        if wrong:
            raise RecordError(f"{path}: episode {wrong} ({scenario}) has seeds that are not the suite's")
    return verified


def _check_replay(path: Path, number: int, episode: Episode) -> None:
    """Raise RecordError where an episode does not replay to what it says."""
    try:
        difference = first_difference(episode)
    except MsgrpoError as error:
        message = f"{path}: episode {number} does not replay: {error.message}"
        raise RecordError(message, fix=error.fix) from error
    if difference is not None:
        raise RecordError(f"{path}: episode {number} ({episode.scenario}) does not replay: {difference}")


def _count_unchecked(verified: Verified, episode: Episode) -> None:
    """Count what of an episode was played again by its player, and what could not be checked."""
    verified.unchecked_prompts += not all(_template(episode, player) is not None for player in episode.prefix)
    verified.misjudged += not _judged_so(episode)
    computed = [turn for turn in episode.turns if episode.agents[turn.player] in COMPUTED]
    verified.computed += sum(_same_program(episode, turn) for turn in computed)
    verified.outdated += not all(_same_program(episode, turn) for turn in computed)


def _count_gaps(
    verified: Verified, run: Run | None, agents: Set[str], scenario: str, there: Set[EpisodeSeeds]
) -> Set[EpisodeSeeds]:
    """Count what of the suite, and of what was asked for, is not `there`; returns what is the suite's."""
    asked = run.repeats if run else {}
    repeats = max((asked.get(agent, {}).get(scenario, 1) for agent in agents), default=1)
    places, foreign = places_in_suite(scenario, there, repeats, run.split if run else "test")
    verified.foreign += len(foreign)
    gaps = max(places.values(), default=-1) + 1 - len(places)
    if gaps:
        verified.missing[scenario] = gaps
    of_agents = [run.asked.get(agent, {}).get(scenario, 0) for agent in agents] if run else []
    if of_agents and (unplayed := max(of_agents) - len(places) - gaps) > 0:
        verified.unplayed[scenario] = unplayed
    return places.keys()


def without_record(folder: Path) -> Iterator[str]:
    """Each agent and scenario that an evaluation below `folder` was to play, and of which there is no line."""
    for file in sorted(folder.rglob(RUN_FILE)):
        run = read_run(file.parent)
        for spec, scenarios in run.asked.items() if run else ():
            for scenario, episodes in scenarios.items():
                record = file.parent / folder_name(spec) / f"{folder_name(scenario)}.jsonl"
                if episodes and not (record.is_file() and record.stat().st_size):
                    yield f"{record}: INCOMPLETE: missing: {counted(episodes, 'episode')} of {scenario} by {spec}"


def _template(episode: Episode, player: str) -> PromptTemplate | None:
    return recorded_template(episode.settings.get(player, {}))


def _judged_so(episode: Episode) -> bool:
    """Whether every regret that was written is what the scenario's judge says."""
    recorded = [turn.regret for turn in episode.turns]
    if recorded == [None] * len(recorded):
        return True
    scenario = recorded_scenario(episode.scenario)
    if scenario.judge is None:
        return False
    again = regrets(scenario, episode)
    return all(a is None or math.isclose(a, b, abs_tol=1e-6) for a, b in zip(recorded, again, strict=True))


def first_difference(episode: Episode) -> str | None:
    """Where a new simulation departs from the record, in words; None where it does not."""
    return next(_differences(episode), None)


def _differences(episode: Episode) -> Iterator[str]:
    if on_server(episode.scenario):
        raise RecordError(f"{episode.scenario} was played on a server, and cannot be simulated again here")
    scenario = recorded_scenario(episode.scenario)
    try:
        game = scenario.new(episode.start_seed, episode.chance_seed)
    except GameFaultError:
        if episode.error != GAME_FAULT or episode.turns:
            raise
        return  # an episode without a result says so itself
    if set(episode.agents) != set(game.players):
        yield f"players {sorted(episode.agents)}, the game has {sorted(game.players)}"
        return
    yield from (f"{spec!r} reads like another agent's name" for spec in episode.agents.values() if imitates(spec))
    for player, prefix in episode.prefix.items():
        template = _template(episode, player)
        if template is not None and template.render(scenario, "").prefix != prefix:
            yield f"the prompt of {player} is not this version's"
    for turn in episode.turns:
        settings, spec = episode.settings.get(turn.player, {}), episode.agents.get(turn.player, "")
        speaks = "template" in settings or is_language_model(spec)
        if _changed_hands(settings, spec):
            continue  # a person took over, or gave it back: some turns have answers, others none
        if speaks and (turn.answer is None or turn.player not in episode.prefix):
            yield f"step {turn.step}: {turn.player} should have a prompt and an answer"
        if turn.answer is not None and (spec in COMPUTED or spec.startswith("dqn:")):
            yield f"step {turn.step}: {turn.player} should not have an answer"
    last: dict[str, Turn] = {}  # each player's last turn, with the rewards that the game gives
    for step, group in groupby(episode.turns, key=lambda turn: turn.step):
        turns = list(group)
        if game.outcome is not Outcome.PLAYING:
            yield f"step {step}: the game was over ({game.outcome})"
            return
        if step != game.steps or sorted(turn.player for turn in turns) != sorted(game.to_move):
            yield f"step {step}: expected a turn of {', '.join(sorted(game.to_move))} at step {game.steps}"
            return
        yield from _not_theirs(episode, scenario, game, turns)
        yield from _of_step(game, turns, last)
    for turn in last.values():
        yield from _late_left(turn)
    if episode.error not in (None, GAME_FAULT) and not any(
        _may_fail(s, episode.error) for s in episode.agents.values()
    ):
        yield f"it says that it failed ({episode.error}), and nobody in it asks anything that could fail so"
    if episode.error is not None and _is_result(scenario, game):
        yield f"it says that it failed ({episode.error}), but the game was over ({game.outcome})"
    if episode.error is None and game.outcome is Outcome.PLAYING and not was_left(episode):
        yield f"the record ends after step {game.steps}, the game does not"
    recorded = (str(episode.outcome), episode.success, episode.returns)
    simulated = (str(game.outcome), game.success, dict(game.returns))
    if recorded != simulated and episode.turns:
        yield f"(outcome, success, returns) {recorded}, now {simulated}"


def _may_fail(spec: str, error: str) -> bool:
    """Whether an agent of this name may lose an episode by this error: one that asks no server fails in no such way,
    but for a prompt that is too long for a model in this process.
    """
    kind = spec.partition(":")[0]
    if "+" in spec or kind not in (*COMPUTED, "dqn", "nano", "adapter", "base"):
        return True  # a server's, somebody's own, or several
    return error == "context_length" and is_language_model(spec)


def was_left(episode: Episode) -> bool:
    """Whether a person left the game before its end: the app keeps it as unfinished, and it has no result."""
    people = any("human" in spec.split("+") for spec in episode.agents.values())
    return people and episode.error is None and episode.outcome is Outcome.PLAYING


def _is_result(scenario: Scenario, game: Game) -> bool:
    """Whether the game is over as its scenario says that it ends; any other end is a fault of the game."""
    try:
        check_end(scenario, game)
    except GameFaultError:
        return False
    return game.outcome is not Outcome.PLAYING


def _is_no_longer(episode: Episode, longest: int) -> bool:
    """Whether the state at which an episode of one player ended has at most so many characters, and is all of the
    prompt that changes.
    """
    players = list(episode.agents)
    template = _template(episode, players[0])
    if len(players) > 1 or template is None or template.history:
        return False
    game = replay(recorded_scenario(episode.scenario), episode, game_steps(episode))
    return len(observation_of(game, players[0])) <= longest


def _fails_again(episode: Episode) -> bool:
    """Whether the game's own code fails after the recorded turns: before a move, or at any that may be made there."""
    scenario, steps = recorded_scenario(episode.scenario), game_steps(episode)
    try:
        game = replay(scenario, episode, steps)
        with games_code(scenario.id):
            views = waiting(scenario, game, episode, steps)
            if any(isinstance(game.legal(player), AnyText) for player in views):
                return True  # nobody can try every text
        for player, view in views.items():
            if (computed := COMPUTED.get(episode.agents[player])) is not None:
                computed.choose(view)
        moves = product(*([*view.legal(), None] for view in views.values()))
        for chosen in islice(moves, MOST_TRIED):
            with games_code(scenario.id):
                twin = game.copy()
                twin.step(dict(zip(views, chosen, strict=True)))
                outcome_of(twin), success_of(twin), dict(twin.returns)
        return next(moves, None) is not None
    except GameError:
        return True


def _changed_hands(settings: Mapping[str, Any], spec: str) -> bool:
    """Whether a seat was played by several, as its name says, too: `nano+human`."""
    parts = settings.get("parts")
    return isinstance(parts, dict) and len(parts) > 1 and "+".join(parts) == spec


def _not_theirs(episode: Episode, scenario: Scenario, game: Game, turns: list[Turn]) -> Iterator[str]:
    """Where a player whose moves follow from the seeds has not moved so: another one has played under that name."""
    for turn in turns:
        player = COMPUTED.get(episode.agents[turn.player])
        if player is None or not _same_program(episode, turn):
            continue
        chosen = player.choose(view_of(game, scenario, turn.player, episode.sampling_seed))
        if chosen != turn.action:
            name = episode.agents[turn.player]
            yield f"step {turn.step}: {name} would have played {chosen}, the record says {turn.action}"


def _same_program(episode: Episode, turn: Turn) -> bool:
    """Whether the moves were computed by this version: a later reference player may know better ones."""
    return episode.agents[turn.player] == "random" or episode.versions.get("msgrpo") == versions()["msgrpo"]


def _of_step(game: Game, turns: list[Turn], last: dict[str, Turn]) -> Iterator[str]:
    """Play one step again. `last` holds each player's last turn, with the late reward that it should have."""
    step = game.steps
    for turn in turns:
        if turn.state != (seen := observation_of(game, turn.player)):
            yield f"step {step}: {turn.player} saw another state:\n{turn.state}\nnow:\n{seen}"
        if turn.answer is not None:
            parsed = parse_action(turn.answer, game.actions, game.legal(turn.player))
            if (parsed.action, parsed.failure) != (turn.action, turn.failure):
                yield f"step {step}: action {turn.action} ({turn.failure}), now {parsed.action} ({parsed.failure})"
    with games_code(type(game).__name__):
        rewards = game.step({turn.player: turn.action for turn in turns})
    for turn in turns:
        if turn.reward != rewards[turn.player]:
            yield f"step {step}: reward {turn.reward:g} of {turn.player}, now {rewards[turn.player]:g}"
    moved = {turn.player for turn in turns}
    for player in set(rewards) - moved:
        if player in last:
            last[player].late -= rewards[player]
    for turn in turns:
        yield from _late_left(last.get(turn.player))
        last[turn.player] = turn.model_copy()


def _late_left(turn: Turn | None) -> Iterator[str]:
    """Yield each turn whose late reward is not what the game pays."""
    if turn is not None and abs(turn.late) > 1e-9:
        yield f"step {turn.step}: {turn.player} has {turn.late:g} more in later reward than the game pays"


@dataclass
class AskedAgain:
    """How often an agent, asked again, chose the recorded action; `temperature` is the recorded one.

    `other_chat`: the arguments of the chat template that made the record's prompts, where they are others.
    """

    turns: int = 0
    agree: int = 0
    temperature: float | None = None
    other_chat: Any = None

    @property
    def summary(self) -> str:
        if not self.turns:
            return "it holds no finished turn of a single player to ask about"
        warm = self.temperature not in (None, 0)
        why = f"; recorded at temperature {self.temperature:g}, at which answers differ by themselves" if warm else ""
        if self.other_chat is not None:
            told = shlex.quote(json.dumps(self.other_chat))
            why += f"; recorded with other arguments of the chat template: --chat {told} asks so"
        return (
            f"asked again, the agent chose the recorded action in {self.agree} of {counted(self.turns, 'turn')}{why}"
        )


def _chat(settings: Mapping[str, Any]) -> Any:
    """The arguments of the chat template, of a model in this process or of one at an endpoint."""
    body = settings.get("body")
    served = body.get("chat_template_kwargs") if isinstance(body, dict) else None
    return settings.get("chat") or served or {}


async def ask_again(path: Path, agent: Agent, count: int) -> AskedAgain:
    """Ask an agent that a person has named about `count` recorded turns, spread over the record.

    A language model answers at temperature 0, in the recorded words of the prompt and at the recorded length at most.
    Raises EndpointError where there is no answer.
    """
    asked = AskedAgain()
    episodes = [episode for episode in read_episodes(path) if episode.error is None and len(episode.agents) == 1]
    places = [(episode, i) for episode in episodes for i in range(len(episode.turns))]
    for episode, i in places[:: max(1, len(places) // count)][:count]:
        scenario, turn = recorded_scenario(episode.scenario), episode.turns[i]
        game = replay(scenario, episode, turn.step)
        view = view_of(game, scenario, turn.player, episode.sampling_seed, episode.turns[:i])
        settings = episode.settings.get(turn.player, {})
        with _asked_as(agent, settings):
            if isinstance(agent, LanguageAgent) and (recorded := _chat(settings)) != _chat(agent.settings()):
                asked.other_chat = recorded
            sampling = recorded_sampling(settings)
            asked.temperature = None if sampling is None else sampling.temperature
            asked.turns += 1
            asked.agree += (await agent.act(view)).action == turn.action
    return asked


@contextmanager
def _asked_as(agent: Agent, settings: Mapping[str, Any]) -> Iterator[None]:
    """A language model with the recorded template and length, as far as they are known, at temperature 0."""
    if not isinstance(agent, LanguageAgent):
        yield
        return
    own = agent.sampling, agent.template
    recorded = recorded_sampling(settings) or agent.sampling
    agent.sampling = agent.sampling.model_copy(update={"temperature": 0.0, "max_tokens": recorded.max_tokens})
    agent.template = recorded_template(dict(settings)) or agent.template
    try:
        yield
    finally:
        agent.sampling, agent.template = own


def game_steps(episode: Episode) -> int:
    """How many steps were played."""
    return 1 + max((turn.step for turn in episode.turns), default=-1)
