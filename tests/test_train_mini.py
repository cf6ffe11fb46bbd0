"""`train/mini.py`, the method in one file, takes the same first step as `msgrpo train`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from msgrpo.models.lora import ADAPTER_WEIGHTS
from msgrpo.train import mini
from msgrpo.train.config import make_config
from msgrpo.train.display import Quiet
from msgrpo.train.loop import train
from msgrpo.train.rivals.paper import AAW, Clip
from msgrpo.train.update import MAX_GRAD_NORM, WARM_UP

SMALL = {"groups": 4, "group_size": 8, "keep": 4, "minibatches": 3}


@pytest.mark.usefixtures("near")
def test_its_first_update_is_that_of_the_full_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To 1e-5, since micro-batches and merged weights add in another order; an update moves a weight by 2e-4."""
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
