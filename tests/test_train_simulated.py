"""credit=simulated: values from the group's own answers, played on in copies of the game."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from msgrpo import episode
from msgrpo.episode import Episode, observation_of, play_episode
from msgrpo.errors import GameError, RunError
from msgrpo.game import Game, Scenario
from msgrpo.games import get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.games.higher import CARDS, Higher
from msgrpo.games.higher import scenario as higher
from msgrpo.references import RandomAgent
from msgrpo.train.config import make_config
from msgrpo.train.display import Quiet
from msgrpo.train.groups import Group, PerTurn, groups_of
from msgrpo.train.loop import train
from msgrpo.train.rivals import choose, simulated
from msgrpo.train.rivals.simulated import Answers, Model, Simulated
from tests.train_helpers import in_any_order, learner


def played(scenario: Scenario, count: int = 4, start: int = 3) -> list[Episode]:
    """Episodes of one start, in which all players move at random, each with its own luck."""
    agents = {player: RandomAgent() for player in scenario.players}

    async def together() -> list[Episode]:
        play = (
            play_episode(scenario, agents, start_seed=start, chance_seed=i, sampling_seed=i) for i in range(count)
        )
        return list(await asyncio.gather(*play))

    return asyncio.run(together())


def groups(scenario: Scenario, count: int = 4) -> list[Group]:
    return groups_of(scenario, played(scenario, count), scenario.players, 0)


def credit(group: Group, **settings: object) -> PerTurn:
    spec = ", ".join(f"{key}={value}" for key, value in {"scale": "update", **settings}.items())
    chosen = choose("credit", f"simulated({spec})")
    assert isinstance(chosen, Simulated)
    return chosen.of_groups([group], learner())[0]


def test_luck_is_averaged_away() -> None:
    """What a guess is worth is the chance that it is right, however the next card fell."""
    (group,) = groups(higher)
    said = Counter(turn.action for turns in group.turns for turn in turns)
    share = {action: n / said.total() for action, n in said.items()}
    furthest = 0.0
    for turns, credits in zip(group.turns, credit(group, playouts=300), strict=True):
        for turn, value in zip(turns, credits, strict=True):
            card = int(turn.state.split()[-1].rstrip("."))
            chance = {"higher": (CARDS - card) / CARDS, "lower": (card - 1) / CARDS, "same": 1 / CARDS}
            here = {a: (n + share[a]) for a, n in dict.fromkeys(share, 0).items()}
            here[turn.action] += sum(turn.state == other.state for one in group.turns for other in one)
            mean = sum(here[a] * chance[str(a)] for a in here) / sum(here.values())
            if sum(turn.state == other.state for one in group.turns for other in one) == 1:
                assert value == pytest.approx(chance[str(turn.action)] - mean, abs=0.12)
                furthest = max(furthest, abs(value))
    assert furthest > 0.3


def test_an_answer_from_another_state_is_one_that_is_legal_here(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = groups(higher, 8)
    answers, game, legal = Answers(group.episodes), higher.new(0, 0), list(Higher.actions)
    monkeypatch.setattr(Higher, "legal", lambda game, player: legal)
    drawn = {}
    for left in (3, 2, 1):
        del legal[left:]  # the game's own list, which it changes
        drawn[left] = {answers.draw(game, "player", "nowhere", Random(k))[0] for k in range(50)}
    assert drawn == {left: set(Higher.actions[:left]) for left in (3, 2, 1)}


def test_a_game_that_can_be_copied_only_at_its_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training went on without one simulated episode."""

    def copy(game: Higher) -> Game:
        if game.steps:
            raise TypeError("cannot pickle '_thread.lock' object")
        return deepcopy(game)

    (group,) = groups(higher)
    monkeypatch.setattr(Higher, "copy", copy)
    with pytest.raises(RunError, match=r"simulated episodes have no result, one of them: .*cannot pickle"):
        credit(group)


def test_a_game_that_does_not_go_the_same_way_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its states other games were simulated, or none, and nothing said so."""
    (group,) = groups(higher)
    monkeypatch.setattr(Higher, "observe", lambda game, player: f"Step {game.steps}, {id(game)}.")
    with pytest.raises(
        RunError, match=r"\d+ of \d+ simulated episodes have no result, .*shows player something else"
    ):
        credit(group)


def test_each_step_of_a_simulated_episode_has_a_calls_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole episode had it: a game of long steps was said to hang, and ended the run."""
    (group,) = groups(higher)
    calls: list[int] = []
    code, advance = simulated.games_code, Higher._advance

    def counted(name: str) -> AbstractContextManager[None]:
        calls.append(0)
        return code(name)

    def noted(game: Higher, actions: Mapping[str, str | None]) -> dict[str, float]:
        calls[-1] += 1
        return advance(game, actions)

    for module in (simulated, episode):
        monkeypatch.setattr(module, "games_code", counted)
    monkeypatch.setattr(Higher, "_advance", noted)
    credit(group)
    assert max(calls) == 1


def test_a_start_of_which_no_copy_goes_on_ends_no_training() -> None:
    """It did, and again at each --resume, in an update that had lost no episode."""

    class Frail(Higher):
        def copy(self) -> Game:
            raise ValueError("odd")

    *whole, last = (groups_of(higher, played(higher, start=start), higher.players, start)[0] for start in range(4))
    frail = replace(last, origin=lambda j: Frail(3, last.episodes[j].chance_seed))
    chosen = choose("credit", "simulated(scale=update)")
    assert isinstance(chosen, Simulated)
    told: list[str] = []
    ours = replace(learner(), note=told.append)
    for _ in range(2):
        found = chosen.of_groups([*whole, frail], ours)
    assert [len(one) for one in found[-1]] == [len(turns) for turns in frail.turns]
    (said,) = told  # once in a run: nothing was, though a quarter of its starts was credited without one
    assert re.match(r"left out: \d+ of \d+ simulated episodes have no result, one of them: .*odd", said)
    assert "msgrpo games check higher" in said
    with pytest.raises(RunError, match=r"one of them: .*odd"):
        chosen.of_groups([frail, frail, whole[0]], learner())


def test_a_move_that_is_illegal_where_a_game_only_looks_the_same_ends_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def legal(game: Higher, player: str) -> tuple[str, ...]:
        hidden: int = game.deck.bit_generator.state["state"]["state"]
        return Higher.actions if hidden % 50 else ("higher",)

    (group,) = groups(higher)
    monkeypatch.setattr(Higher, "legal", legal)
    assert [len(one) for one in credit(group)] == [len(turns) for turns in group.turns]


def test_a_recorded_answer_serves_wherever_its_state_is_met() -> None:
    (group,) = groups(higher)
    answers, first = Answers(group.episodes), group.turns[0][0]
    tried = Counter(turns[0].action for turns in group.turns)
    weights = {action: answers.weight("player", first.state, action) for action in Higher.actions}
    said = Counter(turn.action for turns in group.turns for turn in turns)
    assert weights == {
        action: pytest.approx(tried[action] + max(said[action], 1) / said.total()) for action in Higher.actions
    }


@pytest.mark.parametrize("name", ["frozen-lake", "frozen-lake-slippery", "snake", "snake-duel"])
def test_credit_has_the_shape_of_the_turns_and_comes_out_again(name: str) -> None:
    for group in groups(get_scenario(name)):
        found = credit(group, playouts=2)
        assert [len(one) for one in found] == [len(turns) for turns in group.turns]
        assert found == credit(group, playouts=2)
        assert any(value for one in found for value in one)


def test_one_answer_for_all_has_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However luck treats it, nothing else was said that it could be better than."""
    monkeypatch.setattr(RandomAgent, "choose", lambda *_: "right")
    (group,) = groups(get_scenario("frozen-lake-slippery"))
    assert not any(value for one in credit(group, playouts=3) for value in one)


def test_a_flat_group_has_something_to_teach() -> None:
    """All episodes lost: the returns are alike, and yet some moves lead nearer to the goal."""
    lake = get_scenario("frozen-lake-slippery")
    lost = [episode for episode in played(lake, 40) if not episode.success][:6]
    (group,) = groups_of(lake, lost, lake.players, 0)
    assert group.is_flat
    assert any(value for one in credit(group, playouts=50) for value in one)


def test_whoever_moves_several_times_in_a_row_is_credited() -> None:
    for group in groups(in_any_order_with_luck()):
        assert [len(one) for one in credit(group)] == [len(turns) for turns in group.turns]


def in_any_order_with_luck() -> Scenario:
    plain = in_any_order()

    class Lucky(plain.make):  # type: ignore[name-defined, misc]
        def _draw_luck(self, chance_seed: int) -> None:
            self.order = type(self)(0, chance_seed).order

        def _advance(self, actions: Mapping[str, str | None]) -> dict[str, float]:
            return {player: float(actions.get(player) == "up") for player in self.players}

    return replace(plain, make=Lucky)


class Dealt(Higher):
    """The first card, too, is the luck's."""

    def __init__(self, start_seed: int, chance_seed: int) -> None:
        super().__init__(start_seed, chance_seed)
        self.card = int(self.deck.integers(1, CARDS + 1))


DEALT = replace(higher, make=Dealt, luck_in_start=True)


def replayed(group: Group) -> list[list[str]]:
    """What the player sees in its turns when the episodes are played again."""
    player = group.turns[0][0].player
    return [
        [
            observation_of(game, player)
            for step, game in Model(group)._again(j)
            if step in {turn.step for turn in turns}
        ]
        for j, turns in enumerate(group.turns)
    ]


@pytest.mark.parametrize(
    "scenario", [higher, DEALT, in_any_order_with_luck()], ids=["guess", "dealt", "in any order"]
)
def test_an_episode_is_played_again_with_its_own_luck(scenario: Scenario) -> None:
    """Where luck dealt the start, later luck began anew: states were simulated from other cards than they show."""
    for group in groups(scenario):
        assert replayed(group) == [[turn.state for turn in turns] for turns in group.turns]


@pytest.mark.parametrize("choice", ["credit=simulated", "explore=branch(episodes=2)"])
def test_a_game_without_new_luck_is_refused_before_anything_is_played(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FrozenLake, "_draw_luck")
    with pytest.raises(GameError, match="cannot draw new luck"):
        train(make_config(settings=[choice]), tmp_path / "run", report=Quiet())
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_playout_that_the_games_own_fault_ends_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = groups(higher)
    whole, played_to = credit(group), Higher._advance

    def advance(game: Higher, actions: Mapping[str, str | None]) -> dict[str, float]:
        if game.steps == 6 and game.card <= CARDS // 3:
            raise ValueError("odd")
        return played_to(game, actions)

    monkeypatch.setattr(Higher, "_advance", advance)
    found = credit(group)
    assert [len(one) for one in found] == [len(one) for one in whole]
    assert found != whole


def test_a_prompt_with_history_and_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(Exception, match="history"):
        make_config(settings=["credit=simulated", 'prompt={"history": 4}'])
    for number in ("0", "1001"):
        with pytest.raises(ValueError, match="playouts"):
            choose("credit", f"simulated(playouts={number})")


def test_games_agree_that_a_copy_is_no_move() -> None:
    """The group's own episodes and start are as they were."""
    (group,) = groups(get_scenario("snake"))
    before, start = [one.model_dump() for one in group.episodes], group.origin(0).observe(group.turns[0][0].player)
    credit(group)
    assert [one.model_dump() for one in group.episodes] == before
    assert group.origin(0).observe(group.turns[0][0].player) == start
    assert isinstance(group.origin(0), Game)
