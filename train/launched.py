"""What a launcher (`torchrun`, `accelerate launch`) says of this process, before anything is opened. No torch."""

from __future__ import annotations

import os

from msgrpo.errors import UsageError


def processes() -> int:
    """How many processes a launcher has started; 1 without a launcher."""
    alone = "RANK" not in os.environ  # some job systems set WORLD_SIZE by themselves
    return 1 if alone else launched("WORLD_SIZE", 1, range(1, 2**31))


def by_accelerate() -> bool:
    """Whether the launcher is `accelerate launch`."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ  # it always sets this


def launched(name: str, otherwise: int, allowed: range = range(2**31)) -> int:
    """A number that a launcher set: RANK, WORLD_SIZE, …; without a launcher `otherwise`.

    Raises UsageError for what is no number of those allowed.
    """
    value = os.environ.get(name, str(otherwise))
    if not value.isdecimal() or int(value) not in allowed:
        raise UsageError(
            f"{name} is {value!r}, no number from {allowed[0]} to {allowed[-1]}",
            fix=f"unset {name}; torchrun and accelerate launch set it",
        )
    return int(value)
