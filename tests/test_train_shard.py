"""A base in shares: two ranks that have half of it each compute what one with the whole base computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from msgrpo.errors import ModelError, UsageError
from msgrpo.train.config import make_config
from msgrpo.train.policy import Policy
from msgrpo.train.shard import layers_of
from tests.test_train_ranks import ROOT

SHARDED = ["shard=true", "rollouts=vllm"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `shard_ranks.py` measures with two gloo ranks: one start for all, since each takes long to begin."""
    file = tmp_path_factory.mktemp("shard") / "measured.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "shard_ranks.py"), str(file)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["equal prompts", "different prompts", "the head in parts", "checkpointed", "many micro-batches", "tied"]
)
def test_the_gradient_is_that_of_one_rank_with_the_whole_base(measured: dict[str, Any], case: str) -> None:
    assert measured[case]["norm"] > 1e-3
    assert measured[case]["relative error"] < 2e-5


@pytest.mark.slow
def test_each_rank_has_its_share_of_the_base_and_the_whole_adapter(measured: dict[str, Any]) -> None:
    held = measured["held"]
    assert 0.5 <= held["layers, share"] < 0.51
    assert held["adapter is plain and equal to the one beside a whole base"]
    assert held["log-probabilities differ"] < 1e-5


@pytest.mark.slow
def test_ranks_that_do_not_do_the_same_are_stopped_before_a_gradient_is_used(measured: dict[str, Any]) -> None:
    """Three calls beside two, then two beside three: without the comparison the error was 120 %, and silent."""
    assert "do not do the same" in measured["other order"]
    assert "rank 0: a forward pass as step" in measured["other order"]
    assert "rank 1: a backward pass as step" in measured["other order"]


@pytest.mark.slow
def test_the_canary_proves_at_all_ranks(measured: dict[str, Any]) -> None:
    assert measured["canary"]["gap"] < 1e-4
    assert "plays with the weights of the version before" in measured["canary"]["stale"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"rollouts": "hf"}, "needs others that play: rollouts=vllm"),
        ({"scenario": "snake-duel", "opponent": "base"}, "no room for a second base"),
        ({"credit": "critic"}, "on each rank by itself"),
    ],
)
def test_what_one_rank_computes_alone_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_config(given={"shard": True, "rollouts": "vllm"} | more)


def test_one_process_has_nobody_to_share_with() -> None:
    with pytest.raises(UsageError, match="and there is one"):
        Policy(make_config(settings=SHARDED))


def test_the_layers_are_the_list_that_is_as_long_as_the_config_says() -> None:
    trunk: Any = nn.Module()
    trunk.experts, trunk.layers = (nn.ModuleList(nn.Identity() for _ in range(count)) for count in (2, 3))
    trunk.config = SimpleNamespace(num_hidden_layers=3, model_type="mine")
    assert layers_of(trunk) is trunk.layers
    trunk.config.num_hidden_layers = 4
    with pytest.raises(ModelError, match="mine has no list of 4 layers: shard=true cannot"):
        layers_of(trunk)
