"""Checks that a game keeps the contract of `game.py`: run it over a game of your own before it costs GPU hours.

    msgrpo games check my_game.py:scenario

`RULES` are its parts, each with the change that mends a breach. `examine` plays random games, with ⊥ (no legal
action) among the moves, and reports on all of them; `check_game` raises GameError at the first breach.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from typing import get_args

import numpy as np

from msgrpo.episode import observation_of
from msgrpo.errors import LONGEST_FAULT, GameError, GameFaultError, TookTooLongError, UsageError, where_raised
from msgrpo.game import SPLITS, AnyText, Game, Outcome, Role, Scenario, check_kind, shown_board, stream
from msgrpo.judge import judgement_of
from msgrpo.limits import GAME_S, is_interrupt, within
from msgrpo.references import best_actions, description_of
from msgrpo.text import printable

RULES: dict[str, str] = {
    "runs": "mend what the game raises; only GameError is an answer to a wrong move",
    "start": "make() returns a fresh game: steps 0, still playing, with the step limit of its scenario",
    "actions": "players and actions are the tuples of the scenario; legal(player) names some of them, never none",
    "text": "observe() returns text that is not empty, and changes nothing by being called",
    "rewards": "_advance() returns one finite number for every player, also for those who did not move",
    "returns": "leave returns to Game: it adds up what _advance() pays",
    "refusals": "leave the checks of Game.step as they are: implement _advance, do not override step",
    "limit": "leave steps and step_limit to Game: an episode ends at the limit at the latest",
    "seeds": "draw every random number from stream(seed, purpose): no global generator, no clock, no hash()",
    "processes": "do not depend on the order of a set or on hash(): they differ from process to process",
    "luck": "draw the start from start_seed alone; or say luck_in_start=True",
    "new luck": "_draw_luck(chance_seed) replaces the generators of luck and nothing else",
    "copies": "copy() shares nothing that changes: keep state in plain attributes, or define __deepcopy__",
    "board": "rows of one length, and every letter in the legend; a role is one of msgrpo.game.Role",
    "splits": "make different seeds draw different starts; or say one_start=True",
    "goal": "success is True or False where goal=True, and None where it is not",
    "reference": "reference(game, player) returns some of the actions that are legal now, each time the same",
    "judge": "judge(game, player) gives each legal action and None one finite number, each time the same",
    "describe": "describe(game, player) returns text without <action>",
}
SLOW_S, SEARCH_S = 1.0, 10.0  # seconds of a reference player: an answer that is slow, all answers of a check
STEPS_PLAYED = 400  # at most, of one play: a rule that holds so long is believed


@dataclass(frozen=True)
class Finding:
    """The result for one rule: `breach` is None where it holds."""

    rule: str
    breach: str | None = None

    @property
    def fix(self) -> str | None:
        return None if self.breach is None else RULES[self.rule]


@dataclass(frozen=True)
class Examined:
    findings: list[Finding]
    episode_s: float  # median, of random play
    searches: int | None = None  # how often a reference player was asked that is too slow to be asked at every step

    @property
    def breaches(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.breach is not None]


@dataclass
class _Searches:
    """When the reference player is asked: at every step; one that is slow only once a play, as the judge is, and no
    more once its answers have taken SEARCH_S."""

    seconds: float = 0.0
    answers: int = 0

    @property
    def slow(self) -> bool:
        return self.seconds > SLOW_S * self.answers

    def wanted(self, once: bool) -> bool:
        return self.seconds < SEARCH_S and (once or not self.slow)

    def best(self, scenario: Scenario, game: Game, player: str) -> Sequence[str]:
        began = time.perf_counter()
        best = best_actions(scenario, game, player)
        self.seconds, self.answers = self.seconds + time.perf_counter() - began, self.answers + 1
        return best


class _BrokenError(Exception):
    """A rule does not hold."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(printable(what if len(what) <= LONGEST_FAULT else f"{what[:LONGEST_FAULT]}…"))
        self.rule = rule


def check_game(scenario: Scenario, *, plays: int = 20, seed: int = 0) -> None:
    """Raise GameError at the first breach of the contract, with the change that mends it."""
    for finding in examine(scenario, plays=plays, seed=seed).breaches:
        raise GameError(f"{scenario.id} breaks the contract: {finding.breach}", fix=finding.fix)


def examine(
    scenario: Scenario,
    *,
    plays: int = 20,
    seed: int = 0,
    name: str | None = None,
    tell: Callable[[str], object] = lambda doing: None,
) -> Examined:
    """Play random games and report on every rule; `tell` is told what is done, as it begins.

    `name` is what another process finds the scenario by; without it nothing is said of processes. What breaks one
    rule often makes others meaningless, so a rule is reported as held only where it was seen to be.
    """
    check_kind(scenario)
    for what, number, least in (("plays", plays, 1), ("seed", seed, 0)):  # without a game nothing is seen to hold
        if not isinstance(number, Integral) or number < least:
            raise UsageError(f"{what} is {number!r}, no whole number from {least} on")
    broken: dict[str, str] = {}
    times, searches = [], _Searches()
    for play in range(plays):
        tell(f"random game {play + 1} of {plays}")
        began = time.perf_counter()
        for broke in _breaches(scenario, seed, play, searches):
            broken.setdefault(broke.rule, str(broke))
        times.append(time.perf_counter() - began)
        if "runs" in broken and times[-1] > GAME_S:
            break  # it hangs, and would in every other game
    if not broken and name is not None:
        tell("the same games in other processes")
        for broke in _in_another_process(scenario, name, seed, searches.slow):
            broken.setdefault(broke.rule, str(broke))
    rules = [rule for rule in RULES if name is not None or rule != "processes"]
    findings = [Finding(rule, broken.get(rule)) for rule in rules]
    return Examined(findings, float(np.median(times)), searches.answers if searches.slow else None)


def _breaches(scenario: Scenario, seed: int, play: int, searches: _Searches) -> Iterator[_BrokenError]:
    """The breaches that one play shows; an exception of the game is one of them."""
    generator, began = stream(seed, f"check-{scenario.id}-{play}"), time.perf_counter()
    for part in (_splits, _play) if play == 0 else (_play,):
        if time.perf_counter() - began > GAME_S:
            return
        try:
            with _games_faults():
                part(scenario, generator, play, searches)
        except _BrokenError as broken:
            yield broken


@contextmanager
def _games_faults() -> Iterator[None]:
    """Whatever the game raises within the block is a breach."""
    try:
        yield
    except _BrokenError:
        raise
    except GameFaultError as fault:
        raise _BrokenError(fault.rule, fault.message) from fault
    except TookTooLongError as error:
        raise _BrokenError("runs", f"it took longer than {GAME_S:g} s: {where_raised(error)}") from None
    except BaseException as error:  # what a user's game raises is to be reported
        if is_interrupt(error):
            raise
        raise _BrokenError("runs", where_raised(error)) from error


def _require(holds: bool, rule: str, what: str) -> None:
    if not holds:
        raise _BrokenError(rule, what)


def _splits(scenario: Scenario, generator: np.random.Generator, play: int, searches: _Searches) -> None:
    if not scenario.holds_out:
        return
    with within(GAME_S, f"the game {scenario.id}"):
        train, val, test = ({scenario.start_key(s) for s in islice(scenario.starts(split), 10)} for split in SPLITS)
    _require(len(train | val | test) > 1, "splits", "all seeds that were tried draw the same start")
    _require(not train & (val | test), "splits", "training shares a start with validation or test")


def _play(scenario: Scenario, generator: np.random.Generator, play: int, searches: _Searches) -> None:
    """One random game. Its judge, which may play on many times, is asked once: in play n after n steps."""
    start, chance = (int(x) for x in generator.integers(2**31, size=2))
    name = f"the game {scenario.id}"
    with within(GAME_S, name):
        game = scenario.new(start, chance)
        _check_start(scenario, game, start, chance)
        twin = scenario.new(start, chance)
    for number in range(min(STEPS_PLAYED, scenario.step_limit + 2)):
        with within(GAME_S, name):
            if game.outcome is not Outcome.PLAYING:
                break
            _require(game.steps == number, "limit", f"it says that {game.steps} steps were played after {number}")
            _check_state(scenario, game)
            if scenario.reference is not None and searches.wanted(once=number == play):
                _check_reference(scenario, game, searches)
            if number == play:
                _check_judge(scenario, game)
            _check_step(scenario, game, twin, generator, chance)
    with within(GAME_S, name):
        _check_end(scenario, game)


def _check_step(scenario: Scenario, game: Game, twin: Game, generator: np.random.Generator, chance: int) -> None:
    """One step of a game, of its twin with the same seeds, and of a copy."""
    moves = _random_moves(game, generator)
    fork = game.copy()
    before = _seen(game)
    _check_luck(game, chance + 1)
    forks_rewards = fork.step(moves)
    _require(_seen(game) == before, "copies", f"stepping a copy changed the original at step {game.steps}")
    rewards = game.step(moves)
    for what, rule, other, others_rewards in (
        ("a game with the same seeds", "seeds", twin, twin.step(moves)),
        ("a copy", "copies", fork, forks_rewards),
    ):
        same = others_rewards == rewards and _seen(other) == _seen(game)
        _require(same, rule, f"{what} went another way at step {game.steps}")


def _seen(game: Game) -> tuple[object, ...]:
    """Everything that can be observed of a game, for comparing two games."""
    return (
        *(game.observe(player) for player in game.players),
        game.to_move if game.outcome is Outcome.PLAYING else (),
        game.outcome,
        dict(game.returns),
    )


def _random_moves(game: Game, generator: np.random.Generator) -> dict[str, str | None]:
    def action_of(player: str) -> str | None:
        choices: list[str | None] = [*game.legal(player), None]
        return choices[int(generator.integers(len(choices)))]

    return {player: action_of(player) for player in game.to_move}


def _check_start(scenario: Scenario, game: Game, start: int, chance: int) -> None:
    _require(game.outcome is Outcome.PLAYING and game.steps == 0, "start", "a new game is not at its start")
    limits = f"the game's step limit is {game.step_limit!r}, the scenario's {scenario.step_limit!r}"
    _require(game.step_limit == scenario.step_limit > 0, "start", limits)
    named = game.players == scenario.players and game.actions == scenario.actions
    _require(named, "actions", f"the game has {game.players} and {game.actions}, not those of its scenario")
    distinct = len(set(game.actions)) == len(game.actions) != 1 or isinstance(game.actions, AnyText)
    _require(distinct, "actions", "actions are not two or more distinct names")
    texts = [action for action in game.actions if action != action.strip() or not action or "<" in action]
    _require(not texts, "actions", f"{texts} cannot stand in <action>…</action>")
    if not scenario.luck_in_start:
        other = scenario.new(start, chance + 1)
        _require(_seen(game) == _seen(other), "luck", "what is seen at the start depends on the chance seed")


def _check_state(scenario: Scenario, game: Game) -> None:
    for player in game.players:
        text = observation_of(game, player)
        _require(bool(text.strip()), "text", f"{player} sees nothing at step {game.steps}")
        text = game.observe(player)
        _require(printable(text) == text, "text", f"{player} sees what no screen can show: {text[:60]!r}")
        _require(text == game.observe(player), "text", f"observing twice shows two things at step {game.steps}")
    moving = game.to_move
    _require(bool(moving) and set(moving) <= set(game.players), "actions", f"to move are {moving}")
    for player in moving:
        legal = game.legal(player)
        known = bool(legal) and (not game.actions or set(legal) <= set(game.actions))
        _require(known, "actions", f"legal for {player} are {legal} at step {game.steps}")
        if scenario.describe is not None:
            description = description_of(scenario, game, player)
            _require(bool(description.strip()), "describe", f"it says {description!r}")
    _check_board(game)
    nonsense = "" if isinstance(game.actions, AnyText) else "no such action"
    for wrong in ({}, dict.fromkeys(moving, nonsense)):
        twin = game.copy()
        _require(_refuses(twin, wrong), "refusals", f"step takes {wrong}")


def _check_reference(scenario: Scenario, game: Game, searches: _Searches) -> None:
    for player in game.to_move:
        best, again = (searches.best(scenario, game, player) for _ in range(2))
        _require(best == again, "reference", f"at step {game.steps} it says {best}, and asked again {again}")


def _check_judge(scenario: Scenario, game: Game) -> None:
    for player in game.to_move if scenario.judge is not None else ():
        same = judgement_of(scenario, game, player) == judgement_of(scenario, game, player)
        _require(same, "judge", f"asked again at step {game.steps} it says something else")


def _check_board(game: Game) -> None:
    board = shown_board(game)
    if board is None:
        return
    widths = {len(row) for row in board.cells}
    _require(len(widths) == 1, "board", f"its rows have {sorted(widths)} cells")
    letters = {cell for row in board.cells for cell in row}
    _require(all(len(cell) == 1 for cell in letters), "board", f"not every cell is one character: {sorted(letters)}")
    roles = set(board.roles.values()) - set(get_args(Role))
    _require(not roles, "board", f"there are no roles {sorted(roles)}; known: {', '.join(get_args(Role))}")
    _require(letters <= set(board.legend), "board", f"the legend lacks {sorted(letters - set(board.legend))}")


def _check_luck(game: Game, chance: int) -> None:
    try:
        other = game.with_luck(chance)
    except GameError:
        return  # a game need not be able to; what needs it says so
    _require(_seen(other) == _seen(game), "new luck", f"with new luck another state is seen at step {game.steps}")
    copied = other.copy()
    moves = dict.fromkeys(game.to_move)
    same = other.step(moves) == copied.step(moves) and _seen(other) == _seen(copied)
    _require(same, "new luck", f"a copy of a game with new luck goes another way at step {game.steps}")


def _check_end(scenario: Scenario, game: Game) -> None:
    if game.outcome is Outcome.PLAYING:
        _require(game.steps < game.step_limit, "limit", f"it goes on after {game.steps} steps")
        return
    _require(game.steps <= game.step_limit, "limit", f"{game.steps} steps, limit {game.step_limit}")
    _require(_refuses(game, dict.fromkeys(game.players)), "refusals", "step goes on after the end")
    known = (game.success is not None) == scenario.goal
    _require(known, "goal", f"success is {game.success} at the end, goal={scenario.goal}")
    _require(all(game.observe(player).strip() for player in game.players), "text", "nothing is seen at the end")


def _refuses(game: Game, moves: Mapping[str, str | None]) -> bool:
    try:
        game.step(moves)
    except GameError:
        return True
    return False


def trace(scenario: Scenario, seed: int, slow: bool) -> str:
    """A hash of all that is seen in three random games, and of what the reference player says at each step, or one
    that is slow once a game: the same in every process."""
    digest = hashlib.sha256()
    generator = stream(seed, "trace")
    for start in range(3):
        game = scenario.new(seed + start, seed + start)
        for _ in range(STEPS_PLAYED):
            with within(GAME_S, f"the game {scenario.id}"):
                if game.outcome is not Outcome.PLAYING:
                    break
                asked = scenario.reference is not None and (not slow or game.steps == start)
                best = [list(best_actions(scenario, game, player)) for player in game.to_move if asked]
                digest.update(repr((_seen(game), shown_board(game), best)).encode())
                game.step(_random_moves(game, generator))
        digest.update(repr(_seen(game)).encode())
    return digest.hexdigest()


def _in_another_process(scenario: Scenario, name: str, seed: int, slow: bool) -> Iterator[_BrokenError]:
    command = [sys.executable, "-P", "-c", _TRACE, name, str(seed), "slow" if slow else ""]
    try:
        with _games_faults():
            here = trace(scenario, seed, slow)
    except _BrokenError as broken:  # in a game that was not among those of this process
        yield broken
        return
    for hashes in ("1", "2"):
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"PYTHONHASHSEED": hashes},
                capture_output=True,
                text=True,
                check=False,
                timeout=4 * GAME_S,
            )
        except subprocess.TimeoutExpired:
            yield _BrokenError("processes", f"another process has not ended after {4 * GAME_S:g} s")
            return
        if done.returncode:
            yield _BrokenError("processes", f"another process fails: {done.stderr.strip().splitlines()[-1:]}")
        elif done.stdout.strip() != here:
            yield _BrokenError("processes", "another process plays another game with the same seeds")


_TRACE = """
import sys
from msgrpo.contract import trace
from msgrpo.games import get_scenario
print(trace(get_scenario(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3])))
"""
