"""A trained run as a model of its own: its adapter merged into its base, in a folder that any tool loads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from transformers import AutoConfig

from msgrpo.errors import ModelError
from msgrpo.models.headers import save_base
from msgrpo.models.loading import load_adapted
from msgrpo.models.lora import ADAPTER_WEIGHTS, adapter_arguments, by_layer, read_adapter_config
from msgrpo.models.paths import base_path

PEFTS_ALPHA = LoraConfig().lora_alpha  # where an adapter's config names none


@dataclass(frozen=True)
class Adapter:
    """The adapter's matrices by the name of their layer: ΔW = B A."""

    base: str
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]  # layer: A (r, in), B (out, r), with the layer's scale in B
    whole: bool = True  # nothing but A and B makes the change; in DoRA something does

    @classmethod
    def of(cls, run: Path) -> Adapter:
        """Raises ModelError for what is no adapter that can be loaded here, and for damaged weights."""
        config = read_adapter_config(run)
        settings = adapter_arguments(run, config)
        weights = load_file(run / ADAPTER_WEIGHTS)
        if not all(bool(matrix.isfinite().all()) for matrix in weights.values()):
            raise ModelError(f"the adapter {run} holds no numbers (NaN, or infinite ones): its weights are damaged")
        tensors = by_layer(weights)
        whole = all(parts.keys() == {"A", "B"} for parts in tensors.values())
        layers = {
            layer: (weights[parts["A"]].float(), weights[parts["B"]].float() * _scale(settings, layer))
            for layer, parts in tensors.items()
            if "A" in parts
        }
        return cls(config["base_model_name_or_path"], layers, whole)

    @property
    def changes(self) -> bool:
        """Whether it is more than its base: a run that has learned nothing leaves B at zero."""
        return not self.whole or self.squared_change() > 0

    def squared_change(self) -> float:
        """‖ΔW‖² of all layers: tr(BᵀB · AAᵀ), without making ΔW."""
        return sum(float(((b.T @ b) * (a @ a.T)).sum()) for a, b in self.layers.values())


def _scale(settings: Mapping[str, Any], layer: str) -> float:
    """What PEFT multiplies B A with: alpha / r, or with rsLoRA alpha / √r, by the layer's own alpha and r."""
    ranks, alphas = settings.get("rank_pattern", {}), settings.get("alpha_pattern", {})
    rank = ranks.get(get_pattern_key(ranks, layer), settings["r"])
    alpha = alphas.get(get_pattern_key(alphas, layer), settings.get("lora_alpha", PEFTS_ALPHA))
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def merged(run: Path) -> tuple[Any, Any, Adapter]:
    """(model in float32 on the CPU, tokenizer, the adapter that was added to its base)."""
    adapter = Adapter.of(run)
    model, tokenizer = load_adapted(run, device=torch.device("cpu"), dtype="float32")
    return model, tokenizer, adapter


def base_dtype(base: str) -> torch.dtype:
    """The dtype that a base's own config names; float32 where it names none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtype = getattr(AutoConfig.from_pretrained(base_path(base), trust_remote_code=False), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def lost_in(model: Any, adapter: Adapter, stored: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
    """How far the weights are from the merged ones as they are `stored`, measured by the adapter's change:
    ‖stored(W + ΔW) − (W + ΔW)‖ / ‖ΔW‖; None where there is no change, or one that is more than B A, and so not known.

    In bfloat16, whose neighbours lie 1/256 apart, a change that is small beside its weight is rounded away.
    """
    if not (adapter.whole and adapter.changes):
        return None
    weights = (model.get_submodule(layer).weight.detach() for layer in adapter.layers)
    error = sum(float((stored(weight) - weight).square().sum()) for weight in weights)
    return float((error / adapter.squared_change()) ** 0.5)


def write_merged(run: Path, out: Path, dtype: torch.dtype | None) -> tuple[torch.dtype, float | None]:
    """Write the merged model with its tokenizer to `out`; returns the weights' dtype and what its rounding has taken.

    Without `dtype` that of the base's own files. W + ΔW is added up in float32 and rounded once.
    """
    model, tokenizer, adapter = merged(run)
    chosen = dtype or base_dtype(adapter.base)
    lost = lost_in(model, adapter, lambda weight: weight.to(chosen).float())
    save_base(model.to(chosen), tokenizer, out)
    return chosen, lost
