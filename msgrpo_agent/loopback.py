"""Who may talk to a server on this machine that asks for no key: this machine's own programs and pages.

A page of any site can send requests to 127.0.0.1, and open websockets there, which no browser asks about; and the
site's own name can be made to lead there (DNS rebinding). Both show in the headers that browsers write themselves.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """A host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_own(host: str, origin: str | None, *, anywhere: bool = False) -> bool:
    """Whether a request with these headers is meant for this server, and comes from no page but its own.

    `host` is a loopback name, unless the server may be reached from `anywhere`; `origin`, which browsers name, is the
    same address, or another loopback name with the same port. Programs name no origin.
    """
    asked, page = _split(f"//{host}"), _split(origin or f"http://{host}")
    if asked is None or page is None:
        return False
    local = [is_loopback((one.hostname or "").lower()) for one in (asked, page)]
    same = page.netloc.lower() == asked.netloc.lower() or (all(local) and page.port == asked.port)
    return same and (anywhere or local[0])


def _split(address: str) -> SplitResult | None:
    """The parts of an address; None for what is none."""
    try:
        parts = urlsplit(address)
        return parts if parts.hostname and parts.port != 0 else None
    except ValueError:  # brackets that do not close, a port that is none
        return None
