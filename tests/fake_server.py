"""A scripted OpenAI-compatible server over a real socket, for everything that a client must survive.

`FakeServer(script, then)`: the n-th request is handled by the n-th entry of `script`, later ones by `then`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

ACTIONS = ("up", "down", "left", "right")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Behaviour = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def http(status: int, body: bytes, headers: dict[str, str] | None = None, *, length: int | None = None) -> bytes:
    """A raw HTTP/1.1 response; `length` may claim more bytes than there are."""
    lines = [f"HTTP/1.1 {status} Scripted"]
    given = {"content-type": "application/json", "content-length": str(len(body) if length is None else length)}
    lines += [f"{name}: {value}" for name, value in (given | (headers or {})).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def send(raw: bytes, *, close: bool = False) -> Behaviour:
    async def behave(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        if close:
            writer.close()

    return behave


def reply(status: int, body: Any, headers: dict[str, str] | None = None) -> Behaviour:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return send(http(status, data, headers))


def chat(text: str | None, finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {
        "id": "x",
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


def answer(text: str | None, finish: str | None = "stop", **message: Any) -> Behaviour:
    return reply(200, chat(text, finish, **message))


def streamed(*events: Any, done: bool = True) -> Behaviour:
    """Server-sent events; without `done` the connection just ends."""
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    data += b"data: [DONE]\n\n" if done else b""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return send(head + data, close=True)


async def reset(request: Request, writer: asyncio.StreamWriter) -> None:
    """The connection is reset (RST), not closed."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def hang(request: Request, writer: asyncio.StreamWriter) -> None:
    """Never answers; ends with the connection or the server."""
    await asyncio.Event().wait()


async def player(request: Request, writer: asyncio.StreamWriter) -> None:
    """Answers every prompt with an action that depends on prompt and seed alone."""
    key = request.body["messages"][-1]["content"] + str(request.body.get("seed"))
    chosen = ACTIONS[hashlib.sha256(key.encode()).digest()[0] % 4]
    await answer(f"I go {chosen}. <action>{chosen}</action>")(request, writer)


@dataclass
class FakeServer:
    """Use as an async context manager; `url` ends in /v1, `requests` holds what came in."""

    script: Sequence[Behaviour] = ()
    then: Behaviour = player
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _now: int = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}/v1"

    async def stop(self) -> None:
        """The server dies: open connections are cut, new ones refused."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                request = await read_request(reader)
                if request is None:
                    break
                number = len(self.requests)
                self.requests.append(request)
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
                try:
                    await (self.script[number] if number < len(self.script) else self.then)(request, writer)
                finally:
                    self._now -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client went away
        finally:
            writer.close()


@contextmanager
def time_that_jumps() -> Iterator[Callable[[float], None]]:
    """Gives a function that puts the running event loop's clock forward by so many seconds.

    Limits of minutes are then over at once, and a machine that stands still for seconds meets none of them.
    """
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, 0.0

    def jump(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    loop.time = lambda: real() + ahead  # type: ignore[method-assign]
    try:
        yield jump
    finally:
        loop.time = real  # type: ignore[method-assign]


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None at its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(body) if body else {})
