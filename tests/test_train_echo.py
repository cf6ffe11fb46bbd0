"""ECHO: the policy learns to foretell the next observation, beside its loss and in the same forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from msgrpo.episode import observation_of
from msgrpo.games import get_scenario
from msgrpo.prompt import PromptTemplate
from msgrpo.train.config import TrainConfig, make_config
from msgrpo.train.groups import Lesson, Sample
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE, Ranks
from msgrpo.train.rivals import choose
from msgrpo.train.rivals.echo import observed_tokens
from msgrpo.train.rivals.optimal import Advice, Optimal
from msgrpo.train.update import _accumulate, micro_batches, pick, samples_of, update
from tests.train_helpers import learner, moved_policy, played

WEIGHT = 0.3
SMALL = ["groups=2", "group_size=4", "select=all", "minibatches=1", "evaluation=4(film=0)"]


def config(loss: str, *settings: str) -> TrainConfig:
    return make_config(settings=[*SMALL, f"loss={loss}", *settings])


@pytest.fixture(scope="module")
def policy() -> Policy:
    return moved_policy(config("clip"))


@pytest.fixture(scope="module")
def turns(policy: Policy) -> list[Lesson]:
    """The turns of one update's rollouts, with credit and what was observed."""
    chosen = config(f"clip(echo={WEIGHT})")
    playing, episodes = played(chosen, policy)
    picked = pick(playing.groups(episodes), chosen, learner(policy=policy))
    return [lesson for one in picked for lesson in one.lessons(chosen, policy.tokenizer)]


def accumulated(
    policy: Policy, samples: Sequence[Sample], chosen: TrainConfig, ranks: Ranks = ALONE
) -> tuple[Tensor, dict[str, float]]:
    """The gradient of one minibatch, and its figures."""
    policy.model.zero_grad()
    totals, _ = _accumulate(policy, samples, ranks, chosen)
    return torch.cat([weight.grad.flatten() for weight in policy.parameters if weight.grad is not None]), totals


def cross_entropy(policy: Policy, samples: Sequence[Sample]) -> Tensor:
    """Mean over the observations' tokens, row by row with whole prompts and nothing shared."""
    logs = []
    for sample in samples:
        ids = [*sample.prompt_ids, *sample.answer_ids, *sample.observed]
        logits = policy.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        first = len(ids) - len(sample.observed)
        logs += [logits[i - 1, ids[i]] for i in range(first, len(ids))]
    return -torch.stack(logs).mean()


def without(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(sample, observed=()) for sample in samples]


@given(st.sampled_from(["frozen-lake", "frozen-lake-slippery", "snake", "snake-poison-apple"]), st.integers(0, 200))
def test_the_observation_stands_as_a_prompt_introduces_it(policy: Policy, name: str, start: int) -> None:
    scenario = get_scenario(name)
    game = scenario.new(start, start)
    state = observation_of(game, game.to_move[0])
    prompt = PromptTemplate().render(scenario, state)
    expected = f"\nState: {state}"
    assert (prompt.prefix + prompt.state).endswith(expected)
    assert policy.tokenizer.decode(list(observed_tokens(state, policy.tokenizer))) == expected


def test_a_turn_observes_the_state_of_the_next_and_the_last_nothing(policy: Policy, turns: list[Lesson]) -> None:
    assert {len(lesson.episode.turns) for lesson in turns if lesson.episode} > {1}
    for lesson in turns:
        assert lesson.episode is not None
        after = [turn for turn in lesson.episode.turns if turn.step > lesson.turn.step]
        expected = observed_tokens(after[0].state, policy.tokenizer) if after else ()
        assert lesson.sample.observed == expected


@pytest.mark.parametrize("loss", ["clip", "clip(over=turn)", "cispo", "gspo"])
@pytest.mark.parametrize("tokens", [400, 16_384])
def test_to_the_loss_comes_the_cross_entropy_of_whole_prompts(
    policy: Policy, turns: list[Lesson], loss: str, tokens: int
) -> None:
    """However the turns are packed: its gradient beside that of the loss alone, which sees nothing of it."""
    samples = [lesson.sample for lesson in turns]
    inside = loss.replace(")", ", ") if "(" in loss else f"{loss}("
    chosen = config(f"{inside}echo={WEIGHT})", f"micro_batch={tokens}")
    both, totals = accumulated(policy, samples, chosen)
    alone, totals_alone = accumulated(policy, without(samples), config(loss, f"micro_batch={tokens}"))
    policy.model.zero_grad()
    entropy = cross_entropy(policy, samples)
    (WEIGHT * entropy).backward()  # type: ignore[no-untyped-call]
    own = torch.cat([weight.grad.flatten() for weight in policy.parameters if weight.grad is not None])
    assert own.norm() > 1e-3
    assert (both - alone - own).norm() < 1e-4 * own.norm()
    assert totals["echo"] == pytest.approx(entropy.item(), rel=1e-5)
    assert totals["loss"] == pytest.approx(totals_alone["loss"] + WEIGHT * entropy.item(), rel=1e-5)
    for name in ("kl", "clip_share", "ratio", "mismatch"):
        assert totals[name] == pytest.approx(totals_alone[name], rel=1e-4, abs=1e-7), name


def test_groups_that_went_alike_teach_what_was_observed(policy: Policy) -> None:
    chosen = config("clip", "steps=1")
    playing, episodes = played(chosen, policy)
    flat = [replace(one, advantages_G=one.advantages_G * 0) for one in playing.groups(episodes)]
    for group in flat:
        assert group.is_flat
    silent = config("clip", "credit=episode")
    assert pick(flat, silent, learner(policy=policy)) == []
    assert len(pick(flat, config("clip(echo=0.1)"), learner(policy=policy))) == len(flat)


@pytest.mark.parametrize("settings", [("teacher=optimal",), ("teacher=model(of=nano)",), ()])
@pytest.mark.parametrize("loss", ["clip", "decoupled"])
def test_teachers_and_old_rollouts_leave_what_was_observed(
    policy: Policy, settings: tuple[str, ...], loss: str
) -> None:
    chosen = config(f"{loss}(echo=0.1)", *settings)
    playing, episodes = played(chosen, policy)
    context = learner(policy=policy)
    picked = pick(playing.groups(episodes), chosen, context)
    samples, _ = samples_of(picked, chosen, context)
    plain = [lesson.sample for one in picked for lesson in one.lessons(chosen, policy.tokenizer)]
    observed = {(one.prompt_ids, one.answer_ids, one.observed) for one in samples if one.was_sampled}
    assert observed == {(one.prompt_ids, one.answer_ids, one.observed) for one in plain}
    assert any(one.observed for one in samples)
    assert all(math.isnan(one.old_logprobs[-1]) for one in samples if not one.was_sampled)
    if loss == "decoupled":  # fresh rollouts of this process have a weight of one: nothing slipped by a column
        for sample in samples:
            if sample.was_sampled:
                assert max(map(abs, sample.advantages)) < 50
                for a, b in zip(sample.old_logprobs, plain_logprobs(sample, plain), strict=True):
                    assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("divergence", ["cross-entropy", "reverse-kl"])
def test_a_teacher_that_says_nothing_of_a_turn_leaves_what_was_observed(
    policy: Policy, turns: list[Lesson], divergence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without returns the turns that it would not have chosen, or knows nothing of, were dropped as a whole."""
    teacher = choose("teacher", f"optimal(returns=0, divergence={divergence})")
    assert isinstance(teacher, Optimal)
    seen = [lesson for lesson in turns if lesson.sample.observed and lesson.turn.action is not None]
    other = {a: next(b for b in ("up", "down") if b != a) for a in ("up", "down", "left", "right")}
    said = {id(one.turn): Advice({other[str(one.turn.action)]: 1.0}, 4) for one in seen[1:]}  # of the first nothing
    monkeypatch.setattr(Optimal, "advice", lambda self, lessons: said)
    samples, _ = teacher.taught(seen, learner(policy=policy))
    own = {id(sample.completion): sample for sample in samples}
    for lesson in seen:
        sample = own[id(lesson.sample.completion)]
        assert sample.observed == lesson.sample.observed
        if divergence == "cross-entropy" or lesson is seen[0]:
            assert not any(sample.advantages)
    plain = [replace(lesson, sample=replace(lesson.sample, observed=())) for lesson in seen]
    of_teacher, _ = teacher.taught(plain, learner(policy=policy))
    assert all(any(sample.advantages) for sample in of_teacher)  # without an observation as it was


def test_ranks_share_the_observations_and_fill_their_micro_batches(policy: Policy, turns: list[Lesson]) -> None:
    """The gradients of three ranks sum to that of one, with the base whole on each and in parts."""
    chosen, samples = config(f"clip(echo={WEIGHT})", "micro_batch=500"), [lesson.sample for lesson in turns]
    one, totals = accumulated(policy, samples, chosen)
    for is_sharded in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Policy, "is_sharded", is_sharded)
            patch.setattr(Policy, "together", lambda self, what: None)
            parts = [accumulated(policy, samples, chosen, Ranks(rank, 3)) for rank in range(3)]
        assert (sum(gradient for gradient, _ in parts) - one).norm() < 1e-4 * one.norm()
        for name in ("loss", "echo"):
            assert sum(figures[name] for _, figures in parts) == pytest.approx(totals[name], rel=1e-4)


def test_what_was_observed_counts_in_the_size_of_a_micro_batch(turns: list[Lesson]) -> None:
    samples = [lesson.sample for lesson in turns]
    for micro in micro_batches(samples, 500, torch.device("cpu"), 0):
        longest = max(len(one.prompt_ids) + len(one.answer_ids) + len(one.observed) for one in micro.samples)
        assert len(micro.samples) == 1 or len(micro.samples) * longest <= 500


@pytest.mark.parametrize("loss", ["clip", "clip(echo=0.1)", "clip(kl=0)"])
def test_an_update_says_how_well_it_foretells_and_how_far_it_is_from_the_base_where_it_computes_that(
    policy: Policy, turns: list[Lesson], loss: str
) -> None:
    samples, chosen = [lesson.sample for lesson in turns], config(loss)
    optimizer = torch.optim.SGD(policy.parameters, lr=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msgrpo.train.update.learning_rate", lambda config, step: 0.0)
        stats = update(policy, optimizer, samples, chosen, torch.Generator().manual_seed(0), 0)
    if chosen.loss.echo:
        assert stats["update/echo"] == pytest.approx(cross_entropy(policy, samples).item(), rel=1e-4)
    else:
        assert "update/echo" not in stats
    assert ("update/kl" in stats) == (chosen.loss.kl > 0)  # 0 would say that nothing had moved


def test_each_of_several_players_observes_its_own_next_state(policy: Policy) -> None:
    chosen = make_config(settings=[*SMALL, "groups=1", "loss=clip(echo=0.1)"], given={"scenario": "snake-duel"})
    playing, episodes = played(chosen, policy)
    context, players = learner(policy=policy), set[str]()
    for one in pick(playing.groups(episodes), chosen, context):
        for lesson in one.lessons(chosen, policy.tokenizer):
            assert lesson.episode is not None
            own = [turn for turn in lesson.episode.turns_of(lesson.turn.player) if turn.step > lesson.turn.step]
            expected = observed_tokens(own[0].state, policy.tokenizer) if own else ()
            assert lesson.sample.observed == expected
            players.add(lesson.turn.player)
    assert len(players) == 2


def plain_logprobs(sample: Sample, plain: Sequence[Sample]) -> tuple[float, ...]:
    """Those that its answer was sampled with."""
    return next(
        one.old_logprobs
        for one in plain
        if (one.prompt_ids, one.answer_ids) == (sample.prompt_ids, sample.answer_ids)
    )


def test_a_service_cannot_and_says_so() -> None:
    with pytest.raises(Exception, match="echo must be 0"):
        config("clip(kl=0, echo=0.1)", "backend=tinker", "base=some/model")
