"""Language models behind any OpenAI-compatible URL: what is asked, and when it is asked again.

Three things are kept apart. An *answer*, however bad, empty or cut off, is the model's and is never asked again
(`endpoint_answers.py`; streamed ones: `endpoint_stream.py`). A *failure that may pass* is asked again after a capped
wait, counted in `Completion.retries`. Any other failure is raised as EndpointError at once (`endpoint_failures.py`
tells them apart). `endpoint_settings.py` checks the address, the key, the headers and the extra body beforehand.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from msgrpo.agent import Completion, OnText, Sampling
from msgrpo.errors import EndpointError, UsageError
from msgrpo.models.bounded import BodyError, TooLongError
from msgrpo.models.endpoint_answers import (
    LONGEST_NAME,
    checked,
    completion,
    objects,
    parsed,
    reasoning_of,
    text_of,
)
from msgrpo.models.endpoint_failures import BadBodyError, Failure, StatusError, WebPageError, classify
from msgrpo.models.endpoint_settings import (
    check_address,
    check_body,
    check_headers,
    check_limits,
    check_seconds,
    given_fields,
    key_of,
    openais_headers,
)
from msgrpo.models.endpoint_stream import streamed
from msgrpo.models.http import Client, NoAnswerError, Response, proxy_for
from msgrpo.prompt import Prompt
from msgrpo.text import printable

TOP_LOGPROBS = 20  # the most that OpenAI and vLLM give by default
SEED_BITS = 31  # some servers take 32-bit seeds only
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
RETRIES = 10  # the waits between them add up to four minutes
FIRST_RETRIES = 5  # of a connection to a server that has never answered: about 15 s
MOST_A_TOKEN, ALWAYS_READ = 64, 2**18  # characters of an answer: for each token that it may have, and in any case
LIMITS = ("max_tokens", "max_completion_tokens")  # the fields of a request that say how many tokens
MOST_MODELS = 20  # of a server that are named in an error
_next_at: dict[str, float] = {}  # host -> when its next request may go out: two models of one host share its minute


@dataclass(frozen=True)
class Timeouts:
    """Seconds: to connect, between two pieces of an answer, and for one whole request."""

    connect_s: float = 10.0
    read_s: float = 180.0
    total_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises UsageError for what is no time limit."""
        for seconds in (self.connect_s, self.read_s, self.total_s):
            check_seconds(seconds)


class EndpointModel:
    """A model of an OpenAI-compatible server.

    The key is `key_of` its host; a server without keys needs none. `body` is merged
    into every request, and a value of None takes a parameter out (`{"max_tokens": None,
    "max_completion_tokens": 512}`). A query in the URL (Azure's `?api-version=…`) goes with every request. `retries`
    are the further tries of one request, `rate` the most requests a minute. `retrying` says how many requests have
    failed and have no answer yet, `trouble` how the last of them failed, and which retry that makes.
    No redirect is followed: prompt and headers go to the host that was named and to no other. At most
    `http.IN_FLIGHT` requests are on their way at once; others wait for their place, which costs no try and no time
    of their limits.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        retries: int = RETRIES,
        timeouts: Timeouts = Timeouts(),
        rate: float | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        check_address(url, model_name)
        key = key_of(url)
        own_headers, self.body = given_fields("header", headers or {}), given_fields("body", body or {})
        check_headers({"Authorization": key} | openais_headers(url) | own_headers)
        check_body(self.body)
        check_limits(rate, retries)
        if not isinstance(timeouts, Timeouts):
            raise UsageError(f"timeouts is {timeouts!r}, not msgrpo.models.endpoint.Timeouts")
        self.name = model_name
        self.url = url
        self.retries = retries
        self.timeouts = timeouts
        self.retrying = 0
        self.trouble = ""
        self._sleep = sleep
        self._gap_s = 60 / rate if rate else 0.0
        self._jitter = random.Random(0)
        self._gives_logprobs = True
        self._answered = False
        sent = ({"Authorization": f"Bearer {key}"}, openais_headers(url), own_headers)  # the last of a name counts
        self.headers = {name.lower(): value for one in sent for name, value in one.items()}
        self._chat = self._address("/chat/completions")
        self._client = Client(
            self.headers, connect_s=timeouts.connect_s, read_s=timeouts.read_s, proxy=proxy_for(url)
        )

    @property
    def extra_settings(self) -> dict[str, Any]:
        """What a record must hold beyond the sampling settings: the extra body changes answers."""
        return {"body": self.body} if self.body else {}

    async def close(self) -> None:
        await self._client.close()

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling,
        seed: int,
        *,
        actions: Sequence[str] = (),
        on_text: OnText | None = None,
    ) -> Completion:
        """The answer to one prompt. Raises EndpointError when there is none after all tries."""
        tries = 0
        try:
            while True:
                wanted = tuple(actions) if self._gives_logprobs else ()
                try:
                    answer, seconds = await self._sent(self._request(prompt, sampling, seed, wanted), on_text)
                    return completion(answer, seconds, tries, wanted)
                except (
                    StatusError, BadBodyError, WebPageError, NoAnswerError, BodyError, TimeoutError
                ) as error:  # fmt: skip
                    failure = classify(error)
                if wanted and failure.kind == "bad_request" and "logprob" in failure.message:
                    self._gives_logprobs = False  # this server has none: the answer matters more
                    continue
                tries += 1
                self.retrying += tries == 1
                retries = self._retries_of(failure)
                if not failure.retry or tries > retries:
                    raise await self._final(failure, tries)
                self.trouble = printable(f"{failure.message} (retry {tries} of {retries})")
                await self._wait(failure, tries)
        finally:
            self.retrying -= tries > 0
            if not self.retrying:
                self.trouble = ""

    async def _sent(self, request: dict[str, Any], on_text: OnText | None) -> tuple[dict[str, Any], float]:
        """The answer to a request that has waited for its place, and the seconds that it took."""
        async with self._client.room:
            await self._paced()
            began = time.perf_counter()
            async with asyncio.timeout(self.timeouts.total_s):
                answer = await (self._ask(request) if on_text is None else self._stream(request, on_text))
        self._answered = True
        return answer, time.perf_counter() - began

    def _retries_of(self, failure: Failure) -> int:
        """A server that answered before is waited for; an address where nothing ever answered may just be wrong."""
        new = failure.kind == "connection" and not self._answered
        return min(self.retries, FIRST_RETRIES) if new else self.retries

    async def _wait(self, failure: Failure, tries: int) -> None:
        """Exponential back-off with jitter, or the server's Retry-After where longer; a minute at most."""
        own = FIRST_WAIT_S * 2 ** (tries - 1) * self._jitter.uniform(0.75, 1.0)
        wanted = max(own, failure.retry_after_s or 0.0)
        await self._sleep(min(wanted, LONGEST_WAIT_S))

    async def _final(self, failure: Failure, tries: int) -> EndpointError:
        if failure.kind != "unknown_model":
            return failure.error(tries)
        names = await self._models()
        known = ", ".join(names[:MOST_MODELS]) + (" …" if names[MOST_MODELS:] else "")
        fix = f"its models: {known}" if known else "check the URL (it usually ends in /v1) and the model's name"
        if self.name in names:
            fix = "it lists this model: check the URL, which usually ends in /v1"
        message = f"{self.url} does not serve the model {self.name!r}: {failure.message}"
        return EndpointError(message, kind=failure.kind, fatal=True, fix=fix)

    async def _paced(self) -> None:
        """Wait for this request's place in the minute."""
        if self._gap_s:
            now, host = time.monotonic(), urlsplit(self.url).netloc
            at = max(now, _next_at.get(host, now))
            _next_at[host] = at + self._gap_s
            if at > now:
                await self._sleep(at - now)

    def _request(self, prompt: Prompt, sampling: Sampling, seed: int, actions: Sequence[str]) -> dict[str, Any]:
        """One user message: chat templates with and without a system role take it."""
        request: dict[str, Any] = {
            "model": self.name,
            "messages": prompt.messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": seed & (2**SEED_BITS - 1),
        }
        if actions:
            request |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        return request

    def _address(self, path: str) -> str:
        """The URL of a path below the endpoint's own; a query stays."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(path=parts.path.rstrip("/") + path, fragment=""))

    def _body(self, request: dict[str, Any]) -> bytes:
        """The request with `body` merged in, and what it sets to None taken out."""
        merged = {name: value for name, value in (request | self.body).items() if value is not None}
        return json.dumps(merged).encode()

    async def _models(self) -> list[str]:
        """The names of the models that the server says it has; none where it does not say."""
        try:
            async with asyncio.timeout(self.timeouts.read_s):
                response = await self._client.ask("GET", self._address("/models"))
            listed = json.loads(response.text).get("data")
        except (NoAnswerError, BodyError, TimeoutError, ValueError, RecursionError, AttributeError):
            return []
        return [str(model["id"])[:LONGEST_NAME] for model in objects(listed) if model.get("id")]

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._read(request, await self._client.ask("POST", self._chat, self._body(request)))

    def _read(self, request: dict[str, Any], response: Response) -> dict[str, Any]:
        if not _is_success(response.status):
            raise StatusError(response)
        if response.body.lstrip()[:1] == b"<":
            raise WebPageError
        answer = checked(parsed(response.text, "the body"))
        message = answer["choices"][0].get("message") or {}
        self._check_length(request, len(text_of(message.get("content"))) + len(reasoning_of(message) or ""))
        return answer

    def _check_length(self, request: dict[str, Any], characters: int) -> None:
        """Raise TooLongError for an answer that goes on far beyond the tokens that were asked for."""
        asked = [value for name in LIMITS if isinstance(value := (request | self.body).get(name), int)]
        if asked and characters > max(ALWAYS_READ, MOST_A_TOKEN * max(asked)):
            raise TooLongError(f"it has {characters:,} characters already, and {max(asked)} tokens were asked for")

    async def _stream(self, request: dict[str, Any], on_text: OnText) -> dict[str, Any]:
        """The same answer, put together from its pieces; `on_text` gets the text so far, now and then."""
        request = request | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._client.stream("POST", self._chat, self._body(request)) as (response, pieces):
            begun = await _beginning(pieces)
            if _is_success(response.status) and begun[:1] not in (b"{", b"<"):
                return await streamed(_after(begun, pieces), on_text, partial(self._check_length, request))
            # an error, a web page, or the answer of a server that does not stream
            whole = b"".join([piece async for piece in _after(begun, pieces)])
        return self._read(request, Response(response.status, response.headers, whole))


async def _beginning(pieces: AsyncIterator[bytes]) -> bytes:
    """The first piece that holds more than space, without the space before it; nothing where there is none."""
    async for piece in pieces:
        if begun := piece.lstrip():
            return begun
    return b""


async def _after(begun: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begun
    async for piece in pieces:
        yield piece


def _is_success(status: int) -> bool:
    return 200 <= status < 300
