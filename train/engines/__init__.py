"""What plays rollouts: in this process, or vLLM servers."""

from __future__ import annotations

from pathlib import Path

from msgrpo_agent.game import Scenario
from train.config import TrainConfig
from train.engines.contract import Engine
from train.policy import Policy
from train.ranks import Ranks
from train.sinks import Reporter


def open_engine(
    config: TrainConfig, scenario: Scenario, policy: Policy, out: Path, ranks: Ranks, report: Reporter
) -> Engine:
    """The engine that `config.rollouts` names."""
    if config.rollouts == "hf":
        from train.engines.hf import HfEngine

        return HfEngine(policy, scenario, config)
    from train.engines.vllm import VllmEngine

    return VllmEngine(policy, scenario, config, out, ranks, report)
