"""Bodies of HTTP responses, never longer than they may be, compressed or not.

A few kilobytes of gzip can hold gigabytes. So the inflating is done here, a piece at a time, and ends at a bound; the
event loop gets its turn between the pieces.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

LONGEST_BODY = 16 * 2**20  # bytes; thousands of tokens with twenty alternatives each are a few millions
ACCEPTED = {"Accept-Encoding": "gzip, deflate"}  # what `_inflated` understands
_PIECE = 2**18  # bytes that are inflated between two turns of the loop


class BodyError(Exception):
    """A body cannot be inflated."""


class TooLongError(BodyError):
    """A body went beyond LONGEST_BODY."""


async def bound_body(response: Any) -> None:
    """A hook of a client of httpx, or of its successor that openai uses: the body's bytes are counted as they come.

    It is inflated here, and read as UTF-8: JSON is UTF-8 (RFC 8259), whatever a server calls its charset, and some
    names are no text codec at all.
    """
    response.encoding = "utf-8"
    encoding = response.headers.pop("content-encoding", "identity").strip().lower()
    kind = next(kind for kind in type(response.stream).__mro__ if kind.__name__ == "AsyncByteStream")
    response.stream = _bounded(kind)(response.stream, encoding)


@cache
def _bounded(kind: type) -> type[_Bounded]:
    """The class for one client library, which takes no streams but its own."""
    return type("Bounded", (_Bounded, kind), {})


class _Bounded:
    def __init__(self, stream: Any, encoding: str) -> None:
        self._stream, self._encoding = stream, encoding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        length, inflater = 0, _inflater(self._encoding)
        async for chunk in self._stream:
            for piece in [chunk] if inflater is None else _inflated(inflater, chunk):
                length += len(piece)
                if length > LONGEST_BODY:
                    raise TooLongError(f"the body is longer than {LONGEST_BODY // 2**20} MiB")
                yield piece
                if inflater is not None:
                    await asyncio.sleep(0)

    async def aclose(self) -> None:
        await self._stream.aclose()


def _inflater(encoding: str) -> Any:
    """None for a body that is not compressed."""
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
