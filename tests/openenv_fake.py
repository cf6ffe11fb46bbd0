"""A small OpenEnv server of a script, which behaves or does one of many wrong things."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import WSMsgType, web

ACTIONS = ["up", "down"]
STEPS = 3  # of a game
SCHEMA: dict[str, Any] = {
    "action": {
        "properties": {"metadata": {"type": "object"}, "way": {"$ref": "#/$defs/Way"}},
        "required": ["way"],
        "$defs": {"Way": {"enum": ACTIONS, "type": "string"}},
    },
    "observation": {"properties": {"board": {"type": "string"}, "count": {"type": "integer"}}},
    "state": {"properties": {"episode_id": {}, "step_count": {}}},
}


@dataclass
class FakeEnv:
    """Number `seed` on a board, three steps, a point for each `up`. `wrong` is what it does at the next step."""

    wrong: str | None = None
    schema: dict[str, Any] = field(default_factory=lambda: SCHEMA)
    most: int = 100  # sessions
    seeded: bool = True
    elsewhere: str = ""  # where it redirects to
    headers: list[dict[str, str]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    playing: int = 0
    at_once: int = 0  # the most games that were played at the same time
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/metadata", self._metadata)
        app.router.add_get("/ws", self._socket)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _schema(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        if self.wrong == "no schema":
            return web.Response(text="<html>hello</html>")
        return web.json_response(self.schema)

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response({"name": "fake", "description": "Count \x1b[31mup."})

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if self.wrong == "redirect":
            return web.Response(status=307, headers={"Location": f"{self.elsewhere}/ws"})
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.playing >= self.most or self.wrong == "full":
            await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
            await socket.close()
            return socket
        self.playing += 1
        self.at_once = max(self.at_once, self.playing)
        try:
            await self._play(socket)
        finally:
            self.playing -= 1
        return socket

    async def _play(self, socket: web.WebSocketResponse) -> None:
        number, steps = 0, 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                return
            asked = json.loads(message.data)
            self.asked.append(asked)
            if asked["type"] == "reset":
                number, steps = asked["data"].get("seed", 0) if self.seeded else len(self.asked), 0
                await socket.send_json(observation(number, steps, None))
            elif asked["type"] == "state":
                await socket.send_json({"type": "state", "data": {"step_count": steps}})
            elif self.wrong is not None:
                if await self._misbehave(socket, self.wrong):
                    return
            else:
                steps += 1
                reward = float(asked["data"].get("way") == "up")
                await socket.send_json(observation(number, steps, reward))

    async def _misbehave(self, socket: web.WebSocketResponse, wrong: str) -> bool:
        """Answer a step wrongly; True where the connection ends with it."""
        if wrong == "goes away":
            await socket.close()
            return True
        if wrong == "hangs":
            await asyncio.Event().wait()
        elif wrong == "binary":
            await socket.send_bytes(b"\x80\x04K*.")
        else:
            await socket.send_str(WRONG[wrong])
        return False


def observation(number: int, steps: int, reward: Any) -> dict[str, Any]:
    seen = {"board": f"number {number}, step {steps}", "count": steps}
    return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": steps >= STEPS}}


def _said(**wrong: Any) -> str:
    answer = observation(0, 1, 0.0)
    return json.dumps(answer | {"data": answer["data"] | wrong})


WRONG = {
    "rubbish": "rubbish\x1b]0;owned\x07",
    "a list": "[1, 2]",
    "too long": _said(observation={"board": "x" * 2**21}),
    "too deep": "[" * 100_000,
    "a huge number": '{"type": "observation", "data": {"reward": ' + "9" * 5000 + "}}",
    "another schema": _said(observation={"field": "x"}),
    "no observation": _said(observation="a text"),
    "a reward that is no number": _said(reward="1"),
    "an endless reward": _said(reward=float("inf")),
    "an end that is none": _said(done="yes"),
    "a state": json.dumps({"type": "state", "data": {}}),
    "no data": json.dumps({"type": "observation"}),
    "an exception": json.dumps({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "\x1b[2Jit broke"}}),
}
FAULTS = ("goes away", "hangs", "binary", *WRONG)
