"""`train/mini.py`, the method in one file, takes the same first step as `msgrpo train`."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from msgrpo.agent import Completion
from msgrpo.models.lora import ADAPTER_WEIGHTS
from msgrpo.train import mini
from msgrpo.train.config import make_config
from msgrpo.train.display import Quiet
from msgrpo.train.groups import Sample
from msgrpo.train.loop import train
from msgrpo.train.policy import Policy
from msgrpo.train.ranks import ALONE
from msgrpo.train.rivals.paper import AAW, Clip
from msgrpo.train.update import MAX_GRAD_NORM, WARM_UP, _accumulate, minibatches, pick
from tests.train_helpers import learner, played, samples_in

SMALL = {"groups": 4, "group_size": 8, "keep": 4, "minibatches": 3}


@pytest.mark.usefixtures("near")
async def test_its_first_update_is_that_of_the_full_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To 1e-5, since micro-batches and merged weights add in another order; an update moves a weight by 2e-4. A loop
    runs, as in a notebook's cell: there both were errors of asyncio.
    """
    settings = ["groups=4", "group_size=8", "select=aaw(keep=4)", "minibatches=3", "evaluation=1(film=0)"]
    config = make_config(settings=settings, given={"steps": 1, "seed": 3})
    train(config, tmp_path / "run", report=Quiet())
    model = mini.learn(mini.Settings(seed=3, steps=1, **SMALL))
    full = load_file(tmp_path / "run" / ADAPTER_WEIGHTS)
    small = get_peft_model_state_dict(model)
    assert full.keys() == small.keys()
    for name, weights in full.items():
        torch.testing.assert_close(small[name], weights, rtol=0, atol=1e-5)
    moved = max(float(weights.abs().max()) for name, weights in full.items() if "lora_B" in name)
    assert moved > 1e-4  # where no update went, B is zero
    assert "reached the goal" in capsys.readouterr().out


def another_policys(answer: Completion, draw: torch.Generator) -> Completion:
    """The same tokens, as if somebody had sampled them who found each more or less likely by half a nat or so."""
    off = torch.randn(len(answer.logprobs), generator=draw).tolist()
    return replace(answer, logprobs=tuple(p + 0.5 * by for p, by in zip(answer.logprobs, off, strict=True)))


def gradient(policy: Policy) -> torch.Tensor:
    """Of all weights; they are 0 again afterwards."""
    found = torch.cat([weight.grad.flatten() for weight in policy.parameters if weight.grad is not None])
    policy.model.zero_grad()
    return found


@pytest.mark.usefixtures("near")
def test_its_turns_and_loss_are_those_of_the_full_loop_where_clip_and_penalty_have_a_say() -> None:
    """In a first update the policy is its reference and what played, or nearly: here it is neither."""
    config = make_config(settings=["groups=3", "group_size=6", "select=aaw(keep=3)", "minibatches=2"])
    settings = mini.Settings(groups=3, group_size=6, keep=3, minibatches=2)
    policy, draw = Policy(config), torch.Generator().manual_seed(0)
    playing, episodes = played(config, policy)
    context, generator = learner(), learner().generator
    samples = samples_in(pick(playing.groups(episodes), config, context), config)
    taught = mini.compare([episodes[first : first + 6] for first in (0, 6, 12)], settings.keep, generator)
    parts = mini.parts(taught, settings.minibatches, generator)
    assert [
        [(sample.completion, sample.advantage) for sample in part]
        for part in minibatches(samples, config.minibatches, context.generator)
    ] == parts
    for weight in policy.parameters:
        weight.data = torch.randn(weight.shape, generator=draw) * 0.1
    for part in parts:
        moved = [(another_policys(answer, draw), advantage) for answer, advantage in part]
        sums, _ = _accumulate(policy, [Sample(*one) for one in moved], ALONE, config)
        assert sums["clip_share"] > 0.1
        assert sums["kl"] > 0.01
        full = gradient(policy)
        loss = mini.loss_of(policy.model, policy.pad_id, moved, settings)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == pytest.approx(sums["loss"], rel=1e-4)
        assert (gradient(policy) - full).norm() < 1e-3 * full.norm()


def test_its_values_are_the_presets() -> None:
    config = make_config()
    assert isinstance(config.select, AAW)
    assert isinstance(config.loss, Clip)
    full = config.model_dump() | {
        "keep": config.select.keep, "clip_low": config.loss.low, "clip_high": config.loss.high,
        "kl_coef": config.loss.kl, "max_grad_norm": MAX_GRAD_NORM, "warm_up": WARM_UP, "steps": 20,
    }  # fmt: skip
    assert vars(mini.Settings()) == {name: full[name] for name in vars(mini.Settings())}


def test_it_needs_nothing_else_of_the_training_package() -> None:
    tree = ast.parse(Path(mini.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name for name in modules if name.startswith("msgrpo.train")} == {"msgrpo.train.msgrpo"}
    assert len(Path(mini.__file__).read_text().splitlines()) <= 200
