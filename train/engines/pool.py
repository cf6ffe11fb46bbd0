"""Servers that play one policy's turns: which of them play, who answers next, and what a failure costs.

A failed request costs a retry elsewhere, never a move: there is an answer of the named version, or the run stops. A
server that fails `PATIENCE` times in a row, that forgets the version or answers under another name, leaves.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from msgrpo.agent import Completion, OnText, Sampling
from msgrpo.errors import EndpointError, MsgrpoError, RunError
from msgrpo.models.bounded import ACCEPTED, BodyError, TooLongError, bound_body
from msgrpo.models.chat import ChatFormat
from msgrpo.models.endpoint import speaks_of_context
from msgrpo.prompt import Prompt
from msgrpo.text import printable

PATIENCE = 3  # failures in a row after which a server leaves
TURN_S, TOKEN_S = 60.0, 0.5  # an answer that takes longer than this, and this a token, does not come
COME_BACK_S = 60.0  # how long a turn waits for a server once none is left, over all its retries
Say = Callable[[str], None]


class RemoteError(Exception):
    """A server did not do what it was asked; `final` when asking again cannot help."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(printable(message)[:300])
        self.final = final


NEW = "no version was loaded there yet"


@dataclass
class Remote:
    """One server. `out` says why it plays nothing; None while it plays. `proved` are the versions it may play."""

    url: str
    out: str | None = NEW
    proved: set[str] = field(default_factory=set)
    in_flight: int = 0
    failures: int = 0  # in a row
    answered: int = 0  # turns, over the whole run


@dataclass
class Pool:
    """The servers of a run. Rollouts and the trainer may look at it from two threads."""

    remotes: list[Remote]
    key: str | None = field(repr=False)
    say: Say
    ended: Callable[[], MsgrpoError | None] = lambda: None  # why the servers are gone, where that is known
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def playing(self) -> list[Remote]:
        return [remote for remote in self.remotes if remote.out is None]

    def client(self, timeout: float) -> httpx.AsyncClient:
        headers = ACCEPTED | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=limits,
            trust_env=False,
            event_hooks={"response": [bound_body]},
        )

    @contextmanager
    def least_busy(self) -> Iterator[Remote | None]:
        """The playing server with the fewest turns in flight, which has one more for as long."""
        with self._lock:
            chosen = min(self.playing, key=lambda remote: (remote.in_flight, remote.failures), default=None)
            if chosen is not None:
                chosen.in_flight += 1
        try:
            yield chosen
        finally:
            if chosen is not None:
                with self._lock:
                    chosen.in_flight -= 1

    def answered(self, remote: Remote) -> None:
        with self._lock:
            remote.failures = 0
            remote.answered += 1

    def failed(self, remote: Remote, error: RemoteError) -> None:
        """Count it; say so once if the server leaves."""
        with self._lock:
            remote.failures += 1
            leaves = remote.out in (None, NEW) and (error.final or remote.failures >= PATIENCE)
            if error.final:
                remote.proved.clear()  # it does not come back by itself
            if leaves or error.final:
                remote.out = str(error)
        if leaves:
            self.say(f"{remote.url} plays no more: {error}")  # or never did

    def joined(self, remote: Remote, version: str) -> None:
        """The version is proved there."""
        with self._lock:
            returns = remote.out not in (None, NEW)
            remote.out, remote.failures = None, 0
            remote.proved.add(version)
        if returns:
            self.say(f"{remote.url} plays again")

    def none_left(self) -> MsgrpoError:
        known = self.ended()
        if known is not None:
            return known
        said = "; ".join(f"{remote.url}: {remote.out}" for remote in self.remotes)
        return RunError(
            f"no server is left to play rollouts: {said}",
            fix="start them again (msgrpo serve --allow-runtime-adapters DIR), then the same command with --resume",
        )


async def post(client: httpx.AsyncClient, remote: Remote, path: str, body: dict[str, Any]) -> httpx.Response:
    """The response, whatever its status. Raises RemoteError where there is none."""
    try:
        return await client.post(remote.url + path, json=body)
    except BodyError as error:
        raise RemoteError(str(error), final=isinstance(error, TooLongError)) from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise RemoteError(f"{type(error).__name__}: {error}".rstrip(": ")) from error


async def ask(
    client: httpx.AsyncClient,
    remote: Remote,
    version: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    seed: int,
    stop_ids: Sequence[int],
) -> Completion:
    """One answer to a prompt of token ids, as token ids with the log-probabilities that they were drawn with."""
    body = {
        "model": version,
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": list(stop_ids),
    }
    began = time.perf_counter()
    response = await post(client, remote, "/v1/completions", body)
    if response.status_code in (400, 413, 422) and speaks_of_context(response.text):
        raise EndpointError(f"{remote.url}: {response.text[:200]}", kind="context_length")
    if response.status_code != 200:
        final = 400 <= response.status_code < 500 and response.status_code not in (408, 425, 429)
        raise RemoteError(f"status {response.status_code}: {response.text}", final=final)
    try:
        answer = response.json()
        choice, named = answer["choices"][0], answer["model"]
        ids = tuple(map(int, choice["token_ids"]))
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        text, reason = str(choice["text"]), choice["finish_reason"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RemoteError(f"an answer that cannot be read: {response.text[:200]}") from error
    if named != version:
        raise RemoteError(f"it answered as {named!r}, not as {version!r}", final=True)
    if reason not in ("stop", "length"):  # `abort` and `error`: half an answer is no move
        raise RemoteError(f"its answer has ended by {str(reason)[:40]!r}")
    sound = all(0 <= one < 2**31 for one in ids) and all(math.isfinite(one) and one <= 1e-3 for one in logprobs)
    if not ids or len(ids) != len(logprobs) or not sound:
        raise RemoteError(f"{len(ids)} token ids with {len(logprobs)} log-probabilities, not all of them sound")
    return Completion(
        text=text,
        finish_reason="stop" if reason == "stop" else "length",
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(ids),
        latency_s=time.perf_counter() - began,
        prompt_ids=tuple(prompt_ids),
        token_ids=ids,
        logprobs=logprobs,
        model=version,
    )


class VersionModel:
    """Lθ of one version, played by whichever server of the pool has the fewest turns in flight."""

    def __init__(self, version: str, pool: Pool, chat: ChatFormat, stop_ids: Sequence[int], context: int) -> None:
        self.name = version
        self.extra_settings: dict[str, Any] = {}
        self._pool, self._chat, self._stop_ids, self._context = pool, chat, sorted(stop_ids), context
        self._clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}

    @property
    def is_read(self) -> bool:
        """Whether somebody plays with it now."""
        return bool(self._clients)

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Completion:
        """Ask until there is an answer. Raises RunError when no server is left; no turn is ever lost or made up."""
        client = self._clients.get(loop := asyncio.get_running_loop())
        if client is None:
            client = self._clients[loop] = self._pool.client(timeout=TURN_S + TOKEN_S * sampling.max_tokens)
        prompt_ids = self._chat.ids([prompt])[0]
        if len(prompt_ids) >= self._context:  # as in process: it costs its episode and no server
            too_long = f"the prompt has {len(prompt_ids)} tokens, the model's context {self._context}"
            raise EndpointError(too_long, kind="context_length")
        longest = max(1, min(sampling.max_tokens, self._context - len(prompt_ids)))  # as in process
        sampling = sampling.model_copy(update={"max_tokens": longest})
        retries, deadline = 0, math.inf  # once no server was left for this turn
        while True:
            with self._pool.least_busy() as remote:
                if remote is not None:
                    try:
                        found = await ask(client, remote, self.name, prompt_ids, sampling, seed, self._stop_ids)
                    except RemoteError as error:
                        self._pool.failed(remote, error)
                    else:
                        self._pool.answered(remote)
                        found = Completion(**vars(found) | {"retries": retries})
                        if on_text is not None:
                            on_text(found.text)
                        return found
            retries += 1
            if remote is None:
                deadline = min(deadline, time.monotonic() + COME_BACK_S)  # that comes back and fails again is none
                await self._wait_for_one(client, deadline)
            else:
                await asyncio.sleep(min(0.05 * 2 ** min(retries, 6), 2.0))

    async def _wait_for_one(self, client: httpx.AsyncClient, deadline: float) -> None:
        """Until a server where this version was proved, and that still lists it, answers again: it is that process.

        Raises RunError when there is none, or the time is over.
        """
        while time.monotonic() < deadline and self._pool.ended() is None:
            if self._pool.playing:
                return
            known = [remote for remote in self._pool.remotes if self.name in remote.proved]
            if not known:
                break
            for remote in known:
                if await still_has(client, remote, self.name):
                    self._pool.joined(remote, self.name)
                    return
            await asyncio.sleep(1.0)
        raise self._pool.none_left()

    async def close(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


async def still_has(client: httpx.AsyncClient, remote: Remote, version: str) -> bool:
    """Whether a server lists a version."""
    try:
        response = await client.get(remote.url + "/v1/models", timeout=5.0)
        return any(entry["id"] == version for entry in response.json()["data"])
    except (
        httpx.HTTPError,
        BodyError,
        UnicodeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return False
