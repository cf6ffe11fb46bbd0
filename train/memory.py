"""Memory that is not there, as one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from msgrpo.errors import RunError

# How a RuntimeError says that memory is missing: the CPU's allocator, CUDA's, and libraries with one of their own.
NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn memory that is not there, on a GPU or on the CPU, into one clear error with the settings to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not known and not any(words in str(error) for words in NO_MEMORY):
            raise
        raise RunError(
            f"there is not enough memory: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            fix="lower --set micro_batch_tokens=…, max_tokens or group_size, or --set gradient_checkpointing=true; "
            "in a new --out, since these are settings of the run",
        ) from error
