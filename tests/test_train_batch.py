"""What an update sees: which episodes, how turns are packed, and that packing changes no gradient."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.agent import Completion, ParseFailure, Sampling
from msgrpo.episode import Episode, Turn, read_episodes
from msgrpo.errors import UsageError
from msgrpo.game import Game, Outcome
from msgrpo.games import get_scenario
from msgrpo.run_log import read_rows
from msgrpo.train import loop
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.display import Quiet
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.groups import Group, Sample, beginning
from msgrpo.train.metrics import describe
from msgrpo.train.msgrpo import group_advantages
from msgrpo.train.policy import Pairs, Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.spread import largest_spread
from msgrpo.train.rollouts import Rollouts
from msgrpo.train.update import _accumulate, micro_batches, minibatches, pick
from tests.train_helpers import gradient, learner, samples_in, taught

CPU = torch.device("cpu")
START = get_scenario("frozen-lake").new(0, 0)


def turn(step: int, *ids: int, reward: float = 0.0) -> Turn:
    completion = Completion(
        "x", "stop", prompt_ids=(1, 2, step), token_ids=ids, logprobs=tuple(-0.1 * i for i in ids)
    )
    return Turn(step=step, player="player", state=f"s{step}", reward=reward, completion=completion)


def group(*returns: float) -> Group:
    """One episode a return, paid at its end; the j-th has j + 1 turns, whose answers begin with the token 10 j."""
    returns_G = torch.tensor(returns, dtype=torch.float64)
    turns = [
        [turn(step, 10 * j, step, reward=paid if step == j else 0.0) for step in range(j + 1)]
        for j, paid in enumerate(returns)
    ]
    return Group(START, turns, returns_G, group_advantages(returns_G))


def config(**settings: object) -> TrainConfig:
    return make_config(settings=[f"{name}={value}" for name, value in settings.items()])


def samples_of(groups: Sequence[Group], settings: TrainConfig) -> list[Sample]:
    return samples_in(pick(groups, settings, learner()), settings)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_all_keeps_all_uniform_and_aaw_as_many_as_asked() -> None:
    one = group(0, 0, 0, 1)
    assert config(select="all", group_size=4).select.kept(one, learner()) == [0, 1, 2, 3]
    for name in ("uniform", "aaw", "spread"):
        kept = config(select=f"{name}(keep=2)", group_size=4).select.kept(one, learner())
        assert len(set(kept)) == 2
        assert set(kept) <= {0, 1, 2, 3}


def test_uniform_does_not_look_at_the_advantage_and_aaw_does() -> None:
    """One winner of four: |A| is √3 against 1/√3, so AAW's first draw takes it with e^√3 / (e^√3 + 3 e^(1/√3)).

    That is 0.514 whatever was won; by the returns themselves it would be e^4 / (e^4 + 3), 0.948.
    """
    one = group(0, 0, 0, 4)
    first = {
        name: Counter(
            config(select=f"{name}(keep=1)", group_size=4).select.kept(one, learner(seed))[0] for seed in range(2000)
        )[3]
        / 2000
        for name in ("uniform", "aaw")
    }
    assert first["uniform"] == pytest.approx(0.25, abs=0.03)
    assert first["aaw"] == pytest.approx(0.514, abs=0.035)


def test_select_takes_every_turn_of_every_kept_episode_with_its_advantage() -> None:
    groups = [group(0.0, 1.0), group(2.0, 2.0)]  # the second is flat: it teaches nothing
    samples = samples_of(groups, config(select="all", group_size=2))
    assert [(sample.answer_ids, sample.advantage) for sample in samples] == [
        ((0, 0), -1.0),
        ((10, 0), 1.0),
        ((10, 1), 1.0),
    ]
    assert samples[2].prompt_ids == (1, 2, 1)
    assert samples[2].old_logprobs == pytest.approx((-1.0, -0.1))


def an_episode(number: int, *turns: Turn, error: str | None = None) -> Episode:
    return Episode(
        scenario="frozen-lake", start_seed=0, chance_seed=number, sampling_seed=0, agents={"player": "p"},
        settings={}, turns=list(turns), error=error,
    )  # fmt: skip


def test_a_group_compares_the_episodes_that_have_a_result_and_a_turn() -> None:
    """Lost ones, whatever they were paid, shift no mean and no number: the j-th of each list is the same episode."""
    paid = turn(0, 5, reward=1.0).model_copy(update={"late": 0.5, "shaping": -0.1})
    lost = an_episode(1, turn(0, 6, reward=9.0), error="game_fault")
    episodes = [an_episode(0, paid), lost, an_episode(2), an_episode(3, turn(0, 7), turn(1, 8, reward=0.4))]
    made = Group.of(lambda episode: START if episode.chance_seed == 3 else START.copy(), episodes, "player", 4)
    assert made is not None
    assert made.returns_G.tolist() == pytest.approx([1.4, 0.4])
    assert made.advantages_G.tolist() == pytest.approx([1, -1])
    assert [episode.chance_seed for episode in made.episodes] == [0, 3]
    assert [[one.completion.token_ids for one in turns if one.completion] for turns in made.turns] == [
        [(5,)],
        [(7,), (8,)],
    ]
    assert made.origin(1) is START
    assert made.origin(0) is not START
    assert made.place == 4
    asked = [(1, 2, 0)], [(1, 2, 0), (1, 2, 1)]  # a credit sees what was asked, and the reward with its shaping
    assert [[step.state for step in steps] for steps in made.trajectories()] == [*asked]
    assert [[step.reward for step in steps] for steps in made.trajectories()] == [[1.4], [0.0, 0.4]]
    for too_few in ([], episodes[:1], episodes[:3]):
        assert Group.of(lambda episode: START, too_few, "player", 0) is None


SAMPLES = st.lists(
    st.tuples(st.lists(st.integers(5, 9), max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
    min_size=1,
    max_size=12,
)


@given(SAMPLES, st.integers(1, 60), st.integers(0, 20))
def test_micro_batches_lose_nothing_and_keep_their_bound(
    rows: list[tuple[list[int], list[int]]], most: int, longest_sharing: int
) -> None:
    """What does not share the prefix counts with it: the model will put it in front of every row."""
    samples = [
        taught((1, 2, 3, *rest, 4), tuple(answer), tuple(float(-i) for i in range(len(answer))), float(n))
        for n, (rest, answer) in enumerate(rows)
    ]
    seen = []
    for micro in micro_batches(samples, most, CPU, longest_sharing):
        width = micro.old_logprobs_NT.shape[1]
        longest = max(len(rest) + len(answer) for rest, answer in micro.pairs)
        assert len(micro.pairs) == 1 or len(micro.pairs) * longest <= most
        assert not micro.prefix or len(micro.prefix) + longest <= longest_sharing
        for (rest, answer), old, advantage in zip(
            micro.pairs, micro.old_logprobs_NT, micro.advantages_NT, strict=True
        ):
            sample = samples[int(advantage[-1])]
            assert (*micro.prefix, *rest) == sample.prompt_ids
            assert tuple(answer) == sample.answer_ids
            assert old[width - len(answer) :].tolist() == list(sample.old_logprobs)  # answers end together
            assert not old[: width - len(answer)].any()
            assert advantage[width - len(answer) :].tolist() == [sample.advantage] * len(answer)
            seen.append(int(advantage[-1]))
    assert sorted(seen) == list(range(len(samples)))


@pytest.fixture(scope="module")
def policy() -> Policy:
    made = Policy(make_config())
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters):
            parameter.copy_(torch.randn(parameter.shape, generator=generator(i)) * 0.03)
    return made


@pytest.fixture(scope="module")
def samples(policy: Policy) -> list[Sample]:
    """Answers of different lengths to different prompts, with log-probabilities of another policy."""
    from msgrpo.prompt import PromptTemplate

    scenario = get_scenario("frozen-lake")
    prompts = [PromptTemplate().render(scenario, scenario.new(seed, 0).observe("player")) for seed in range(6)]
    engine = HfEngine(policy, scenario, make_config()).load(1)
    answers = engine.generate(prompts, Sampling(max_tokens=20), list(range(6)))
    return [
        taught(a.prompt_ids, a.token_ids[: 3 + 2 * i], tuple(p - 0.1 for p in a.logprobs[: 3 + 2 * i]), (-1.0) ** i)
        for i, a in enumerate(answers)
    ]


@pytest.mark.parametrize("over", ["token", "turn"])
def test_the_size_of_a_micro_batch_changes_no_gradient(policy: Policy, samples: list[Sample], over: str) -> None:
    """The named wrong variant, parts that weigh the same whatever they hold, differs."""
    whole, totals = gradient(policy, samples, config(loss=f"clip(over={over})", micro_batch=100_000))
    parts, in_parts = gradient(policy, samples, config(loss=f"clip(over={over})", micro_batch=1))
    assert apart(parts, whole) < 1e-3
    assert in_parts == pytest.approx(totals, rel=1e-4, abs=1e-6)
    each = [gradient(policy, [sample], config(loss=f"clip(over={over})"))[0] for sample in samples]
    equal_weights = torch.stack(each).mean(0)
    assert (apart(equal_weights, whole) < 1e-2) == (over == "turn")


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a − b| / |b|."""
    return float((a - b).norm() / b.norm())


def test_aggregates_weigh_turns_differently(policy: Policy, samples: list[Sample]) -> None:
    by_token, _ = gradient(policy, samples, config(loss="clip(over=token)"))
    by_turn, _ = gradient(policy, samples, config(loss="clip(over=turn)"))
    assert apart(by_token, by_turn) > 0.05


def test_describe_by_hand() -> None:
    def episode(success: bool, *turns: Turn) -> Episode:
        return Episode(
            scenario="frozen-lake", start_seed=0, chance_seed=0, sampling_seed=0, agents={"player": "p"},
            settings={}, turns=list(turns), outcome=Outcome.TERMINATED, success=success,
            returns={"player": float(success)},
        )  # fmt: skip

    good = Turn(step=0, player="player", state="s", completion_tokens=10, finish_reason="stop")
    cut = Turn(step=0, player="player", state="s", completion_tokens=30, finish_reason="length")
    bad = cut.model_copy(update={"failure": ParseFailure.NO_TAG})
    episodes = [episode(True, good, cut), episode(False, bad, good)]
    found = describe(Rollouts([group(0, 1), group(1, 1)], episodes, episodes, [], 0, 0, 0.0, 0.0))
    assert found == {
        "rollout/return": 0.5, "rollout/success": 0.5, "rollout/invalid": 0.25, "rollout/truncated": 0.5,
        "rollout/turns": 4.0, "rollout/tokens": 80.0, "rollout/flat_groups": 0.5, "rollout/lost": 0.0,
    }  # fmt: skip


def test_several_players_are_groups_of_their_own_and_train(tmp_path: Path) -> None:
    settings = config(
        groups=1,
        group_size=4,
        select="aaw(keep=2)",
        max_tokens=24,
        evaluation="2(every=1)",
        minibatches=1,
        seed=3,
    )
    run = settings.model_copy(update={"scenario": "snake-duel", "steps": 1})
    summary = loop.train(run, tmp_path / "run", report=Quiet())
    assert summary["score"] == "return"
    (row,) = [row for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert row["update/kept_turns"] > 0
    episodes = list(read_episodes(tmp_path / "run" / "transcripts.jsonl"))
    assert len(episodes) == 4  # of one group
    assert all({turn.player for turn in episode.turns} == {"snake1", "snake2"} for episode in episodes)


def test_in_units_of_reward_a_group_of_four_weighs_as_one_of_two() -> None:
    """C − mean C is ½ in both; an episode that is lost must not make the others' differences larger."""
    for returns in ((0.0, 1.0), (0.0, 1.0, 1.0, 0.0)):
        assert group(*returns).of_episodes("update") == pytest.approx([paid - 0.5 for paid in returns])
        assert group(*returns).of_episodes("group") == pytest.approx([2 * paid - 1 for paid in returns])


def test_by_the_updates_spread_a_start_weighs_by_what_is_at_stake_in_it() -> None:
    """Of two starts of two episodes one has a tenth of the other's differences: by the group both weigh the same."""
    pair = [group(0.0, 1.0), group(0.9, 1.0)]
    by_group, by_update = (
        [
            one.credits[1][0]
            for one in pick(pair, config(select="aaw(keep=2)", credit=f"episode(scale={scale})"), learner())
        ]
        for scale in ("group", "update")
    )
    assert by_group == pytest.approx([1.0, 1.0])
    assert by_update[0] == pytest.approx(10 * by_update[1])
    assert by_update[0] ** 2 + by_update[1] ** 2 == pytest.approx(2.0)  # mean of the squares 1
    with pytest.raises(UsageError, match="compares returns of one game"):
        config(scenario="frozen-lake,snake", credit="episode(scale=update)")


# ── found by mutation ──


def flat_or_not(*returns: float) -> Group:
    returns_G = torch.tensor(returns, dtype=torch.float64)
    return Group(START, [[] for _ in returns], returns_G, group_advantages(returns_G))


def sample(own: int, answer: int, advantage: float = 0.0) -> Sample:
    """A prompt of 7, 7 and `own` tokens more, the first of which is `own`; an answer of `answer` tokens."""
    return taught((7, 7, own, *[0] * (own - 1)), (9,) * answer, tuple(-0.5 for _ in range(answer)), advantage)


def test_a_samples_tokens_are_those_of_prompt_and_answer() -> None:
    assert sample(3, 4).tokens == 2 + 3 + 4
    assert replace(sample(3, 2, advantage=2.0), weights=(0.5, 1.0)).advantages == (1.0, 2.0)
    assert taught((7,), (9, 9), (-0.5, -0.5), 0.0).was_sampled
    assert not taught((7,), (9, 9), (-0.5, math.nan), 0.0).was_sampled  # a teacher's word in the policy's answer


@pytest.mark.parametrize("luck_in_start", [False, True])
def test_a_beginning_has_the_luck_that_the_episode_had(luck_in_start: bool) -> None:
    lake, made = get_scenario("frozen-lake"), list[tuple[int, int]]()

    def make(start: int, chance: int) -> Game:
        made.append((start, chance))
        return lake.make(start, chance)

    new = beginning(replace(lake, make=make, luck_in_start=luck_in_start))
    for chance in (1, 2):
        new(an_episode(chance))
    assert made == [(0, 1), (0, 2)]


def test_a_group_is_flat_where_no_return_is_larger_than_another() -> None:
    assert flat_or_not(2.0, 2.0).is_flat
    assert not flat_or_not(0.0, 2.0).is_flat


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1, 1, 1, 1]),
        (7, [1, 1, 1, 1]),
        (8, [2, 1, 1]),  # 2·4 are as many as may be; 3·6 and 2·7 are too many
        (13, [2, 1, 1]),
        (14, [2, 2]),
        (18, [3, 1]),
        (27, [3, 1]),
        (28, [4]),
    ],
)
def test_micro_batches_are_filled_up_from_short_to_long(most: int, sizes: list[int]) -> None:
    """Own tokens 3, 4, 6 and 7, in this order; the two that all prompts share are not counted."""
    samples = [sample(2, 4, 6.0), sample(1, 2, 3.0), sample(6, 1, 7.0), sample(3, 1, 4.0)]
    parts = list(micro_batches(samples, most, CPU, 100))
    assert [len(part.pairs) for part in parts] == sizes
    assert [value for part in parts for value in part.advantages_NT[:, -1].tolist()] == [3.0, 4.0, 6.0, 7.0]


def test_a_micro_batch_by_hand() -> None:
    """Log-probabilities stand on the right, where answers end together; the prefix is computed once."""
    one, two = taught((7, 7, 1), (5, 6), (-0.5, -0.25), 1.0), taught((7, 7, 2, 2, 2), (8,), (-2.0,), -1.0)
    (part,) = micro_batches([two, one], 100, CPU, 100)
    assert part.prefix == [7, 7]
    assert part.pairs == [([1], [5, 6]), ([2, 2, 2], [8])]
    assert part.old_logprobs_NT.tolist() == [[-0.5, -0.25], [0.0, -2.0]]
    assert part.advantages_NT.tolist() == [[1.0, 1.0], [0.0, -1.0]]


def test_an_update_fills_its_micro_batches_with_whole_prompts_where_no_prefix_is_shared(
    policy: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past a layer's window every row holds its prompt: counted without it, a part would be many times too large."""
    most, widths = 600, list[int]()
    logprobs = Policy.logprobs

    def seen(self: Policy, prefix: list[int], pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        assert not prefix
        if len(pairs) > 1:
            widths.append(len(pairs) * max(len(rest) + len(answer) for rest, answer in pairs))
        return logprobs(self, prefix, pairs)

    monkeypatch.setattr(Policy, "longest_sharing", 0)
    monkeypatch.setattr(Policy, "logprobs", seen)
    _accumulate(policy, samples, ALONE, make_config(settings=[f"micro_batch={most}"]))
    assert widths
    assert max(widths) <= most


@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (2, [3, 4]), (3, [2, 2, 3]), (7, [1] * 7), (9, [1] * 7)])
def test_minibatches_are_at_most_as_many_as_asked(count: int, sizes: list[int]) -> None:
    parts = list(minibatches([sample(i + 1, 1) for i in range(7)], count, generator()))
    assert sorted(len(part) for part in parts) == sizes
    assert list(minibatches([], count, generator())) == []


def test_minibatches_are_drawn_by_their_generator_alone() -> None:
    samples = [sample(i + 1, 1) for i in range(8)]
    orders = []
    for seed, others in ((0, 1), (0, 2), (1, 1), (2, 1)):
        torch.manual_seed(others)
        orders.append([one.tokens for part in minibatches(samples, 2, generator(seed)) for one in part])
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in [[one.tokens for one in samples], *orders]}) == 4


@pytest.mark.parametrize("name", ["uniform", "aaw"])
def test_selection_is_drawn_by_its_generator_alone(name: str) -> None:
    group, settings = flat_or_not(0, 0, 1, 2, 3, 5, 8, 13), config(select=f"{name}(keep=4)", group_size=8)
    drawn = []
    for seed, others in ((0, 1), (0, 2), (1, 1), (2, 1)):
        torch.manual_seed(others)
        drawn.append(settings.select.kept(group, learner(seed)))
    assert drawn[0] == drawn[1]
    assert len({tuple(kept) for kept in drawn}) == 3
    assert all(len(set(settings.select.kept(group, learner(seed)))) == 4 for seed in range(50))


def test_a_uniform_draw_takes_every_episode_as_often() -> None:
    group, settings = flat_or_not(0, 0, 0, 1), config(select="uniform(keep=2)", group_size=4)
    counts = torch.zeros(4)
    draw = learner()
    for _ in range(2000):
        counts[settings.select.kept(group, draw)] += 1
    assert (counts / 2000).tolist() == pytest.approx([0.5] * 4, abs=4.5 * 0.5 / 2000**0.5)


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]), min_size=3, max_size=7), st.integers(1, 7))
def test_no_other_subset_has_a_larger_spread(returns: list[float], keep: int) -> None:
    keep = min(keep, len(returns))
    found = largest_spread(torch.tensor(returns), keep)
    assert len(set(found)) == keep

    def variance(chosen: Sequence[int]) -> float:
        return float(torch.tensor([returns[i] for i in chosen]).var(correction=0))

    assert variance(found) == pytest.approx(max(map(variance, combinations(range(len(returns)), keep))))


def test_the_largest_spread_is_not_the_largest_advantages() -> None:
    """Wrong: the two with the largest |A|, which here are both the high ones."""
    returns = torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 6.0])
    assert sorted(largest_spread(returns, 2)) == [0, 5]
    assert group_advantages(returns).abs().topk(2).indices.sort().values.tolist() == [4, 5]


def test_each_turn_of_a_kept_episode_has_its_own_credit() -> None:
    """One winner of four: with `state-action` only the turns at which they part have credit, and not all the same."""
    one = group(0, 0, 0, 1)
    by_episode, by_turn = (
        {sample.advantage for sample in samples_of([one], config(credit=name, select="all", group_size=4))}
        for name in ("episode", "to-go")
    )
    assert by_episode == set(one.advantages_G.tolist())
    assert by_turn != by_episode


def test_the_words_before_an_action_weigh_as_the_credit_says() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))  # no action: words only
    for credit, weights in (("episode", ()), ("episode(words=0.5)", (0.5, 0.5))):
        settings = config(credit=credit, select="all", group_size=2)
        picked = pick([group(0, 1)], settings, learner())
        assert {sample.weights for sample in samples_in(picked, settings, tokenizer)} == {weights}


def test_flat_groups_take_no_draw() -> None:
    """A flat group before another does not change what that one's draw is."""
    alone, after = learner(), learner()
    settings = config(select="aaw(keep=2)", group_size=4)
    pick([flat_or_not(0, 0, 0, 1)], settings, alone)
    pick([flat_or_not(1, 1, 1, 1), flat_or_not(0, 0, 0, 1)], settings, after)
    assert torch.equal(alone.generator.get_state(), after.generator.get_state())
