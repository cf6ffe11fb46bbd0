"""Loading a causal LM and its tokenizer from a folder, a hub name or the package, with clear refusals."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from msgrpo.errors import ModelError, MsgrpoError, first_line, no_memory, of_the_machine
from msgrpo.files import digest, expanded, is_folder
from msgrpo.models.asked import run_settings, taught_as, trained_as
from msgrpo.models.gguf_file import is_gguf, named, ready
from msgrpo.models.local import LocalModel
from msgrpo.models.lora import ADAPTER_WEIGHTS, adapter_arguments, base_of, read_adapter_config
from msgrpo.models.paths import (
    NANO,
    NANO_DIR,
    NANO_SIZED,
    adapters_base,
    base_path,
    check_base,
    is_hub_name,
    no_such_base,
    own_code,
    parameters_of,
)
from msgrpo.models.proof import prepare
from msgrpo.text import printable

# transformers loads under process-wide switches (meta device, no initialisation): two loads at once do damage.
_LOADING = threading.Lock()
HUB_S = 10.0  # for a first answer of the hub
PAYS = 1.5  # times as fast as float32 that bfloat16 must be on a CPU
ROUNDS = 10  # of that comparison, a tenth of a second


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usual_dtype(base: str, device: torch.device) -> str:
    """bfloat16 on a GPU, and of a base beyond nano's size on a processor that is faster with it; else float32."""
    if base == NANO:
        return "float32"
    if device.type == "cpu" and ((parameters_of(base) or 0) <= NANO_SIZED or not _bfloat16_pays()):
        return "float32"
    return "bfloat16"


@cache
def _bfloat16_pays() -> bool:
    """Whether this processor multiplies matrices clearly faster in bfloat16. Measured: instructions may lack.

    The two are measured in turn: a run that is resumed must decide alike, whatever else the machine does meanwhile.
    """
    fastest = {torch.float32: math.inf, torch.bfloat16: math.inf}
    for _ in range(ROUNDS):
        for dtype in fastest:
            fastest[dtype] = min(fastest[dtype], _product_s(dtype))
    return fastest[torch.float32] > PAYS * fastest[torch.bfloat16]


def _product_s(dtype: torch.dtype) -> float:
    """Seconds that this thread computes for one product; those in which other programs have its core do not count."""
    x, y = torch.ones(64, 1024, dtype=dtype), torch.ones(1024, 2048, dtype=dtype)
    began = time.thread_time()
    x @ y
    return time.thread_time() - began


# Makes a model by its first argument, and reads its weights from a folder its own way.
Placing = Callable[[Callable[[], Any], str, torch.device], Any]


def load_base(
    base: str, *, device: torch.device | None = None, dtype: str = "auto", placing: Placing | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer). `dtype` auto: see `usual_dtype`.

    With `placing` the weights are not loaded here, but by it (into shares of several processes).
    Raises ModelError when it cannot be found or reached, or is no causal language model.
    """
    device = device or default_device()
    transformers_logging.disable_progress_bar()
    if dtype == "auto":
        dtype = usual_dtype(base, device)
    path = base_path(base)
    if is_gguf(base):
        ready(expanded(base))
    if not (is_folder(path) or is_hub_name(path)):
        raise no_such_base(base)
    check_base(base)
    try:
        if not is_folder(path):
            _look_at_hub(path)
        with _LOADING:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            if placing is None:
                model = AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
                )
            else:
                model = _placed(path, getattr(torch, dtype), device, placing)
    except MsgrpoError:
        raise
    except Exception as error:  # a damaged folder raises nearly anything, in transformers and in safetensors
        reason = first_line(error)
        if (code := own_code(base)) is not None:
            reason = f"it comes with code of its own ({code}), which is never run; without it: {reason}"
        fix = "check the name and the network, or give the folder of a causal language model"
        if no_memory(error) is not None:
            fix = "take a smaller base, or make room: other programs may hold the memory"
        raise ModelError(f"the base model {base!r} cannot be loaded: {reason}", fix=fix) from error
    model = (model.to(device) if placing is None else model).eval()
    prepare(model, base)
    return model, tokenizer


def local_tokenizer(base: str) -> Any | None:
    """The tokenizer of a base whose folder, or whose name in the hub's cache, has one; None where nothing is here."""
    path = base_path(base)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged folder raises nearly anything; a name that is not in the cache too
        if not is_folder(path):
            return None
        raise ModelError(
            f"the tokenizer of {base!r} cannot be loaded: {str(error)[:300]}",
            fix="give a folder with tokenizer.json and tokenizer_config.json; its weights are not needed",
        ) from error


def _placed(path: str, dtype: torch.dtype, device: torch.device, placing: Placing) -> Any:
    folder = path if is_folder(path) else snapshot_download(path, allow_patterns=["*.json", "*.safetensors"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = placing(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype), folder, device)
    if (Path(folder) / "generation_config.json").is_file():  # which tokens end an answer
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_adapted(folder: Path, *, device: torch.device | None = None, dtype: str = "auto") -> tuple[Any, Any]:
    """(model, tokenizer) of an adapter on its base; merged into the weights where these are float32.

    In bfloat16 merging would round small changes away, so there the adapter stays beside the weights.
    """
    from peft import LoraConfig, PeftModel

    config = read_adapter_config(folder)
    arguments = adapter_arguments(folder, config)
    named_layers, lora = list(arguments["target_modules"]), LoraConfig(**arguments)  # PEFT shortens its own list
    model, tokenizer = load_base(adapters_base(folder), device=device, dtype=dtype)
    try:
        with _LOADING, warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # it would play as its base
            adapted = PeftModel.from_pretrained(model, str(folder), config=lora).eval()
    except Exception as error:  # as above, and peft
        why = "cannot be loaded" if of_the_machine(error) else "does not fit its base"
        raise ModelError(f"the adapter {folder} {why}: {first_line(error)}") from error
    layers = {name for name, layer in adapted.get_base_model().named_modules() if hasattr(layer, "lora_A")}
    unused = sorted(set(named_layers) - layers)
    if unused:  # PEFT passes over weights that no layer takes, unless it finds a layer for none of them
        raise ModelError(
            f"the adapter {folder} does not fit its base: {len(unused)} of its {len(named_layers)} layers are none "
            f"of the base's, like {unused[0]}",
            fix="its weights are for another base, or were renamed",
        )
    return (adapted.merge_and_unload() if model.dtype == torch.float32 else adapted), tokenizer


def _look_at_hub(name: str) -> None:
    """Raise where a model is not on this disk and the hub cannot be reached: its client would try for minutes."""
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    with suppress(HfHubHTTPError):  # it answers: loading says what is wrong
        HfApi().model_info(name, timeout=HUB_S)


def nano() -> LocalModel:
    """The embedded model."""
    model = LocalModel(NANO, *load_base(NANO))
    model.extra_settings = {"weights": _digest(NANO_DIR / "model.safetensors")}
    return model


def based(base: str, chat: Mapping[str, Any] | None = None) -> LocalModel:
    """A base model as it is, from a folder, a GGUF file or a hub; `chat` are the arguments of its chat template."""
    if base == NANO:
        return nano()
    model = LocalModel(Path(base).name if is_gguf(base) else base, *load_base(base), chat=chat)
    model.extra_settings = {"weights": weights_of(base), **({"chat": chat} if chat else {}), **_taught_by(base)}
    return model


def weights_of(base: str) -> str:
    """Names a base's weights in records: by their digests, or by a GGUF file's name and checksum."""
    if is_gguf(base):
        return named(expanded(base))
    weights = sorted(Path(base_path(base)).glob("*.safetensors"))
    return "+".join(map(_digest, weights)) or base


def adapted(folder: Path, chat: Mapping[str, Any] | None = None) -> LocalModel:
    """A trained run's model, named after its folder; without `chat`, with the arguments that it was trained with."""
    chat = trained_as(folder).chat if chat is None else chat
    model = LocalModel(folder.resolve().name, *load_adapted(folder), chat=chat)
    chat_given = {"chat": chat} if chat else {}
    model.extra_settings = {"weights": _digest(folder / ADAPTER_WEIGHTS), **chat_given, **teacher_of(folder)}
    return model


def teacher_of(folder: Path) -> dict[str, str]:
    """Who taught an adapter, or the base that it was trained from; nobody where the returns alone did.

    A table must not take the score for that of reinforcement.
    """
    if isinstance(teacher := run_settings(folder).get("teacher"), str):
        return {"teacher": printable(teacher)[:200]}
    return _taught_by(str(folder)) or _taught_by(base_of(folder))


def _taught_by(base: str) -> dict[str, str]:
    known = taught_as(base)
    return {} if known is None or known.teacher is None else {"teacher": printable(known.teacher)[:200]}


def _digest(file: Path) -> str:
    """Names weights in records: a folder that was trained again is another agent."""
    return digest(file)[:12]
