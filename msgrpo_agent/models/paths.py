"""Where models and adapters lie on disk. No torch: serving and listing read this too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from msgrpo_agent.errors import ModelError

NANO = "nano"
NANO_DIR = Path(__file__).parents[1] / "nano"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def base_path(base: str) -> str:
    """Where the weights of a base are: `nano` is in the package, anything else is a folder or a hub name."""
    return str(NANO_DIR) if base == NANO else str(Path(base).expanduser()) if base.startswith("~") else base


def shipped_adapters() -> dict[str, Path]:
    """The adapters that come with nano, by the scenario that they were trained on."""
    return {path.parent.name: path.parent for path in sorted(NANO_DIR.glob(f"adapters/*/{ADAPTER_WEIGHTS}"))}


def is_folder(name: str | Path) -> bool:
    """Whether there is such a folder; names that no file can have are none."""
    try:
        return Path(name).is_dir()
    except OSError:
        return False


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The adapter's own config, after checking that the folder holds a complete adapter."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not is_folder(folder) or not (folder / name).is_file():
            raise ModelError(
                f"{folder} is no complete adapter: {name} is missing",
                fix="train one: msgrpo train --out " + str(folder),
            )
    try:
        config = from_json((folder / ADAPTER_CONFIG).read_bytes())
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
