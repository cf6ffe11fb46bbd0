"""Rivals of the paper's choices that are more than an estimator: critic, branches, groups passed over, objectives,
weights of tokens, temperature, mixtures. Each by hand, and each in a short run of nano."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.agent import Completion, ParseFailure, Sampling
from msgrpo.episode import Episode, Turn, replay
from msgrpo.errors import EndpointError, GameError, GameFaultError, UsageError
from msgrpo.game import Board, Game, Outcome, Remote, Scenario
from msgrpo.games import SCENARIOS, get_scenario
from msgrpo.games.frozen_lake import FrozenLake
from msgrpo.prompt import Prompt
from msgrpo.run_log import read_rows
from msgrpo.train import loop
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.groups import Group, PerTurn, Step
from msgrpo.train.msgrpo import group_advantages
from msgrpo.train.nano.words import look
from msgrpo.train.policy import Policy
from msgrpo.train.rivals import RIVALS, choose, critic
from msgrpo.train.rivals import branch as branching
from msgrpo.train.rivals.actfocus import token_weights
from msgrpo.train.rivals.branch import Branch, disputed
from msgrpo.train.rivals.critic import critic_values, hidden_states, left_out_values, sums_of
from msgrpo.train.rivals.entropy import Entropy
from msgrpo.train.rivals.objectives import OBJECTIVES, Fixed, Variance
from msgrpo.train.rivals.skip import Skip, key_of
from msgrpo.train.rivals.widest import Widest
from msgrpo.train.rollouts import LostError, Players, Rollouts, RolloutSource
from msgrpo.train.sinks import Measured
from tests.train_helpers import learner, played

LAKE = get_scenario("frozen-lake")
TINY = ["groups=2", "group_size=4", "select=aaw(keep=2)", "minibatches=1", "evaluation=4(film=0)", "steps=2"]


def config(*settings: str, scenario: str | None = None) -> TrainConfig:
    return make_config(settings=[*TINY, *settings], given={"scenario": scenario})


# ── critic ──


def test_a_value_comes_from_the_other_groups_alone() -> None:
    """Groups of one feature x with R = 2x in the one and R = 4x in the other: each is valued by the other's slope."""
    xs = torch.tensor([[-1.0], [1.0], [3.0]], dtype=torch.float64)
    sums = [sums_of(xs, 2 * xs[:, 0]), sums_of(xs, 4 * xs[:, 0])]
    first, second = left_out_values([xs, xs], sums, [0, 1])
    shrunk = 0.01 * 22 / (8 + 0.01 * 22)  # Σ(x − mean)² = 8; λ is a hundredth of the sum of squares of both, 22
    assert first.tolist() == pytest.approx([4 + 4 * (1 - shrunk) * (x - 1) for x in (-1, 1, 3)])
    assert second.tolist() == pytest.approx([2 + 2 * (1 - shrunk) * (x - 1) for x in (-1, 1, 3)])
    assert first.tolist() != pytest.approx(second.tolist())  # wrong: one head, fitted on what it is asked about


def test_where_there_is_no_other_start_the_value_is_the_mean() -> None:
    """0 would make every turn of a game that pays look good, whatever was done."""
    states = torch.ones(3, 2, dtype=torch.float64)
    (alone,) = left_out_values([states], [sums_of(states, torch.arange(3.0).double())], [0])
    assert alone.tolist() == [1, 1, 1]
    past = sums_of(states, torch.full((3,), 5.0).double())  # where earlier updates tell of others, they are asked
    (asked,) = left_out_values([states], [sums_of(states, torch.arange(3.0).double())], [0], past)
    assert asked.tolist() == pytest.approx([5, 5, 5], abs=1e-4)


def test_the_other_seat_of_a_game_is_no_data() -> None:
    """Two seats of one start, and another start: what one seat lost the other won, so neither is the other's data."""
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(6, 2, generator=draw, dtype=torch.float64) for _ in range(3)]
    targets = [torch.ones(6, dtype=torch.float64), -torch.ones(6, dtype=torch.float64), torch.zeros(6).double()]
    sums = list(map(sums_of, states, targets))
    mine, other, third = left_out_values(states, sums, [0, 0, 1])
    assert mine.tolist() == pytest.approx([0.0] * 6, abs=1e-6)  # fitted on the third alone
    assert other.tolist() == pytest.approx([0.0] * 6, abs=1e-6)
    assert third.tolist() != pytest.approx([0.0] * 6, abs=1e-3)
    assert [one.tolist() for one in left_out_values(states[:2], sums[:2], [0, 0])] == [[1.0] * 6, [-1.0] * 6]


@given(st.integers(2, 4), st.integers(1, 5), st.integers(0, 99))
def test_what_is_constant_is_learnt_whatever_the_features(groups: int, turns: int, seed: int) -> None:
    """Every return is 7: so is every value, since the constant is not shrunk."""
    draw = torch.Generator().manual_seed(seed)
    states = [torch.randn(turns, 3, generator=draw, dtype=torch.float64) for _ in range(groups)]
    sevens = [torch.full((turns,), 7.0, dtype=torch.float64)] * groups
    for values in left_out_values(states, list(map(sums_of, states, sevens)), list(range(groups))):
        assert values.tolist() == pytest.approx([7.0] * turns, abs=1e-4)


def test_a_head_remembers_earlier_updates_less_and_less() -> None:
    """memory=4: three updates, each weighs ¾ of the one after it, and the value of a start is still of the others.

    The slow way: least squares over all rows, each row times the root of its weight.
    """
    policy = Policy(config())
    context = learner(policy=policy)
    rows, returns, weights = [], [], []
    for update, seed in enumerate((0, 1, 2)):
        settings = config("group_size=4").model_copy(update={"seed": seed})
        playing, episodes = played(settings, policy)
        groups = playing.groups(episodes)
        values = critic_values(context, groups, 1.0, memory=4)
        for group in groups:
            prompts = [turn.completion.prompt_ids for one in group.turns for turn in one if turn.completion]
            states = hidden_states(policy, prompts)
            rows.append(torch.cat([states, states.new_ones(len(states), 1)], dim=1))
            togo = [sum(s.reward for s in one[t:]) for one in group.trajectories() for t in range(len(one))]
            returns.append(torch.tensor(togo, dtype=torch.float64))
            weights.append(0.75 ** (2 - update))
    *others, _, own = rows  # of the last update's second start: all rows but its own
    counted = list(zip([*others, rows[-2]], returns[:-1], weights[:-1], strict=True))
    whole = sum(weight * x.T @ x for x, _, weight in counted) + own.T @ own  # with its own, for the shrinking
    shrink = 1e-2 * whole.diagonal()[:-1].mean() * torch.eye(len(whole), dtype=torch.float64)
    shrink[-1, -1] = 1e-9
    square = sum(weight * x.T @ x for x, _, weight in counted) + shrink
    head = torch.linalg.solve(square, sum(weight * x.T @ y for x, y, weight in counted))
    assert [value for one in values[-1] for value in one] == pytest.approx((own @ head).tolist(), abs=1e-6)


def test_hidden_states_are_the_models_own() -> None:
    policy = Policy(config())
    prompts = [(5, 6, 7, 8), (5, 6, 9), (5, 6, 7, 8, 9, 10)]
    for found, prompt in zip(hidden_states(policy, prompts), prompts, strict=True):
        plain = policy.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert found.tolist() == pytest.approx(plain.tolist(), abs=1e-4)


def test_long_prompts_are_not_read_sixty_four_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of a long game took memory without a bound."""
    policy = Policy(config())
    prompts = [(5, 6, *range(7, 11 + place)) for place in range(6)]
    whole = hidden_states(policy, prompts)
    at_once: list[int] = []
    hidden = policy.hidden

    def counted(prefix: list[int], rests: Sequence[list[int]]) -> torch.Tensor:
        at_once.append(len(rests) * max(map(len, rests)))
        return hidden(prefix, rests)

    monkeypatch.setattr(policy, "hidden", counted)
    monkeypatch.setattr(critic, "TOKENS", 20)
    assert torch.allclose(hidden_states(policy, prompts), whole, atol=1e-5)
    assert max(at_once) <= 20
    monkeypatch.setattr(critic, "TOKENS", 1)  # less than any prompt has
    assert torch.allclose(hidden_states(policy, prompts), whole, atol=1e-5)


def test_every_turn_of_a_rollout_has_a_value() -> None:
    settings = config("group_size=6")
    policy = Policy(settings)
    playing, episodes = played(settings, policy)
    groups = playing.groups(episodes)
    values = critic_values(learner(policy=policy), groups, 1.0)
    assert [[len(one) for one in group.turns] for group in groups] == [[len(one) for one in of] for of in values]
    for memory, kept in ((1.0, []), (4.0, ["critic"])):
        context = learner(policy=policy)
        critic.Critic(memory=memory).of_groups(groups, context)
        assert list(context.memory) == kept
    same = [values[0][j][0] for j in range(6)]
    assert same == pytest.approx([same[0]] * 6)  # one prompt, one value
    assert all(math.isfinite(value) for of_group in values for one in of_group for value in one)


# ── branches ──


def test_the_disputed_state_is_where_actions_differ_most() -> None:
    """a and b both tell two actions apart, b by 2 points and a by 1; s was the first turn, which does not count."""
    found = disputed(
        [
            [Step("s", "up", 0), Step("a", "up", 1), Step("b", "up", 2)],
            [Step("s", "down", 0), Step("a", "up", 1), Step("b", "down", 0)],
            [Step("s", "down", 0), Step("a", "down", 2)],
        ],
        gamma=1.0,
    )
    assert found is not None
    assert found[1:] == (0, 2)
    assert found[0] == pytest.approx(2.0)
    assert disputed([[Step("s", "up", 1)], [Step("s", "down", 0)]], 1.0) is None
    assert disputed([[Step("s", "up", 0), Step("a", "up", 1)]] * 2, 1.0) is None  # nobody tried another action


def test_what_is_at_stake_is_a_sum_of_squares_of_discounted_gains() -> None:
    """In a two answers differ from V by 1, in b four by 0.6: squares 2 and 1.44, where absolute values say 2 and 2.4.

    In c the whole difference of 4 comes a turn later: at γ = ½ that is ±1 as well, at γ = 1 ±2.
    """
    first = Step("s", "up", 0)
    a = [[first, Step("a", "up", 2)], [first, Step("a", "down", 0)]]
    b = [[first, Step("b", action, reward)] for action, reward in (("up", 1.2), ("down", 0)) for _ in range(2)]
    assert disputed([*b, *a], 1.0) == (pytest.approx(2.0), 4, 1)
    c = [[first, Step("c", action, 0), Step("e", "up", reward)] for action, reward in (("up", 4), ("down", 0))]
    for gamma, stake in ((1.0, 8.0), (0.5, 2.0)):
        assert disputed(c, gamma) == (pytest.approx(stake), 0, 1)


@pytest.mark.parametrize("id", sorted(SCENARIOS))
def test_new_luck_leaves_the_state_and_the_original_alone(id: str) -> None:
    """At the start, a game with the luck of seed 7 is the fresh game of seed 7; later it has the same board."""
    scenario = SCENARIOS[id]
    fresh, changed = scenario.new(3, 7), scenario.new(3, 1).with_luck(7)
    moves = [dict.fromkeys(scenario.players, action) for action in ("up", "right", "down", "left", "right")]
    for move in moves:
        if fresh.outcome is not Outcome.PLAYING:
            break
        assert fresh.step(move) == changed.step(move)
        assert fresh.board() == changed.board()
    game, twin = scenario.new(3, 1), scenario.new(3, 1)
    game.step(moves[0])
    twin.step(moves[0])
    if game.outcome is Outcome.PLAYING:
        other = game.with_luck(7)
        assert (other.board(), other.steps, other.returns) == (game.board(), game.steps, game.returns)
        other.step(moves[1])
        assert game.step(moves[1]) == twin.step(moves[1])
        assert game.board() == twin.board()


def test_slippery_ice_slides_another_way_with_new_luck() -> None:
    game = get_scenario("frozen-lake-slippery").new(3, 1)
    ends = set()
    for seed in range(40):
        twin = game.with_luck(seed)
        twin.step({"player": "right"})
        ends.add(twin.board().text())
    assert len(ends) > 1


class Luckless(Game):
    def observe(self, player: str) -> str:
        return ""

    def board(self) -> Board:
        return Board(((".",),), {})

    def _advance(self, actions: object) -> dict[str, float]:
        return {"player": 0.0}


def test_a_game_that_cannot_draw_new_luck_says_what_to_define() -> None:
    with pytest.raises(GameError, match="Luckless cannot draw new luck") as error:
        Luckless(3).with_luck(0)
    assert error.value.fix is not None
    assert "_draw_luck" in error.value.fix


def test_branches_go_on_from_the_disputed_state() -> None:
    settings = config("group_size=8", "explore=branch(episodes=3)", scenario="frozen-lake-slippery")
    playing, episodes = played(settings, Policy(settings))
    branch = settings.explore
    assert isinstance(branch, Branch)
    forks = branch.forks(playing, episodes)
    assert forks
    further = branch.further(playing, episodes)
    assert [len(group.turns) for group in further.groups] == [3] * len(forks)
    for fork, group in zip(forks, further.groups, strict=True):
        game = fork.game()
        assert game.steps > 0
        first = {one[0].state for one in group.turns}
        assert first == {game.observe("player")}
        assert {one[0].step for one in group.turns} == {game.steps}
        begun, turns = group.origin(1), group.turns[1]
        for turn in turns:
            assert begun.observe("player") == turn.state
            assert begun.step({"player": turn.action})["player"] == turn.reward
    again = branch.further(playing, episodes).episodes
    assert [[t.answer for t in one.turns] for one in again] == [
        [t.answer for t in one.turns] for one in further.episodes
    ]


def test_a_branch_that_cannot_begin_is_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The game's own fault ended the run."""
    settings = config("group_size=8", "explore=branch(episodes=3)")
    playing, episodes = played(settings, Policy(settings))
    draw, drawn = FrozenLake.with_luck, itertools.count()

    def with_luck(game: FrozenLake, seed: int) -> Game:
        if next(drawn) == 0:
            raise ValueError("no luck")
        return draw(game, seed)

    monkeypatch.setattr(FrozenLake, "with_luck", with_luck)
    assert settings.explore is not None
    further = settings.explore.further(playing, episodes)
    (lost,) = [episode for episode in further.episodes if episode.error is not None]
    assert "no luck" in str(lost.error_message)
    assert sum(len(group.turns) for group in further.groups) == len(further.episodes) - 1


def test_a_state_that_cannot_be_reached_again_loses_its_branches_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The game's own fault ended the run, as that of a copy had."""
    settings = config("group_size=8", "explore=branch(episodes=3)")
    playing, episodes = played(settings, Policy(settings))
    again, numbers = branching.replay, itertools.count()

    def replayed(scenario: Scenario, episode: Episode, steps: int) -> Game:
        if next(numbers) < 2:
            raise GameFaultError("it does not go the same way")
        return again(scenario, episode, steps)

    monkeypatch.setattr(branching, "replay", replayed)
    assert settings.explore is not None
    further = settings.explore.further(playing, episodes)
    why = "it does not go the same way"
    assert [episode.error_message for episode in further.episodes] == [why, why, None]


def test_a_replay_stands_where_the_episode_stood() -> None:
    settings = config()
    _, episodes = played(settings, Policy(settings))
    for episode in episodes:
        for turn in episode.turns:
            assert replay(LAKE, episode, turn.step).observe("player") == turn.state


# ── groups, objectives, tokens, temperature ──


def group(returns: list[float], *turns: list[Turn]) -> Group:
    returns_G = torch.tensor(returns, dtype=torch.float64)
    start = LAKE.new(1, 0)
    return Group(lambda j: start, list(turns), returns_G, group_advantages(returns_G))


def test_the_groups_with_the_least_variance_are_passed_over() -> None:
    groups = [group(returns) for returns in ([0.0, 1.0], [0.0, 0.0], [0.0, 3.0], [1.0, 1.5])]
    assert Widest(drop=0.0).passing(groups) == [0, 1, 2, 3]
    assert Widest(drop=0.5).passing(groups) == [0, 2]  # and not the two with the highest mean, 2 and 3
    assert Widest(drop=0.49).passing(groups) == [0, 2, 3]


def turns(*answers: tuple[str, int]) -> list[Turn]:
    return [
        Turn(
            step=i,
            player="player",
            state="s",
            answer=text,
            completion_tokens=tokens,
            failure=None if "<action>" in text else ParseFailure.NO_TAG,
        )
        for i, (text, tokens) in enumerate(answers)
    ]


def test_objectives_by_hand() -> None:
    begin = partial(LAKE.new, 1, 0)
    true = look(begin(), "player") + "<action>up</action>"
    said = turns((true, 30), ("nothing", 10))
    assert OBJECTIVES["format"](said, begin) == 0.5
    assert OBJECTIVES["brevity"](said, begin) == -20
    assert OBJECTIVES["words"](said, begin) == 1
    assert OBJECTIVES["words"](turns((true.replace("hole", "free"), 30)), begin) == 0


def test_objectives_are_normalised_each_by_itself() -> None:
    """Tokens are ten times the return's numbers: normalised, a weight of ½ is half of the return's say."""
    credit: PerTurn = [[-1.0], [1.0]]
    pair = group([0.0, 1.0], turns(("<action>up</action>", 10)), turns(("<action>up</action>", 30)))
    fixed = Fixed(brevity=0.5).combined(credit, pair)
    assert fixed == [[-0.5], [0.5]]
    assert fixed != [[-1 + 0.5 * -10], [1 + 0.5 * -30]]  # wrong: the raw numbers are added
    assert Fixed().combined(credit, pair) == credit
    # var = ¼ of the return and 100 of the tokens at c = 0.01: shares ⅕ and ⅘
    assert Variance(brevity=0.01).combined(credit, pair) == [[pytest.approx(0.6)], [pytest.approx(-0.6)]]


def test_each_episodes_words_are_held_against_its_own_beginning() -> None:
    lakes = [LAKE.new(1, 0), LAKE.new(2, 0)]
    said = turns((look(lakes[0], "player") + "<action>up</action>", 9))
    both = replace(group([0.0, 0.0], said, said), origin=lambda j: lakes[j])
    assert Fixed(words=1).combined([[0.0], [0.0]], both) == [[1.0], [-1.0]]


def test_objectives_of_the_answers_alone_begin_no_game() -> None:
    """One was begun for each episode, at a server too; where that failed, it ended the run."""

    def gone(j: int) -> Game:
        raise ConnectionError("the server is gone")

    said = turns(("<action>up</action>", 9))
    both = replace(group([0.0, 1.0], said, said), origin=gone)
    assert Fixed(format=1, brevity=1).combined([[0.0], [0.0]], both) == [[0.0], [0.0]]


def test_weights_by_variance() -> None:
    """var = ¼ of the return and 1 of the other at c = ½: shares ⅓ and ⅔; what does not vary has none."""
    values = {"return": torch.tensor([0.0, 1.0]), "words": torch.tensor([0.0, 2.0]), "form": torch.ones(2)}
    weights = Variance().weights(values, {"return": 1.0, "words": 0.5, "form": 9.0})
    assert weights == pytest.approx({"return": 1 / 3, "words": 2 / 3, "form": 0.0})
    flat = {name: torch.ones(2) for name in values}
    assert set(Variance().weights(flat, dict.fromkeys(values, 1.0)).values()) == {0.0}


def test_words_weigh_as_asked_and_the_action_whole() -> None:
    tokenizer = Policy(config()).tokenizer
    for text, action in (("hole free. <action>up</action>", "<action>up</action>"), ("<action>up</action>", None)):
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        weights = token_weights(Completion(text, "stop", token_ids=ids), tokenizer, 0.25)
        own = [token for token, weight in zip(ids, weights, strict=True) if weight == 1.0]
        assert tokenizer.decode(own).strip() == (action or text)
        assert set(weights) <= {0.25, 1.0}
        assert list(weights) == sorted(weights)
    ids = tuple(tokenizer.encode("hole free.", add_special_tokens=False))
    assert set(token_weights(Completion("hole free.", "stop", token_ids=ids), tokenizer, 0.25)) == {0.25}


def test_the_temperature_follows_the_entropy_and_stays_within_a_factor_of_two() -> None:
    following = Entropy(target=0.2).temperature
    assert following(1.0, 0.2, 1.0) == 1.0
    assert following(1.0, 0.1, 1.0) == pytest.approx(math.exp(0.05))  # too sure: warmer
    assert following(1.0, 9.0, 1.0) == pytest.approx(math.exp(-0.1))
    assert following(1.99, 0.0, 1.0) == 2.0
    assert following(0.51, 9.0, 1.0) == 0.5


class Up:
    """A language model that always goes up, or by the seed of a turn down or right."""

    name = "up"
    extra_settings: Mapping[str, Any] = {}

    def __init__(self, varied: bool) -> None:
        self._varied = varied

    async def complete(self, prompt: Prompt, sampling: Sampling, seed: int, **given: Any) -> Completion:
        action = ("down", "right")[seed % 2] if self._varied else "up"
        return Completion(f"<action>{action}</action>", "stop")

    async def close(self) -> None:
        """Nothing is open."""


def next_of(settings: TrainConfig, varied: bool, memory: dict[str, torch.Tensor]) -> Rollouts:
    model: Any = Up(varied)
    return RolloutSource(Players(settings), memory).next(0, 0, model, settings.sampling, lambda *counts: None)


def test_flat_groups_are_refilled_with_fresh_starts_so_often_as_was_said() -> None:
    settings = config("groups=3", "group_size=2", "explore=refill(rounds=2)")
    rollouts = next_of(settings, False, {})  # who only goes up never gets anywhere: all groups are flat
    starts = [episode.start_seed for episode in rollouts.all_episodes]
    assert [starts.count(start) for start in sorted(set(starts))] == [2] * 9
    assert [group.place for group in rollouts.groups] == list(range(9))
    assert rollouts.next_start == max(starts) + 1
    assert len({episode.sampling_seed for episode in rollouts.all_episodes}) == 18
    assert len(rollouts.episodes) == 6


def test_groups_that_teach_are_not_refilled() -> None:
    settings = config("groups=6", "group_size=16", "explore=refill(rounds=1)")
    rollouts = next_of(settings, True, {})
    flat = sum(group.is_flat for group in rollouts.groups[:6])
    assert 0 < flat < 6, "the test needs both"
    assert len(rollouts.groups) == 6 + flat


def test_episodes_that_are_lost_are_not_played_again_in_place_of_flat_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def away(self: Up, prompt: Prompt, sampling: Sampling, seed: int, **given: Any) -> Completion:
        asked.append(seed)
        raise EndpointError("no answer", kind="timeout")

    monkeypatch.setattr(Up, "complete", away)
    with pytest.raises(LostError, match="6 of 6 episodes have no result"):
        next_of(config("groups=3", "group_size=2", "explore=refill(rounds=50)"), False, {})
    assert len(asked) == 6


def test_a_start_that_was_flat_is_played_less_often_and_never_given_up() -> None:
    settings = config("groups=40", "group_size=2", "explore=skip(chance=0.5)")
    memory: dict[str, torch.Tensor] = {}
    source = RolloutSource(Players(settings), memory)
    plain = [start for _, start in source.next_starts(0, 2_000)[0]]
    next_of(settings, False, memory)
    assert set(memory["skip"][:, 1].tolist()) >= {1, 2}  # boards that came twice among the forty
    before = {key_of(settings.scenarios[0], start) for start in plain[:40]}

    def share_of_those(starts: Sequence[int]) -> float:
        return sum(key_of(settings.scenarios[0], start) in before for start in starts) / len(starts)

    after = [start for _, start in source.next_starts(0, 1_000)[0]]
    assert after == sorted(set(after) & set(range(max(after) + 1)))
    assert 0 < share_of_those(after) < 0.75 * share_of_those(plain)
    source = RolloutSource(Players(config("groups=40", "group_size=2")), memory)
    assert [start for _, start in source.next_starts(0, 2_000)[0]] == plain


def test_a_start_that_was_always_flat_is_played_once_in_twenty_times() -> None:
    starts = range(400)
    memory = {"skip": torch.tensor([[key_of(LAKE, start), 60] for start in starts])}
    played_again = list(Skip(chance=0.5).worthwhile(LAKE, iter(starts), memory))
    assert len(played_again) == pytest.approx(0.05 * 400, abs=10)


def test_flat_groups_are_counted_in_a_row_and_lost_ones_are_no_sign() -> None:
    memory: dict[str, torch.Tensor] = {}
    lost, ended = SimpleNamespace(error="timeout"), SimpleNamespace(error=None)
    for flat, episodes, in_a_row in (
        (True, [ended, ended], 1),
        (True, [lost, ended], 2),
        (True, [lost, lost], 2),
        (False, [ended, ended], 0),
        (True, [ended, ended], 1),
    ):
        playing: Any = SimpleNamespace(
            memory=memory,
            flat=lambda _, flat=flat: [flat],
            by_start=lambda _, of_start=episodes: [(LAKE, 5, ("player",), of_start)],
        )
        Skip().further(playing, [])
        assert memory["skip"].tolist() == [[key_of(LAKE, 5), in_a_row]]
    assert key_of(replace(LAKE, id="another"), 5) != key_of(LAKE, 5)  # the same board in another game


def test_a_server_is_not_asked_which_starts_are_worth_playing(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(start_seed: int, chance_seed: int) -> Game:
        raise AssertionError("a game was made only to look at its start")

    remote = replace(LAKE, make=asked, remote=Remote(sessions=1, repeats=False, copies=False))
    monkeypatch.setitem(SCENARIOS, "frozen-lake", remote)
    source = RolloutSource(Players(config("explore=skip")), {})
    assert len(source.next_starts(0, 5)[0]) == 5


# ── mixtures ──


def test_a_mixture_draws_its_scenarios_by_their_shares() -> None:
    settings = config("groups=400", scenario="frozen-lake@3,snake@1")
    starts, after = RolloutSource(Players(settings)).next_starts(0)
    ids = [scenario.id for scenario, _ in starts]
    assert ids.count("snake") == pytest.approx(100, abs=4.5 * (400 * 0.25 * 0.75) ** 0.5)
    assert len({(scenario.id, seed) for scenario, seed in starts}) == 400
    assert after > max(seed for _, seed in starts)


@pytest.mark.parametrize(
    ("scenario", "settings", "said"),
    [
        ("frozen-lake@1,snake@0", [], "above 0"),
        ("frozen-lake@0.5.5,snake", [], "0.5.5"),
        ("frozen-lake,frozen-lake", [], "twice"),
        ("frozen-lake", ["objectives=fixed(beauty=1)"], "objectives=fixed does not take beauty; it takes format"),
        ("frozen-lake", ["credit=episode(gamma=0.5)"], "credit=episode does not take gamma"),
        ("frozen-lake", ["credit=to-go(gamma=2)"], "less than or equal to 1, not '2'"),
        ("frozen-lake", ["credit=to-go(0.5)"], "'0.5' in 'to-go\\(0.5\\)' is not one key=value"),
        ("frozen-lake", ["credit=togo"], "did you mean to-go"),
        ("frozen-lake", ["explore=branch(episodes=1)"], "greater than or equal to 2"),
        ("frozen-lake", ["explore=branch(episodes=2)", "rollouts=vllm(ahead=1)"], "ahead=1"),
        ("frozen-lake", ["explore=entropy(target=0.1)", "rollouts=hf(ahead=1)"], "ahead=1"),
        ("frozen-lake", ["loss=gspo", "teacher=optimal"], "loss=gspo has one ratio for all"),
        ("frozen-lake", ["loss=turn", "credit=episode(words=0.5)"], "loss=turn has one ratio for all"),
        ("frozen-lake~noise", ["objectives=fixed(words=1)"], "no true words there; leave out .* words=…"),
        ("frozen-lake,frozen-lake~noise", ["gate=true-words"], "no true words there; leave out .*gate=true-words"),
        ("frozen-lake", ["objectives=variance(brevity=-0.9)"], "0 or more"),
        ("frozen-lake,snake", ["gate=widest(drop=0.5)"], "several"),
        ("frozen-lake,snake", ["credit=critic"], "several"),
        ("snake-duel", ["opponent=randm"], "in this process"),
        ("snake-duel", ["opponent=human"], "in this process"),
        ("snake-duel", ["opponent=endpoint:http://127.0.0.1:8000/v1#m"], "in this process"),
        ("spiel:kuhn_poker", ["opponent=optimal"], "no reference player"),
    ],
)
def test_settings_that_do_not_fit_are_refused(scenario: str, settings: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config(*settings, scenario=scenario)


# ── and all of them in a run ──


SETTINGS = {
    "critic": "(memory=3)",
    "branch": "(episodes=3)",
    "entropy": "(target=0.5)",
    "widest": "(drop=0.5)",
    "variance": "(brevity=0.2, words=1)",
    "fixed": "(brevity=0.2, format=1)",
    "model": "(of=nano:frozen-lake)",
    "episode": "(words=0.3, scale=update)",
    "refill": "(rounds=1)",
    "uniform": "(keep=2)",
    "spread": "(keep=2)",
}
RUNS = [
    ("frozen-lake,frozen-lake-slippery@0.5", []),
    *(
        ("frozen-lake", [f"{kind}={name}{SETTINGS.get(name, '')}"])
        for kind, names in RIVALS.items()
        for name in names
        if name not in ("aaw", "clip")  # of every run
    ),
]


class Killed(Quiet):
    """Copies the run's folder as a kill in its second update's last moment would leave it."""

    def __init__(self, run: Path, copy: Path) -> None:
        self._run, self._copy = run, copy

    def update(self, step: int, values: Measured) -> None:
        if step == 2:
            shutil.copytree(self._run, self._copy)


@pytest.mark.usefixtures("near", "lean")
@pytest.mark.parametrize(("scenario", "settings"), RUNS)
def test_a_run_with_it_goes_on_as_it_would_have(scenario: str, settings: list[str], tmp_path: Path) -> None:
    """Two updates at once, and the second again from the first one's checkpoint: the same adapter to the byte."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    chosen = config("evaluation=1(film=0)", *settings, "checkpoint_every=1", scenario=scenario)
    loop.train(chosen, whole, report=Killed(whole, parts))
    first, second = [(folder / "adapter_model.safetensors").read_bytes() for folder in (parts, whole)]
    assert first != second  # there is something to go on with
    loop.train(chosen, parts, resume=True, report=Quiet())
    assert (parts / "adapter_model.safetensors").read_bytes() == second
    rows = [row for row in read_rows(whole) if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["update/kept_turns"] for row in rows)
    if settings == ["explore=entropy(target=0.5)"]:
        assert rows[1]["rollout/temperature"] > 1  # nano is surer than that


def test_what_a_choice_is_called_is_what_it_is_read_from() -> None:
    for kind, names in RIVALS.items():
        for name in names:
            chosen = choose(kind, f"{name}{SETTINGS.get(name, '')}")
            assert chosen.name == name
            assert choose(kind, str(chosen)) == chosen


def test_a_class_that_kept_the_name_it_was_copied_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json and the model card said to-go, and --resume went on with that, without a word."""
    monkeypatch.setitem(RIVALS["credit"], "mine", "rivals.to_go:ToGo")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="credit=mine: its class ToGo has name = 'to-go': write 'mine' there"):
        choose("credit", "mine")


OUTSIDE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Dealt:  # a dataclass looks its own module up
    value: float

def credit(group): return [[float(j)] * len(turns) for j, turns in enumerate(group.turns)]
def short(group): return [[1.0] for turns in group.turns]
def nan(group): return [[float("nan")] * len(turns) for turns in group.turns]
def nothing(group): return None
def first(group, generator): return [0, 1]
def far(group, generator): return [99]
def none(group, generator): return []
"""


@pytest.mark.usefixtures("near", "lean")
def test_a_choice_of_ones_own_is_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OUTSIDE)
    chosen = config(f"credit={file}:credit", f"select={file}:first", "steps=1")
    assert chosen.model_dump()["credit"] == f"{file}:credit"
    loop.train(chosen, tmp_path / "run", report=Quiet())
    (row,) = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert row["update/kept_turns"] > 0
    for setting, message in {
        "credit=short": "for episodes of",
        "credit=nan": "one finite number",
        "credit=nothing": "returned None",
        "select=far": "at least one index",
        "select=none": "at least one index",
        "credit=missing": "has no function 'missing'",
    }.items():
        kind, name = setting.split("=")
        with pytest.raises(UsageError) as error:
            loop.train(config(f"{kind}={file}:{name}", "steps=1"), tmp_path / name, report=Quiet())
        assert message in f"{error.value} {error.value.fix}"


@pytest.mark.parametrize(
    "settings",
    [["credit=critic"], ["credit=to-go"], ["objectives=fixed(brevity=1, format=1)"], ["explore=branch(episodes=2)"]],
)
def test_a_seat_that_never_moved_is_compared_with_nothing(settings: list[str], tmp_path: Path) -> None:
    """nano knows no connect four: its first answer loses, and the other seat has no turn in any episode."""
    chosen = config(*settings, scenario="spiel:connect_four").model_copy(update={"steps": 1})
    loop.train(chosen, tmp_path / "run", report=Quiet())
    (row,) = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert row["rollout/invalid"] > 0.5


def test_names_of_a_mixture_keep_their_own_commas() -> None:
    from msgrpo.mixture import names_of, weights_of

    assert weights_of("snake, frozen-lake@0.5") == [1, 0.5]
    assert names_of("snake, frozen-lake") == ["snake", "frozen-lake"]
    name = "spiel:goofspiel(imp_info=True,num_cards=4)"
    assert names_of(f"{name}@0.3,snake@0.7") == [name, "snake"]
