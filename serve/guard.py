"""An ASGI middleware inside vLLM: known paths only, the key on every one, and runtime adapters from one folder only.

vLLM asks for its key below /v1 and a few other paths alone; /invocations (inference), /tokenize, /metrics and /docs
answer anybody. And it loads an adapter from any folder that it can read. What passes is named here: a path that the
router understands in a way of its own (its patterns end before a newline) is not among them. The guard is configured
by the environment that `msgrpo.serve.vllm_command` builds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from msgrpo.errors import MsgrpoError
from msgrpo.loopback import is_own
from msgrpo.models.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from msgrpo.serve.adapters import check_fits, read_adapter, same_base
from msgrpo.serve.vllm_command import is_model_name

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Version = tuple[tuple[int, int], ...]  # (modification time, size) of an adapter's files

OPEN_PATH = "/health"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = frozenset(
    (
        *(OPEN_PATH, "/ping", "/version", "/load", "/metrics", "/metrics/"),
        *("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
    )
)
_LOAD_FIELDS = {"lora_name", "lora_path", "load_inplace"}
_LONGEST_LOAD_REQUEST = 65_536  # bytes


class RefusedError(Exception):
    """A request that the guard does not pass on to vLLM."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Guard:
    """`--middleware msgrpo.serve.guard.Guard`."""

    def __init__(self, app: App) -> None:
        self.app = app
        key = os.environ.get("VLLM_API_KEY", "")
        self._key = hashlib.sha256(key.encode()).digest() if key else None
        root = os.environ.get("MSGRPO_ADAPTER_ROOT")
        self._root = Path(root).resolve() if root else None
        served = map(Path, json.loads(os.environ.get("MSGRPO_SERVED_ADAPTERS", "[]")))
        self._loaded = {folder: _version(folder) for folder in served}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        try:
            self._check_own(scope)
            self._check_key(scope)
            _check_path(scope)
            receive, send = await self._check_loading(scope, receive, send)
        except RefusedError as refused:
            await _refuse(scope, send, refused)
            return
        await self.app(scope, receive, send)

    def _check_own(self, scope: Scope) -> None:
        """Without a key a page of any site could ask, and vLLM lets it read the answer: there only this machine's own
        programs are answered, by loopback's names alone (DNS rebinding), and pages of this very server.
        """
        if self._key is not None or scope["path"] == OPEN_PATH:
            return
        hosts, origins = (
            [value.decode("latin-1") for name, value in scope["headers"] if name == header]
            for header in (b"host", b"origin")
        )
        host = hosts[0] if hosts else "localhost"  # HTTP/1.0; every browser names the host
        if len(hosts) > 1 or not is_own(host, None):
            raise RefusedError(421, "a server without a key answers to localhost and 127.0.0.1 only")
        if len(origins) > 1 or not is_own(host, origins[0] if origins else None):
            raise RefusedError(403, "a server without a key answers no page of another address; start it with a key")

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] == OPEN_PATH:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(
            hashlib.sha256(token.strip(b" \t")).digest(), self._key
        ):
            raise RefusedError(401, "this server needs its key: Authorization: Bearer …")
        # vLLM looks at the key, too, and takes one in exactly these bytes only
        others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        scope["headers"] = [*others, (b"authorization", b"Bearer " + token.strip(b" \t"))]

    async def _check_loading(self, scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """What vLLM gets for `receive` and `send`: for a load, the checked request, and a note when it has worked."""
        if scope["path"] not in (LOAD, UNLOAD):
            return receive, send
        if self._root is None:
            raise RefusedError(403, "loading adapters at run time is off")
        if scope["path"] == UNLOAD:
            return receive, send
        try:  # in a thread, since a slow disk would block every other request
            request, folder, version = await asyncio.to_thread(self._checked_load, await _read(receive))
        except (OSError, ValueError, RuntimeError) as error:  # impossible file names, circular links
            raise RefusedError(400, f"that folder cannot be read: {error}") from error
        body = json.dumps(request).encode()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()  # the next message says when the client has gone

        async def note(message: Message) -> None:
            if message.get("status") == 200:
                self._loaded[folder] = version
            await send(message)

        scope["headers"] = [(n, v) for n, v in scope["headers"] if n != b"content-length"] + [
            (b"content-length", str(len(body)).encode())
        ]
        return replay, note

    def _checked_load(self, body: bytes) -> tuple[dict[str, Any], Path, Version]:
        """The request with its folder resolved, so that what was checked is what is loaded; folder; version."""
        assert self._root is not None
        try:
            request = from_json(body)
            name, asked = request["lora_name"], Path(request["lora_path"])
            unknown = ", ".join(sorted(set(request) - _LOAD_FIELDS))
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(400, "give lora_name and lora_path as JSON") from error
        if unknown or not isinstance(name, str) or not is_model_name(name):
            raise RefusedError(
                400, f"give lora_name, a model's name, and lora_path, not {unknown or repr(name)[:80]}"
            )
        folder = (self._root / asked).resolve()  # joining keeps an absolute path unchanged
        if not folder.is_relative_to(self._root):
            raise RefusedError(403, "that folder is not below the one that adapters may be loaded from")
        if request.get("load_inplace"):
            raise RefusedError(400, "a new version of an adapter needs a new name and a new folder, not load_inplace")
        for file in (folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS):
            if not file.resolve().is_relative_to(self._root):
                raise RefusedError(403, f"that adapter's {file.name} is a link out of the folder")
        try:
            adapter = read_adapter(folder, name)
            if not same_base(adapter.base, os.environ["MSGRPO_SERVED_BASE"]):
                raise RefusedError(400, f"that adapter was trained on {adapter.base}")
            check_fits(adapter, Path(os.environ["MSGRPO_SERVED_WEIGHTS"]))
        except MsgrpoError as error:
            raise RefusedError(400, error.message) from error
        version = _version(folder)
        # vLLM keys its prefix cache by adapter name and path: other weights there would meet stale entries.
        if self._loaded.get(folder, version) != version:
            raise RefusedError(
                409, "that folder was loaded with other weights before: write each version to a new folder"
            )
        return {"lora_name": name, "lora_path": str(folder)}, folder, version


def _check_path(scope: Scope) -> None:
    """Raise RefusedError for a path that is not known. The decoded path is compared, as the router will see it."""
    if scope["type"] == "websocket" or scope["path"] not in PATHS | {LOAD, UNLOAD}:
        raise RefusedError(404, "msgrpo serve does not serve that path; POST /v1/load_lora_adapter loads adapters")
    if scope.get("root_path"):
        raise RefusedError(404, "msgrpo serve serves no path below another")


def _version(folder: Path) -> Version:
    """The version of an adapter's files, which changes when they are written again."""
    statuses = [(folder / name).stat() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    return tuple((status.st_mtime_ns, status.st_size) for status in statuses)


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise RefusedError(400, "the request ended early")
        body += bytes(message.get("body", b""))
        if len(body) > _LONGEST_LOAD_REQUEST:
            raise RefusedError(413, "the request is too long")
        if not message.get("more_body"):
            return body


async def _refuse(scope: Scope, send: Send, refused: RefusedError) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refused.message})
        return
    error = {"message": refused.message, "type": "refused", "param": None, "code": refused.status}
    headers = [(b"content-type", b"application/json")]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
