"""HTTP requests to the servers of language models: of evaluations, of the app, and of rollouts in training.

aiohttp carries them. What holds for all of them is decided here: no redirect is followed, no cookie is kept, bodies
and times are bounded, and only so many requests are on their way to one server at once. What waits for its place has
not begun: no time limit runs, and no failure can come of it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp
import certifi

from msgrpo import __version__
from msgrpo.errors import UsageError
from msgrpo.models.bounded import ACCEPTED, BodyError, bounded

IN_FLIGHT = 256  # requests at once to one server: what most servers run at once, and few enough for an even loop
KEEP_S = 4.0  # an idle connection is kept for so long: vLLM closes its own after 5 s
LONGEST_HEADER = 2**16  # bytes
SHORT_BODY = 2**18  # bytes of a body that are read in any case; 256 bodies of LONGEST_BODY would fill 4 GiB
LONG_AT_ONCE = 8  # bodies of which more is read; the others wait where they are
JSON = {"Content-Type": "application/json"}
OTHER_FILES = 256  # that the process may have open beside its connections


class NoAnswerError(Exception):
    """A request has no response, or not all of it. `late`: a time limit was over; `nobody`: nothing is there."""

    def __init__(self, message: str, *, late: bool = False, nobody: bool = False) -> None:
        super().__init__(message)
        self.late, self.nobody = late, nobody


@dataclass(frozen=True)
class Response:
    """A whole response, whatever its status. Names of headers are found in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as UTF-8, which JSON is (RFC 8259), whatever a server calls its charset."""
        return self.body.decode("utf-8", "replace")


@dataclass(frozen=True)
class _Open:
    """What one event loop has open: its connections, and room for so many requests and long bodies."""

    session: aiohttp.ClientSession
    room: asyncio.Semaphore
    long_bodies: asyncio.Semaphore


class Client:
    """Sends requests with the same headers and time limits; each event loop that uses it gets connections of its own.

    `read_s` are the seconds between two pieces of an answer, `total_s` those of a whole request. `proxy` is the URL
    of a proxy. `close` closes the connections of the running loop.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        connect_s: float = 10.0,
        read_s: float | None = None,
        total_s: float | None = None,
        proxy: str | None = None,
    ) -> None:
        self._headers = {"User-Agent": f"msgrpo/{__version__}"} | ACCEPTED | dict(headers)
        self._timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=read_s)
        self._proxy = proxy
        self._open: dict[asyncio.AbstractEventLoop, _Open] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_open(self) -> bool:
        """Whether an event loop has used it and not closed it yet."""
        return bool(self._open)

    @property
    def room(self) -> asyncio.Semaphore:
        """The places for requests on their way from this loop; for those who ask one server only."""
        return self._here().room

    async def ask(self, method: str, url: str, body: bytes | None = None) -> Response:
        """The response. Raises NoAnswerError without a whole one, BodyError for a body that is not read on."""
        here = self._here()
        try:
            async with self._request(here.session, method, url, body) as response:
                return Response(response.status, response.headers, await _whole(response, here.long_bodies))
        except BodyError:
            raise
        except Exception as error:
            raise _fault(error, here.session) from error

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: bytes | None = None
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncIterator[bytes]]]:
        """The response and the pieces of its body as they come; both raise what `ask` raises."""
        session = self._here().session
        try:
            response = await self._request(session, method, url, body)
        except Exception as error:
            raise _fault(error, session) from error
        async with response:
            yield response, _pieces(response, session)

    async def socket(self, url: str, longest: int) -> aiohttp.ClientWebSocketResponse:
        """An open websocket, which a message of more than `longest` bytes ends. Raises what `ask` raises."""
        session = self._here().session
        try:
            return await session.ws_connect(url, max_msg_size=longest, proxy=self._proxy)
        except Exception as error:
            raise _fault(error, session) from error

    def _request(
        self, session: aiohttp.ClientSession, method: str, url: str, body: bytes | None
    ) -> aiohttp.client._RequestContextManager:
        headers = None if body is None else JSON
        return session.request(method, url, data=body, headers=headers, allow_redirects=False, proxy=self._proxy)

    async def close(self) -> None:
        here = self._open.pop(asyncio.get_running_loop(), None)
        if here is not None:
            await here.session.close()

    def _here(self) -> _Open:
        loop = asyncio.get_running_loop()
        if loop not in self._open:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S, ssl=_certificates())
            session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                max_line_size=LONGEST_HEADER,
                max_field_size=LONGEST_HEADER,
                trace_configs=[_no_redirects()],
            )
            self._open[loop] = _Open(session, asyncio.Semaphore(most_in_flight(1)), asyncio.Semaphore(LONG_AT_ONCE))
        return self._open[loop]


def _no_redirects() -> aiohttp.TraceConfig:
    """Ends what would follow a redirect: aiohttp has no other way for websockets to say so."""

    async def refuse(
        session: aiohttp.ClientSession, context: SimpleNamespace, redirect: aiohttp.TraceRequestRedirectParams
    ) -> None:
        raise NoAnswerError("it redirects to another address; no redirect is followed")

    traced = aiohttp.TraceConfig()
    traced.on_request_redirect.append(refuse)
    return traced


async def _whole(response: aiohttp.ClientResponse, long_bodies: asyncio.Semaphore) -> bytes:
    """The body; one that says that it is short and plain, as most are, is read at once."""
    length = response.content_length
    if length is not None and length <= SHORT_BODY and "Content-Encoding" not in response.headers:
        return await response.read()
    body = bytearray()
    async with AsyncExitStack() as place:
        async for piece in _bounded(response):
            if len(body) <= SHORT_BODY < len(body) + len(piece):
                await place.enter_async_context(long_bodies)
            body += piece
    return bytes(body)


def _bounded(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    return bounded(response.content.iter_any(), response.headers.get("Content-Encoding", ""))


async def _pieces(response: aiohttp.ClientResponse, session: aiohttp.ClientSession) -> AsyncIterator[bytes]:
    try:
        async for piece in _bounded(response):
            yield piece
    except BodyError:
        raise
    except Exception as error:
        raise _fault(error, session) from error


def _fault(error: Exception, session: aiohttp.ClientSession) -> BaseException:
    """What an exception of the transport, or of its parsers, which some bodies raise, means for the request."""
    if isinstance(error, NoAnswerError):
        return error
    if isinstance(error, TimeoutError):
        return NoAnswerError("no answer in time", late=True)
    if session.closed:  # by its owner, who waits for no answer any more
        return asyncio.CancelledError()
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return UsageError(
            f"this process has {most} files and connections open and may have no more", fix="ulimit -n 8192"
        )
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        unknown = isinstance(error, aiohttp.ClientConnectorDNSError)
        why = "no such host" if unknown else os.strerror(error.errno) if error.errno else str(error.os_error)
        return NoAnswerError(f"nothing answers at {error.host}:{error.port} ({why})", nobody=True)
    if isinstance(error, aiohttp.ServerDisconnectedError):  # it holds what had been read, with all its headers
        return NoAnswerError("the connection ended before the answer")
    if type(error) is aiohttp.ClientResponseError:  # the head cannot be read; it quotes a line, a cookie's too
        return NoAnswerError("what came is no answer by HTTP")
    return NoAnswerError(str(error) or type(error).__name__)


def most_in_flight(servers: int) -> int:
    """Requests at once to each of so many servers: IN_FLIGHT, or fewer where so many files may not be open."""
    return max(1, min(IN_FLIGHT, (may_open(servers * IN_FLIGHT + OTHER_FILES) - OTHER_FILES) // servers))


def may_open(wanted: int) -> int:
    """How many of the `wanted` files and connections this process may have open at once.

    Its own limit is raised as far as it is needed and allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for a URL: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, and NO_PROXY for none.

    Raises UsageError for one that does not speak HTTP.
    """
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    if not parts.hostname or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is None or "://" not in proxy:
        return proxy and f"http://{proxy}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise UsageError(
            f"the environment names the proxy {proxy!r}, and only http:// proxies are spoken to",
            fix=f"for a server that needs none: export NO_PROXY={parts.hostname}",
        )
    return proxy


@cache
def _certificates() -> ssl.SSLContext:
    """The authorities that the system trusts (or SSL_CERT_FILE names), and those that browsers do."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
