"""Files that are whole, or as they were before."""

from __future__ import annotations

from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write a text file, in UTF-8; see `replace_bytes`."""
    replace_bytes(file, text.encode())


def replace_bytes(file: Path, data: bytes) -> None:
    """Write a file beside its place and move it there: killed on the way, what was there before stays.

    Raises OSError where it cannot be written; then nothing is left of it.
    """
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_bytes(data)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
