"""LoRA layers that compute in the type of their base, where their own weights are held more exactly.

An adapter trained beside a bfloat16 base has float32 weights, since its updates are small. PEFT then computes the
adapter's part in float32, and converts all that flows in and out: with a 135M on a processor, a third of a rollout.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor


def compute_as_base(model: Any) -> None:
    """Let plain LoRA layers compute y = W x + s B A x in W's type: A and B are rounded for it, and stay as they are.

    s is the layer's scaling, α / r or α / √r. Where all types are equal nothing changes.
    """
    for layer in model.modules():
        if isinstance(layer, Linear) and not layer.lora_variant and _rounds(layer):
            layer.forward = MethodType(_forward, layer)


def _rounds(layer: Linear) -> bool:
    return any(part.weight.dtype != layer.get_base_layer().weight.dtype for part in layer.lora_A.values())


def _forward(layer: Linear, x: Tensor) -> Tensor:
    """x (…, in) → (…, out)."""
    y: Tensor = layer.base_layer(x)
    if layer.disable_adapters:
        return y
    (name,) = layer.active_adapters
    down, up = (part[name].weight.to(y.dtype) for part in (layer.lora_A, layer.lora_B))
    low = x.flatten(0, -2) @ down.T
    return torch.addmm(y.flatten(0, -2), low, up.T, alpha=layer.scaling[name]).view_as(y)
