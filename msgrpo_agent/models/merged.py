"""A trained run as a model of its own: its adapter merged into its base, in a folder that any tool loads."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from msgrpo.errors import ModelError
from msgrpo.models.loading import ADAPTER_WEIGHTS, base_path, load_adapted
from msgrpo.models.paths import read_adapter_config


@dataclass(frozen=True)
class Adapter:
    """The adapter's matrices by the name of their layer: ΔW = scale · B A."""

    base: str
    scale: float
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]  # layer: A (r, in), B (out, r)

    @classmethod
    def of(cls, run: Path) -> Adapter:
        """Raises ModelError for what is no plain adapter, and for damaged weights."""
        config = read_adapter_config(run)
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
            raise ModelError(f"the adapter {run} has no rank and alpha: {rank!r}, {alpha!r}")
        weights = load_file(run / ADAPTER_WEIGHTS)
        layers = {}
        for name, matrix in weights.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                layers[layer.removeprefix("base_model.model.")] = (
                    matrix.float(),
                    weights[f"{layer}.lora_B.weight"].float(),
                )
        adapter = cls(config["base_model_name_or_path"], alpha / rank, layers)
        if not math.isfinite(adapter.squared_change()):
            raise ModelError(f"the adapter {run} holds no numbers (NaN, or infinite ones): its weights are damaged")
        return adapter

    def squared_change(self) -> float:
        """‖ΔW‖² of all layers: tr(BᵀB · AAᵀ), without making ΔW."""
        return sum(self.scale**2 * float(((b.T @ b) * (a @ a.T)).sum()) for a, b in self.layers.values())


def merged(run: Path) -> tuple[Any, Any, Adapter]:
    """(model in float32 on the CPU, tokenizer, the adapter that was added to its base)."""
    adapter = Adapter.of(run)
    model, tokenizer = load_adapted(run, device=torch.device("cpu"), dtype="float32")
    return model, tokenizer, adapter


def base_dtype(base: str) -> torch.dtype:
    """What a base's own files hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtype = getattr(AutoConfig.from_pretrained(base_path(base), trust_remote_code=False), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def lost_in(model: Any, adapter: Adapter, dtype: torch.dtype) -> float:
    """How much of the adapter's change rounding to `dtype` takes away: ‖round(W + ΔW) − (W + ΔW)‖ / ‖ΔW‖.

    In bfloat16, whose neighbours lie 1/256 apart, a change that is small beside its weight is rounded away.
    """
    weights = dict(model.named_modules())
    error = sum(
        float((weights[layer].weight.to(dtype).float() - weights[layer].weight).square().sum())
        for layer in adapter.layers
    )
    change = adapter.squared_change()
    return float((error / change) ** 0.5) if change else 0.0


def write_merged(run: Path, out: Path, dtype: torch.dtype | None) -> tuple[torch.dtype, float]:
    """Write the merged model with its tokenizer to `out`; returns the weights' dtype and what its rounding has taken.

    Without `dtype` that of the base's own files. W + ΔW is added up in float32 and rounded once.
    """
    model, tokenizer, adapter = merged(run)
    chosen = dtype or base_dtype(adapter.base)
    lost = lost_in(model, adapter, chosen)
    model.to(chosen).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return chosen, lost
