"""Rollouts by hand: whose luck an episode has, which starts say nothing, what is lost, where branches go on, and what
is played beside the trainer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from msgrpo.agent import Completion, Sampling
from msgrpo.episode import Episode, Turn
from msgrpo.errors import RunError
from msgrpo.game import Game, Scenario
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.loops import InThread, run_async
from msgrpo.prompt import Prompt
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.engines import fleet
from msgrpo.train.rivals import branch as branching
from msgrpo.train.rivals.branch import Branch
from msgrpo.train.rivals.contract import Further
from msgrpo.train.rivals.refill import Refill
from msgrpo.train.rollouts import LostError, Play, Players, Playing, Rollouts, RolloutSource, check_lost, with_result
from tests.train_helpers import in_any_order

LAKE = get_scenario("frozen-lake")


def config(*settings: str, **given: Any) -> TrainConfig:
    return make_config(settings=["select=all", *settings], given=given)


class Says:
    """A language model that always says the same."""

    name = "says"
    extra_settings: Mapping[str, Any] = {}

    def __init__(self, text: str) -> None:
        self.text = text

    async def complete(self, prompt: Prompt, sampling: Sampling, seed: int, **given: Any) -> Completion:
        return Completion(self.text, "stop")

    async def close(self) -> None:
        """Nothing is open."""


def playing_of(settings: TrainConfig, starts: Sequence[int] = (), step: int = 0, **given: Any) -> Playing:
    model: Any = Says("nothing")
    return Playing(Players(settings), step, model, settings.sampling, [(LAKE, start) for start in starts], **given)


def episode(*turns: Turn, start: int = 0, error: str | None = None) -> Episode:
    return Episode(
        scenario="frozen-lake", start_seed=start, chance_seed=0, sampling_seed=0, agents={"player": "p"},
        settings={}, turns=list(turns), error=error,
    )  # fmt: skip


def test_every_episode_has_luck_and_sampling_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs, two updates, four groups (two of them added later) and three episodes: 48 times two numbers."""
    plays: list[Play] = []

    async def play(self: Players, model: Any, sampling: Sampling, of: Sequence[Play], *given: Any) -> list[Episode]:
        plays.extend(of)
        return []

    monkeypatch.setattr(Players, "play", play)
    for seed in (0, 1):
        for step in (0, 1):
            for first in (0, 2):
                settings = config("groups=2", "group_size=3", seed=seed)
                asyncio.run(playing_of(settings, (5, 5), step, first=first).play())
    assert len(plays) == 48
    assert len({play.chance for play in plays} | {play.sampling for play in plays}) == 96


def test_a_start_says_nothing_where_all_went_alike_wherever_it_stands_in_the_update() -> None:
    """Of starts that were added later none was known to say something, and they were filled up again."""
    settings = config("groups=2", "group_size=2")
    turns = [Turn(step=0, player="player", state="s", reward=paid) for paid in (1.0, 0.0, 1.0, 1.0)]
    for first in (0, 2):
        assert playing_of(settings, (5, 6), first=first).flat(list(map(episode, turns))) == [False, True]


def test_a_quarter_of_the_episodes_may_be_lost_and_no_more() -> None:
    good, lost = episode(), episode(error="timeout")
    few = [good, lost, good, good]
    check_lost(few)
    assert with_result(few) == [good] * 3
    with pytest.raises(LostError, match="2 of 7 episodes have no result"):
        check_lost([lost, good, lost, good, good, good, good])


def next_of(settings: TrainConfig, monkeypatch: pytest.MonkeyPatch, added: list[Episode]) -> Rollouts:
    """An update whose `explore` adds these episodes, and has taken starts up to 99."""
    monkeypatch.setattr(Refill, "further", lambda self, playing, episodes: Further([], added, 99))
    model: Any = Says("nothing")
    return RolloutSource(Players(settings)).next(0, 0, model, settings.sampling, lambda *counts: None)


def test_what_was_added_counts_among_the_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config("groups=3", "group_size=2", "explore=refill")
    good, lost = episode(start=70), episode(start=80, error="timeout")
    rollouts = next_of(settings, monkeypatch, [good, lost])
    added = rollouts.all_episodes[len(rollouts.episodes) :]
    assert (added, rollouts.lost, rollouts.next_start) == ([good], [lost], 99)
    with pytest.raises(LostError, match="3 of 9 episodes have no result"):
        next_of(settings, monkeypatch, [lost] * 3)


def test_a_mixture_is_drawn_anew_for_each_update_and_run_and_no_start_comes_twice() -> None:
    drawn, orders = set[tuple[str, int]](), set[tuple[str, ...]]()
    for seed in (0, 1):
        source, first = RolloutSource(Players(config("groups=12", seed=seed, scenario="frozen-lake,snake"))), 0
        for _ in range(4):
            starts, first = source.next_starts(first)
            drawn |= {(scenario.id, start) for scenario, start in starts}
            orders.add(tuple(scenario.id for scenario, _ in starts))
    assert (len(drawn), len(orders)) == (2 * 4 * 12, 2 * 4)


def test_a_branch_has_its_own_luck_and_pays_for_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs, two updates, two starts, two branches from each."""
    luck, made = list[int](), list[Episode]()
    draw = FrozenLake.with_luck

    def with_luck(game: FrozenLake, seed: int) -> Game:
        luck.append(seed)
        return draw(game, seed)

    monkeypatch.setattr(FrozenLake, "with_luck", with_luck)
    for seed in (0, 1):
        for step in (0, 1):
            settings = config("group_size=2", "explore=branch(episodes=2)", "format_penalty=0.25", seed=seed)
            forks = [
                branching.Fork(LAKE, start, lambda start=start: LAKE.new(start, 0), place, LAKE.players)  # type: ignore[misc]
                for place, start in enumerate((5, 6), 3)
            ]
            monkeypatch.setattr(Branch, "forks", lambda self, playing, episodes, forks=forks: forks)
            assert settings.explore is not None
            further = settings.explore.further(playing_of(settings, (5, 6), step), [])
            assert [group.place for group in further.groups] == [3, 4]
            assert [one.start_seed for one in further.episodes] == [5, 5, 6, 6]
            made += further.episodes
    assert len(luck) == len(made) == 16
    assert luck == [one.chance_seed for one in made]
    assert len({*luck, *(one.sampling_seed for one in made)}) == 32
    assert {turn.shaping for one in made for turn in one.turns} == {-0.25}


def test_of_several_seats_the_one_with_more_at_stake_names_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seat's second turn tells two actions apart, by ±½ in the one, by ±2 in the other: Σ (Q − V)² is ½ and 8.

    That turn is the fourth step of the game.
    """
    replayed: list[tuple[Episode, int]] = []

    def replay(scenario: Scenario, episode: Episode, steps: int) -> Game:
        replayed.append((episode, steps))
        return scenario.new(0, 0)

    def of(action: str, paid_a: float, paid_b: float) -> Episode:
        decided = [("a", "up", 0.0), ("b", "up", 0.0), ("a", action, paid_a), ("b", action, paid_b)]
        turns = [
            Turn(step=step, player=player, state=f"s{step}", action=action, reward=paid)
            for step, (player, action, paid) in enumerate(decided)
        ]
        return episode(*turns)

    monkeypatch.setattr(branching, "replay", replay)
    game = in_any_order()
    for seats in (("a", "b"), ("b", "a")):
        for b_pays in (4.0, -4.0):
            episodes = [of("up", 1.0, b_pays), of("down", 0.0, 0.0)]
            playing: Any = SimpleNamespace(
                by_start=lambda given, seats=seats: [(game, 7, seats, given)], config=config("group_size=2")
            )
            (fork,) = Branch(episodes=2).forks(playing, episodes)
            fork.game()
            assert replayed.pop()[1] == 3
            assert (fork.place, fork.start_seed, fork.seats) == (0, 7, seats)


def test_what_is_played_beside_the_trainer_is_given_up_with_all_that_it_has_open() -> None:
    begun, ended = threading.Event(), list[str]()

    async def plays() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("closed")

    work = InThread(plays())
    assert begun.wait(60)
    work.give_up()
    assert (ended, work._thread.is_alive(), work._loop.is_closed()) == (["closed"], False, True)
    with pytest.raises(asyncio.CancelledError):
        work.result()


async def test_what_a_failed_coroutine_leaves_behind_ends_in_its_thread() -> None:
    """In a notebook an episode's error left the others unended: Python said so, long after, where nobody knew why."""
    ended = []

    async def plays() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as a connection that is closed
            ended.append("closed")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise RunError("no server is left")

    async def both() -> None:
        await asyncio.gather(plays(), fails())

    with pytest.raises(RunError, match="no server is left"):
        run_async(both())
    assert ended == ["closed"]


def test_what_was_played_beside_the_trainer_is_there_or_says_why_not() -> None:
    async def plays() -> int:
        return 7

    async def fails() -> int:
        raise RunError("no server is left")

    played, failed = InThread(plays()), InThread(fails())
    assert played.result() == 7
    with pytest.raises(RunError, match="no server is left"):
        failed.result()
    for work in (played, failed):
        work.give_up()  # it has ended
        assert work._loop.is_closed()


def test_a_vllm_that_takes_long_to_begin_is_waited_for_with_the_name_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that hung the run said `starting vLLM: importing vLLM` again and again, and not where to look."""

    class Hangs:
        def __init__(self, launch: object, log: Path) -> None:
            self.log = log

        def start(self) -> None: ...

        def wait_ready(self, on_stage: Callable[[str], None]) -> None:
            on_stage("importing vLLM")

    told: list[str] = []
    report: Any = SimpleNamespace(doing=told.append, note=told.append)
    monkeypatch.setattr(fleet, "Server", Hangs)
    monkeypatch.setattr(fleet, "prepare", lambda request, say: None)
    fleet.Child(make_config(settings=["rollouts=vllm"]), "float32", tmp_path, report)
    assert told[-1] == f"starting vLLM: importing vLLM; its log is {tmp_path / 'vllm.log'}"
