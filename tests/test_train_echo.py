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
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.echo import observed_tokens
from msgrpo.train.update import _accumulate, lessons, pick
from tests.train_helpers import learner, played

WEIGHT = 0.3
SMALL = ["groups=2", "group_size=4", "select=all", "minibatches=1", "evaluation=4(film=0)"]


def config(loss: str, *settings: str) -> TrainConfig:
    return make_config(settings=[*SMALL, f"loss={loss}", *settings])


@pytest.fixture(scope="module")
def policy() -> Policy:
    made = Policy(config("clip"))
    generator = torch.Generator().manual_seed(1)
    for weight in made.parameters:  # LoRA's first weights give no gradient to one of its two factors
        weight.data = torch.randn(weight.shape, generator=generator) * 0.02
    return made


@pytest.fixture(scope="module")
def turns(policy: Policy) -> list[Lesson]:
    """The turns of one update's rollouts, with credit and what was observed."""
    chosen = config(f"clip(echo={WEIGHT})")
    playing, episodes = played(chosen, policy)
    picked = pick(playing.groups(episodes), chosen, learner(policy=policy))
    return [lesson for one in picked for lesson in one.lessons(chosen, policy.tokenizer)]


def accumulated(policy: Policy, samples: Sequence[Sample], chosen: TrainConfig) -> tuple[Tensor, dict[str, float]]:
    """The gradient of one minibatch, and its figures."""
    policy.model.zero_grad()
    totals, _ = _accumulate(policy, samples, ALONE, chosen)
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
    samples, _ = lessons(picked, chosen, context)
    plain = [sample for one in picked for sample in one.samples(chosen, policy.tokenizer)]
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


def plain_logprobs(sample: Sample, plain: Sequence[Sample]) -> tuple[float, ...]:
    """Those that its answer was sampled with."""
    return next(
        one.old_logprobs
        for one in plain
        if (one.prompt_ids, one.answer_ids) == (sample.prompt_ids, sample.answer_ids)
    )


def test_a_service_cannot_and_says_so() -> None:
    with pytest.raises(Exception, match="echo must be 0"):
        config("clip(kl=0, echo=0.1)", "engine=tinker", "base=some/model")
