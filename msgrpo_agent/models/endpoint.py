"""Lθ behind any OpenAI-compatible URL, and everything that can go wrong on the way to it.

Three things are kept apart. An *answer*, however bad, empty or cut off, is the model's and is never asked again.
A *failure that may pass* (connection, time-out, 408, 409, 425, 429, 5xx, a body that is no chat completion) is
asked again after a capped wait, counted in `Completion.retries`. Any other failure is raised as EndpointError at
once; it is `fatal` where every further request would fail too (wrong key, unknown model, no quota).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from msgrpo.agent import Completion, FinishReason, OnText, Sampling, action_span
from msgrpo.episode import MOST_TOKENS
from msgrpo.errors import EndpointError, UsageError
from msgrpo.models.bounded import BodyError, TooLongError
from msgrpo.models.http import Client, NoAnswerError, Response, proxy_for
from msgrpo.prompt import Prompt
from msgrpo.text import printable

KEY_VARIABLES = ("MSGRPO_API_KEY", "OPENAI_API_KEY")
TOP_LOGPROBS = 20  # the most that OpenAI and vLLM give by default
SEED_BITS = 31  # some servers take 32-bit seeds only
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
RETRIES = 10  # the waits between them add up to four minutes
TELL_S = 0.05  # between two tellings of an answer that grows
LONGEST_SAID = 4096  # characters of an error's body that are looked at
LONGEST_NAME = 200  # characters of what a server calls itself
_SECRET = re.compile(r"key|token|secret|sig|pass|auth|code", re.IGNORECASE)  # in a name of the URL's query
_SECRET_FIELD = re.compile(r"(api[_-]?)?key|secret|password|authorization|(access|auth)[_-]?token", re.IGNORECASE)
MOST_A_TOKEN, ALWAYS_READ = 64, 2**18  # characters of an answer: for each token that it may have, and in any case
LIMITS = ("max_tokens", "max_completion_tokens")  # the fields of a request that say how many tokens
LONGEST_LINE = 2**20  # bytes of a stream's line: one chunk, with its alternatives, is a few thousand
MOST_MODELS = 20  # of a server that are named in an error
FIRST_RETRIES = 5  # of a connection to a server that has never answered: about 15 s
REFUSED_BODY = ("messages", "model", "prompt", "stream", "stream_options", "n")  # not to be changed
OPENAI_HOST = "api.openai.com"

_CONTEXT = re.compile(
    r"context.?(length|window|size)|maximum context|prompt is too long|too many (input )?tokens|max_model_len", re.I
)
_NO_MODEL = re.compile(r"model.?not.?found|unknown model|invalid model|model .{0,80}does not exist", re.I)
_next_at: dict[str, float] = {}  # host -> when its next request may go out: two models of one host share its minute
_RATE = re.compile(r"rate.?limit|too many requests", re.I)
_NO_QUOTA = "insufficient_quota"  # texts on quota and billing accompany passing rate limits, too
_FILTER = re.compile(r"content.?(filter|policy|management)", re.I)
_UNFINISHED = ("error", "abort")  # how gateways and vLLM end an answer that failed half-way
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a header's name, RFC 9110
_OURS = ("content-length", "transfer-encoding", "host", "connection")


@dataclass(frozen=True)
class Timeouts:
    """Seconds: to connect, between two pieces of an answer, and for one whole request."""

    connect_s: float = 10.0
    read_s: float = 180.0
    total_s: float = 600.0


@dataclass(frozen=True)
class Failure:
    """What went wrong with one request: its kind (a column of the table) and whether asking again may help."""

    kind: str
    message: str
    retry: bool = True
    fatal: bool = False
    retry_after_s: float | None = None
    fix: str | None = None

    def error(self, tries: int) -> EndpointError:
        """The failure as an exception, with the number of tries."""
        again = f" ({tries} tries)" if tries > 1 else ""
        return EndpointError(self.message + again, kind=self.kind, fatal=self.fatal, fix=self.fix)


class _BadBodyError(Exception):
    """A response with status 200 that holds no chat completion. `retry`: another try may bring one."""

    def __init__(self, message: str, status: int | None = None, *, retry: bool = True) -> None:
        super().__init__(message)
        self.status, self.retry = status, retry


class _WebPageError(Exception):
    """A web page in place of an answer: the address is not that of the API."""


class _StatusError(Exception):
    """A response whose status says that it is no answer."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"status {response.status}")
        self.response = response


def key_of(url: str) -> str:
    """The key for the host of an address: MSGRPO_API_KEY_HOST where that is set, even to nothing, else
    MSGRPO_API_KEY or OPENAI_API_KEY; "none" without one.

    HOST is API_EXAMPLE_COM for api.example.com, and API__EXAMPLE_COM for api-example.com, which is somebody else. A
    host with other characters than letters, digits, dots and hyphens has no variable of its own.
    """
    host = (urlsplit(url).hostname or "").rstrip(".")
    plain = re.fullmatch(r"[a-z0-9.:-]+", host)
    of_host = f"{KEY_VARIABLES[0]}_{re.sub(r'[.:]', '_', host.replace('-', '__')).upper()}" if plain else ""
    names = (of_host,) if of_host in os.environ else KEY_VARIABLES
    return next((os.environ[name] for name in names if os.environ.get(name)), "none")


class EndpointModel:
    """A model of an OpenAI-compatible server.

    The key is `key_of` its host; a server without keys needs none. `body` is merged
    into every request, and a value of None takes a parameter out (`{"max_tokens": None,
    "max_completion_tokens": 512}`). A query in the URL (Azure's `?api-version=…`) goes with every request. `retries`
    are the further tries of one request, `rate` the most requests a minute. `retrying` says how many requests wait
    for their next try right now.
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
        check_headers({"Authorization": key} | _openais(url) | dict(headers or {}))
        check_body(body or {})
        self.name = model_name
        self.url = url
        self.body = dict(body or {})
        self.retries = retries
        self.timeouts = timeouts
        self.retrying = 0
        self.trouble = ""  # the failure that is being waited out, and which retry comes next; for a screen
        self._sleep = sleep
        self._gap_s = 60 / rate if rate else 0.0
        self._jitter = random.Random(0)
        self._gives_logprobs = True
        self._answered = False
        sent = ({"Authorization": f"Bearer {key}"}, _openais(url), headers or {})  # the last of a name counts
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
        while True:
            wanted = tuple(actions) if self._gives_logprobs else ()
            request = self._request(prompt, sampling, seed, wanted)
            try:
                async with self._client.room:
                    await self._paced()
                    began = time.perf_counter()
                    async with asyncio.timeout(self.timeouts.total_s):
                        answer = await (self._ask(request) if on_text is None else self._stream(request, on_text))
                self._answered = True
                return completion(answer, time.perf_counter() - began, tries, wanted)
            except (
                _StatusError, _BadBodyError, _WebPageError, NoAnswerError, BodyError, TimeoutError
            ) as error:  # fmt: skip
                failure = classify(error)
            if wanted and failure.kind == "bad_request" and "logprob" in failure.message:
                self._gives_logprobs = False  # this server has none: the answer matters more
                continue
            tries += 1
            retries = self._retries_of(failure)
            if not failure.retry or tries > retries:
                raise await self._final(failure, tries)
            await self._wait(failure, tries, retries)

    def _retries_of(self, failure: Failure) -> int:
        """A server that answered before is waited for; an address where nothing ever answered may just be wrong."""
        new = failure.kind == "connection" and not self._answered
        return min(self.retries, FIRST_RETRIES) if new else self.retries

    async def _wait(self, failure: Failure, tries: int, retries: int) -> None:
        """Exponential back-off with jitter, or the server's Retry-After where longer; a minute at most."""
        own = FIRST_WAIT_S * 2 ** (tries - 1) * self._jitter.uniform(0.75, 1.0)
        wanted = max(own, failure.retry_after_s or 0.0)
        self.retrying += 1
        self.trouble = printable(f"{failure.message} (retry {tries} of {retries})")
        try:
            await self._sleep(min(wanted, LONGEST_WAIT_S))
        finally:
            self.retrying -= 1
            self.trouble = ""

    async def _final(self, failure: Failure, tries: int) -> EndpointError:
        if failure.kind != "unknown_model":
            return failure.error(tries)
        names = await self._models()
        known = ", ".join(names[:MOST_MODELS]) + (" …" if names[MOST_MODELS:] else "")
        fix = f"its models: {known}" if known else "check the URL (it usually ends in /v1) and the model's name"
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
        return [str(model["id"])[:LONGEST_NAME] for model in _dicts(listed) if model.get("id")]

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.ask("POST", self._chat, self._body(request))
        if not _is_success(response.status):
            raise _StatusError(response)
        if response.body.lstrip()[:1] == b"<":
            raise _WebPageError
        answer = checked(_json(response.text, "the body"))
        message = answer["choices"][0].get("message") or {}
        self._check_length(request, len(_text(message.get("content"))) + len(_reasoning(message) or ""))
        return answer

    def _check_length(self, request: dict[str, Any], characters: int) -> None:
        """Raise TooLongError for an answer that goes on far beyond the tokens that were asked for."""
        asked = [value for name in LIMITS if isinstance(value := (request | self.body).get(name), int)]
        if asked and characters > max(ALWAYS_READ, MOST_A_TOKEN * max(asked)):
            raise TooLongError(f"it has {characters:,} characters already, and {max(asked)} tokens were asked for")

    async def _stream(self, request: dict[str, Any], on_text: OnText) -> dict[str, Any]:
        """The same answer, put together from its pieces; `on_text` gets the text so far, now and then."""
        request = request | {"stream": True, "stream_options": {"include_usage": True}}
        text, reasoning = _Growing(on_text), _Growing()
        finish, usage, failed = None, None, None
        served: dict[str, Any] = {}
        logprobs: list[Any] = []
        async with self._client.stream("POST", self._chat, self._body(request)) as (response, pieces):
            if not _is_success(response.status):
                whole = b"".join([piece async for piece in pieces])
                raise _StatusError(Response(response.status, response.headers, whole))
            if response.content_type == "text/html":
                raise _WebPageError
            characters, ended = 0, False
            async for chunk in _chunks(pieces):
                if chunk is None:
                    ended = True
                    break
                usage = chunk.get("usage") or usage
                served |= {name: chunk[name] for name in ("model", "system_fingerprint") if chunk.get(name)}
                for choice in _dicts(chunk.get("choices")):
                    (delta,) = _dicts([choice.get("delta")]) or [{}]
                    new = (_reasoning(delta) or "", _text(delta.get("content")))
                    characters += sum(map(len, new))
                    self._check_length(request, characters)
                    reasoning.add(new[0])
                    finish = choice.get("finish_reason") or finish
                    failed = choice.get("error") or failed
                    for known in _dicts([choice.get("logprobs")]):
                        logprobs += _dicts(known.get("content"))
                    text.add(new[1])
        if finish is None and ended:
            reason = (
                "the stream ended with [DONE] and gave no finish_reason, so nobody knows whether the answer is whole"
            )
            raise _BadBodyError(reason, retry=False)
        if finish is None:
            raise _BadBodyError("the stream ended before the answer did")
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


def check_address(url: str, model_name: str) -> None:
    """Raise UsageError for what no request can be made of, before the first one."""
    if "@" in url:
        raise UsageError(
            "the endpoint's URL holds a user or a password, which would stand in folder names and tables",
            fix=f"leave it out and export the key as {' or '.join(KEY_VARIABLES)}, or give a header",
        )
    secret = [name for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True) if _SECRET.search(name)]
    if secret:
        raise UsageError(
            f"the endpoint's URL holds {', '.join(secret)}, which would stand in folder names and tables",
            fix=f"leave it out and export the key as {' or '.join(KEY_VARIABLES)}, or give a header",
        )
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is none
        whole = False
    if not whole or not model_name:
        raise UsageError(
            f"{url!r} with the model {model_name!r} is no endpoint", fix="endpoint:http://host:8000/v1#model"
        )


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise UsageError for a header that HTTP cannot send, or that a request sets by itself."""
    for name, value in headers.items():
        fits = value.isascii() and value.isprintable() and value == value.strip()
        if not fits or not _TOKEN.fullmatch(name) or name.lower() in _OURS:
            raise UsageError(f"the header {name!r} cannot be sent: its name or its value is not allowed in HTTP")


def check_body(body: Mapping[str, Any]) -> None:
    """Raise UsageError for fields that would change what is asked, or of whom, behind the record's back."""
    secret = [name for name in _names(body) if _SECRET_FIELD.fullmatch(name)]
    if secret:
        raise UsageError(
            f"--body holds {secret[0]}, which would stand in every record",
            fix=f"export the key as {' or '.join(KEY_VARIABLES)}, or give a --header",
        )
    refused = [name for name in body if name in REFUSED_BODY]
    if refused:
        raise UsageError(
            f"--body may not set {', '.join(refused)}: the record would not say what was asked",
            fix="choose the model by --model, and leave the prompt to the template",
        )


def _names(data: Any) -> Iterator[str]:
    """Every name in nested data of JSON."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield str(name)
            yield from _names(value)
    elif isinstance(data, list):
        for value in data:
            yield from _names(value)


def _openais(url: str) -> dict[str, str]:
    """What OpenAI's own host takes from the environment beside the key; no other host gets it."""
    names = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
    if urlsplit(url).hostname != OPENAI_HOST:
        return {}
    return {header: os.environ[name] for header, name in names.items() if os.environ.get(name)}


def _is_success(status: int) -> bool:
    return 200 <= status < 300


async def _chunks(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """The objects of a stream of server-sent events, up to `[DONE]`, which is None."""
    async for data in _events(pieces):
        if data.startswith(b"[DONE]"):
            yield None
            return
        chunk = _json(data.decode("utf-8", "replace"), "a chunk")
        if not isinstance(chunk, dict):
            raise _BadBodyError(f"the stream holds {str(chunk)[:80]!r} in place of a chunk")
        if chunk.get("error"):
            raise _no_answer(chunk["error"], "")
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


def _json(text: str, what: str) -> Any:
    """The value of JSON. Raises _BadBodyError where it is none."""
    try:
        return json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise _BadBodyError(f"status 200, but {what} is no JSON: {text[:80]!r}") from error


def checked(body: Any) -> dict[str, Any]:
    """The body of a chat completion, or _BadBodyError for what servers send with status 200 in its place."""
    if not isinstance(body, dict):
        raise _BadBodyError(f"status 200, but the body is no object: {str(body)[:80]!r}")
    choices = body.get("choices")
    if not choices:
        raise _no_answer(body.get("error"), f"choices is {str(choices)[:80]!r}")
    choice = choices[0] if isinstance(choices, list) else None
    if not isinstance(choice, dict):
        raise _BadBodyError(f"status 200, but choices is {str(choices)[:80]!r}")
    if choice.get("error") or choice.get("finish_reason") in _UNFINISHED:
        raise _no_answer(choice.get("error"), f"finish_reason is {str(choice.get('finish_reason'))[:80]!r}")
    if not isinstance(choice.get("message"), dict) and choice.get("finish_reason") != "content_filter":
        raise _BadBodyError(f"status 200, but the message is {str(choice.get('message'))[:80]!r}")
    return body


def _no_answer(error: Any, otherwise: str) -> _BadBodyError:
    """What a server says in place of an answer; OpenRouter's errors hold the status of its provider."""
    code = error.get("code") if isinstance(error, dict) else None
    reason = _shown(json.dumps(error)[:200]) if error else otherwise
    return _BadBodyError(f"status 200, but no answer: {reason}", code if isinstance(code, int) else None)


def completion(body: Mapping[str, Any], latency_s: float, retries: int, actions: Sequence[str]) -> Completion:
    """A checked body as a Completion. A token count that is missing, or none, is 0: the answer stays.

    Raises _BadBodyError where something has another type than the protocol says.
    """
    try:
        return _completion(body, latency_s, retries, actions)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _BadBodyError(f"status 200, but the answer cannot be read: {error}") from error


def _completion(body: Mapping[str, Any], latency_s: float, retries: int, actions: Sequence[str]) -> Completion:
    choice = body["choices"][0]
    message = choice.get("message") or {}
    usage = body["usage"] if isinstance(body.get("usage"), dict) else {}
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return Completion(
        text=_text(message.get("content")) or _text(message.get("refusal")),
        finish_reason=_finish_reason(choice.get("finish_reason")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        latency_s=latency_s,
        reasoning=_reasoning(message),
        action_probabilities=_probabilities(content, actions) if actions else None,
        retries=retries,
        model=_served(body),
    )


def _served(body: Mapping[str, Any]) -> str | None:
    """Which model the server says has answered, and its fingerprint of the system."""
    names = [text for name in ("model", "system_fingerprint") if (text := _text(body.get(name)).strip())]
    return printable(" ".join(names)[:LONGEST_NAME]) or None


def _dicts(given: Any) -> list[dict[str, Any]]:
    """The objects of a list; nothing where it is none: a server's chunks have every shape."""
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []


def _whole(digits: str) -> int:
    """A whole number of JSON; one that no count can be, thousands of digits long, is −1 and so none."""
    return int(digits) if len(digits) < 20 else -1


def _text(content: Any) -> str:
    """A string, or the text parts of a list of parts, or nothing; what UTF-8 cannot hold is marked."""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else ""


def _count(given: Any) -> int:
    """A number of tokens, or 0 for what is none: other types, negative numbers, and those beyond MOST_TOKENS."""
    whole = isinstance(given, int) or (isinstance(given, float) and given.is_integer())
    return int(given) if whole and 0 <= given <= MOST_TOKENS else 0


def _probabilities(content: Any, actions: Sequence[str]) -> dict[str, float] | None:
    """`action_probabilities`, and None where the server's alternatives cannot be read: the answer stays."""
    try:
        return action_probabilities(content or [], actions)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def _reasoning(message: Mapping[str, Any]) -> str | None:
    return _text(message.get("reasoning")) or _text(message.get("reasoning_content")) or None


def _finish_reason(given: Any) -> FinishReason:
    if given == "length":
        return "length"
    return "content_filter" if given == "content_filter" else "stop"


def action_probabilities(tokens: Sequence[Mapping[str, Any]], actions: Sequence[str]) -> dict[str, float] | None:
    """P over the legal actions from the alternatives to the token that follows the `<action>` that the parser reads.

    Each alternative counts for the one action that begins with it; the rest is left out and the sum made 1.
    None where the server gave no alternatives, the answer has no tag, or no alternative begins an action.
    """
    texts = [str(token.get("token") or "") for token in tokens]
    span = action_span("".join(texts))
    if span is None:
        return None
    position, offset = span[0], 0
    for token, text in zip(tokens, texts, strict=True):
        if offset <= position < offset + len(text):
            return _over_actions(token.get("top_logprobs") or [], text[: position - offset], actions)
        offset += len(text)
    return None


def _over_actions(
    alternatives: Sequence[Mapping[str, Any]], head: str, actions: Sequence[str]
) -> dict[str, float] | None:
    mass = dict.fromkeys(actions, 0.0)
    for alternative in alternatives:
        text = str(alternative.get("token") or "")
        begins = text.removeprefix(head).partition("<")[0].strip().casefold()
        fits = [action for action in actions if begins and action.casefold().startswith(begins)]
        if text.startswith(head) and len(fits) == 1:
            logprob = float(alternative.get("logprob", -math.inf))
            mass[fits[0]] += math.exp(logprob) if logprob <= 0 else math.nan  # no probability is above 1
    total = sum(mass.values())
    return {action: m / total for action, m in mass.items()} if total > 0 else None  # also where one is no number


def classify(error: Exception) -> Failure:
    """Which failure an exception of the client is."""
    if isinstance(error, _StatusError):
        response = error.response
        if 300 <= response.status < 400:
            return _redirect(response)
        return _of_status(response.status, _said(response.text), retry_after(response.headers))
    if isinstance(error, _BadBodyError):
        if error.status is not None and error.status >= 400:
            return _of_status(error.status, str(error), None)
        return Failure("bad_response", str(error), retry=error.retry)
    if isinstance(error, _WebPageError):
        message, fix = (
            "status 200, and a web page: this address has no such API",
            "check the URL: it usually ends in /v1",
        )
        return Failure("bad_address", message, retry=False, fatal=True, fix=fix)
    if isinstance(error, TooLongError):
        return Failure("bad_response", f"the answer is not read to its end: {error}", retry=False)
    if isinstance(error, BodyError):
        return Failure("bad_response", f"the answer cannot be read: {error}")
    if isinstance(error, TimeoutError) or (isinstance(error, NoAnswerError) and error.late):
        return Failure("timeout", "no answer in time")
    nobody = isinstance(error, NoAnswerError) and error.nobody
    start = "start its server, or check the address, which usually ends in /v1" if nobody else None
    return Failure("connection", f"connection failed: {error}", fix=start)


def speaks_of_context(text: str) -> bool:
    """Whether a server says that a prompt is longer than its model's context."""
    return _CONTEXT.search(text[:LONGEST_SAID]) is not None


def _said(text: str) -> str:
    """What the server says, shortened, without the tags of an HTML page; error bodies have every shape."""
    return _shown(re.sub(r"\s+", " ", re.sub(r"<[^<>]*>", " ", text[:LONGEST_SAID])).strip()[:300])


def _shown(text: str) -> str:
    """The text, of JSON too, without what drives a terminal."""
    return printable(re.sub(r"\\u00[01][0-9a-fA-F]", "\N{REPLACEMENT CHARACTER}", text))


def _redirect(response: Response) -> Failure:
    target = response.headers.get("location", "an address that it does not name")[:200]
    message = f"status {response.status}: the endpoint redirects to {target}; redirects are not followed"
    return Failure("bad_address", message, retry=False, fatal=True, fix="give the endpoint's own URL")


def _of_status(status: int, text: str, wait: float | None) -> Failure:
    message = f"status {status}: {text}" if text else f"status {status}"
    if status == 403 and _RATE.search(text):
        return Failure("rate_limit", message, retry_after_s=wait)
    if status in (405, 410):
        fix = "check the URL: it usually ends in /v1"
        return Failure("bad_address", message, retry=False, fatal=True, fix=fix)
    if status in (401, 403):
        keys = " or ".join(KEY_VARIABLES)
        return Failure("auth", message, retry=False, fatal=True, fix=f"export the endpoint's key as {keys}")
    if status == 404 or (status == 400 and _NO_MODEL.search(text)):
        return Failure("unknown_model", message, retry=False, fatal=True)
    if status == 402 or (status == 429 and wait is None and _NO_QUOTA in text):
        return Failure("quota", message, retry=False, fatal=True, fix="the account has no quota left")
    if status == 413 or (status in (400, 422) and speaks_of_context(text)):
        return Failure("context_length", message, retry=False)
    if status == 400 and _FILTER.search(text):
        return Failure("content_filter", message, retry=False)
    if status == 429:
        return Failure("rate_limit", message, retry_after_s=wait)
    if status in (408, 409, 425) or status >= 500:
        return Failure("server_error", message, retry_after_s=wait)
    return Failure("bad_request", message, retry=False)


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that the server asks to wait: a number or an HTTP date; None where absent or unreadable."""
    given = headers.get("retry-after")
    if not given:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", given.strip()):
        return float(given)
    try:
        when = parsedate_to_datetime(given).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, when - (time.time() if now is None else now))
