"""Loading a causal LM and its tokenizer from a folder, a hub name or the package, with clear refusals."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import from_json
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from msgrpo_agent.errors import ModelError
from msgrpo_agent.models.local import LocalModel
from msgrpo_agent.models.paths import ADAPTER_CONFIG as ADAPTER_CONFIG
from msgrpo_agent.models.paths import ADAPTER_WEIGHTS as ADAPTER_WEIGHTS
from msgrpo_agent.models.paths import NANO as NANO
from msgrpo_agent.models.paths import NANO_DIR as NANO_DIR
from msgrpo_agent.models.paths import base_path as base_path
from msgrpo_agent.models.paths import read_adapter_config as read_adapter_config
from msgrpo_agent.models.trunk import prepare
from msgrpo_agent.prompt import PromptTemplate

# transformers loads under process-wide switches (meta device, no initialisation): two loads at once do damage.
_LOADING = threading.Lock()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_base(base: str, *, device: torch.device | None = None, dtype: str = "auto") -> tuple[Any, Any]:
    """(model, tokenizer). `dtype` auto is bfloat16 on a GPU (nano: float32) and float32 on a CPU.

    Raises ModelError when it cannot be found or reached, or is no causal language model.
    """
    device = device or default_device()
    transformers_logging.disable_progress_bar()
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" or base == NANO else "bfloat16"
    path = base_path(base)
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise ModelError(
            f"the base model {base!r} is no folder and no hub name",
            fix="use nano, a folder with config.json and safetensors, or a name like Qwen/Qwen2.5-3B-Instruct",
        )
    try:
        with _LOADING:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except Exception as error:  # a damaged folder raises nearly anything, in transformers and in safetensors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"the base model {base!r} cannot be loaded: {reason}",
            fix="check the name and the network, or give the folder of a causal language model",
        ) from error
    model = model.to(device).eval()
    prepare(model, base)
    return model, tokenizer


def load_adapted(folder: Path, *, device: torch.device | None = None, dtype: str = "auto") -> tuple[Any, Any]:
    """(model, tokenizer) of an adapter on its base; merged into the weights where these are float32.

    In bfloat16 merging would round small changes away, so there the adapter stays beside the weights.
    """
    from peft import PeftModel

    config = read_adapter_config(folder)
    model, tokenizer = load_base(config["base_model_name_or_path"], device=device, dtype=dtype)
    try:
        with _LOADING, warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # it would play as its base
            adapted = PeftModel.from_pretrained(model, str(folder)).eval()
    except Exception as error:  # as above, and peft
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ModelError(f"the adapter {folder} does not fit its base: {reason}") from error
    return (adapted.merge_and_unload() if model.dtype == torch.float32 else adapted), tokenizer


def nano() -> LocalModel:
    """The embedded model."""
    model = LocalModel(NANO, *load_base(NANO))
    model.extra_settings = {"weights": _digest(NANO_DIR / "model.safetensors")}
    return model


def based(base: str, chat: Mapping[str, Any] | None = None) -> LocalModel:
    """A base model as it is, from a folder or a hub; `chat` are the arguments of its chat template."""
    if base == NANO:
        return nano()
    model = LocalModel(base, *load_base(base), chat=chat)
    weights = sorted(Path(base_path(base)).glob("*.safetensors"))
    model.extra_settings = {"weights": "+".join(map(_digest, weights)) or base, **({"chat": chat} if chat else {})}
    return model


def adapted(folder: Path, chat: Mapping[str, Any] | None = None) -> LocalModel:
    """A trained run's model, named after its folder; without `chat`, with the arguments that it was trained with."""
    chat = _trained_with(folder, "chat") if chat is None else chat
    model = LocalModel(folder.resolve().name, *load_adapted(folder), chat=chat)
    model.extra_settings = {"weights": _digest(folder / ADAPTER_WEIGHTS), **({"chat": chat} if chat else {})}
    return model


def template_of(folder: Path) -> PromptTemplate | None:
    """The prompt that an adapter was trained with; None for one that was trained elsewhere."""
    try:
        return PromptTemplate.model_validate(_trained_with(folder, "prompt"))
    except ValidationError:
        return None


def _trained_with(folder: Path, setting: str) -> dict[str, Any]:
    """A setting of the adapter's training that is an object; empty for one that was trained elsewhere."""
    try:
        held = from_json((folder / "config.json").read_bytes()).get(setting, {})
    except (OSError, ValueError, AttributeError):
        return {}
    return held if isinstance(held, dict) else {}


def _digest(file: Path) -> str:
    """Names weights in records: a folder that was trained again is another agent."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
