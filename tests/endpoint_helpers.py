"""A model on a scripted server, for the tests of endpoints."""

from __future__ import annotations

from typing import Any

from msgrpo.agent import Completion, Sampling
from msgrpo.models.endpoint import EndpointModel
from msgrpo.prompt import Prompt
from tests.fake_server import FakeServer, answer

PROMPT = Prompt("rules ", "state")
GOOD = answer("Go. <action>up</action>")


class Client:
    """A model on a fake server, with the waits it asked for."""

    def __init__(self, server: FakeServer, **arguments: Any) -> None:
        self.waits: list[float] = []
        self.model = EndpointModel(server.url, "fake", sleep=self._sleep, **arguments)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def ask(self, **arguments: Any) -> Completion:
        try:
            return await self.model.complete(PROMPT, Sampling(), 7, **arguments)
        finally:
            await self.model.close()
