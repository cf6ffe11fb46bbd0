"""Bodies of HTTP responses, never longer than they may be, compressed or not.

A few kilobytes of gzip can hold gigabytes. So the inflating is done here, a piece at a time, and ends at a bound; the
event loop gets its turn between the pieces.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

LONGEST_BODY = 16 * 2**20  # bytes; thousands of tokens with twenty alternatives each are a few millions
ACCEPTED = {"Accept-Encoding": "gzip, deflate"}  # what `_inflated` understands
_PIECE = 2**18  # bytes that are inflated between two turns of the loop


class BodyError(Exception):
    """A body cannot be inflated."""


class TooLongError(BodyError):
    """A body went beyond LONGEST_BODY."""


async def bounded(pieces: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """The pieces of a body, inflated; `encoding` is its Content-Encoding.

    Raises BodyError where it cannot be inflated, TooLongError once it is longer than LONGEST_BODY.
    """
    length, inflater = 0, _inflater(encoding)
    async for chunk in pieces:
        for piece in [chunk] if inflater is None else _inflated(inflater, chunk):
            length += len(piece)
            if length > LONGEST_BODY:
                raise TooLongError(f"the body is longer than {LONGEST_BODY // 2**20} MiB")
            yield piece
            if inflater is not None:
                await asyncio.sleep(0)


def _inflater(encoding: str) -> Any:
    """None for a body that is not compressed."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise BodyError(f"the body is compressed as {encoding[:40]!r}, which nobody asked for")
    return zlib.decompressobj(wbits=47)  # tells gzip and zlib apart by itself


def _inflated(inflater: Any, chunk: bytes) -> Iterator[bytes]:
    try:
        while chunk:
            yield inflater.decompress(chunk, _PIECE)
            chunk = inflater.unconsumed_tail
    except zlib.error as error:
        raise BodyError(f"the body cannot be inflated: {error}") from error
