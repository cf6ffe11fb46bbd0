"""The beginning of a model's files: config, names and shapes of tensors; and writing a model whole. No torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from msgrpo.errors import ModelError
from msgrpo.files import check_regular, read_regular

Shapes = dict[str, tuple[int, ...]]
LARGEST_CONFIG = 8 * 2**20  # bytes of a config
LARGEST_HEADER = 16 * 2**20  # bytes of a safetensors file's list of tensors


def small_config(file: Path) -> bytes:
    """A config file whole. Raises ModelError for one that is none by its size."""
    if file.stat().st_size > LARGEST_CONFIG:
        raise ModelError(f"{file} has {file.stat().st_size:,} bytes; no config has more than {LARGEST_CONFIG:,}")
    return read_regular(file)


def check_header(file: Path) -> int:
    """How many tensors a safetensors file lists. Raises ModelError where the list is damaged, or too long for one."""
    check_regular(file)
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > LARGEST_HEADER:
            raise ModelError(
                f"{file} is no complete safetensors file: it says that its list of tensors has {length:,} bytes",
                fix="copy or train it again",
            )
        try:
            return len(from_json(handle.read(length)))
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"{file} is no complete safetensors file: its list of tensors is damaged: {error}",
                fix="copy or train it again",
            ) from error


def tensor_shapes(file: Path) -> Shapes:
    """Tensor name → shape, from the header. Raises ModelError when the file is torn or no safetensors."""
    try:
        check_header(file)
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ModelError(f"{file} is no complete safetensors file: {error}", fix="copy or train it again") from error


def save_base(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model as a base that can be read by whoever may read the folder's other files.

    safetensors makes its files readable for their owner alone: a shared cache, or a server of another user, got the
    settings and not the weights. Raises OSError where it cannot be written.
    """
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # how safetensors tells of a full disk, with the system's number in its words
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise OSError(str(error)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    tokenizer.save_pretrained(folder)
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)
