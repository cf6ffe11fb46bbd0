"""Our games as an OpenEnv server (`pip install -e '.[openenv]'`), for every trainer that reads that protocol.

Each websocket session has an environment of its own (`env_session.py`); what is said over HTTP has none, as the
protocol wants it, so a game is played over /ws.
"""

from __future__ import annotations

import html
import os
from asyncio import CancelledError
from contextlib import suppress
from secrets import compare_digest
from typing import Any

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import (
    Action,
    ConcurrencyConfig,
    EnvironmentMetadata,
    Observation,
    State,
)
from starlette.responses import JSONResponse

from msgrpo import __version__
from msgrpo.errors import UsageError
from msgrpo.game import SPLITS
from msgrpo.loopback import is_own
from msgrpo.models.http import may_open
from msgrpo.serve.env_session import Catalogue, Move, Saved, Seen, Session

SPLIT_TYPES = {"train": "train", "val": "validation", "test": "test"}  # the protocol's own words
MOST_MESSAGE = 2**20  # bytes of one message
PING_S = 20.0  # a client that does not answer a ping within this time is gone
STOP_S = 5  # for what is being answered when the server is to end
SESSIONS = 1000  # at most, where nobody says
OTHER_FILES = 64  # that the server may have open beside its clients' connections
NAME = "msgrpo"


class MoveAction(Move, Action):  # type: ignore[misc]  # OpenEnv is not checked
    """A move, as the protocol's Action."""


class GameObservation(Seen, Observation):  # type: ignore[misc]  # OpenEnv is not checked
    """What is seen, as the protocol's Observation."""


class GameState(Saved, State):  # type: ignore[misc]  # OpenEnv is not checked
    """What brings a game back, as the protocol's State: `reset(injected_state=…)` takes it."""

    scenario: str = ""
    start_seed: int = 0
    chance_seed: int = 0


def observed(seen: Seen) -> GameObservation:
    return GameObservation(**dict(seen))


class GameEnvironment(Environment[MoveAction, GameObservation, GameState]):  # type: ignore[misc]  # OpenEnv is not checked
    """One session; a step that is not to be understood is answered, as `env_session.py` says."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__()
        self.catalogue = catalogue
        self.session = Session(catalogue)
        self._episode_id: str | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **asked: Any) -> GameObservation:
        seen = self.session.reset(seed=seed, **asked)
        self._episode_id = None if episode_id is None else str(episode_id)[:255]
        return observed(seen)

    def step(self, action: MoveAction, timeout_s: float | None = None, **asked: Any) -> GameObservation:
        return observed(self.session.step(action))

    @property
    def state(self) -> GameState:
        saved = self.session.saved
        if saved is None:
            return GameState(episode_id=self._episode_id)
        return GameState(episode_id=self._episode_id, step_count=len(saved.moves), **saved.model_dump())

    def close(self) -> None:
        self.session.close()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name=NAME,
            description=f"msgrpo's games, chosen by reset(scenario=…): {', '.join(self.catalogue.scenarios)}",
            version=__version__,
        )

    def list_splits(self) -> list[dict[str, str]]:
        return [{"name": split, "type": SPLIT_TYPES[split]} for split in SPLITS]

    def num_tasks(self, split: str) -> int:
        return self.catalogue.tasks(self.catalogue.get(None))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        scenario = self.catalogue.get(None)
        if split not in SPLIT_TYPES:
            raise IndexError(f"there is no split {split!r}")
        seed = self.catalogue.start_of(scenario, split, index)  # type: ignore[arg-type]  # it is one of them
        return {"id": f"{scenario.id}/{split}/{index}", "index": index, "split": split, "start_seed": seed}

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return [self.get_task(split, index) for index in range(self.num_tasks(split))[start:stop]]

    def list_tasks(self, split: str) -> list[Any]:
        return self.get_task_range(split)

    def render_web(self, observation: dict[str, Any]) -> str:
        seats = observation.get("seats") or [observation]
        return "".join(f"<pre>{html.escape(str(seat.get('text', '')))}</pre>" for seat in seats)

    def web_actions(self, observation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        if observation.get("seats"):  # a click is one player's move, and here each player needs one
            return []
        return [(str(action), {"action": action}) for action in observation.get("legal_actions", [])]


def usual_sessions() -> int:
    """`SESSIONS`, or as many as this process may have connections for."""
    return max(1, min(SESSIONS, may_open(SESSIONS + OTHER_FILES) - OTHER_FILES))


def make_server(
    catalogue: Catalogue, *, sessions: int, idle_s: float, key: str | None, web: bool, local: bool = False
) -> Any:
    """The ASGI application: `sessions` clients at most, each forgotten after `idle_s` seconds without a message.

    `local`: only this machine is answered, and no page but its own. Raises UsageError where the process may not have
    so many connections.
    """
    wanted = sessions + OTHER_FILES
    if (most := may_open(wanted)) < wanted:
        raise UsageError(
            f"{sessions} sessions need {wanted} open files and connections, and this process may have {most}",
            fix=f"ulimit -n {wanted}, or a smaller --sessions",
        )

    def environment() -> GameEnvironment:
        return GameEnvironment(catalogue)

    os.environ["ENABLE_WEB_INTERFACE"] = "true" if web else "false"  # the only way to say it
    app = create_app(
        environment,
        MoveAction,
        GameObservation,
        env_name=NAME,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=idle_s),
        state_cls=GameState,
    )
    app = LocalOnly(app) if local else app
    return ClientsGo(SmallBodies(KeyRequired(app, key) if key else app))


class SmallBodies:
    """Over HTTP a body may be as long as a message over a websocket: a longer one filled the memory."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > MOST_MESSAGE:
            await refuse(scope, receive, send, f"a body has {MOST_MESSAGE:,} bytes at most", 413)
            return
        read = 0

        async def receive_from_it() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            return message if read <= MOST_MESSAGE else {"type": "http.disconnect"}

        await self.app(scope, receive_from_it, send)


class ClientsGo:
    """A client of a websocket that has gone is no error: what is sent to it is lost, and nothing more comes of it.

    OpenEnv would still answer it and close it, and say of each that it could not. Nor is it one that the server ends.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_there = True

        async def receive_from_it() -> Any:
            return await receive() if is_there else {"type": "websocket.disconnect", "code": 1006}

        async def send_to_it(message: Any) -> None:
            nonlocal is_there
            try:
                await send(message)
            except OSError:  # by the ASGI protocol: it has gone
                is_there = False

        with suppress(CancelledError):  # the server ends; this may be half a request, whose rest never comes
            if scope["type"] == "websocket":
                await self.app(scope, receive_from_it, send_to_it)
            else:
                await self.app(scope, receive, send)


class LocalOnly:
    """Answers programs of this machine, and the server's own page, over HTTP and for websockets."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = {name: value.decode("latin-1") for name, value in scope.get("headers", [])}
        if scope["type"] == "lifespan" or is_own(given.get(b"host", "localhost"), given.get(b"origin")):
            await self.app(scope, receive, send)
        else:
            await refuse(scope, receive, send, "a server without a key answers this machine's own programs only", 421)


async def refuse(scope: Any, receive: Any, send: Any, why: str, status: int) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": why})
    else:
        await JSONResponse({"detail": why}, status)(scope, receive, send)


class KeyRequired:
    """Lets nobody in without the key but /health: `Authorization: Bearer KEY`, over HTTP and for websockets."""

    def __init__(self, app: Any, key: str) -> None:
        self.app, self._wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope["path"] == "/health" or compare_digest(given, self._wanted):
            await self.app(scope, receive, send)
        else:
            await refuse(scope, receive, send, "a key is needed", 401)


def run(app: Any, host: str, port: int) -> None:
    """Serve until a signal ends it."""
    import uvicorn

    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        ws_max_size=MOST_MESSAGE,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        timeout_graceful_shutdown=STOP_S,
    )
