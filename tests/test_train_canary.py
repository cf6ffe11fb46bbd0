"""Rollouts by other weights, or with other numbers than the trainer's, are noticed; mere rounding is not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msgrpo.agent import Completion, Sampling
from msgrpo.errors import RunError
from msgrpo.games import get_scenario
from msgrpo.models import generation, local, shared_prefix
from msgrpo.train import loop, update
from msgrpo.train.display import Quiet
from msgrpo.train.doctor import examine
from msgrpo.train.engines import contract
from msgrpo.train.engines.hf import HfEngine
from msgrpo.train.policy import Policy
from tests.train_helpers import engine_of, tiny

pytestmark = pytest.mark.usefixtures("near")


def canary(engine: HfEngine, policy: Policy, **given: Any) -> float:
    """The canary without the merge before it."""
    prompts = contract.canary_prompts(get_scenario("frozen-lake"))
    answers = engine.model.generate(prompts, contract.canary_sampling(1.0), contract.SEEDS)
    return contract.check(policy, "the rollout engine", answers, **given)


def moved(policy: Policy, by: float) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(policy.parameters):
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))


def test_the_canary_sees_what_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny())
    monkeypatch.setattr(contract, "_plain", lambda policy, answers: torch.tensor([float("nan")]))
    with pytest.raises(RunError, match="disagree by nan"):
        engine_of(policy).load(0)


@pytest.mark.parametrize("fault", ["padding", "rows"])
def test_the_canary_sees_faults_that_one_row_cannot_show(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is attended to, and rows that answer for one another: with one row there is neither."""
    policy = Policy(tiny())
    engine = engine_of(policy)
    assert canary(engine, policy) < 1e-3
    if fault == "padding":
        run = shared_prefix.run
        monkeypatch.setattr(
            shared_prefix, "run", lambda trunk, ids, mask, *more: run(trunk, ids, torch.ones_like(mask), *more)
        )
    else:
        monkeypatch.setattr(generation, "distinct_rows", lambda rows: (rows[::-1], list(range(len(rows)))))
    with pytest.raises(RunError, match="disagree"):
        canary(engine, policy)


def test_the_models_own_forward_is_a_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny())
    engine = engine_of(policy)
    forward = policy.model.forward

    def scaled(*arguments: Any, **named: Any) -> Any:
        found = forward(*arguments, **named)
        found.logits = found.logits / 8
        return found

    monkeypatch.setattr(policy.model, "forward", scaled)
    with pytest.raises(RunError, match="the model's own forward and the trainer disagree"):
        canary(engine, policy)


@pytest.mark.parametrize("by", [0.002, 0.02])
def test_the_canary_names_whose_weights_an_engine_plays_with(by: float) -> None:
    """The base's, or the version before; also where the difference is smaller than what rounding may be."""
    policy = Policy(tiny())
    base = engine_of(policy)
    base.load(0)
    moved(policy, by)
    with pytest.raises(RunError, match=r"plays with the weights of the base"):
        canary(base, policy)
    before = policy.adapter_state()
    stale = engine_of(policy)
    stale.load(1)
    assert canary(stale, policy) < 1e-3
    moved(policy, by)
    with pytest.raises(RunError, match=r"plays with the weights of the version before"):
        canary(stale, policy, previous=[before])
    assert all(torch.equal(policy.adapter_state()[name], value) for name, value in policy.adapter_state().items())
    stale.load(2)
    assert canary(stale, policy, previous=[before]) < 1e-3


def test_small_differences_are_told_apart_by_whose_they_are() -> None:
    """Far below the tolerance, and ten times what rounding in float32 is: the old rule let it pass."""
    policy = Policy(tiny())
    stale = engine_of(policy)
    stale.load(0)
    moved(policy, 1e-4)
    before = policy.adapter_state()
    stale.load(1)
    moved(policy, 1e-4)
    with pytest.raises(RunError, match=r"plays with the weights of the version before"):
        canary(stale, policy, previous=[before])


def test_rounding_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 an engine may be nearer to the base by chance, after an update that moved less than rounding."""
    policy = Policy(tiny())
    stale = engine_of(policy)
    stale.load(0)
    moved(policy, 1e-4)
    moved(policy, 1e-4)
    with pytest.raises(RunError, match="plays with the weights of the base"):
        canary(stale, policy)
    exact = contract._plain
    monkeypatch.setattr(contract, "_plain", lambda policy, answers: exact(policy, answers) + 4e-4)
    assert canary(stale, policy) < 1e-3


@pytest.mark.parametrize(("tokens", "by"), [(1, 1 / 16), (2, 0.4)], ids=["one spacing", "a few, as SmolLM2"])
def test_rounded_logits_of_uncertain_tokens_in_bfloat16_accuse_nobody(
    tokens: int, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of a token or two of sixty fall on other numbers of bfloat16 than in engine and base."""
    policy = Policy(tiny(dtype="bfloat16"))
    engine = engine_of(policy)
    engine.load(0)
    prompts = contract.canary_prompts(get_scenario("frozen-lake"))
    said = engine.model.generate(prompts, contract.canary_sampling(1.0), contract.SEEDS)
    exact = contract._trainer_logprobs

    def rounded(policy: Policy, answers: Any) -> Tensor:
        found = exact(policy, answers)
        uncertain = found.argsort()[:tokens]
        found[uncertain] += by * (1 - found[uncertain].exp())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(contract, "_trainer_logprobs", rounded)
        patch.setattr(contract, "_plain", rounded)
        patch.setattr(contract, "_under", lambda policy, answers, weights: exact(policy, answers))
        contract.check(policy, "the rollout engine", said)
    moved(policy, 0.07)
    with pytest.raises(RunError, match="plays with the weights of the base"):
        contract.check(policy, "the rollout engine", said)


def test_one_uncertain_token_in_bfloat16_stops_no_run_and_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM and the trainer of a 0.5B were 0.29 nats apart about one token, and as near as usual about the others."""
    policy = Policy(tiny(dtype="bfloat16"))
    engine = engine_of(policy)
    exact = contract._plain

    def off(tokens: int) -> Callable[[Policy, Any], Tensor]:
        def apart(policy: Policy, answers: Any) -> Tensor:
            logprobs = exact(policy, answers)
            logprobs[:tokens] -= 0.4
            return logprobs

        return apart

    monkeypatch.setattr(contract, "_plain", off(2))
    assert canary(engine, policy) > 0.25
    monkeypatch.setattr(contract, "_plain", off(999))
    with pytest.raises(RunError, match=r"disagree by 0\.4"):
        canary(engine, policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_reports_another_temperature_is_seen(dtype: str) -> None:
    config = tiny(temperature=0.7, dtype=dtype)
    policy = Policy(config)
    engine = engine_of(policy, config)
    engine.load(0)
    prompts = contract.canary_prompts(get_scenario("frozen-lake"))
    raw = engine.model.generate(prompts, Sampling(max_tokens=contract.TOKENS), contract.SEEDS)  # at temperature 1
    with pytest.raises(RunError, match="disagree"):
        contract.check(policy, "the rollout engine", raw)


def test_a_mismatch_on_fresh_rollouts_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The canary has passed, and then the engine reports other numbers: the first minibatch shows it. The update
    before is saved; it was lost.
    """
    complete = local.LocalModel.complete

    async def off(self: Any, *arguments: Any, **named: Any) -> Completion:
        found = await complete(self, *arguments, **named)
        by = 0.01 if self.name == "policy-v000001" else 0.0
        return Completion(**vars(found) | {"logprobs": tuple(value - by for value in found.logprobs)})

    monkeypatch.setattr(local.LocalModel, "complete", off)
    with pytest.raises(RunError, match=r"engine and trainer differ by 0\.01 nats a token"):
        loop.train(tiny(checkpoint_every=100), tmp_path / "run", report=Quiet())
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    (finding, *_) = examine(tmp_path / "run").findings  # its row was written before
    assert finding.cause == "engine mismatch"
    assert "0.01 nats a token on fresh rollouts; a run stops at 0.001" in finding.evidence


def test_rollouts_that_are_one_version_old_may_differ() -> None:
    fresh = {"engine/mismatch_bound": 1e-3, "engine/mismatch_max": 2.0, "rollout/staleness": 0.0}
    update.check_mismatch(fresh | {"engine/mismatch_mean": 1.0, "rollout/staleness": 1.0})
    update.check_mismatch(fresh)  # no turn was kept
    for mean in (1.0, math.nan):
        with pytest.raises(RunError):
            update.check_mismatch(fresh | {"engine/mismatch_mean": mean})


def test_a_run_as_on_a_gpu_bfloat16_with_checkpointed_layers(tmp_path: Path) -> None:
    """There the adapted model itself plays rollouts, and its layers keep no cache in training mode."""
    config = tiny(steps=1, dtype="bfloat16", micro_batch="16384(checkpointing=true)", evaluation="6(every=1, film=0)")
    summary = loop.train(config, tmp_path / "run", report=Quiet())
    assert summary["before"]["invalid"] < 0.2  # a model without its cache would not find the format
    policy = Policy(config)
    engine = engine_of(policy, config)
    assert engine.load(0).model is policy.model
    assert canary(engine, policy) < 0.1
    assert policy.model.training
