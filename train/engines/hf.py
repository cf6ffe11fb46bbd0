"""Rollouts in this process: the policy's own weights, in lock-step batches (`models/local.py`)."""

from __future__ import annotations

import copy

import torch

from msgrpo.game import Scenario
from msgrpo.models.local import LocalModel
from msgrpo.train.config import TrainConfig
from msgrpo.train.engines import contract
from msgrpo.train.policy import Policy


class HfEngine:
    """In float32 a second copy of the base, into which the adapter is merged: plain matrices are faster.

    In bfloat16 merging would round small changes away, so there the engine is the adapted model itself.
    """

    def __init__(self, policy: Policy, scenario: Scenario, config: TrainConfig) -> None:
        merges = policy.model.dtype == torch.float32
        self._policy = policy
        self._merged = copy.deepcopy(policy.model).unload() if merges else None
        self._prompts = contract.canary_prompts(scenario)
        model = policy.model if self._merged is None else self._merged
        self.model = LocalModel("policy", model, policy.tokenizer, chat=config.chat)

    def load(self, version: int) -> LocalModel:
        self._merge()
        self.model.name = f"policy-v{version:06d}"
        sampling = contract.canary_sampling(self._policy.temperature)
        generated = self.model.generate(self._prompts, sampling, contract.SEEDS)
        contract.check(self._policy, "the rollout engine", generated)
        return self.model

    def close(self) -> None:
        """Nothing runs beside this process."""

    def _merge(self) -> None:
        """Merging starts from the base each time: nothing drifts."""
        if self._merged is None:
            return
        target = dict(self._merged.named_modules())
        with torch.no_grad():
            for name, layer in self._policy.model.base_model.model.named_modules():
                if hasattr(layer, "lora_A"):
                    target[name].weight.copy_(layer.base_layer.weight + layer.get_delta_weight("default"))
