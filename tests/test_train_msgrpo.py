"""The method's maths: by hand, against a slow loop, against finite differences, and against named wrong variants."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msgrpo.train.msgrpo import K3_MAX, aaw_sample, composite_returns, group_advantages, k3, policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.1}


# ── returns and advantages ───────────────────────────────────────────────────────────────────────────────────


def test_composite_returns_add_shaping_over_all_steps() -> None:
    returns = composite_returns([[0.0, 1.0], [0.0, 0.0, -1.0]], [[-0.1, 0.0], [0.0, -0.1, -0.1]])
    assert returns.tolist() == pytest.approx([0.9, -1.2])


def test_composite_returns_refuse_ragged_shaping() -> None:
    with pytest.raises(ValueError, match="same steps"):
        composite_returns([[0.0, 1.0]], [[0.0]])


def test_advantages_by_hand() -> None:
    """Returns 0, 0, 0, 1: mean 1/4, population std √3/4; the sample std (÷ G − 1) would give 1.5, not √3."""
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64))
    assert advantages.tolist() == pytest.approx([-1 / math.sqrt(3)] * 3 + [math.sqrt(3)])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=40))
def test_advantages_are_normalised_or_zero(values: list[float]) -> None:
    returns = torch.tensor(values, dtype=torch.float64)
    advantages = group_advantages(returns)
    assert torch.isfinite(advantages).all()
    if advantages.any():
        assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert advantages.square().mean().item() == pytest.approx(1, abs=1e-6)
        assert (advantages[returns.argsort()].diff() >= 0).all()
    else:
        assert returns.max() - returns.min() <= 1e-9 * max(1.0, returns.abs().max().item())


whole_returns = st.lists(st.integers(-9, 9), min_size=1, max_size=12).map(
    lambda values: torch.tensor(values).double()
)


@given(whole_returns, st.integers(-100, 100), st.sampled_from([0.5, 2.0, 3.0]), st.randoms(use_true_random=False))
def test_only_differences_in_units_of_their_spread_count(
    returns: torch.Tensor, bonus: int, rate: float, chance: random.Random
) -> None:
    """A bonus for all, another currency and another order change nothing; the opposite game turns all around."""
    advantages = group_advantages(returns)
    order = torch.tensor(chance.sample(range(len(returns)), len(returns)))
    assert torch.allclose(group_advantages(returns + bonus), advantages)
    assert torch.allclose(group_advantages(rate * returns), advantages)
    assert torch.allclose(group_advantages(returns[order]), advantages[order])
    assert torch.allclose(group_advantages(-returns), -advantages)


def test_an_episode_alone_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([7.0])).tolist() == [0.0]


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6])
def test_equal_returns_have_no_advantage(value: float) -> None:
    assert group_advantages(torch.full((24,), value, dtype=torch.float64)).tolist() == [0.0] * 24


# ── selection ────────────────────────────────────────────────────────────────────────────────────────────────


def inclusion_probabilities(weights: list[float], keep: int) -> list[float]:
    """By enumerating every ordered draw without replacement."""
    chance = [0.0] * len(weights)
    for order in itertools.permutations(range(len(weights)), keep):
        p, left = 1.0, sum(weights)
        for i in order:
            p *= weights[i] / left
            left -= weights[i]
        for i in order:
            chance[i] += p
    return chance


def test_aaw_draws_with_exp_of_the_absolute_advantage() -> None:
    advantages = torch.tensor([-2.0, -0.5, 0.0, 0.5, 1.5], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    draws, keep = 20_000, 2
    counts = torch.zeros(5)
    for _ in range(draws):
        kept = aaw_sample(advantages, keep, generator)
        assert len(set(kept.tolist())) == keep
        counts[kept] += 1
    expected = inclusion_probabilities([math.exp(abs(a)) for a in advantages.tolist()], keep)
    for seen, p in zip((counts / draws).tolist(), expected, strict=True):
        assert seen == pytest.approx(p, abs=4.5 * math.sqrt(p * (1 - p) / draws))
    wrong_without_abs = inclusion_probabilities([math.exp(a) for a in advantages.tolist()], keep)
    assert abs(counts[0] / draws - wrong_without_abs[0]) > 0.2


def test_aaw_keeps_all_when_asked_and_refuses_more() -> None:
    advantages = torch.tensor([0.1, -0.2, 0.3])
    assert sorted(aaw_sample(advantages, 3, torch.Generator()).tolist()) == [0, 1, 2]
    for keep in (0, 4):
        with pytest.raises(ValueError, match="between 1 and"):
            aaw_sample(advantages, keep, torch.Generator())


def test_aaw_is_reproducible_by_its_generator() -> None:
    advantages = torch.linspace(-2, 2, 24)
    first, second = (aaw_sample(advantages, 6, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.tolist() == second.tolist()


# ── loss ─────────────────────────────────────────────────────────────────────────────────────────────────────


def random_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator, n, t = torch.Generator().manual_seed(seed), 5, 4

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -noise(n, t).abs()
    mask = torch.ones(n, t, dtype=torch.long)
    mask[0, 0] = mask[1, :3] = 0
    return logprobs, logprobs + 0.3 * noise(n, t), logprobs + 0.3 * noise(n, t), noise(n), mask


def slow_loss(lp, old, ref, advantages, mask, *, clip_low, clip_high, kl_coef, aggregate) -> float:  # type: ignore[no-untyped-def]
    per_turn = []
    for n in range(lp.shape[0]):
        tokens = []
        for t in range(lp.shape[1]):
            if mask[n, t]:
                w, a = math.exp(lp[n, t] - old[n, t]), float(advantages[n])
                clipped = min(max(w, 1 - clip_low), 1 + clip_high)
                r = math.exp(ref[n, t] - lp[n, t])
                tokens.append(-min(w * a, clipped * a) + kl_coef * (r - math.log(r) - 1))
        per_turn.append(tokens)
    if aggregate == "token":
        everything = list(itertools.chain.from_iterable(per_turn))
        return sum(everything) / len(everything)
    return sum(sum(tokens) / len(tokens) for tokens in per_turn) / len(per_turn)


@pytest.mark.parametrize("aggregate", ["token", "turn"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_a_slow_loop(aggregate: str, seed: int) -> None:
    inputs = random_inputs(seed)
    loss, _ = policy_loss(*inputs, **CLIP, aggregate=aggregate)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(slow_loss(*inputs, **CLIP, aggregate=aggregate), rel=1e-12)


def test_the_two_aggregates_differ_on_ragged_turns() -> None:
    inputs = random_inputs()
    by = {name: policy_loss(*inputs, **CLIP, aggregate=name)[0].item() for name in ("token", "turn")}  # type: ignore[arg-type]
    assert by["token"] != pytest.approx(by["turn"], rel=1e-3)


def test_loss_by_hand() -> None:
    """One token, A = 2, w = e^0.5 ≈ 1.649 clipped to 1.28, reference equal to the policy: loss = −2.56."""
    lp = torch.tensor([[-1.0]], dtype=torch.float64)
    loss, stats = policy_loss(lp, lp - 0.5, lp, torch.tensor([2.0]), torch.ones(1, 1), **CLIP, aggregate="token")
    assert loss.item() == pytest.approx(-2.56)
    assert stats["clip_share"].item() == 1.0


def test_a_bad_turn_is_not_clipped_when_it_became_more_likely() -> None:
    """A < 0 and w > 1 + ε: min() takes the unclipped, worse value, so the gradient still pushes down."""
    lp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    loss, stats = policy_loss(
        lp, lp.detach() - 0.5, lp.detach(), torch.tensor([-2.0]), torch.ones(1, 1), **CLIP, aggregate="token"
    )
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.exp(0.5))
    assert stats["clip_share"].item() == 0.0
    assert lp.grad is not None
    assert lp.grad.item() == pytest.approx(2 * math.exp(0.5))


def test_the_kl_term_by_hand_and_its_sign() -> None:
    """p_ref/pθ = 2: k3 = 2 − ln 2 − 1; the other direction's estimator, w − ln w − 1 with w = 1/2, is 0.193."""
    lp = torch.tensor([[-2.0]], dtype=torch.float64)
    loss, stats = policy_loss(lp, lp, lp + math.log(2), torch.zeros(1), torch.ones(1, 1), **CLIP, aggregate="token")
    assert stats["kl"].item() == pytest.approx(1 - math.log(2))
    assert loss.item() == pytest.approx(0.1 * (1 - math.log(2)))


def test_a_token_that_the_policy_gave_up_cannot_outweigh_all_others() -> None:
    """p_ref/pθ = e^12: unbounded, k3 and its gradient would be 163,000; at p_ref/pθ = e^4 both are exact."""
    lp = torch.tensor([[-13.0, -5.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.full((1, 2), -1.0, dtype=torch.float64)
    loss, stats = policy_loss(
        lp, lp.detach(), ref, torch.zeros(1), torch.ones(1, 2),
        clip_low=0.2, clip_high=0.2, kl_coef=1.0, aggregate="token",
    )  # fmt: skip
    loss.backward()
    assert lp.grad is not None
    assert stats["kl"].item() == pytest.approx((K3_MAX + math.exp(4) - 5) / 2)
    assert lp.grad[0].tolist() == pytest.approx([0.0, (1 - math.exp(4)) / 2])


def test_a_token_that_is_all_but_impossible_leaves_the_gradient_finite() -> None:
    """p_ref/pθ = e^94 is infinite in float32, and 0 · ∞ would be the gradient behind the cut-off."""
    lp = torch.tensor([[-95.0, -1.0]], requires_grad=True)
    loss, stats = policy_loss(
        lp, lp.detach(), torch.tensor([[-1.0, -1.0]]), torch.zeros(1), torch.ones(1, 2),
        clip_low=0.2, clip_high=0.2, kl_coef=1.0, aggregate="token",
    )  # fmt: skip
    loss.backward()
    assert lp.grad is not None
    assert lp.grad[0].tolist() == [0.0, 0.0]
    assert stats["kl"].item() == pytest.approx(K3_MAX / 2)


def test_padding_has_no_say() -> None:
    lp, old, ref, advantages, mask = random_inputs()
    noisy = torch.where(mask.bool(), old, torch.full_like(old, -1e3))
    same = [policy_loss(lp, o, ref, advantages, mask, **CLIP, aggregate="token")[0].item() for o in (old, noisy)]
    assert same[0] == same[1]
    wrong_unmasked = policy_loss(lp, old, ref, advantages, torch.ones_like(mask), **CLIP, aggregate="token")[0].item()
    assert same[0] != pytest.approx(wrong_unmasked, rel=1e-3)


@pytest.mark.parametrize("aggregate", ["token", "turn"])
def test_gradient_against_finite_differences(aggregate: str) -> None:
    lp, *rest = random_inputs(3)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return policy_loss(x, *rest, **CLIP, aggregate=aggregate)[0]  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(loss_of, (lp.clone().requires_grad_(),), eps=1e-6, atol=1e-6)


def test_on_policy_gradient_is_minus_the_advantage() -> None:
    """With w = 1 and no KL, ∂loss/∂log p = −A/tokens: better than the mean means more likely."""
    lp = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -3.0])
    loss, _ = policy_loss(
        lp, lp.detach(), lp.detach(), advantages, torch.ones(2, 2),
        clip_low=0.2, clip_high=0.2, kl_coef=0.0, aggregate="token",
    )  # fmt: skip
    loss.backward()
    assert lp.grad is not None
    assert lp.grad.flatten().tolist() == pytest.approx([-0.25, -0.25, 0.75, 0.75])


@pytest.mark.parametrize("size", [2, 3])
def test_over_all_groups_the_gradient_is_that_of_the_expected_return(size: int) -> None:
    """A game of one turn with three answers: the mean over all groups of G, by their probabilities.

    With C_j − mean C for an advantage the descent is (G − 1)/G ∇ E[C]: the mean holds a G-th of the episode's own
    return. (What is divided by the group's spread is not the gradient of any return.)
    """
    worth = torch.tensor([0.0, 1.0, 0.3], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.7, 0.4], dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(3, dtype=torch.float64)
    for answers in itertools.product(range(3), repeat=size):
        logprobs_NT = logits.log_softmax(0)[list(answers), None]
        returns_G = composite_returns([[float(worth[answer])] for answer in answers], [[0.0]] * size)
        played = logprobs_NT.detach()
        loss, _ = policy_loss(
            logprobs_NT, played, played, returns_G - returns_G.mean(), torch.ones(size, 1),
            clip_low=0.2, clip_high=0.28, kl_coef=0.0, aggregate="token",
        )  # fmt: skip
        expected += played.sum().exp() * torch.autograd.grad(loss, logits)[0]
    (uphill,) = torch.autograd.grad(logits.softmax(0) @ worth, logits)
    assert torch.allclose(-expected, (size - 1) / size * uphill)


def test_k3_has_the_value_of_one_divergence_and_the_gradient_of_the_other() -> None:
    """Summed over all tokens by their probabilities: KL(pθ ‖ p_ref), and the gradient of KL(p_ref ‖ pθ)."""
    logits = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    log_ref = torch.tensor([1.0, 0.3, -0.5, 0.2], dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    mean = log_p.detach().exp() @ k3(log_ref - log_p)
    assert mean.item() == pytest.approx((log_p.exp() @ (log_p - log_ref)).item())
    of_mean, of_reverse, of_forward = (
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (mean, log_p.exp() @ (log_p - log_ref), log_ref.exp() @ (log_ref - log_p))
    )
    assert torch.allclose(of_mean, of_forward)
    assert not torch.allclose(of_mean, of_reverse, rtol=0.1)


# ── found by mutation ──


@pytest.mark.parametrize(("rewards", "shaping"), [([[0.0]], [[0.0, 1.0]]), ([[0.0]], [[0.0], [0.0]])])
def test_composite_returns_refuse_more_shaping_than_rewards(
    rewards: list[list[float]], shaping: list[list[float]]
) -> None:
    with pytest.raises(ValueError, match="same steps"):
        composite_returns(rewards, shaping)


def test_returns_keep_double_precision_and_the_loss_that_of_the_model() -> None:
    assert composite_returns([[0.1]], [[0.0]]).dtype == torch.float64
    lp = torch.zeros(1, 1)
    loss, stats = policy_loss(
        lp, lp, lp, torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.long),
        clip_low=0.2, clip_high=0.2, kl_coef=0.1, aggregate="token",
    )  # fmt: skip
    assert {loss.dtype, *(value.dtype for value in stats.values())} == {torch.float32}


def test_only_rounding_counts_as_equal_returns() -> None:
    """A billionth of the largest return: 1e-4 beside 1e6 and 1.5e-9 beside 1 are on either side of it."""
    for returns in ([1e6, 1e6 + 1e-4], [-1e6, -1e6 - 1e-4]):
        assert group_advantages(torch.tensor(returns, dtype=torch.float64)).tolist() == [0.0, 0.0]
    for returns in ([0.0, 1.5e-9], [1e6, 1e6 + 1e-2]):
        assert group_advantages(torch.tensor(returns, dtype=torch.float64)).tolist() == pytest.approx([-1.0, 1.0])


def test_rewards_that_cancel_leave_nothing_to_compare() -> None:
    """0.1 + 0.2 − 0.3 is 5.6e-17: beside 0 it is the larger return, and by rounding alone."""
    returns = composite_returns([[0.1, 0.2, -0.3], [0.0]], [[0.0] * 3, [0.0]])
    assert returns[0] != returns[1]
    assert group_advantages(returns).tolist() == [0.0, 0.0]


def test_aaw_can_keep_a_single_episode() -> None:
    (kept,) = aaw_sample(torch.tensor([0.0, 0.0, 100.0]), 1, torch.Generator().manual_seed(0)).tolist()
    assert kept == 2


def test_statistics_are_means_over_the_generated_tokens() -> None:
    """Three tokens and one of padding: w = 2 with A = 2 (cut), w = 1 (not), w = 1/2 with A = −2 (cut).

    p_ref/pθ is 2 for one of them and 1 for the others, and the padding's numbers are wild.
    """
    lp = torch.full((2, 2), -3.0, dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-3 - math.log(2), -3.0], [-50.0, -3 + math.log(2)]], dtype=torch.float64)
    ref = torch.tensor([[-3 + math.log(2), -3.0], [-0.1, -3.0]], dtype=torch.float64)
    _, stats = policy_loss(
        lp, old, ref, torch.tensor([2.0, -2.0]), torch.tensor([[1, 1], [0, 1]]),
        clip_low=0.2, clip_high=0.28, kl_coef=0.1, aggregate="token",
    )  # fmt: skip
    assert stats["ratio"].item() == pytest.approx((2 + 1 + 0.5) / 3)
    assert stats["clip_share"].item() == pytest.approx(2 / 3)
    assert stats["kl"].item() == pytest.approx((1 - math.log(2)) / 3)
    assert not any(value.requires_grad for value in stats.values())


def test_a_given_up_token_counts_a_hundred() -> None:
    """p_ref/pθ = e^12, cut off at 100: the number itself, not only the name of the constant."""
    lp = torch.tensor([[-13.0]], dtype=torch.float64)
    _, stats = policy_loss(
        lp, lp, lp + 12, torch.zeros(1), torch.ones(1, 1), clip_low=0.2, clip_high=0.2, kl_coef=1.0, aggregate="token"
    )
    assert stats["kl"].item() == 100.0


def test_a_token_that_the_reference_all_but_excludes_is_pulled_back() -> None:
    """p_ref/pθ = e^−30: k3 is 29 and its gradient 1. Only the other side, p_ref/pθ = e^20, has a bound of its own."""
    lp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    value = k3(torch.tensor(-31.0) - lp)
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert lp.grad is not None
    assert (value.item(), lp.grad.item()) == pytest.approx((29.0, 1.0))


def test_padding_of_any_value_leaves_the_gradient_finite() -> None:
    """exp(1000) is infinite, and 0 · ∞ no number."""
    lp = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old, ref = (torch.tensor([[wild, -1.0]], dtype=torch.float64) for wild in (-1000.0, 1000.0))
    loss, _ = policy_loss(
        lp, old, ref, torch.ones(1), torch.tensor([[0, 1]]),
        clip_low=0.2, clip_high=0.2, kl_coef=0.1, aggregate="token",
    )  # fmt: skip
    loss.backward()  # type: ignore[no-untyped-call]
    assert lp.grad is not None
    assert loss.item() == -1.0
    assert lp.grad.tolist() == [[0.0, -1.0]]
