"""The policy being trained: a base model with LoRA on all linear layers, and its reference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized

from msgrpo.errors import RunError
from msgrpo.files import replace_bytes
from msgrpo.models.loading import load_base
from msgrpo.models.local import pad_id
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from msgrpo.models.paths import absolute
from msgrpo.models.shared_prefix import answer_logprobs, last_hidden, longest_sharing, trunk_and_head
from msgrpo.train.config import TrainConfig

if TYPE_CHECKING:
    from msgrpo.train.shard import Lockstep

Pairs = Sequence[tuple[list[int], list[int]]]  # of each turn what follows the prefix in its prompt, and its answer
AdapterState = dict[str, Tensor]  # the adapter's weights by name


class Policy:
    """pθ and its reference, the same model with the adapter switched off. It knows nothing of engines."""

    def __init__(self, config: TrainConfig) -> None:
        self._lockstep: Lockstep | None = None  # of the ranks that have a part of the base each
        dtype = _dtype(config)
        if config.shard:
            from msgrpo.train.shard import load_sharded, lockstep

            base, self.tokenizer = load_base(config.base, dtype=dtype, placing=load_sharded)
            self._lockstep = lockstep(base)
        else:
            base, self.tokenizer = load_base(config.base, dtype=dtype)
        torch.manual_seed(config.seed)
        lora = LoraConfig(
            r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        in_float32 = base.dtype == torch.float32
        self.model: Any = get_peft_model(base, lora, autocast_adapter_dtype=not in_float32)
        self.model.peft_config["default"].base_model_name_or_path = absolute(config.base)
        if config.micro_batch.checkpointing:
            self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            _without_noise(self.model)
            self.model.train()
        self.temperature = config.temperature
        self.pad_id = pad_id(self.model, self.tokenizer)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the base, so that all must compute at the same time."""
        return self._lockstep is not None

    def together(self, what: str) -> None:
        """Where the base is sharded, raise RunError unless all ranks are about to do this."""
        if self._lockstep is not None:
            self._lockstep.at(what)

    @property
    def longest_sharing(self) -> int:
        """The longest row that may share a computed prefix; see `shared_prefix.longest_sharing`."""
        return longest_sharing(trunk_and_head(self.model)[0])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained: the adapter's weights and nothing else."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def logprobs(self, prefix: list[int], pairs: Pairs) -> tuple[Tensor, Tensor]:
        """log pθ (N, T) of every answer token and the mask; see `shared_prefix.answer_logprobs`."""
        trunk, head = trunk_and_head(self.model)
        return answer_logprobs(trunk, head, prefix, pairs, self.pad_id, self.temperature, merge=not self.is_sharded)

    def reference_logprobs(self, prefix: list[int], pairs: Pairs) -> Tensor:
        """log p_ref (N, T): the same model with the adapter switched off."""
        with torch.no_grad(), self.model.disable_adapter():
            return self.logprobs(prefix, pairs)[0]

    def hidden(self, prefix: list[int], rests: Sequence[list[int]]) -> Tensor:
        """The trunk's last hidden state (N, D) at the end of each prompt."""
        return last_hidden(trunk_and_head(self.model)[0], prefix, rests, self.pad_id)

    def adapter_state(self) -> AdapterState:
        """A copy of the adapter's weights, in the CPU's memory."""
        state: AdapterState = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}

    def load_adapter_state(self, state: AdapterState) -> None:
        """Take these weights over. Raises RunError unless they are all of the adapter's, and no others."""
        own = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        wrong = {
            name
            for name in own.keys() | state.keys()
            if getattr(own.get(name), "shape", None) != getattr(state.get(name), "shape", None)
        }
        if wrong:
            raise RunError(
                f"these are not the adapter's weights: {len(wrong)} of {len(own)} layers differ in name or shape, "
                f"like {min(wrong)}",
                fix="the checkpoint was made by another version of PEFT, or with another rank or base",
            )
        set_peft_model_state_dict(self.model, state)

    @contextmanager
    def holding(self, state: AdapterState) -> Iterator[None]:
        """While this is open, the policy has these weights."""
        own = self.adapter_state()
        self.load_adapter_state(state)
        try:
            yield
        finally:
            self.load_adapter_state(own)

    def adapter_files(self, state: AdapterState | None = None) -> dict[str, bytes]:
        """The PEFT adapter as files: safetensors, and a config that names all linear layers."""
        config = self.model.peft_config["default"].to_dict()
        config |= {"inference_mode": True, "target_modules": sorted(config["target_modules"])}
        plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
        text = json.dumps(plain, indent=2, default=str) + "\n"
        weights = self.adapter_state() if state is None else state
        return {ADAPTER_WEIGHTS: save(weights, {"format": "pt"}), ADAPTER_CONFIG: text.encode()}

    def save_adapter(self, folder: Path, state: AdapterState | None = None) -> None:
        """Write the PEFT adapter, each file replaced in one move."""
        for name, data in self.adapter_files(state).items():
            replace_bytes(folder / name, data)


def _without_noise(model: nn.Module) -> None:
    """Layers are checkpointed in training mode, in which some bases would drop values at random, or shake those of a
    router: the ratio to the rollouts, and the gradient, would be noise.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for settings in filter(None, (module, getattr(module, "config", None))):
            for name, value in vars(settings).items():
                if ("drop" in name or "jitter" in name) and isinstance(value, float):
                    setattr(settings, name, 0.0)


def _dtype(config: TrainConfig) -> str:
    """What the weights are held in. Processors of several processes take float32: each would choose for itself."""
    several = config.servers > 0 or config.trainers != "1" or (is_initialized() and get_world_size() > 1)
    if config.dtype == "auto" and several and not torch.cuda.is_available():
        return "float32"
    return config.dtype
