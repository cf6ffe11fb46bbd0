"""The losses beside the paper's clip, each against a slow loop over its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msgrpo.train.config import make_config
from msgrpo.train.groups import Sample
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import Ranks
from msgrpo.train.rivals import choose
from msgrpo.train.rivals import decoupled as rivals_decoupled
from msgrpo.train.rivals.contract import Learner, Loss
from msgrpo.train.update import logprobs_of, pick, samples_of
from tests.test_train_msgrpo import random_inputs
from tests.train_helpers import learner, played

NAMES = ("gspo", "turn", "cispo", "dual", "icepop", "icepop of turns")
LOW, HIGH, MOST, BETA = 0.2, 0.28, 1.5, 0.1
LEAST, LARGEST = 0.8, 1.2  # icepop's
NARROW = (0.05, 0.06)  # gspo's: the mean of a turn's tokens hardly moves


def loss_of(name: str, over: str) -> Loss:
    bounds = {
        "gspo": f"low={NARROW[0]}, high={NARROW[1]}",
        "cispo": f"high={HIGH}",
        "dual": f"low={LOW}, high={HIGH}, most={MOST}",
        "icepop": f"low={LEAST}, high={LARGEST}",
        "icepop of turns": f"low={LEAST}, high={LARGEST}, whole=true",
    }
    of_name = bounds.get(name, f"low={LOW}, high={HIGH}")
    chosen = choose("loss", f"{name.partition(' ')[0]}({of_name}, kl={BETA}, over={over})")
    assert isinstance(chosen, Loss)
    return chosen


def slow(name: str, over: str, lp, old, ref, advantages, mask) -> float:  # type: ignore[no-untyped-def]
    """By the equations at the head of `rivals/ratio.py`, token by token."""
    per_turn, (low, high) = [], NARROW if name == "gspo" else (LOW, HIGH)
    for n in range(len(lp)):
        a, there = float(advantages[n]), [t for t in range(lp.shape[1]) if mask[n, t]]
        logs = [float(lp[n, t] - old[n, t]) for t in there]
        tokens = []
        for t, log_w in zip(there, logs, strict=True):
            of_turn = {"gspo": sum(logs) / len(logs), "turn": sum(logs)}.get(name, log_w)
            w = math.exp(of_turn)
            value = min(w * a, min(max(w, 1 - low), 1 + high) * a)
            if name == "cispo":
                value = min(w, 1 + HIGH) * a * float(lp[n, t])
            elif name.startswith("icepop"):
                judged = math.exp(sum(logs) / len(logs)) if name == "icepop of turns" else w
                value = w * a * float(lp[n, t]) if LEAST <= judged <= LARGEST else 0.0
            elif name == "dual" and a < 0:
                value = max(value, MOST * a)
            r = math.exp(float(ref[n, t] - lp[n, t]))
            tokens.append(BETA * (r - math.log(r) - 1) - value)
        per_turn.append(tokens)
    if over == "token":
        return sum(map(sum, per_turn)) / sum(map(len, per_turn))
    return sum(sum(tokens) / len(tokens) for tokens in per_turn) / len(per_turn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("over", ["token", "turn"])
@pytest.mark.parametrize("seed", range(5))
def test_each_equals_a_slow_loop(name: str, over: str, seed: int) -> None:
    lp, old, ref, advantages, mask = random_inputs(seed)
    value, stats = loss_of(name, over)(lp, old, ref, advantages, mask)
    assert value.item() == pytest.approx(slow(name, over, lp, old, ref, advantages, mask), rel=1e-9)
    assert set(stats) == {"kl", "clip_share", "ratio"}


def pull(name: str, logs: list[float], t: int, a: float) -> float:
    """How strongly a token's log-probability is raised, by hand: A times its weight, or nothing beyond a bound."""
    of_turn = {"gspo": sum(logs) / len(logs), "turn": sum(logs)}.get(name, logs[t])
    w, (low, high) = math.exp(of_turn), NARROW if name == "gspo" else (LOW, HIGH)
    if name == "cispo":
        return min(w, 1 + HIGH) * a
    if name.startswith("icepop"):
        judged = math.exp(sum(logs) / len(logs)) if name == "icepop of turns" else w
        return w * a if LEAST <= judged <= LARGEST else 0.0
    if (a > 0 and w > 1 + high) or (a < 0 and w < 1 - low) or (name == "dual" and a < 0 and w > MOST):
        return 0.0
    return w * a * (len(logs) if name == "turn" else 1)  # each of a turn's tokens moves all of its terms


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_each_pulls_at_a_token_as_worked_out_by_hand(name: str, seed: int) -> None:
    """Away from w = 1, where what is held without its gradient matters."""
    lp, old, _, advantages, mask = random_inputs(seed)
    x = lp.clone().requires_grad_()
    loss = loss_of(name, "token").model_copy(update={"kl": 0.0})
    loss(x, old, x.detach(), advantages, mask)[0].backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    for n, of_turn in enumerate(x.grad):
        there = [t for t in range(len(of_turn)) if mask[n, t]]
        logs = [float(lp[n, t] - old[n, t]) for t in there]
        by_hand = [-pull(name, logs, i, float(advantages[n])) / int(mask.sum()) for i in range(len(there))]
        assert of_turn[mask[n].bool()].tolist() == pytest.approx(by_hand)
        assert not of_turn[~mask[n].bool()].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_statistics_are_means_over_the_generated_tokens(name: str, seed: int) -> None:
    """`ratio` is the ratio before any bound; `clip_share` counts the tokens that a bound holds."""
    lp, old, ref, advantages, mask = random_inputs(seed)
    by_hand: dict[str, list[float]] = {"ratio": [], "clip_share": [], "kl": []}
    for n in range(len(lp)):
        there = mask[n].bool()
        logs = (lp - old)[n][there].tolist()
        for t, log_w in enumerate(logs):
            w = math.exp({"gspo": sum(logs) / len(logs), "turn": sum(logs)}.get(name, log_w))
            by_hand["ratio"].append(w)
            by_hand["clip_share"].append(
                w > 1 + HIGH if name == "cispo" else pull(name, logs, t, float(advantages[n])) == 0
            )
        by_hand["kl"] += [math.exp(r) - r - 1 for r in (ref - lp)[n][there].tolist()]
    _, stats = loss_of(name, "turn")(lp, old, ref, advantages, mask)
    for statistic, of_tokens in by_hand.items():
        assert stats[statistic].item() == pytest.approx(sum(of_tokens) / len(of_tokens))


@pytest.mark.parametrize("name", NAMES)
def test_the_slow_loops_inputs_lie_within_the_bounds_and_beyond(name: str) -> None:
    shares = []
    for seed in range(5):
        lp, old, ref, advantages, mask = random_inputs(seed)
        shares.append(float(loss_of(name, "token")(lp, old, ref, advantages, mask)[1]["clip_share"]))
    assert 0 < sum(shares) < len(shares)


@pytest.mark.parametrize("name", ["clip", *NAMES])
def test_where_nothing_has_changed_yet_all_have_one_gradient(name: str) -> None:
    """With w = 1 each is the policy gradient, A ∇ log pθ; what differs begins with the second step."""
    lp, _, _, advantages, mask = random_inputs(3)
    gradients = []
    whole = ", whole=true" if name == "icepop of turns" else ""
    for chosen in (choose("loss", "clip(kl=0)"), choose("loss", f"{name.partition(' ')[0]}(kl=0{whole})")):
        assert isinstance(chosen, Loss)
        x = lp.clone().requires_grad_()
        chosen(x, lp, lp, advantages, mask)[0].backward()  # type: ignore[no-untyped-call]
        gradients.append(x.grad)
    first, second = gradients
    assert first is not None
    assert second is not None
    if name in ("gspo", "turn"):  # a turn's gradient is shared out over its tokens, or given to each of them
        scale = mask.sum(1) if name == "turn" else torch.ones(len(mask))
        first = first * scale[:, None]
    assert torch.allclose(first, second)


LOGPROBS = st.floats(-1e4, 0.0, width=32)  # with -0.0, and far beyond e to which float32 holds


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(name, over) for name in ("clip", *NAMES) for over in ("token", "turn")]),
    st.lists(st.tuples(LOGPROBS, LOGPROBS, LOGPROBS), min_size=4, max_size=4),
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=2, max_size=2),
)
def test_loss_and_gradient_are_numbers_whatever_the_log_probabilities(
    chosen: tuple[str, str], tokens: list[tuple[float, float, float]], advantages: list[float]
) -> None:
    """Two turns of two tokens, the last of which is padding: nothing flows to it."""
    now, old, reference = torch.tensor(tokens).T.reshape(3, 2, 2)
    now = now.clone().requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0]])
    loss, stats = loss_of(*chosen)(now, old, reference, torch.tensor(advantages)[:, None].expand(2, 2), mask)
    loss.backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    assert bool(loss.isfinite() and now.grad.isfinite().all())
    assert now.grad[1, 1] == 0
    assert all(bool(value.isfinite()) for value in stats.values())


@pytest.mark.parametrize("name", ["clip", *NAMES])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_no_number_holds_leaves_the_gradient_finite(name: str, advantage: float) -> None:
    """A turn of 900 tokens that each became likelier by 0.1 nats: e^90 is infinite in float32; then such a token."""
    whole = ", whole=true" if name == "icepop of turns" else ""
    chosen = choose("loss", f"{name.partition(' ')[0]}(kl=0{whole})")
    assert isinstance(chosen, Loss)
    for turn in ([0.1] * 900, [90.0, 0.0]):
        x = torch.full((1, len(turn)), -1.0, requires_grad=True)
        old = x.detach() - torch.tensor([turn])
        value, stats = chosen(x, old, x.detach(), torch.tensor([advantage]), torch.ones(1, len(turn)))
        value.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert all(map(math.isfinite, [value.item(), *x.grad[0].tolist(), *(one.item() for one in stats.values())]))


def test_a_token_beyond_the_clip_still_teaches_in_cispo_and_not_in_clip() -> None:
    """w = e, A = 1: the clip's gradient is 0; CISPO's is that of 1.28 log pθ."""
    for name, expected in {"clip": 0.0, "cispo": -(1 + HIGH)}.items():
        chosen = choose("loss", f"{name}(kl=0, high={HIGH})")
        assert isinstance(chosen, Loss)
        x = torch.tensor([[-0.5]], requires_grad=True)
        value, stats = chosen(x, x.detach() - 1, x.detach(), torch.tensor([1.0]), torch.ones(1, 1))
        value.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.item() == pytest.approx(expected)
        assert stats["clip_share"] == 1


def test_the_second_bound_holds_where_the_first_does_not() -> None:
    """w = e², A = −1: clip's loss is 7.39 and pulls; the dual's is c = 3 and does not."""
    values = {}
    for name in ("clip", "dual"):
        chosen = choose("loss", f"{name}(kl=0)")
        assert isinstance(chosen, Loss)
        x = torch.tensor([[-0.5]], requires_grad=True)
        value, _ = chosen(x, x.detach() - 2, x.detach(), torch.tensor([-1.0]), torch.ones(1, 1))
        value.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        values[name] = (value.item(), x.grad.item())
    assert values["clip"] == pytest.approx((math.e**2, math.e**2))
    assert values["dual"] == pytest.approx((3.0, 0.0))


@pytest.fixture(scope="module")
def turned() -> tuple[Learner, list[Sample]]:
    """A policy, and turns that it sampled; one token of the second is said to be nobody's."""
    settings = ["groups=2", "group_size=4", "select=all", "minibatches=1", "evaluation=4(film=0)"]
    chosen = make_config(settings=settings)
    policy = Policy(chosen)
    playing, episodes = played(chosen, policy)
    context = learner(policy=policy)
    samples, _ = samples_of(pick(playing.groups(episodes), chosen, context), chosen, context)
    first, second, *others = samples
    logprobs = (math.nan, *second.old_logprobs[1:])
    return context, [first, replace(second, completion=replace(second.completion, logprobs=logprobs)), *others]


def decoupled(learner: Learner, samples: list[Sample], tokens: int) -> tuple[list[Sample], dict[str, float]]:
    loss = choose("loss", "decoupled(cap=1.5)")
    assert isinstance(loss, Loss)
    return loss.prepared(samples, learner, tokens)


@pytest.mark.parametrize("tokens", [16_384, 100])
def test_fresh_rollouts_of_the_own_process_have_a_weight_of_one(
    turned: tuple[Learner, list[Sample]], tokens: int
) -> None:
    learner, samples = turned
    found, figures = decoupled(learner, samples, tokens)
    assert figures["engine/mismatch_max"] < 1e-3
    for before, after in zip(samples, found, strict=True):
        assert after.completion.token_ids == before.completion.token_ids
        assert after.advantages == pytest.approx(before.advantages, rel=1e-3)
        assert after.old_logprobs == pytest.approx(before.old_logprobs, abs=1e-3, nan_ok=True)


def test_old_rollouts_weigh_as_likely_as_the_policy_has_become_up_to_the_cap(
    turned: tuple[Learner, list[Sample]],
) -> None:
    """Sampled at a log-probability that is lower by 0, 0.1, … nats: e^0, e^0.1, …, and never above 1.5."""
    learner, samples = turned
    lower = [[0.1 * (t % 8) for t in range(len(sample.answer_ids))] for sample in samples]
    older = [
        replace(
            sample,
            completion=replace(
                sample.completion, logprobs=tuple(a - b for a, b in zip(sample.old_logprobs, of_turn, strict=True))
            ),
            weights=tuple(0.5 for _ in of_turn),
        )
        for sample, of_turn in zip(samples, lower, strict=True)
    ]
    found, figures = decoupled(learner, older, 16_384)
    sampled = [
        difference
        for sample, of_turn in zip(samples, lower, strict=True)
        for logprob, difference in zip(sample.old_logprobs, of_turn, strict=True)
        if not math.isnan(logprob)
    ]
    assert figures["engine/mismatch_mean"] == pytest.approx(sum(sampled) / len(sampled), abs=1e-4)
    for sample, after, of_turn in zip(samples, found, lower, strict=True):
        assert after.advantage == sample.advantage
        ratios = [min(math.exp(difference), 1.5) for difference in of_turn]
        if math.isnan(sample.old_logprobs[0]):
            ratios[0] = 1.0
        assert after.weights == pytest.approx([0.5 * ratio for ratio in ratios], rel=1e-3)
        assert after.old_logprobs == pytest.approx(sample.old_logprobs, abs=1e-3, nan_ok=True)  # where it begins


def test_each_rank_computes_its_share_of_where_the_update_begins(
    turned: tuple[Learner, list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, samples = turned
    asked: list[Sequence[Sample]] = []

    def of_share(own: Sequence[Sample], *given: Any) -> list[tuple[float, ...]]:
        asked.append(own)
        return logprobs_of(own, *given)

    policy = alone.policy
    every = logprobs_of(samples, 16_384, policy.model, policy.logprobs)
    monkeypatch.setattr(rivals_decoupled, "logprobs_of", of_share)
    monkeypatch.setattr(Ranks, "gather", lambda self, items: every)
    found, figures = decoupled(replace(alone, ranks=Ranks(1, 3)), samples, 16_384)
    assert asked == [Ranks(1, 3).share(samples)]
    monkeypatch.undo()
    assert (found, figures) == decoupled(alone, samples, 16_384)
