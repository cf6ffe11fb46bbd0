"""The policy being trained: a base model with LoRA on all linear layers; its reference; its rollout engine."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from msgrpo_agent.agent import Sampling
from msgrpo_agent.errors import RunError
from msgrpo_agent.game import Scenario
from msgrpo_agent.models.loading import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NANO, base_path, load_base
from msgrpo_agent.models.local import LocalModel, trunk_and_head
from msgrpo_agent.models.shared_prefix import answer_logprobs, share_prefixes
from msgrpo_agent.prompt import PromptTemplate
from train.checkpoint import replace_text
from train.config import TrainConfig

# How far engine and trainer may disagree about one token's log-probability before the run stops.
CANARY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class Policy:
    """pθ, its reference (the adapter switched off) and the engine that plays rollouts.

    In float32 the engine is a second copy of the base into which the adapter is merged after every update:
    plain matrices are faster. In bfloat16 merging would round small changes away, so the engine is the adapted
    model itself.
    """

    def __init__(self, config: TrainConfig) -> None:
        base, tokenizer = load_base(config.base, dtype=config.dtype)
        share_prefixes(base)
        merge = base.dtype == torch.float32
        engine = copy.deepcopy(base) if merge else None
        torch.manual_seed(config.seed)
        lora = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self.model: Any = get_peft_model(base, lora, autocast_adapter_dtype=not merge)
        folder = Path(base_path(config.base))
        named = str(folder.resolve()) if config.base != NANO and folder.is_dir() else config.base
        self.model.peft_config["default"].base_model_name_or_path = named
        self.engine = LocalModel("policy", engine or self.model, tokenizer)
        self._merged = engine
        if config.gradient_checkpointing:
            self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.temperature = config.temperature

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained: the adapter's weights and nothing else."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def logprobs(self, prefix: list[int], pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
        """log pθ (N, T) of every answer token and the mask; see `shared_prefix.answer_logprobs`."""
        trunk, head = trunk_and_head(self.model)
        return answer_logprobs(trunk, head, prefix, pairs, self.engine.pad_id, self.temperature)

    def reference_logprobs(self, prefix: list[int], pairs: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        """log pref (N, T): the same model with the adapter switched off."""
        with torch.no_grad(), self.model.disable_adapter():
            return self.logprobs(prefix, pairs)[0]

    def refresh_engine(self) -> None:
        """Bring the engine to the current weights (merging starts from the base each time: nothing drifts)."""
        if self._merged is None:
            return
        target = dict(self._merged.named_modules())
        with torch.no_grad():
            for name, layer in self.model.base_model.model.named_modules():
                if hasattr(layer, "lora_A"):
                    target[name].weight.copy_(layer.base_layer.weight + layer.get_delta_weight("default"))

    def check_engine(self, scenario: Scenario) -> float:
        """The canary: the engine answers a fixed prompt, and the trainer must give its tokens the same odds.

        Rollouts from the base or from a stale adapter are the most common silent fault of this field. Returns
        the largest difference in log-probability; raises RunError if it is more than the tolerance.
        """
        prompt = PromptTemplate().render(scenario, scenario.new(0, 0).observe(scenario.players[0]))
        greedy = Sampling(temperature=0, max_tokens=16)
        answer = self.engine.generate([prompt], greedy, [0])[0]
        pair = (list(answer.prompt_ids), list(answer.token_ids))
        trunk, head = trunk_and_head(self.model)
        with torch.no_grad():
            trainer, _ = answer_logprobs(trunk, head, [], [pair], self.engine.pad_id)
        gap = float((trainer[0].cpu() - torch.tensor(answer.logprobs)).abs().max())
        tolerance = CANARY_TOLERANCE[self.engine.model.dtype]
        if not gap <= tolerance:
            raise RunError(
                f"the rollout engine and the trainer disagree by {gap:.3g} nats about a fixed prompt "
                f"(tolerance {tolerance:g}): rollouts would come from other weights than those being trained"
            )
        return gap

    def adapter_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        set_peft_model_state_dict(self.model, state)
        self.refresh_engine()

    def save_adapter(self, folder: Path) -> None:
        """Write the PEFT adapter (safetensors, all linear layers by name), each file replaced in one move."""
        config = self.model.peft_config["default"].to_dict()
        config |= {"inference_mode": True, "target_modules": sorted(config["target_modules"])}
        text = json.dumps(
            {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}, indent=2, default=str
        )
        weights = folder / (ADAPTER_WEIGHTS + ".part")
        save_file(self.adapter_state(), weights, metadata={"format": "pt"})
        os.replace(weights, folder / ADAPTER_WEIGHTS)
        replace_text(folder / ADAPTER_CONFIG, text + "\n")
        # safetensors writes files that only their owner can read
        shutil.copymode(folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS)
