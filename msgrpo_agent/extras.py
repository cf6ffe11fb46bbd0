"""Packages that are optional, and packages of ours that something else hides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from msgrpo_agent.errors import MissingExtraError, MsgrpoError, UsageError

# What each extra of pyproject.toml brings, by the name that is imported.
EXTRAS = {
    "train": ("torch", "transformers", "peft", "tokenizers", "matplotlib", "tensorboard"),
    "dqn": ("stable_baselines3", "torch", "tensorboard"),
    "web": ("textual_serve",),
    "minigrid": ("minigrid",),
    "openspiel": ("pyspiel",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "export": ("inspect_ai", "pyarrow"),
}
OURS = ("evals", "serve", "train", "tui")
ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import of one of the extra's packages into the command that installs it.

    A module of ours that is missing is a fault of this project and stays a traceback. A package that is there and
    cannot be imported (a library that it needs is missing) is told with its own words.
    """
    try:
        yield
    except ImportError as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in (*OURS, "msgrpo_agent"):
            raise
        if missing in EXTRAS[extra]:
            raise MissingExtraError(what, extra) from error
        raise MsgrpoError(
            f"{what} cannot start, because an installed package cannot be imported: {error}",
            fix=f"pip install --force-reinstall 'msgrpo[{extra}]'",
        ) from error


def check_not_hidden() -> None:
    """Raise UsageError where another file is found under the name of one of our packages (a user's train.py)."""
    for package in OURS:
        spec = find_spec(package)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if found is None or found.parent != ROOT / package:
            where = found or (list(spec.submodule_search_locations or []) if spec is not None else "nothing")
            raise UsageError(
                f"the name {package!r}, a package of msgrpo, leads to {where} instead of {ROOT / package}",
                fix="rename that file or folder, or take its folder out of PYTHONPATH",
            )
