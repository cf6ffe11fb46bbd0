"""The protocol of OpenEnv servers (0.10): JSON over HTTP says what a server is, a websocket each plays one game.

What a server sends is data: bounded, and made printable by who shows it. Games are stepped from any thread, so the
connections live in a thread of their own. Every failure is a GameFaultError, which costs the episode.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import json
import os
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from msgrpo.errors import GameFaultError, UsageError
from msgrpo.models.bounded import BodyError
from msgrpo.models.http import Client, NoAnswerError, proxy_for

ANSWER_S = 30.0  # that a server may take for one answer; less than a game's step may take
CONNECT_S = 10.0
PATIENCE_S = 10.0  # that a game waits for a place on a full server
AGAIN_S = 0.1
LONGEST_MESSAGE = 2**20  # bytes
LONGEST_REASON = 300  # characters of a server's own words in a message
KEYS = "MSGRPO_ENV_KEYS"
FULL = "CAPACITY_REACHED"
HOW = "start the server, or see that the address is right: openenv:http://host:8000"
T = TypeVar("T")


class RefusedError(GameFaultError):
    """The server answered that it does not do what it was asked for; `code` is the protocol's word for why."""

    def __init__(self, url: str, code: str, reason: str) -> None:
        super().__init__(f"{url} refuses: {code} {reason[:LONGEST_REASON]}".rstrip())
        self.code, self.reason = code, reason[:LONGEST_REASON]


def key_for(url: str) -> str | None:
    """The key of this server's host and port in MSGRPO_ENV_KEYS, `host:port=key` with spaces between them.

    Raises UsageError for one that names no host: it could go anywhere.
    """
    parts = urlsplit(url)
    asked = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
    for entry in os.environ.get(KEYS, "").split():
        host, sign, key = entry.partition("=")
        if not sign or not key or ":" not in host or not key.isascii():
            raise UsageError(
                f"{KEYS} holds a key without the host that it is for", fix=f"export {KEYS}=host:8000=KEY"
            )
        if host.casefold() == asked:
            return key
    return None


class Server:
    """An OpenEnv server by its address. Its key, where there is one, goes to this address only."""

    def __init__(self, url: str) -> None:
        self.url = url
        key = key_for(url)
        self._client = Client(
            {"Authorization": f"Bearer {key}"} if key else {},
            connect_s=CONNECT_S,
            read_s=ANSWER_S,
            proxy=proxy_for(url),
        )
        weakref.finalize(self, close, self._client).atexit = False
        _clients.add(self._client)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. Raises GameFaultError where there is none."""
        return talk(self._get(path))

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                response = await self._client.ask("GET", self.url + path)
        except (NoAnswerError, BodyError, TimeoutError) as error:
            raise self.fault(f"does not answer {path}: {said(error)}") from error
        if response.status != 200:
            raise self.fault(f"answers {path} with status {response.status}")
        return self.parsed(response.text)

    def parsed(self, text: str) -> dict[str, Any]:
        """Raises GameFaultError where the text is no JSON object."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.fault(f"answers what is no JSON: {text[:80]!r}") from error
        if not isinstance(value, dict):
            raise self.fault(f"answers a {type(value).__name__}, not a JSON object")
        return value

    def fault(self, what: str) -> GameFaultError:
        return GameFaultError(f"{self.url} {what}")

    def begin(self, patience_s: float | None = None, **reset: Any) -> tuple[Session, dict[str, Any]]:
        """(a session, the answer to its reset); a full server is asked again for so many seconds (PATIENCE_S).

        Raises GameFaultError, and RefusedError where the server refuses.
        """
        ends = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        while True:
            session = Session(self)
            try:
                return session, session.ask("reset", reset)
            except RefusedError as refused:
                session.close()
                if refused.code != FULL or time.monotonic() >= ends:
                    raise
                time.sleep(AGAIN_S)

    async def open(self) -> aiohttp.ClientWebSocketResponse:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._client.socket(self.url.replace("http", "ws", 1) + "/ws", LONGEST_MESSAGE)
        except (NoAnswerError, TimeoutError) as error:
            raise self.fault(f"opens no game: {said(error)}") from error


class Session:
    """One game's websocket. After a fault it is closed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._socket = talk(server.open())

    def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """The data of the answer to a message of this kind (reset, step, state).

        Raises RefusedError where the server says why not, GameFaultError for everything else that is no answer.
        """
        message = {"type": kind} | ({} if data is None else {"data": data})
        try:
            answer = self._server.parsed(talk(self._exchange(json.dumps(message))))
            content = answer.get("data")
            if not isinstance(content, dict):
                raise self._server.fault(f"answers {kind} without data")
            if answer.get("type") == "error":
                code, reason = content.get("code"), content.get("message")
                raise RefusedError(self._server.url, str(code)[:40], str(reason))
            wanted = "state" if kind == "state" else "observation"
            if answer.get("type") != wanted:
                raise self._server.fault(f"answers {kind} with {str(answer.get('type'))[:40]!r}, not with {wanted!r}")
        except RefusedError:
            raise
        except GameFaultError:
            self.close()
            raise
        return content

    async def _exchange(self, message: str) -> str:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._socket.send_str(message)
                answer = await self._socket.receive()
        except TimeoutError:
            raise self._server.fault(f"has not answered within {ANSWER_S:g} s") from None
        except (OSError, RuntimeError, aiohttp.ClientError) as error:
            raise self._server.fault(f"is gone: {said(error)}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            reason = said(answer.data) if answer.type is aiohttp.WSMsgType.ERROR else answer.type.name.lower()
            raise self._server.fault(f"ended the game's connection: {reason}")
        return str(answer.data)

    def close(self) -> None:
        """Tell the server, without waiting for it."""
        close(self._socket)


def close(connection: Client | aiohttp.ClientWebSocketResponse) -> None:
    """Close a connection in its own thread, without waiting for it."""
    asyncio.run_coroutine_threadsafe(closed(connection), loop())


async def closed(connection: Client | aiohttp.ClientWebSocketResponse) -> None:
    await connection.close()


def said(error: object) -> str:
    return (str(error) or type(error).__name__)[:LONGEST_REASON]


_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process: a forked one has no thread of its parent's
_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_starting = threading.Lock()


def loop() -> asyncio.AbstractEventLoop:
    """The loop of the thread in which connections live."""
    with _starting:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=_loops[os.getpid()].run_forever, name="msgrpo-openenv", daemon=True).start()
            atexit.register(_end)
        return _loops[os.getpid()]


def _end() -> None:
    """Close what is still open when the process ends, and wait a moment for it."""
    if os.getpid() in _loops:
        ending = [asyncio.run_coroutine_threadsafe(closed(client), loop()) for client in _clients]
        concurrent.futures.wait(ending, timeout=1)


def talk(asked: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives that has time limits of its own."""
    future = asyncio.run_coroutine_threadsafe(asked, loop())
    try:
        return future.result()
    except BaseException:  # a Ctrl-C, too: nobody waits for the answer any more
        future.cancel()
        raise
