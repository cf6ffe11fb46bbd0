"""One clear error where the memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from msgrpo.errors import RunError, no_memory


@contextmanager
def enough_memory() -> Iterator[None]:
    """Where the memory of the GPU or of the machine runs out, raise RunError with the settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        why = no_memory(error)
        if why is None:
            raise
        raise RunError(
            why,
            fix="lower micro_batch, max_tokens or group_size, or take more time: --set "
            "'micro_batch=2048(checkpointing=true)'; in a new --out, since these are settings of the run",
        ) from error
