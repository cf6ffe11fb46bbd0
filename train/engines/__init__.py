"""What plays rollouts, by the setting `rollouts`: `hf.py` in this process, or `vllm.py` with servers.

The setting `backend` says what computes, update included: with `backend=tinker` a service does, and `tinker.py` plays
there; `train/tinker/weights.py` opens it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgrpo.train.config import TrainConfig
    from msgrpo.train.engines.contract import Engine
    from msgrpo.train.engines.fleet import Fleet
    from msgrpo.train.policy import Policy
    from msgrpo.train.ranks import Ranks
    from msgrpo.train.sinks import Reporter


def open_engine(
    config: TrainConfig,
    policy: Policy,
    out: Path,
    ranks: Ranks,
    report: Reporter,
    fleet: Fleet | None,
) -> Engine:
    """The engine that `config.rollouts` names; `fleet` are the servers of a cluster, where there are any."""
    scenario = config.scenarios[0]  # whose prompts the canary takes
    if config.plays_here:
        from msgrpo.train.engines.hf import HfEngine

        return HfEngine(policy, scenario, config)
    from msgrpo.train.engines.vllm import VllmEngine

    return VllmEngine(policy, scenario, config, out, ranks, report, fleet)
