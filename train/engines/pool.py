"""Servers that play one policy's turns: which of them play, who answers next, and what a failure costs.

A failed request costs a retry elsewhere, never a move: there is an answer of the named version, or the run stops. A
server that fails `PATIENCE` times in a row, that forgets the version or answers under another name, leaves.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic_core import from_json, to_json

from msgrpo.agent import Completion, FinishReason, OnText, Sampling
from msgrpo.errors import EndpointError, MsgrpoError, RunError
from msgrpo.models.bounded import BodyError, TooLongError
from msgrpo.models.endpoint_failures import speaks_of_context
from msgrpo.models.http import Client, NoAnswerError, Response, most_in_flight
from msgrpo.prompt import ChatFormat, Prompt
from msgrpo.text import printable

PATIENCE = 3  # failures in a row after which a server leaves
TURN_S, TOKEN_S = 60.0, 0.5  # an answer that takes longer than this, and this a token, does not come
LIST_S = 5.0  # for the list of its versions
COME_BACK_S = 60.0  # how long a turn waits for a server once none is left, over all its retries
LEAST_LOGPROB = -104.0  # e to this is 0 in float32, and a token of probability 0 is never drawn
Say = Callable[[str], None]


class RemoteError(Exception):
    """A server did not do what it was asked; `final` when asking again cannot help."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(printable(message)[:300])
        self.final = final


class NoServerError(RunError):
    """No server is left that plays rollouts."""


NEW = "no version was loaded there yet"


@dataclass
class Remote:
    """One server. `out` says why it plays nothing; None while it plays. `proved` are the versions it may play."""

    url: str
    out: str | None = NEW
    proved: set[str] = field(default_factory=set)
    in_flight: int = 0
    is_asked: bool = False  # whether it still has a version, by a turn that waits for one
    failures: int = 0  # in a row
    last_failure: str | None = None  # also once it plays again
    answered: int = 0  # turns, over the whole run


@dataclass
class Pool:
    """The servers of a run. Rollouts and the trainer may look at it from two threads.

    Each server has so many places for requests on their way; a turn for which there is none waits in line, and gets
    the first that comes free at a server that plays.
    """

    remotes: list[Remote]
    key: str | None = field(repr=False)
    say: Say
    ended: Callable[[], MsgrpoError | None] = lambda: None  # why the servers are gone, where that is known
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _line: deque[asyncio.Future[Remote | None]] = field(default_factory=deque)

    @property
    def playing(self) -> list[Remote]:
        return [remote for remote in self.remotes if remote.out is None]

    def at(self, url: str) -> Remote:
        return next(remote for remote in self.remotes if remote.url == url)

    def follow(self, urls: Sequence[str]) -> None:
        """Take over which servers there are now: new ones play once they are proved, those that are gone no more."""
        with self._lock:
            known = {remote.url: remote for remote in self.remotes}
            self.remotes = [known.get(url) or Remote(url) for url in urls]
            self.__dict__.pop("places", None)  # it depends on how many there are
            self._move_up()

    @cached_property
    def places(self) -> int:
        """The most requests on their way to one server at once."""
        return most_in_flight(len(self.remotes))

    def client(self, timeout: float) -> Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return Client(headers, total_s=timeout)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Remote | None]:
        """A place at the playing server with the fewest turns in flight, once it is this turn's; None where none
        plays.
        """
        remote = await self._place()
        try:
            yield remote
        finally:
            self._leave(remote)

    async def _place(self) -> Remote | None:
        with self._lock:
            remote = self._least_busy()
            if not self._line and (remote is None or remote.in_flight < self.places):
                if remote is not None:
                    remote.in_flight += 1
                return remote
            waiting: asyncio.Future[Remote | None] = asyncio.get_running_loop().create_future()
            self._line.append(waiting)
            self._move_up()
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():  # it had its place already
                self._leave(waiting.result())
            raise

    def _least_busy(self) -> Remote | None:
        return min(self.playing, key=lambda remote: (remote.in_flight, remote.failures), default=None)

    def _leave(self, remote: Remote | None) -> None:
        if remote is not None:
            with self._lock:
                remote.in_flight -= 1
                self._move_up()

    def _move_up(self) -> None:
        """Give the places that are free to those who wait longest; where no server plays, all are told so."""
        while self._line:
            remote = self._least_busy()
            if remote is not None and remote.in_flight >= self.places:
                return
            first = self._line.popleft()
            if first.done() or first.get_loop().is_closed():  # it was given up
                continue
            if remote is not None:
                remote.in_flight += 1
            if first.get_loop() is _running_loop():
                first.set_result(remote)
            else:
                first.get_loop().call_soon_threadsafe(self._give, first, remote)

    def _give(self, waiting: asyncio.Future[Remote | None], remote: Remote | None) -> None:
        if waiting.done():
            self._leave(remote)
        else:
            waiting.set_result(remote)

    def answered(self, remote: Remote) -> None:
        with self._lock:
            remote.failures = 0
            remote.answered += 1

    def failed(self, remote: Remote, error: RemoteError) -> None:
        """Count a failed request; say so once if the server leaves."""
        with self._lock:
            remote.failures += 1
            remote.last_failure = str(error)
            leaves = remote.out in (None, NEW) and (error.final or remote.failures >= PATIENCE)
            if error.final:
                remote.proved.clear()  # it does not come back by itself
            if leaves or error.final:
                remote.out = str(error)
                self._move_up()
        if leaves:
            self.say(f"{remote.url} plays no more: {error}")  # or never did

    def joined(self, remote: Remote, version: str) -> None:
        """Let a server play a version that has been proved there."""
        with self._lock:
            returns = remote.out not in (None, NEW)
            remote.out, remote.failures = None, 0
            remote.proved.add(version)
            self._move_up()
        if returns:
            self.say(f"{remote.url} plays again")

    def none_left(self) -> MsgrpoError:
        known = self.ended()
        if known is not None:
            return known
        reasons = "; ".join(f"{remote.url}: {remote.out or remote.last_failure}" for remote in self.remotes)
        return NoServerError(
            f"no server is left to play rollouts: {reasons}",
            fix="start them again (msgrpo serve --allow-runtime-adapters DIR), then the same command with --resume",
        )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def post(client: Client, remote: Remote, path: str, body: dict[str, Any]) -> Response:
    """The response, whatever its status. Raises RemoteError where there is none."""
    try:
        return await client.ask("POST", remote.url + path, to_json(body))
    except BodyError as error:
        raise RemoteError(str(error), final=isinstance(error, TooLongError)) from error
    except NoAnswerError as error:
        raise RemoteError(str(error)) from error


async def ask(
    client: Client,
    remote: Remote,
    version: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    seed: int,
    stop_ids: Sequence[int],
    vocabulary: int,
) -> Completion:
    """One answer to a prompt of token ids, as token ids with the log-probabilities that they were drawn with.

    Raises RemoteError for an answer that no model with a `vocabulary` of so many tokens can have given.
    """
    body = {
        "model": version,
        "prompt": prompt_ids,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": stop_ids,
    }
    began = time.perf_counter()
    response = await post(client, remote, "/v1/completions", body)
    if response.status in (400, 413, 422) and speaks_of_context(response.text):
        raise EndpointError(f"{remote.url}: {response.text[:200]}", kind="context_length")
    if response.status != 200:
        final = 400 <= response.status < 500 and response.status not in (408, 425, 429)
        raise RemoteError(f"status {response.status}: {response.text}", final=final)
    text, reason, ids, logprobs = _read_answer(response, version, sampling.max_tokens, vocabulary)
    return Completion(
        text=text,
        finish_reason=reason,
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(ids),
        latency_s=time.perf_counter() - began,
        prompt_ids=tuple(prompt_ids),
        token_ids=ids,
        logprobs=logprobs,
        model=version,
    )


def _read_answer(
    response: Response, version: str, most: int, vocabulary: int
) -> tuple[str, FinishReason, tuple[int, ...], tuple[float, ...]]:
    """Its text, why it ended, token ids and log-probabilities. Raises RemoteError where it cannot be used."""
    try:
        answer = from_json(response.body)
        choice, named = answer["choices"][0], answer["model"]
        ids = tuple(map(int, choice["token_ids"]))
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
        text, reason = choice["text"], choice["finish_reason"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise RemoteError(f"an answer that cannot be read: {response.text[:200]}") from error
    if named != version:
        raise RemoteError(f"it answered as {named!r}, not as {version!r}", final=True)
    if reason not in ("stop", "length"):  # `abort` and `error`: half an answer is no move
        raise RemoteError(f"its answer has ended by {str(reason)[:40]!r}")
    if not isinstance(text, str):
        raise RemoteError(f"its answer has {str(text)[:40]!r} for a text")
    if not ids or len(ids) != len(logprobs) or not _sound(ids, logprobs, vocabulary):
        raise RemoteError(f"{len(ids)} token ids with {len(logprobs)} log-probabilities, not all of them sound")
    if len(ids) > most:
        raise RemoteError(f"it was asked for at most {most} tokens and answered with {len(ids)}")
    return text, reason, ids, logprobs


def _sound(ids: Sequence[int], logprobs: Sequence[float], vocabulary: int) -> bool:
    """Whether all are tokens of the model, with log-probabilities (up to rounding) with which tokens are drawn."""
    known = min(ids) >= 0 and max(ids) < vocabulary
    return known and math.isfinite(sum(logprobs)) and min(logprobs) >= LEAST_LOGPROB and max(logprobs) <= 1e-3


class VersionModel:
    """Lθ of one version, played by whichever server of the pool has the fewest turns in flight."""

    def __init__(
        self, version: str, pool: Pool, chat: ChatFormat, stop_ids: Sequence[int], context: int, vocabulary: int
    ) -> None:
        self.name = version
        self.extra_settings: dict[str, Any] = {}
        self._pool, self._chat, self._stop_ids = pool, chat, sorted(stop_ids)
        self._context, self._vocabulary = context, vocabulary
        self._client: Client | None = None

    @property
    def is_read(self) -> bool:
        """Whether rollouts are played with it now."""
        return self._client is not None and self._client.is_open

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
        if self._client is None:
            self._client = self._pool.client(timeout=TURN_S + TOKEN_S * sampling.max_tokens)
        client = self._client
        prompt_ids = self._chat.ids([prompt])[0]
        if len(prompt_ids) >= self._context:  # as in process: it costs its episode and no server
            too_long = f"the prompt has {len(prompt_ids)} tokens, the model's context {self._context}"
            raise EndpointError(too_long, kind="context_length")
        longest = self._context - len(prompt_ids)
        if longest < sampling.max_tokens:  # as in process
            sampling = sampling.model_copy(update={"max_tokens": longest})
        retries, deadline = 0, math.inf  # once no server was left for this turn
        while True:
            async with self._pool.place() as remote:
                if remote is not None:
                    try:
                        completion = await ask(
                            client, remote, self.name, prompt_ids, sampling, seed, self._stop_ids, self._vocabulary
                        )
                    except RemoteError as error:
                        self._pool.failed(remote, error)
                    else:
                        self._pool.answered(remote)
                        completion = replace(completion, retries=retries) if retries else completion
                        if on_text is not None:
                            on_text(completion.text)
                        return completion
            retries += 1
            if remote is None:
                deadline = min(deadline, time.monotonic() + COME_BACK_S)  # that comes back and fails again is none
                await self._wait_for_one(client, deadline)
            else:
                await asyncio.sleep(min(0.05 * 2 ** min(retries, 6), 2.0))

    async def _wait_for_one(self, client: Client, deadline: float) -> None:
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
                if not remote.is_asked and await _has_again(client, remote, self.name):
                    self._pool.joined(remote, self.name)
                    return
            await asyncio.sleep(1.0)
        raise self._pool.none_left()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


async def _has_again(client: Client, remote: Remote, version: str) -> bool:
    """`still_has`, for one of all the turns that wait for it."""
    remote.is_asked = True
    try:
        return await still_has(client, remote, version)
    finally:
        remote.is_asked = False


async def still_has(client: Client, remote: Remote, version: str) -> bool:
    """Whether a server lists a version."""
    try:
        async with asyncio.timeout(LIST_S):
            response = await client.ask("GET", remote.url + "/v1/models")
        return any(entry["id"] == version for entry in from_json(response.body)["data"])
    except (NoAnswerError, BodyError, TimeoutError, ValueError, KeyError, TypeError, AttributeError):
        return False
