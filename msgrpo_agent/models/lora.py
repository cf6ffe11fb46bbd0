"""A LoRA on disk, as PEFT writes it: two files, the names of its tensors, what its config may say. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from msgrpo.errors import ModelError
from msgrpo.files import is_folder
from msgrpo.models.headers import small_config, tensor_shapes

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE_LAYERS = "base_model.model."  # how PEFT calls the base that it has put layers into


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter's own config, after checking that the folder holds a complete adapter."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not is_folder(folder) or not (folder / name).is_file():
            raise ModelError(
                f"{folder} is no complete adapter: {name} is missing",
                fix="msgrpo adapters lists the runs; msgrpo train frozen-lake --out runs/frozen-lake trains one",
            )
    try:
        config = from_json(small_config(folder / ADAPTER_CONFIG))
    except OSError as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder / ADAPTER_CONFIG} holds no JSON object")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not 0 < len(base) < 1024:
        raise ModelError(f"{folder / ADAPTER_CONFIG} does not name its base model (base_model_name_or_path)")
    return config


def base_of(folder: Path) -> str:
    """The base that an adapter was trained on, as its config names it."""
    return str(read_adapter_config(folder)["base_model_name_or_path"])


def by_layer(tensors: Iterable[str]) -> dict[str, dict[str, str]]:
    """Layer of the base → part of its change → the tensor's name in the file. A LoRA has the parts A and B, DoRA one
    more. What is no layer's stands under an empty name.
    """
    layers: dict[str, dict[str, str]] = {}
    for tensor in tensors:
        layer, _, part = tensor.removeprefix(_BEFORE_LAYERS).rpartition(".lora_")
        layers.setdefault(layer, {})[part.removesuffix(".weight")] = tensor
    return layers


def adapter_arguments(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What of an adapter's config makes its layers: a plain LoRA's, each value checked.

    The layers are those that the weights name: a pattern from a file is no pattern that is run over anything. Raises
    ModelError for a config that asks for more than that.
    """
    named = by_layer(tensor_shapes(folder / ADAPTER_WEIGHTS)).keys() - {""}
    settings = {key: config[key] for key in PLAIN if key in config}
    odd = [key for key in NOT_PLAIN if config.get(key)] + [
        key
        for key, kind in PLAIN.items()
        if key in settings and not (isinstance(settings[key], kind) and _fits(settings[key], len(named)))
    ]
    inits = config.get("init_lora_weights")
    if config.get("peft_type", "LORA") != "LORA":
        odd.append("peft_type")
    if isinstance(inits, str) and inits.lower().startswith(CHANGES_BASE):
        odd.append("init_lora_weights")
    if odd or "r" not in settings or not named:
        seen = ", ".join(f"{key}={str(config.get(key))[:60]}" for key in odd) or "no rank, or no layer"
        raise ModelError(
            f"the adapter {folder} is no plain LoRA of this project's kind: {seen}",
            fix="train one, or merge it into its base with the tool that made it",
        )
    return settings | {"target_modules": sorted(named), "task_type": "CAUSAL_LM", "init_lora_weights": False}


# A LoRA's own settings and their types; settings that make it something else; inits that change the base's weights.
PLAIN: dict[str, Any] = {
    "r": int,
    "lora_alpha": (int, float),
    "rank_pattern": dict,
    "alpha_pattern": dict,
    "use_rslora": bool,
    "use_dora": bool,
    "fan_in_fan_out": bool,
}
NOT_PLAIN = (
    "modules_to_save",
    "layer_replication",
    "megatron_config",
    "trainable_token_indices",
    "lora_bias",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "eva_config",
    "target_parameters",
)
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
LARGEST = 8192  # rank, and alpha


def _fits(value: Any, layers: int) -> bool:
    """Whether a number is one that a layer can have; of a pattern, all of them, and plain names beside them, of which
    there are no more than layers: each is tried on each layer.
    """
    if isinstance(value, bool):
        return True
    if isinstance(value, dict):
        plain = all(re.fullmatch(r"[\w.]{1,200}", key) and _fits(nested, layers) for key, nested in value.items())
        return plain and len(value) <= layers
    return isinstance(value, (int, float)) and 0 < value <= LARGEST
