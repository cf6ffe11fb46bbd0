"""Where base models lie on disk, and what is refused there. No torch: serving and listing read this too."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from msgrpo.errors import ModelError
from msgrpo.files import check_regular, expanded, is_file, is_folder, read_regular
from msgrpo.models.gguf_file import folder_of, is_gguf, parameters
from msgrpo.models.headers import check_header, small_config, tensor_shapes
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_of

NANO_SIZED = 20_000_000  # parameters up to which a base counts as small as nano
NANO = "nano"
NANO_DIR = Path(__file__).parents[1] / "nano"


def base_path(base: str) -> str:
    """Where the weights of a base are: `nano` is in the package, anything else is a folder, a file or a hub name.

    Of a GGUF file it is the folder in the cache into which `gguf_file.ready` converts it.
    """
    if base == NANO:
        return str(NANO_DIR)
    path = _expanded(base)
    return str(folder_of(Path(path))) if is_gguf(path) and not is_folder(path) else path


def _expanded(base: str) -> str:
    try:
        return str(expanded(base)) if base.startswith("~") else base
    except FileNotFoundError as error:
        raise ModelError(f"the base model {base!r} is no folder: {error.strerror}") from error


def is_hub_name(base: str) -> bool:
    """Whether a hub could have a model of this name: OWNER/NAME."""
    return not is_gguf(base) and not base.startswith((".", "/", "~")) and base.count("/") == 1


def no_such_base(base: str) -> ModelError:
    """What is said of a base that is nothing on this disk, and that no hub could have."""
    return ModelError(
        f"the base model {base!r} is no folder and no hub name",
        fix="use nano, a folder with config.json and safetensors, a GGUF file, or a name like "
        "Qwen/Qwen2.5-3B-Instruct",
    )


def adapters_base(adapter: Path) -> str:
    """The base that an adapter names. Raises ModelError where no hub could have it and nothing is at that place."""
    base = base_of(adapter)
    place = _expanded(base)
    if base != NANO and not (is_hub_name(base) or is_file(place) or is_folder(place)):
        raise ModelError(
            f"the adapter {adapter} was trained on {base}, which is not there",
            fix="put it back, or name its new place, or OWNER/NAME of a hub, as base_model_name_or_path in "
            f"{adapter / ADAPTER_CONFIG}",
        )
    return base


def absolute(base: str) -> str:
    """The name of a base that holds in every folder: files and folders by their whole path."""
    there = base != NANO and (is_gguf(base) or is_folder(base_path(base)))
    return str(expanded(base).resolve()) if there else base


def shipped_adapters() -> dict[str, Path]:
    """The adapters that come with nano, by the scenario that they were trained on."""
    return {path.parent.name: path.parent for path in sorted(NANO_DIR.glob(f"adapters/*/{ADAPTER_WEIGHTS}"))}


def parameters_of(base: str) -> int | None:
    """How many parameters a base has, by the headers of its files; None for a hub name and for what is not there.

    Nothing is loaded or converted: of a GGUF file, its own list of tensors is read.
    """
    if is_gguf(base):
        return parameters(Path(_expanded(base)))
    folder = Path(base_path(base))
    files = sorted(folder.glob("*.safetensors")) if is_folder(folder) else []
    shapes = [shape for file in files for shape in tensor_shapes(file).values()]
    return sum(map(prod, shapes)) if shapes else None


def check_base(base: str) -> None:
    """Raise ModelError for the folder of a base whose files are not what they should be: pickles, absurd headers.

    Only the files are looked at; nothing is loaded. A hub name is left to the hub's client.
    """
    folder = Path(base_path(base))
    if not is_folder(folder):
        return
    try:
        for file in folder.iterdir():  # transformers opens most of them itself
            if not file.is_dir():
                check_regular(file)
        config = from_json(small_config(folder / "config.json"))
        if (folder / "tokenizer_config.json").is_file():
            small_config(folder / "tokenizer_config.json")
        weights = sorted(folder.glob("*.safetensors"))
        tensors = sum(map(check_header, weights))
    except OSError as error:
        raise ModelError(f"the base model {base!r} cannot be loaded: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"the base model {base!r} cannot be loaded: config.json is no JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        adapter = (folder / ADAPTER_CONFIG).is_file()
        fix = f"it holds an adapter: adapter:{base}" if adapter else "give the folder of a causal language model"
        raise ModelError(f"the base model {base!r} cannot be loaded: its config.json names no model_type", fix=fix)
    if kernel := foreign_kernel(config):
        raise ModelError(
            f"the base model {base!r} cannot be loaded: its config.json asks for the attention of {kernel[:80]!r}, "
            "which is compiled code from a hub",
            fix="take attn_implementation out of its config.json",
        )
    if not weights:
        pickled = sorted(file.name for end in ("*.bin", "*.pt", "*.pth") for file in folder.glob(end))
        what = f"only pickled weights ({pickled[0]}), which can run code" if pickled else "no safetensors weights"
        raise ModelError(
            f"the base model {base!r} cannot be loaded: it holds {what}", fix="convert it to safetensors"
        )
    layers = config.get("num_hidden_layers", 0)
    if isinstance(layers, int) and layers > max(tensors, 1):
        raise ModelError(
            f"the base model {base!r} cannot be loaded: {layers:,} layers, and {tensors} tensors for them"
        )


def foreign_kernel(config: Any) -> str | None:
    """The repository of an attention kernel that a config names anywhere: transformers would load compiled code."""
    if isinstance(config, list):
        return next(filter(None, map(foreign_kernel, config)), None)
    if not isinstance(config, dict):
        return None
    named = (str(value) for key, value in config.items() if "attn_implementation" in key)
    return next((name for name in named if "/" in name), None) or foreign_kernel(list(config.values()))


def own_code(base: str) -> str | None:
    """The files of code that a base's folder wants to be run, which they never are; None without any."""
    folder = Path(base_path(base))
    for name in ("config.json", "tokenizer_config.json"):
        try:
            named = from_json(read_regular(folder / name)).get("auto_map")
        except (OSError, ValueError, AttributeError):
            continue
        if named:
            return str(named)[:80]
    return None
