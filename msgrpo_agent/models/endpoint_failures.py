"""What went wrong with a request to a server, whether asking again may help, and what a person can do about it.

A failure has `retry` where it may pass (connection, time-out, 408, 409, 425, 429, 5xx, a body that is no chat
completion); it is `fatal` where every further request would fail too (wrong key, unknown model, no quota).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from msgrpo.errors import EndpointError
from msgrpo.models.bounded import BodyError, TooLongError
from msgrpo.models.endpoint_settings import KEY_VARIABLES
from msgrpo.models.http import NoAnswerError, Response
from msgrpo.text import printable

LONGEST_SAID = 4096  # characters of an error's body that are looked at
_CONTEXT = re.compile(
    r"context.?(length|window|size)|maximum context|prompt is too long|too many (input )?tokens|max_model_len", re.I
)
_NO_MODEL = re.compile(r"model.?not.?found|unknown model|invalid model|model .{0,80}does not exist", re.I)
_RATE = re.compile(r"rate.?limit|too many requests", re.I)
_NO_QUOTA = "insufficient_quota"  # texts on quota and billing accompany passing rate limits, too
_FILTER = re.compile(r"content.?(filter|policy|management)", re.I)


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


class BadBodyError(Exception):
    """A response with status 200 that holds no chat completion. `retry`: another try may bring one."""

    def __init__(self, message: str, status: int | None = None, *, retry: bool = True) -> None:
        super().__init__(message)
        self.status, self.retry = status, retry


class WebPageError(Exception):
    """A web page in place of an answer: the address is not that of the API."""


class StatusError(Exception):
    """A response whose status says that it is no answer."""

    def __init__(self, response: Response) -> None:
        super().__init__(f"status {response.status}")
        self.response = response


def classify(error: Exception) -> Failure:
    """Which failure an exception of the client is."""
    if isinstance(error, StatusError):
        response = error.response
        if 300 <= response.status < 400:
            return _redirect(response)
        return _of_status(response.status, _said(response.text), retry_after(response.headers))
    if isinstance(error, BadBodyError):
        if error.status is not None and error.status >= 400:
            return _of_status(error.status, str(error), None)
        return Failure("bad_response", str(error), retry=error.retry)
    if isinstance(error, WebPageError):
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


def speaks_of_context(text: str) -> bool:
    """Whether a server says that a prompt is longer than its model's context."""
    return _CONTEXT.search(text[:LONGEST_SAID]) is not None


def _said(text: str) -> str:
    """What the server says, shortened, without the tags of an HTML page; error bodies have every shape."""
    return shown(re.sub(r"\s+", " ", re.sub(r"<[^<>]*>", " ", text[:LONGEST_SAID])).strip()[:300])


def shown(text: str) -> str:
    """The text, of JSON too, without what drives a terminal."""
    return printable(re.sub(r"\\u00[01][0-9a-fA-F]", "\N{REPLACEMENT CHARACTER}", text))
