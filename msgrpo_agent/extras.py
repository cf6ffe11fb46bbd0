"""Optional packages, and the command that installs each."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from msgrpo.errors import MissingExtraError, MsgrpoError
from msgrpo.install import install_command

# What each extra of pyproject.toml brings, by the name that is imported.
EXTRAS = {
    "train": ("torch", "transformers", "peft", "tokenizers", "matplotlib", "tensorboard"),
    "gguf": ("gguf",),
    "dqn": ("stable_baselines3", "torch", "tensorboard"),
    "web": ("textual_serve",),
    "minigrid": ("minigrid",),
    "openspiel": ("pyspiel",),
    "textarena": ("textarena", "nltk"),
    "openenv": ("openenv", "websockets"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "tinker": ("tinker", "torch", "transformers", "peft", "matplotlib", "tensorboard"),
    "ray": ("ray", "pandas", "pyarrow"),
    "export": ("inspect_ai", "pyarrow"),
}


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import of one of the extra's packages into the command that installs it.

    A module of ours that is missing is a fault of this project and stays a traceback. A package that is there and
    cannot be imported (a library that it needs is missing) is told with its own words.

    Meanwhile Python searches for no cycles: modules stay, and the searches among them took a seventh of an import.
    """
    searches = gc.isenabled()
    gc.disable()
    try:
        yield
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing == "msgrpo":
            raise
        if missing in EXTRAS[extra]:
            raise MissingExtraError(what, extra) from error
        raise MsgrpoError(
            f"{what} cannot start, because an installed package cannot be imported: {error}",
            fix=install_command(extra, "--force-reinstall"),
        ) from error
    finally:
        if searches:
            gc.enable()
