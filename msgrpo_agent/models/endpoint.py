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
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import openai
from openai import BaseModel

from msgrpo.agent import Completion, FinishReason, OnText, Sampling
from msgrpo.episode import MOST_TOKENS
from msgrpo.errors import EndpointError, UsageError
from msgrpo.models.bounded import ACCEPTED, BodyError, TooLongError, bound_body
from msgrpo.parse import action_span
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
    """A response with status 200 that holds no chat completion."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _BrokenStreamError(Exception):
    """Reading an answer, or its next piece, failed in the client; the cause says how."""


@contextmanager
def _client_faults() -> Iterator[None]:
    """The client passes on whatever its transport and its parsers raise, of some bodies: that is a failed request."""
    try:
        yield
    except (openai.OpenAIError, _BadBodyError, _BrokenStreamError, BodyError, TimeoutError):
        raise
    except Exception as error:
        raise _BrokenStreamError(str(error) or type(error).__name__) from error


class EndpointModel:
    """A model of an OpenAI-compatible server.

    The key comes from MSGRPO_API_KEY or OPENAI_API_KEY; a server without keys needs neither. `body` is merged
    into every request, and a value of None takes a parameter out (`{"max_tokens": None,
    "max_completion_tokens": 512}`). A query in the URL (Azure's `?api-version=…`) goes with every request. `retries`
    are the further tries of one request, `rate` the most requests a minute. `retrying` says how many requests wait
    for their next try right now.
    No redirect is followed: prompt and headers go to the host that was named and to no other.
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
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "none")
        check_address(url, model_name, {"Authorization": key} | dict(headers or {}))
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
        parts = urlsplit(url)
        self._client = openai.AsyncOpenAI(
            base_url=urlunsplit(parts._replace(query="", fragment="")),
            api_key=key,
            default_headers=dict(headers or {}),
            default_query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            timeout=openai.Timeout(timeouts.read_s, connect=timeouts.connect_s, pool=timeouts.total_s),
            max_retries=0,  # our own, so that they can be shown and counted
            http_client=openai.DefaultAsyncHttpxClient(
                follow_redirects=False, event_hooks={"response": [bound_body]}, headers=ACCEPTED
            ),
        )
        if parts.hostname != OPENAI_HOST:  # the client takes these from the environment for any host
            self._client.organization = self._client.project = None

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
            await self._paced()
            began = time.perf_counter()
            wanted = tuple(actions) if self._gives_logprobs else ()
            request = self._request(prompt, sampling, seed, wanted)
            try:
                async with asyncio.timeout(self.timeouts.total_s):
                    with _client_faults():
                        answer = await (self._ask(request) if on_text is None else self._stream(request, on_text))
                self._answered = True
                return completion(answer, time.perf_counter() - began, tries, wanted)
            except (openai.OpenAIError, _BadBodyError, _BrokenStreamError, BodyError, TimeoutError) as error:
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
        try:
            with _client_faults():
                found = [str(model.id)[:LONGEST_NAME] async for model in await self._client.models.list()]
            known = ", ".join(found[:MOST_MODELS]) + (" …" if found[MOST_MODELS:] else "")
        except (openai.OpenAIError, _BrokenStreamError, BodyError, TimeoutError):
            known = ""
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

    def _arguments(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request for the openai client, with `body` merged in and what it sets to None taken out.

        All of it goes as `extra_body`, which overrides: the client's walk over typed messages costs more time
        than all else that it does for a request.
        """
        merged = {name: value for name, value in (request | self.body).items() if value is not None}
        return {"model": self.name, "messages": [], "extra_body": merged}

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        raw = await self._client.chat.completions.with_raw_response.create(**self._arguments(request))
        try:
            return checked(json.loads(raw.http_response.text, parse_int=_whole))
        except (ValueError, RecursionError) as error:
            raise _BadBodyError(f"status 200, but the body is no JSON: {raw.http_response.text[:80]!r}") from error

    async def _stream(self, request: dict[str, Any], on_text: OnText) -> dict[str, Any]:
        """The same answer, put together from its pieces; `on_text` gets the text so far, now and then."""
        arguments = self._arguments(request | {"stream_options": {"include_usage": True}}) | {"stream": True}
        text, reasoning = _Growing(on_text), _Growing()
        finish, usage, failed = None, None, None
        served: dict[str, Any] = {}
        logprobs: list[Any] = []
        async with await self._client.chat.completions.create(**arguments) as chunks:
            async for piece in _pieces(chunks):
                usage = piece.get("usage") or usage
                served |= {name: piece[name] for name in ("model", "system_fingerprint") if piece.get(name)}
                for choice in _dicts(piece.get("choices")):
                    (delta,) = _dicts([choice.get("delta")]) or [{}]
                    reasoning.add(_reasoning(delta) or "")
                    finish = choice.get("finish_reason") or finish
                    failed = choice.get("error") or failed
                    for known in _dicts([choice.get("logprobs")]):
                        logprobs += _dicts(known.get("content"))
                    text.add(_text(delta.get("content")))
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


def check_address(url: str, model_name: str, headers: Mapping[str, str]) -> None:
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


def _names(held: Any) -> Iterator[str]:
    """Every name in nested data of JSON."""
    if isinstance(held, Mapping):
        for name, value in held.items():
            yield str(name)
            yield from _names(value)
    elif isinstance(held, list):
        for value in held:
            yield from _names(value)


async def _pieces(chunks: AsyncIterator[Any]) -> AsyncIterator[dict[str, Any]]:
    """The chunks as plain dicts. The client passes on whatever its transport raises in mid-stream."""
    while True:
        try:
            chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except openai.OpenAIError:
            raise
        except Exception as error:
            raise _BrokenStreamError(str(error) or type(error).__name__) from error
        if not isinstance(chunk, BaseModel):  # the client passes on what stands for a chunk, of whatever type
            raise _BadBodyError(f"the stream holds {str(chunk)[:80]!r} in place of a chunk")
        yield chunk.to_dict(warnings=False)


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
    said = _shown(json.dumps(error)[:200]) if error else otherwise
    return _BadBodyError(f"status 200, but no answer: {said}", code if isinstance(code, int) else None)


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
    said = [text for name in ("model", "system_fingerprint") if (text := _text(body.get(name)).strip())]
    return printable(" ".join(said)[:LONGEST_NAME]) or None


def _dicts(given: Any) -> list[dict[str, Any]]:
    """The objects of a list; nothing where it is none: a server's chunks have every shape."""
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


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
    if isinstance(error, openai.APIStatusError):
        if error.response.is_redirect:
            return _redirect(error.response)
        return _of_status(error.status_code, _said(error.response.text), retry_after(error.response.headers))
    if isinstance(error, _BadBodyError):
        if error.status is not None and error.status >= 400:
            return _of_status(error.status, str(error), None)
        return Failure("bad_response", str(error))
    if isinstance(error, (openai.APITimeoutError, TimeoutError)):
        return Failure("timeout", "no answer in time")
    if isinstance(error, (openai.APIConnectionError, _BrokenStreamError, BodyError)):
        cause = error if isinstance(error, BodyError) else error.__cause__ or error
        if isinstance(cause, TooLongError):
            return Failure("bad_response", f"the answer is not read to its end: {cause}", retry=False)
        if isinstance(cause, (BodyError, ValueError, RecursionError)):  # of a chunk that is no JSON
            return Failure("bad_response", f"the answer cannot be read: {str(cause)[:200]}")
        return Failure("connection", f"connection failed: {str(cause) or type(cause).__name__}")
    return Failure("bad_response", f"the answer cannot be read: {str(error)[:200]}")


def speaks_of_context(said: str) -> bool:
    """Whether a server says that a prompt is longer than its model's context."""
    return _CONTEXT.search(said[:LONGEST_SAID]) is not None


def _said(text: str) -> str:
    """What the server says, shortened, without the tags of an HTML page; error bodies have every shape."""
    return _shown(re.sub(r"\s+", " ", re.sub(r"<[^<>]*>", " ", text[:LONGEST_SAID])).strip()[:300])


def _shown(text: str) -> str:
    """The text, of JSON too, without what drives a terminal."""
    return printable(re.sub(r"\\u00[01][0-9a-fA-F]", "\N{REPLACEMENT CHARACTER}", text))


def _redirect(response: Any) -> Failure:
    target = str(response.headers.get("location", "an address that it does not name"))[:200]
    message = f"status {response.status_code}: the endpoint redirects to {target}; redirects are not followed"
    return Failure("bad_address", message, retry=False, fatal=True, fix="give the endpoint's own URL")


def _of_status(status: int, said: str, wait: float | None) -> Failure:
    message = f"status {status}: {said}" if said else f"status {status}"
    if status == 403 and _RATE.search(said):
        return Failure("rate_limit", message, retry_after_s=wait)
    if status in (405, 410):
        fix = "check the URL: it usually ends in /v1"
        return Failure("bad_address", message, retry=False, fatal=True, fix=fix)
    if status in (401, 403):
        keys = " or ".join(KEY_VARIABLES)
        return Failure("auth", message, retry=False, fatal=True, fix=f"export the endpoint's key as {keys}")
    if status == 404 or (status == 400 and _NO_MODEL.search(said)):
        return Failure("unknown_model", message, retry=False, fatal=True)
    if status == 402 or (status == 429 and wait is None and _NO_QUOTA in said):
        return Failure("quota", message, retry=False, fatal=True, fix="the account has no quota left")
    if status == 413 or (status in (400, 422) and speaks_of_context(said)):
        return Failure("context_length", message, retry=False)
    if status == 400 and _FILTER.search(said):
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
