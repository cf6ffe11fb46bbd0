"""A connection to a Ray cluster. Ray is imported when one is opened, and only then."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgrpo.errors import RunError, UsageError
from msgrpo.extras import needs

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing about a run goes to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}
PROBE_S = 5.0  # for an address to answer at all


@contextmanager
def connected(address: str) -> Iterator[bool]:
    """A connection for as long: to the cluster at `address`, or by `auto` to the one that `ray start` began on this
    machine ($RAY_ADDRESS names another), else to a new one. Somebody's private cluster is never joined.

    Yields whether it is a new one, which ends with the connection. Raises UsageError where none answers.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with needs("--ray", "ray"):
        import ray
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    there = _current() if address == "auto" else _checked(address)
    if there is None:
        _start(ray, quiet)
    else:
        if address == "auto" and not os.environ.get("RAY_ADDRESS"):
            _use_token()
        try:
            ray.init(there, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"the Ray cluster at {there} cannot be joined: {str(error).splitlines()[0]}",
                fix="the same versions of Python and Ray as there, and where it asks for a token: export "
                "RAY_AUTH_MODE=token; --ray local starts a cluster of its own",
            ) from error
    try:
        yield there is None
    finally:
        ray.shutdown()


def _checked(address: str) -> str | None:
    """An address at which something listens; None for `local`."""
    if address == "local":
        return None
    form = re.fullmatch(r"([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})", address)
    if form is None:
        raise UsageError(
            f"--ray {address!r} is no address",
            fix="--ray auto, --ray local, or HOST:PORT as `ray start --head` has shown it",
        )
    if not _answers(address):
        raise UsageError(
            f"no Ray cluster answers at {address}",
            fix="--ray auto, or HOST:PORT as `ray start --head` has shown it",
        )
    return address


def _current() -> str | None:
    """The cluster that $RAY_ADDRESS or `ray start` on this machine names, where it is still there."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address and address not in ("auto", "local"):
        return _checked(address)
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    with suppress(OSError):
        address = (folder / "ray_current_cluster").read_text().strip()
        return address if _answers(address) else None
    return None


def _use_token() -> None:
    """Send Ray's token to the cluster of this machine, where there is one and RAY_AUTH_MODE does not say otherwise.

    Ray writes a token when it first starts a cluster of its own, and from then on `ray start --head` begins clusters
    that ask for it. `ray.init("auto")` sends it by the same function, and `ray.init(address)` does not.
    """
    with suppress(ImportError):  # of other versions of Ray: then the error says what to export
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), PROBE_S):
        return True
    return False


def _start(ray: Any, quiet: dict[str, Any]) -> None:
    """A cluster of this machine. Ray gives its processes half a minute to begin, and says only `Exception` then."""
    try:
        ray.init("local", include_dashboard=False, **quiet)
    except Exception as error:
        ray.shutdown()
        raise RunError(
            f"Ray cannot start here: {str(error).splitlines()[0]}",
            fix="the same command again when this machine has less to do; or --ray ADDRESS of a cluster that runs",
        ) from error
