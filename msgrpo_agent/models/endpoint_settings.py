"""What a person gives to reach a server (its address, its key, headers, fields of the body), checked before the first
request.

What is given stands in records, folder names and tables, so no secret may be part of it: a key comes from the
environment.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from msgrpo.errors import UsageError

KEY_VARIABLES = ("MSGRPO_API_KEY", "OPENAI_API_KEY")
REFUSED_BODY = ("messages", "model", "prompt", "stream", "stream_options", "n")  # not to be changed
OPENAI_HOST = "api.openai.com"
_SECRET = re.compile(r"key|token|secret|sig|pass|auth|code", re.IGNORECASE)  # in a name of the URL's query
_SECRET_FIELD = re.compile(r"(api[_-]?)?key|secret|password|authorization|(access|auth)[_-]?token", re.IGNORECASE)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a header's name, RFC 9110
_OURS = ("content-length", "transfer-encoding", "host", "connection")


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


def openais_headers(url: str) -> dict[str, str]:
    """What OpenAI's own host takes from the environment beside the key; no other host gets it."""
    names = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
    if urlsplit(url).hostname != OPENAI_HOST:
        return {}
    return {header: os.environ[name] for header, name in names.items() if os.environ.get(name)}


def check_address(url: str, model_name: str) -> None:
    """Raise UsageError for what no request can be made of, before the first one."""
    if not isinstance(url, str) or not isinstance(model_name, str):
        raise UsageError(f"the address {url!r} and the model {model_name!r} are not both text")
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


def given_fields(what: str, given: Any) -> dict[str, Any]:
    """The headers, or the fields of the body, that a person gives. Raises UsageError for what are none."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"the {what} is {reprlib.repr(given)}, not a dict whose keys are text")
    return dict(given)


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise UsageError for a header that HTTP cannot send, or that a request sets by itself."""
    for name, value in headers.items():
        fits = isinstance(value, str) and value.isascii() and value.isprintable() and value == value.strip()
        if not fits or not _TOKEN.fullmatch(name) or name.lower() in _OURS:
            raise UsageError(f"the header {name!r} cannot be sent: its name or its value is not allowed in HTTP")


def check_body(body: Mapping[str, Any]) -> None:
    """Raise UsageError for fields that cannot be sent, or would change what is asked, or of whom, behind the record's
    back.
    """
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the body {reprlib.repr(body)} cannot be sent as JSON: {error}") from error
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


def check_limits(rate: float | None, retries: int) -> None:
    """Raise UsageError for what is no number of requests a minute, or of further tries: NaN would limit nothing."""
    if rate is not None and not (isinstance(rate, Real) and 0 < rate < math.inf):
        raise UsageError(f"{rate!r} is no number of requests a minute", fix="--rate 60, or none for no limit")
    if not isinstance(retries, Integral) or retries < 0:
        raise UsageError(f"{retries!r} is no number of further tries", fix="--retries 10")


def check_seconds(seconds: float) -> None:
    """Raise UsageError for what is no time limit."""
    if not (isinstance(seconds, Real) and 0 < seconds < math.inf):
        raise UsageError(f"{seconds!r} is no number of seconds", fix="--timeout 300")


def _names(data: Any) -> Iterator[str]:
    """Every name in nested data of JSON."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield str(name)
            yield from _names(value)
    elif isinstance(data, list):
        for value in data:
            yield from _names(value)
