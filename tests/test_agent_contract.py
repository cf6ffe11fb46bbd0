"""`check_game` finds each breach of the contract: a game with one fault for every promise."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from msgrpo.contract import RULES, check_game, examine
from msgrpo.errors import GameError, GameFaultError, UsageError
from msgrpo.game import SPLITS, Board, Game, Judgement, Outcome, Scenario, stream
from msgrpo.games import SCENARIOS

DIE = np.random.default_rng(0)  # a global generator, which a game must not use
COUNT = count()


class Walk(Game):
    """A faultless little game: find the end of a row; luck sometimes pushes you."""

    def __init__(self, start: int, chance: int) -> None:
        super().__init__(step_limit=6)
        self.place = start % 7
        self.luck = stream(chance, "walk")

    @property
    def success(self) -> bool | None:
        return self.place == 9

    def observe(self, player: str) -> str:
        return f"step {self.steps} place {self.place}"

    def board(self) -> Board:
        return Board((tuple("P" if i == self.place else "." for i in range(10)),), {"P": "you", ".": "empty"})

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        push = int(self.luck.integers(3)) - 1
        self.place = max(0, min(9, self.place + push + {"right": 1, "left": -1}.get(actions["player"] or "", 0)))
        self._over = self.place == 9
        return {"player": float(self._over)}


def scenario(game: Callable[[int, int], Game], **fields: Any) -> Scenario:
    return replace(Scenario("walk", "walk", "Walk right.", 6, "ours", game, goal=True), **fields)


class Takes(Walk):
    """Takes the moves out of what it is given."""

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        assert isinstance(actions, dict)
        return super()._advance({"player": actions.pop("player")})


def test_what_a_game_does_to_its_moves_is_nobody_elses() -> None:
    """An environment server keeps them: the game could not be brought back from what was left of them."""
    moves = {"player": "right"}
    Takes(0, 0).step(moves)
    assert moves == {"player": "right"}


def test_the_faultless_game_passes() -> None:
    check_game(scenario(Walk))


class LuckyStart(Walk):
    def __init__(self, start: int, chance: int) -> None:
        super().__init__(start + chance, chance)


class Seedless(Walk):
    def __init__(self, start: int, chance: int) -> None:
        super().__init__(0, chance)


class ListedActions(Walk):
    actions: ClassVar[Any] = ["left", "right"]


class OtherActions(Walk):
    actions = ("left", "right")


class OneAction(Walk):
    actions = ("right",)


class Twice(Walk):
    actions = ("right", "right")


class Restless(Walk):
    def observe(self, player: str) -> str:
        return f"{super().observe(player)} {next(COUNT)}"


class OtherLimit(Walk):
    def __init__(self, start: int, chance: int) -> None:
        super().__init__(start, chance)
        self.step_limit = 5


class Begun(Walk):
    def __init__(self, start: int, chance: int) -> None:
        super().__init__(start, chance)
        self.steps = 1


class NoReward(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        super()._advance(actions)
        return {}


class Infinite(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return {"player": super()._advance(actions)["player"] + float("inf")}


class Words(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        return super()._advance(actions) | {"player": "one"}  # type: ignore[dict-item]


class SetsReturns(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.returns["player"] = 50.0
        return super()._advance(actions)


class Speechless(Walk):
    def observe(self, player: str) -> str:
        return None  # type: ignore[return-value]


class Endless3MB(Walk):
    def observe(self, player: str) -> str:
        return "x" * 3_000_000


class Escapes(Walk):
    def observe(self, player: str) -> str:
        return super().observe(player) + "\x1b[2J"


class Exits(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        raise SystemExit(3)


class Interrupts(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        raise KeyboardInterrupt


class TakesBack(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        rewards = super()._advance(actions)
        self.steps -= 1
        return rewards


class Silent(Walk):
    def observe(self, player: str) -> str:
        return super().observe(player) if self.steps == 0 else " "


class Ragged(Walk):
    def board(self) -> Board:
        return Board((("P",), ("P", "P")), {"P": "you"})


class NoLegend(Walk):
    def board(self) -> Board:
        return Board((("?",),), {})


class TakesAnything(Walk):
    def step(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        known = {"player": actions.get("player") if actions.get("player") in self.actions else None}
        return super().step(known)


class NeverOver(Walk):
    def step(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        if self.outcome is not Outcome.PLAYING:
            return {"player": 0.0}
        return super().step(actions)


class GlobalLuck(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.place = int(DIE.integers(9))
        return {"player": 0.0}


class SharedLuck(Walk):
    """A copy that draws from the same generator as the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedLuck:
        twin = copy.copy(self)
        twin.returns = dict(self.returns)
        return twin


class Aimless(Walk):
    @property
    def success(self) -> bool | None:
        return None


class Raises(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        raise ZeroDivisionError("no reason")


class Nameless(Walk):
    def legal(self, player: str) -> tuple[str, ...]:
        return ()


class Unheard(Walk):
    def legal(self, player: str) -> tuple[str, ...]:
        return ("jump",)


class Nobody(Walk):
    @property
    def to_move(self) -> tuple[str, ...]:
        return ()


class Tagged(Walk):
    actions = ("<action>", "right")


class Endless(Walk):
    @property
    def outcome(self) -> Outcome:
        return Outcome.PLAYING


class Hashed(Walk):
    """What it shows depends on the process: the hash of a text is drawn anew in each."""

    def observe(self, player: str) -> str:
        return f"{super().observe(player)} {hash('walk') % 1000}"


class MovesWithLuck(Walk):
    def _draw_luck(self, chance_seed: int) -> None:
        self.place = chance_seed % 7


class Touched(Walk):
    """A copy that shares its place with the original."""

    def __init__(self, start: int, chance: int) -> None:
        super().__init__(start, chance)
        self.shared = [0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Touched:
        twin = copy.copy(self)
        twin.returns, twin.luck = dict(self.returns), copy.deepcopy(self.luck)
        return twin

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.shared[0] += 1
        return super()._advance(actions)

    def observe(self, player: str) -> str:
        return f"{super().observe(player)} {self.shared[0]}"


class Wide(Walk):
    def board(self) -> Board:
        return Board((("PP",),), {"PP": "you"})


class Told(Walk):
    def board(self) -> Any:
        return "a board"


class Enemy(Walk):
    def board(self) -> Board:
        board = super().board()
        return Board(board.cells, board.legend, {"P": "enemy"})  # type: ignore[dict-item]


def nonsense(game: Walk, player: str) -> list[str]:
    return ["jump"]


def silent(game: Walk, player: str) -> str:
    return ""


def acts(game: Walk, player: str) -> str:
    return "so <action>right</action>"


def falls_short(game: Walk, player: str) -> list[str]:
    while True:
        game.step({"player": "right"})


def values_right(game: Walk, player: str) -> Judgement:
    return Judgement({"right": 1.0})


def forgets_later(game: Walk, player: str) -> Judgement:
    return Judgement(dict.fromkeys([*game.actions[game.steps // 3 :], None], 0.0))


def undecided(game: Walk, player: str) -> Judgement:
    return Judgement(dict.fromkeys([*game.actions, None], float(next(COUNT))))


BREACHES = [
    (LuckyStart, {}, "luck", "depends on the chance seed"),
    (OtherActions, {}, "actions", "not those of its scenario"),
    (ListedActions, {}, "actions", r"the game has .* and \['left', 'right'\]"),
    (Seedless, {}, "splits", "draw the same start"),
    (Walk, {"players": ("one", "two")}, "actions", "not those of its scenario"),
    (OneAction, {"actions": ("right",)}, "actions", "two or more distinct"),
    (Twice, {"actions": ("right", "right")}, "actions", "two or more distinct"),
    (Tagged, {"actions": ("<action>", "right")}, "actions", "cannot stand in"),
    (Nameless, {}, "actions", "names no action"),
    (Unheard, {}, "actions", "jump"),
    (Nobody, {}, "actions", r"to move are \(\)"),
    (Restless, {}, "luck", "depends on the chance seed"),
    (OtherLimit, {}, "start", "step limit is 5, the scenario's 6"),
    (Begun, {}, "start", "not at its start"),
    (NoReward, {}, "rewards", "not for each of player"),
    (Infinite, {}, "rewards", "is not finite"),
    (Words, {}, "rewards", "is no number"),
    (SetsReturns, {}, "returns", "returns were changed"),
    (Speechless, {}, "text", "no text"),
    (Endless3MB, {}, "text", "3,000,000 characters"),
    (Escapes, {}, "text", "what no screen can show"),
    (Exits, {}, "runs", "SystemExit: 3"),
    (Interrupts, {}, "runs", "KeyboardInterrupt"),
    (TakesBack, {}, "limit", "0 steps were played after 1"),
    (Silent, {}, "text", "sees nothing at step 1"),
    (Ragged, {}, "board", r"its rows have \[1, 2\] cells"),
    (NoLegend, {}, "board", "the legend lacks"),
    (Wide, {}, "board", "not one character"),
    (Told, {}, "board", r"board\(\) gave 'a board'"),
    (Enemy, {}, "board", r"there are no roles \['enemy'\]"),
    (TakesAnything, {}, "refusals", "step takes"),
    (NeverOver, {}, "refusals", "goes on after the end"),
    (Endless, {}, "limit", "goes on after"),
    (GlobalLuck, {}, "seeds", "went another way"),
    (SharedLuck, {}, "copies", "went another way"),
    (Touched, {}, "copies", "stepping a copy changed the original"),
    (MovesWithLuck, {}, "new luck", "another state is seen"),
    (Aimless, {}, "goal", "success is None at the end"),
    (Raises, {}, "runs", r"ZeroDivisionError: no reason \(.*test_agent_contract.py:\d+"),
    (Walk, {"reference": nonsense}, "reference", r"reference\(\) gave \['jump'\]"),
    (Walk, {"judge": values_right}, "judge", "not each legal action and None"),
    (Walk, {"judge": forgets_later}, "judge", "not each legal action and None"),
    (Walk, {"judge": undecided}, "judge", "asked again at step 0 it says something else"),
    (Walk, {"reference": falls_short}, "reference", r"reference\(\) failed: .*over"),
    (Walk, {"describe": silent}, "describe", "it says ''"),
    (Walk, {"describe": acts}, "describe", "names an action itself"),
]


@pytest.mark.parametrize(("game", "fields", "rule", "says"), BREACHES)
def test_every_breach_is_found(
    game: Callable[[int, int], Game], fields: dict[str, Any], rule: str, says: str
) -> None:
    found = examine(scenario(game, **fields)).breaches
    assert any(one.rule == rule and re.search(says, str(one.breach)) for one in found), found
    assert all(one.fix == RULES[one.rule] for one in found)
    with pytest.raises(GameError, match="breaks the contract"):
        check_game(scenario(game, **fields))


def hashed() -> Scenario:
    return scenario(Hashed)


def walk() -> Scenario:
    return scenario(Walk)


def test_what_differs_between_processes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes with other hashes; and a game that is the same in all of them passes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    here = f"{Path(__file__)}:"
    (breach,) = examine(hashed(), name=here + "hashed").breaches
    assert (breach.rule, breach.breach) == ("processes", "another process plays another game with the same seeds")
    assert not examine(walk(), name=here + "walk").breaches
    (breach,) = examine(walk(), name="nowhere:walk").breaches
    assert "another process fails" in str(breach.breach)


def test_a_game_that_fails_only_where_processes_are_compared_is_a_breach() -> None:
    """Its exception ended the check in a traceback."""

    def fails_at_its_first_seed(start: int, chance: int) -> Game:
        return Raises(start, chance) if start == 0 else Walk(start, chance)

    found = examine(scenario(fails_at_its_first_seed), name=f"{Path(__file__)}:walk").breaches
    assert [(one.rule, "no reason" in str(one.breach)) for one in found] == [("runs", True)]


def test_a_slow_reference_player_is_asked_once_a_play_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chess's search was asked twice at every step of 20 games, and the check took half an hour."""
    asked: list[int] = []

    def right(game: Walk, player: str) -> list[str]:
        asked.append(game.steps)
        return ["right"]

    told: list[str] = []
    assert examine(scenario(Walk, reference=right), plays=3, tell=told.append).searches is None
    assert (told, set(asked) > {0, 1, 2}) == ([f"random game {n} of 3" for n in (1, 2, 3)], True)
    asked.clear()
    monkeypatch.setattr("msgrpo.contract.SLOW_S", 0.0)
    assert examine(scenario(Walk, reference=right), plays=3).searches == len(asked)
    assert asked == [0, 0, 1, 1, 2, 2]
    asked.clear()
    monkeypatch.setattr("msgrpo.contract.SEARCH_S", 0.0)
    assert examine(scenario(Walk, reference=right), plays=3).breaches == []
    assert asked == []


def test_every_rule_has_a_breach_that_shows_it() -> None:
    assert {rule for _, _, rule, _ in BREACHES} | {"processes"} == set(RULES)


def test_a_start_that_is_in_two_splits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scenario, "starts", lambda self, split, first_seed=0: iter(range(20)))
    (breach,) = examine(scenario(Walk), plays=1).breaches
    assert breach.rule == "splits"


@pytest.mark.parametrize("starts", [1, 2, 3, 7])
def test_a_game_with_few_starts_has_all_splits_and_they_are_apart(starts: int) -> None:
    """With two starts neither may fall into a held-out share, and looking for one went on for ever."""
    few = scenario(lambda start, chance: Walk(start % starts, chance), one_start=starts == 1)
    check_game(few)
    seen = {split: {few.start_key(seed) for seed in islice(few.starts(split), 50)} for split in SPLITS}
    assert all(seen.values())
    assert starts == 1 or not seen["train"] & (seen["val"] | seen["test"])
    assert starts <= 2 or not seen["val"] & seen["test"]
    assert len(set().union(*seen.values())) == starts


@pytest.mark.parametrize("id", SCENARIOS)
def test_values_of_a_scenario_are_those_of_its_games(id: str) -> None:
    game = SCENARIOS[id].new(0, 0)
    assert (SCENARIOS[id].players, SCENARIOS[id].actions) == (game.players, game.actions)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(UsageError, match="no split is named 'eval'"):
        SCENARIOS["snake"].starts("eval")  # type: ignore[arg-type]


def test_without_a_game_no_rule_is_said_to_hold() -> None:
    """All of them did, of a game that nobody had played."""
    with pytest.raises(UsageError, match="plays is 0"):
        check_game(scenario(Walk), plays=0)


def test_what_is_said_of_a_fault_is_short() -> None:
    """A game whose legal moves are a megabyte of text wrote that megabyte into each record, and into the table."""

    class Wordy(Walk):
        @property
        def to_move(self) -> tuple[str, ...]:
            return ("x" * 10**6,)

    long = scenario(Wordy)
    assert all(len(finding.breach or "") < 2100 for finding in examine(long, plays=1).findings)
    with pytest.raises(GameError) as caught:
        check_game(long, plays=1)
    assert len(caught.value.message) < 2200
    assert len(GameFaultError("y" * 10**6).message) < 2100
