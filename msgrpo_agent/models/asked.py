"""How a model was asked while it learned: what a run's settings and a taught base's file say. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from msgrpo.errors import ModelError, first_fault, first_line, of_the_machine
from msgrpo.files import expanded, is_file, read_regular
from msgrpo.models.headers import small_config
from msgrpo.models.paths import NANO
from msgrpo.prompt import USUAL, Asked
from msgrpo.run_log import CONFIG

ASKED_IN_TRAINING = "the adapter was asked in training"
TAUGHT = "taught.json"  # beside what `teach` or `export` wrote: how it is asked, and how it was taught


class Taught(Asked):
    """What of a TAUGHT file is read: how it is asked, and the teacher beside the returns, where there was one."""

    teacher: str | None = None


def taught_as(base: str) -> Taught | None:
    """What is known of a folder or GGUF file that `msgrpo teach` or `export` wrote; None for any other.

    Raises ModelError where nobody knows how it is to be asked, since the file is damaged.
    """
    file = (Path(base).parent if is_file(base) else Path(base)) / TAUGHT
    if base == NANO or not is_file(file):
        return None
    try:
        return Taught.model_validate_json(small_config(expanded(file)))
    except (OSError, ValidationError) as error:
        reason = first_fault(error, "the file") if isinstance(error, ValidationError) else error
        raise _unknown(file, "the base was asked when it was taught", error, reason) from error


def trained_as(folder: Path) -> Asked:
    """How an adapter was asked in its training; as usual where nobody says so, since it was trained elsewhere."""
    settings = run_settings(folder)
    if settings.get("prompt") is None:
        return taught_as(str(folder)) or USUAL
    try:
        return Asked.model_validate(settings)
    except ValidationError as error:
        raise _unknown(folder / CONFIG, ASKED_IN_TRAINING, error, first_fault(error, "prompt")) from error


def run_settings(folder: Path) -> dict[str, Any]:
    """The settings of an adapter's training; empty for one that was trained elsewhere."""
    try:
        config = from_json(read_regular(folder / CONFIG))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unknown(folder / CONFIG, ASKED_IN_TRAINING, error, error) from error
    return config if isinstance(config, dict) else {}


def _unknown(file: Path, how: str, error: Exception, reason: object) -> ModelError:
    """What to raise for a file that does not say how a model is to be asked."""
    if of_the_machine(error):
        return ModelError(f"{file} cannot be read, so nobody knows how {how}: {first_line(error)}")
    return ModelError(
        f"{file} is damaged, or of a later version, so nobody knows how {how}: {reason}",
        fix="copy the folder again, or take the msgrpo that wrote it; or remove the file to have the model asked as "
        "usual",
    )
