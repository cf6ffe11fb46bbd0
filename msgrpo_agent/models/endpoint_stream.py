"""An answer that a server streams (server-sent events), put together to the body that it would have sent at once."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from msgrpo.agent import OnText
from msgrpo.models.bounded import TooLongError
from msgrpo.models.endpoint_answers import checked, no_answer, objects, parsed, reasoning_of, text_of
from msgrpo.models.endpoint_failures import BadBodyError

LONGEST_LINE = 2**20  # bytes of a stream's line: one chunk, with its alternatives, is a few thousand
TELL_S = 0.05  # between two tellings of an answer that grows


async def streamed(
    pieces: AsyncIterator[bytes], on_text: OnText, check_length: Callable[[int], None]
) -> dict[str, Any]:
    """The checked body of an answer, from the pieces of its stream.

    `on_text` gets the text so far, now and then, `check_length` the number of characters so far; it may raise.
    Raises BadBodyError for a stream that holds no whole answer.
    """
    text, reasoning = _Growing(on_text), _Growing()
    finish, usage, failed = None, None, None
    served: dict[str, Any] = {}
    logprobs: list[Any] = []
    characters, ended = 0, False
    async for chunk in _chunks(pieces):
        if chunk is None:
            ended = True
            break
        usage = chunk.get("usage") or usage
        served |= {name: chunk[name] for name in ("model", "system_fingerprint") if chunk.get(name)}
        for choice in objects(chunk.get("choices")):
            (delta,) = objects([choice.get("delta")]) or [{}]
            new = (reasoning_of(delta) or "", text_of(delta.get("content")))
            characters += sum(map(len, new))
            check_length(characters)
            reasoning.add(new[0])
            finish = choice.get("finish_reason") or finish
            failed = choice.get("error") or failed
            for known in objects([choice.get("logprobs")]):
                logprobs += objects(known.get("content"))
            text.add(new[1])
    if finish is None and ended:
        reason = "the stream ended with [DONE] and gave no finish_reason, so nobody knows whether the answer is whole"
        raise BadBodyError(reason, retry=False)
    if finish is None:
        raise BadBodyError("the stream ended before the answer did")
    text.tell()
    message = {"content": text.whole, "reasoning": reasoning.whole or None}
    choice = {"message": message, "finish_reason": finish, "logprobs": {"content": logprobs}, "error": failed}
    return checked({"choices": [choice], "usage": usage} | served)


class _Growing:
    """A text that comes in pieces. `on_text` is told of it at most every TELL_S: each telling copies all of it."""

    def __init__(self, on_text: OnText | None = None) -> None:
        self._pieces: list[str] = []
        self._on_text = on_text
        self._told_at = -math.inf
        self._untold = False

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._untold = True
            if time.monotonic() - self._told_at >= TELL_S:
                self.tell()

    def tell(self) -> None:
        if self._on_text is not None and self._untold:
            self._on_text(self.whole)
            self._untold, self._told_at = False, time.monotonic()

    @property
    def whole(self) -> str:
        return "".join(self._pieces)


async def _chunks(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """The objects of a stream of server-sent events, up to `[DONE]`, which is None."""
    async for data in _events(pieces):
        if data.startswith(b"[DONE]"):
            yield None
            return
        chunk = parsed(data.decode("utf-8", "replace"), "a chunk")
        if not isinstance(chunk, dict):
            raise BadBodyError(f"the stream holds {str(chunk)[:80]!r} in place of a chunk")
        if chunk.get("error"):
            raise no_answer(chunk["error"], "")
        yield chunk


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event: its `data:` lines, up to an empty line."""
    data: list[bytes] = []
    async for line in _lines(pieces):
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" "))
        elif not line and data:
            yield b"\n".join(data)
            data.clear()


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines without their end. A line is put together once, however small the pieces are that it comes in."""
    begun, length = list[bytes](), 0
    async for piece in pieces:
        first, *others = piece.split(b"\n")
        begun.append(first)
        length += len(first)
        if length > LONGEST_LINE:
            raise TooLongError(f"a line of the stream has more than {LONGEST_LINE // 2**20} MiB and no end")
        for start in others:
            yield b"".join(begun).removesuffix(b"\r")
            begun, length = [start], len(start)
