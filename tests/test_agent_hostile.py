"""Games from elsewhere that do what no game should: it costs an episode, or is one clear error."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msgrpo.agent import Completion, Decision, LanguageAgent, OnText, Sampling, View
from msgrpo.contract import examine
from msgrpo.episode import GAME_FAULT, play_episode
from msgrpo.errors import EndpointError, GameError, GameFaultError, UsageError
from msgrpo.game import Board, Game, Scenario
from msgrpo.games import get_scenario
from msgrpo.games.outside import _checked
from msgrpo.limits import asked_of, games_code, passing_faults
from msgrpo.prompt import Prompt
from msgrpo.references import RandomAgent
from tests.hostile_games import Walk, played, scenario

pytestmark = pytest.mark.usefixtures("nothing_has_hung")


class Pays(Walk):
    reward: Any = None

    def _advance(self, actions: Mapping[str, str | None]) -> Any:
        return {"player": self.reward} if not isinstance(self.reward, dict) else self.reward


def paying(reward: Any) -> type[Walk]:
    return type("Paying", (Pays,), {"reward": reward})


class Raises(Walk):
    fault: BaseException = ValueError("boom \x1b[2J")

    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        raise self.fault


def raising(fault: BaseException) -> type[Walk]:
    return type("Raising", (Raises,), {"fault": fault})


class Interrupts(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        raise KeyboardInterrupt


class BadTextError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class SetsReturns(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.returns["player"] = 50.0
        return super()._advance(actions)


class NoMoves(Walk):
    def legal(self, player: str) -> tuple[str, ...]:
        return ()


def allowing(legal: Any) -> type[Walk]:
    return type("Allowing", (Walk,), {"legal": lambda self, player: legal})


class Shows(Walk):
    text: Any = None

    def observe(self, player: str) -> Any:
        return self.text


def showing(text: Any) -> type[Walk]:
    return type("Showing", (Shows,), {"text": text})


class Endless(Walk):
    def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
        self.steps = -1
        return super()._advance(actions)


class Begins(Walk):
    def __init__(self, start_seed: int, chance_seed: int) -> None:
        raise RuntimeError("no start")


class Unmade(Walk):
    def __init__(self, start_seed: int, chance_seed: int) -> None:
        """Forgets Game's own."""


@pytest.mark.parametrize(
    ("game", "says"),
    [
        (paying(math.nan), "not finite"),
        (paying(-math.inf), "not finite"),
        (paying(None), "is no number"),
        (paying("1"), "is no number"),
        (paying({}), "not for each of player"),
        (paying({"player": 1.0, "ghost": 1.0}), "not for each of player"),
        (raising(ValueError("boom \x1b[2J")), "ValueError: boom"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (Interrupts, "KeyboardInterrupt"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (raising(BadTextError()), "BadTextError"),
        (paying(1e300), "more than"),
        (SetsReturns, "returns were changed"),
        (NoMoves, "names no action"),
        (allowing("on"), "legal('player') gave 'on', no tuple of actions"),  # ("on") is no tuple
        (allowing((0, 1)), "legal('player') gave (0, 1), no tuple of actions"),
        (showing(None), "no text"),
        (showing(7), "no text"),
        (showing("x" * 200_000), "200,000 characters"),
        (Endless, "it goes on after"),
        (Begins, "no start"),
        (Unmade, "did not call super().__init__(step_limit)"),
        (lambda start_seed, chance_seed: None, "make() gave None, no msgrpo.Game"),
    ],
)
async def test_a_games_own_fault_costs_its_episode_and_is_named(game: type[Game], says: str) -> None:
    episode = await played(game)
    assert episode.error == GAME_FAULT
    assert says in episode.error_message
    assert "hostile" in episode.error_message
    assert "\x1b" not in episode.error_message
    if isinstance(game, type) and issubclass(game, Raises | Interrupts | Begins):
        assert f"{Path(__file__).name}:" in episode.error_message  # file and line


@pytest.mark.parametrize("moving", [(), ("ghost",), ("player", "ghost")])
async def test_who_is_to_move_is_one_of_the_players(moving: tuple[str, ...]) -> None:
    class Moves(Walk):
        @property
        def to_move(self) -> tuple[str, ...]:
            return moving

    episode = await played(Moves)
    assert episode.error == GAME_FAULT
    assert "to_move is" in episode.error_message


@pytest.mark.parametrize(
    ("given", "becomes"), [("yes", "no result"), (1, "no result"), (np.True_, True), (None, None)]
)
async def test_a_success_is_true_or_false_or_none(given: Any, becomes: Any) -> None:
    """`eval` took "yes" for a success, and a training ended in a ValueError. Looked for: what else a game gives
    beside its rewards (outcome, to_move, legal and texts are checked where they are read).
    """

    class Odd(Walk):
        @property
        def success(self) -> Any:
            return given

    episode = await played(Odd, goal=given is not None)
    if becomes == "no result":
        assert episode.error == GAME_FAULT
        assert f"success is {given!r}, not True, False or None" in (episode.error_message or "")
    else:
        assert episode.error is None
        assert episode.success is becomes


async def test_an_outcome_is_none_but_an_outcome() -> None:
    """A text in its place ended a training in a division by zero: nothing had been played, and it seemed over."""

    class Says(Walk):
        @property
        def outcome(self) -> Any:
            return "playing"

    episode = await played(Says)
    assert episode.error == GAME_FAULT
    assert "outcome is 'playing'" in episode.error_message
    assert [one.rule for one in examine(scenario(Says), plays=2).breaches] == ["start"]


@pytest.mark.parametrize("reward", [np.float32(1), np.float64(1), np.int64(1), True, 1, np.array(1.0)])
async def test_numbers_of_any_library_are_rewards(reward: Any) -> None:
    """Every Gymnasium game returns them; they passed the check and ended a training in a traceback."""
    episode = await played(paying(reward))
    assert (episode.error, episode.returns) == (None, {"player": 3.0})
    assert all(type(turn.reward) is float for turn in episode.turns)
    assert examine(scenario(paying(reward)), plays=2).breaches == []
    assert json.loads(episode.model_dump_json())["returns"] == {"player": 3.0}


async def test_torchs_numbers_are_rewards() -> None:
    import torch

    assert (await played(paying(torch.tensor(1.0)))).returns == {"player": 3.0}


async def test_escape_codes_and_halves_of_characters_do_not_leave_the_game() -> None:
    episode = await played(showing("a\x1b[2J\ud800b"))
    assert episode.error is None
    assert {turn.state for turn in episode.turns} == {"a\ufffd[2J\ufffdb"}
    episode.model_dump_json().encode()
    assert len(scenario(showing("a\ud800b")).start_key(0)) == 64  # which is a hash of what is seen


def test_what_a_game_raises_is_reported_without_its_escape_codes() -> None:
    class Shouts(Walk):
        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            raise ValueError("boom \x1b[2J\x1b]0;owned\x07")

    (breach,) = [one.breach for one in examine(scenario(Shouts), plays=2).breaches if one.rule == "runs"]
    assert breach is not None
    assert "boom" in breach
    assert "\x1b" not in breach


class LateLegal(Walk):
    """Its `legal` works for whoever shows the state, and fails for the agent that asks again."""

    asked = 0

    def legal(self, player: str) -> tuple[str, ...]:
        self.asked += 1
        if self.asked == 2:
            raise ValueError("no \x1b[2J")
        return self.actions


async def test_what_an_agent_asks_of_the_game_is_the_games_code_too() -> None:
    """The agents, random and language models alike, asked the game itself: a traceback ended the run."""
    for agent in (RandomAgent(), LanguageAgent("m", Says())):
        episode = await play_episode(
            scenario(LateLegal), {"player": agent}, start_seed=0, chance_seed=0, sampling_seed=0
        )
        assert episode.error == GAME_FAULT
        assert f"no \ufffd[2J ({__file__}:" in (episode.error_message or "")


class Says:
    """A model that always says one thing."""

    name = "says"
    extra_settings: Mapping[str, Any] = {}

    async def complete(
        self, prompt: Prompt, sampling: Sampling, seed: int, *, actions: Any = (), on_text: OnText | None = None
    ) -> Completion:
        return Completion("<action>on</action>", "stop")

    async def close(self) -> None:
        """Nothing to close."""


class Mending(LanguageAgent):
    """Somebody's own, which acts otherwise than its model says."""

    async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
        said = await super().act(view)
        return replace(said, action="back", failure=None)


async def test_who_changes_a_language_models_action_is_told_how_to_say_it() -> None:
    """A LanguageAgent of somebody's own was not looked at: verify refused its records afterwards."""
    seats = {"player": Mending("mending", Says())}
    with pytest.raises(UsageError, match="mending decided for 'back', and its words say on") as refused:
        await play_episode(scenario(Walk), seats, start_seed=0, chance_seed=0, sampling_seed=0)
    assert "words that end with that action in tags" in (refused.value.fix or "")


@pytest.mark.parametrize("words", [{"caption": "\x1b[2J"}, {"legend": {".": "\x1b]0;x"}}, {"down": ("\x9b1m",)}])
def test_words_of_a_board_do_not_drive_the_terminal(words: dict[str, Any]) -> None:
    """Its cells were looked at, and its words were printed by `msgrpo play --plain` as they were."""
    with pytest.raises(GameFaultError, match="no text that can be printed"):
        Board((((".",),)), **({"legend": {}} | words))


def test_the_other_seat_is_not_asked_on_where_one_has_failed() -> None:
    """Its answer was paid for, and stood in no record."""
    ended: list[str] = []

    class Slow(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return await super().act(view)

    class Fails(RandomAgent):
        async def act(self, view: View, *, on_text: OnText | None = None) -> Decision:
            raise EndpointError("no answer", kind="timeout")

    duel = get_scenario("snake-duel")
    agents = dict(zip(duel.players, (Slow(), Fails()), strict=True))
    episode = asyncio.run(play_episode(duel, agents, start_seed=0, chance_seed=0, sampling_seed=0))
    assert (episode.error, ended) == ("timeout", ["cancelled"])


def test_names_that_drive_a_terminal_are_no_names() -> None:
    with pytest.raises(UsageError, match="can be printed"):
        _checked(scenario(Walk, players=("a\x1b[2J",)), "x", "f.py")
    found = _checked(Scenario("h", "h", "rules \x1b[2J", 3, "s\x1b", Walk, actions=Walk.actions), "x", "f.py")
    assert "\x1b" not in found.rules + found.source


@pytest.mark.parametrize(("name", "cards"), [("kuhn_poker", 3), ("leduc_poker", 6)])
def test_hands_of_cards_are_not_held_out(name: str, cards: int) -> None:
    """Training held only kings, validation only jacks, the test only queens: the hash was of the first hand."""
    pytest.importorskip("pyspiel")
    poker = get_scenario(f"spiel:{name}")
    assert not poker.holds_out
    for split in ("train", "val", "test"):
        starts = poker.starts(split)  # type: ignore[arg-type]
        seen = {poker.start_key(next(starts)) for _ in range(200)}
        assert len(seen) == cards
    assert get_scenario("spiel:backgammon").holds_out
    assert all(get_scenario(own).holds_out for own in ("frozen-lake", "snake", "snake-duel"))


@pytest.mark.parametrize("boards", [33, 34, 40, 60])
def test_no_split_is_empty_however_many_starts_there_are(boards: int) -> None:
    """Of 3,000 families with 34 boards 13 had an empty split, and looking for its first start never ended."""

    class Numbered(Walk):
        def __init__(self, start_seed: int, chance_seed: int) -> None:
            super().__init__(start_seed, chance_seed)
            self.number = start_seed % boards

        def observe(self, player: str) -> str:
            return f"board {self.number}"

    for family in range(400):
        numbered = Scenario("n", f"family {family}", "", 3, "[test]", Numbered, actions=Walk.actions)
        firsts = [next(numbered.starts(split)) % boards for split in ("train", "val", "test")]  # type: ignore[arg-type]
        assert len(set(firsts)) == 3


def test_one_team_loses_together_and_bystanders_keep_what_they_have() -> None:
    """A partner's unparsed answer paid the others of a cooperative game."""
    pytest.importorskip("pyspiel")
    hanabi = get_scenario("spiel:tiny_hanabi").new(0, 0)
    paid = hanabi.step(dict.fromkeys(hanabi.to_move))
    assert len(set(paid.values())) == 1
    kuhn = get_scenario("spiel:kuhn_poker").new(0, 0)
    assert sum(kuhn.step(dict.fromkeys(kuhn.to_move)).values()) == 0
    deal = get_scenario("spiel:bargaining").new(0, 0)
    failed = deal.to_move[0]
    others = {player: paid for player, paid in deal.step({failed: None}).items() if player != failed}
    assert set(others.values()) == {0.0}


def test_a_fault_of_a_game_is_a_game_error() -> None:
    with pytest.raises(GameFaultError, match="the game x failed: ZeroDivisionError"), games_code("x"):
        print(1 // 0)


def test_a_fault_keeps_its_rule_what_mends_it_and_that_it_is_fatal() -> None:
    """What mends a judge that asks its game for what it refuses was lost on the way."""
    with pytest.raises(GameFaultError) as refused, games_code("x"), asked_of("judge"):
        raise GameError("it has no luck", fix="define _draw_luck")
    fault = refused.value
    assert (fault.message, fault.rule, fault.fix, fault.fatal) == (
        "the game x: judge() failed: it has no luck", "judge", "define _draw_luck", False,
    )  # fmt: skip
    with pytest.raises(GameFaultError) as twice, games_code("x"), asked_of("describe"), games_code("x"):
        raise fault
    assert twice.value is fault  # it is named already, and is no new one
    with pytest.raises(GameFaultError, match="the game y: the game x: judge"), games_code("y"):
        raise fault
    for fatal in (False, True):
        with pytest.raises(GameFaultError) as passed, games_code("x"):
            raise GameFaultError("it hangs", fatal=fatal)
        assert passed.value.fatal == fatal


def test_only_a_fatal_fault_of_a_game_goes_on() -> None:
    with passing_faults():
        raise GameFaultError("no view")
    with pytest.raises(GameFaultError), passing_faults():
        raise GameFaultError("it hangs", fatal=True)


def test_a_game_that_fails_in_another_folder_is_said_to_fail(tmp_path: Path) -> None:
    def fails() -> None:
        with games_code("x"):
            os.chdir(tmp_path)
            print(1 // 0)

    here = Path.cwd()
    with pytest.raises(GameFaultError, match="the game x failed: ZeroDivisionError"):
        fails()
    assert Path.cwd() == here
