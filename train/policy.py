"""The policy being trained: a base model with LoRA on all linear layers; its reference; its rollout engine."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from msgrpo_agent.agent import Completion, Sampling
from msgrpo_agent.errors import RunError
from msgrpo_agent.game import Scenario
from msgrpo_agent.models.loading import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NANO, base_path, load_base
from msgrpo_agent.models.local import LocalModel
from msgrpo_agent.models.shared_prefix import answer_logprobs, common_prefix_length, share_prefixes
from msgrpo_agent.models.trunk import evaluating, trunk_and_head
from msgrpo_agent.prompt import Prompt, PromptTemplate
from train.checkpoint import replace_text
from train.config import TrainConfig

# How far engine and trainer may disagree about one token's log-probability before the run stops.
CANARY_ROWS, CANARY_TOKENS = 3, 16
CANARY_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


def canary_prompts(scenario: Scenario) -> list[Prompt]:
    """Prompts of different lengths from one scenario: the start, cut off at different places."""
    observed = scenario.new(0, 0).observe(scenario.players[0])
    texts = [observed[: len(observed) * (i + 1) // CANARY_ROWS] for i in range(CANARY_ROWS)]
    return [PromptTemplate().render(scenario, text) for text in texts]


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
        """The canary: three witnesses must give the same tokens the same log-probabilities.

        The engine answers CANARY_ROWS prompts of different lengths in one batch, each answer of another length, so
        that padding and the selection of rows are seen too. The trainer computes these answers in a padded batch
        after the shared prefix, and the model's own forward computes each row alone, with nothing of ours around it.
        Rollouts from the base or from a stale adapter are the most common silent fault of this field. Returns the
        largest difference in log-probability; raises RunError if it is more than the tolerance.
        """
        prompts = canary_prompts(scenario)
        greedy = Sampling(temperature=0, max_tokens=CANARY_TOKENS)
        generated = self.engine.generate(prompts, greedy, [0] * len(prompts))
        answers = [
            replace(answer, token_ids=answer.token_ids[:length], logprobs=answer.logprobs[:length])
            for answer, length in zip(generated, range(CANARY_TOKENS, 0, -1), strict=False)
        ]
        shared = common_prefix_length([list(answer.prompt_ids) for answer in answers])
        prefix = list(answers[0].prompt_ids[:shared])
        pairs = [(list(answer.prompt_ids[shared:]), list(answer.token_ids)) for answer in answers]
        trunk, head = trunk_and_head(self.model)
        with torch.no_grad(), evaluating(self.model):
            trainer, _ = answer_logprobs(trunk, head, prefix, pairs, self.engine.pad_id)
            plain = [self._plain_logprobs(answer) for answer in answers]
        ours = torch.cat(
            [row[len(row) - len(one.token_ids) :] for row, one in zip(trainer.cpu(), answers, strict=True)]
        )
        engine = torch.cat([torch.tensor(answer.logprobs) for answer in answers])
        witnesses = {"the rollout engine": engine, "the model's own forward": torch.cat(plain)}
        gaps = {name: float((ours - theirs).abs().max()) for name, theirs in witnesses.items()}  # NaN stays NaN
        tolerance = CANARY_TOLERANCE[self.engine.model.dtype]
        for name, gap in gaps.items():
            if not gap <= tolerance:
                raise RunError(
                    f"{name} and the trainer disagree by {gap:.3g} nats about fixed prompts "
                    f"(tolerance {tolerance:g}): rollouts would come from other weights than those being trained, or "
                    "this model computes something that the trainer does not"
                )
        return max(gaps.values())

    def _plain_logprobs(self, answer: Completion) -> Tensor:
        """log p (T) of an answer's tokens by `model(ids).logits`: no shared prefix, no padding, no cache."""
        ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0, len(answer.prompt_ids) - 1 : -1].float()
        targets = ids[0, len(answer.prompt_ids) :, None]
        found: Tensor = logits.log_softmax(-1).gather(1, targets)[:, 0].cpu()
        return found

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
