"""The equations of `train/msgrpo.py` are the way to the loss: there is no second one beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from msgrpo.episode import Episode
from msgrpo.train import groups as groups_module
from msgrpo.train import msgrpo as equations
from msgrpo.train import update as update_module
from msgrpo.train.config import make_config
from msgrpo.train.display import Quiet
from msgrpo.train.groups import Sample
from msgrpo.train.loop import train
from msgrpo.train.msgrpo import composite_returns
from msgrpo.train.policy import Policy
from msgrpo.train.rivals import discounted
from msgrpo.train.update import pick
from tests.train_helpers import gradient, learner, played, samples_in

TINY = [
    "groups=3",
    "group_size=6",
    "select=aaw(keep=3)",
    "minibatches=2",
    "evaluation=2(film=0)",
    "loss=clip(kl=0)",
]
pytestmark = pytest.mark.usefixtures("near")
EQUATIONS = ("composite_returns", "group_advantages", "aaw_sample", "policy_loss")


def test_negated_returns_turn_the_gradient_of_a_default_update_around(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(settings=TINY)
    policy = Policy(config)
    playing, episodes = played(config, policy)

    def samples(of: list[Episode]) -> list[Sample]:
        return samples_in(pick(playing.groups(of), config, learner()), config)

    before, _ = gradient(policy, samples(episodes), config)
    monkeypatch.setattr(groups_module, "composite_returns", lambda *given: -composite_returns(*given))
    after, _ = gradient(policy, samples(episodes), config)
    assert before.norm() > 0
    assert (after + before).norm() < 1e-5 * before.norm()


def test_a_default_update_computes_each_equation_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of each group the returns and advantages, of each that is not flat the draw, of each micro-batch the loss."""
    counts: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return call(*given, **named)

        return counted

    for module in (groups_module, equations, discounted):
        for name in EQUATIONS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    monkeypatch.setattr(update_module, "micro_batches", counting("micro", update_module.micro_batches))
    train(make_config(settings=TINY, given={"steps": 1}), tmp_path / "run", report=Quiet())
    assert counts["composite_returns"] == counts["group_advantages"] == 3
    assert 1 <= counts["aaw_sample"] <= 3
    assert counts["policy_loss"] == counts["micro"] == 2
