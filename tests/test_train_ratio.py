"""The losses beside the paper's clip, each against a slow loop over its tokens."""

from __future__ import annotations

import math

import pytest
import torch

from msgrpo.train.rivals import choose
from msgrpo.train.rivals.contract import Loss
from tests.test_train_msgrpo import random_inputs

NAMES = ("gspo", "turn", "cispo", "dual")
LOW, HIGH, MOST, BETA = 0.2, 0.28, 1.5, 0.1


def loss_of(name: str, over: str) -> Loss:
    bounds = {"cispo": f"high={HIGH}", "dual": f"low={LOW}, high={HIGH}, most={MOST}"}
    chosen = choose("loss", f"{name}({bounds.get(name, f'low={LOW}, high={HIGH}')}, kl={BETA}, over={over})")
    assert isinstance(chosen, Loss)
    return chosen


def slow(name: str, over: str, lp, old, ref, advantages, mask) -> float:  # type: ignore[no-untyped-def]
    """By the equations at the head of `rivals/ratio.py`, token by token."""
    per_turn = []
    for n in range(len(lp)):
        a, there = float(advantages[n]), [t for t in range(lp.shape[1]) if mask[n, t]]
        logs = [float(lp[n, t] - old[n, t]) for t in there]
        tokens = []
        for t, log_w in zip(there, logs, strict=True):
            of_turn = {"gspo": sum(logs) / len(logs), "turn": sum(logs)}.get(name, log_w)
            w = math.exp(of_turn)
            value = min(w * a, min(max(w, 1 - LOW), 1 + HIGH) * a)
            if name == "cispo":
                value = min(w, 1 + HIGH) * a * float(lp[n, t])
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


@pytest.mark.parametrize("name", ["clip", *NAMES])
def test_where_nothing_has_changed_yet_all_have_one_gradient(name: str) -> None:
    """With w = 1 each is the policy gradient, A ∇ log pθ; what differs begins with the second step."""
    lp, _, _, advantages, mask = random_inputs(3)
    gradients = []
    for chosen in (choose("loss", "clip(kl=0)"), choose("loss", f"{name}(kl=0)")):
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
