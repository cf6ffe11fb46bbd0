"""A connection to a Ray cluster. Ray is imported when one is opened, and only then."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from msgrpo.errors import RunError, UsageError, first_line
from msgrpo.extras import needs
from msgrpo.files import read_regular
from msgrpo.signals import ASIDE

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing about a run goes to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",  # Ray waits ten minutes for a trainer that stands still
    "RAY_worker_niceness": "0",  # of a cluster that begins here: with Ray's 15 it stands still beside anything else
}
AUTH_MODE = "RAY_AUTH_MODE"  # Ray's: whether this process sends its token
TRIES = "RAY_gcs_server_port_wait_time_s"  # Ray's: how often it asks a cluster's head, 40 s each time
PROBE_S = 5.0  # for an address to answer at all
END_S = 30.0  # for the end of a connection


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
    mode = os.environ.get(AUTH_MODE)
    there = _current() if address == "auto" else _checked(address)
    try:
        if there is None:
            _start(ray, quiet)
        else:
            if address == "auto" and not os.environ.get("RAY_ADDRESS"):
                _use_token()
            _join(ray, there, quiet)
        yield there is None
    finally:
        _disconnect(ray)
        if mode is None:
            _forget_token()


def _join(ray: Any, address: str, quiet: dict[str, Any]) -> None:
    try:
        with _few_tries():
            ray.init(address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the Ray cluster at {address} cannot be joined: {first_line(error)}",
            fix="the same versions of Python and Ray as there, and where it asks for a token: export "
            "RAY_AUTH_MODE=token; --ray local starts a cluster of its own",
        ) from error


def _disconnect(ray: Any) -> None:
    """End the connection; Ray waits without end, and hears no Ctrl-C, for a head that stands still."""
    ending = threading.Thread(target=ray.shutdown, daemon=True, name=ASIDE)
    ending.start()
    ending.join(END_S)


@contextmanager
def _few_tries() -> Iterator[None]:
    """Ray asks 20 times, for a quarter of an hour, where something listens at the address that is no Ray, or stands
    still. A cluster that this process starts later needs its usual time.
    """
    mine = TRIES not in os.environ
    os.environ.setdefault(TRIES, "2")
    try:
        yield
    finally:
        if mine:
            del os.environ[TRIES]


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
    file = folder / "ray_current_cluster"
    with suppress(OSError):
        address, owner = read_regular(file).decode().strip(), file.stat().st_uid
        if not _answers(address):
            return None
        if owner not in (0, os.getuid()):  # everybody may write to /tmp: it would get our token, and our work
            raise UsageError(
                f"another user of this machine says in {file} that its Ray cluster is at {address}",
                fix=f"--ray {address} where you trust it; --ray local starts a cluster of its own",
            )
        return address
    return None


def _use_token() -> None:
    """Send Ray's token to the cluster of this machine, where there is one and RAY_AUTH_MODE does not say otherwise.

    Ray writes a token when it first starts a cluster of its own, and from then on `ray start --head` begins clusters
    that ask for it. `ray.init("auto")` sends it by the same function, and `ray.init(address)` does not.
    """
    with suppress(ImportError):  # of other versions of Ray: then the error says what to export
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _forget_token() -> None:
    """Put the mode back: the next cluster of this process, and what it starts, are others."""
    if os.environ.pop(AUTH_MODE, None) is not None:
        with suppress(ImportError, AttributeError):  # of other versions of Ray, which read the variable each time
            import_module("ray._raylet").Config.initialize("")


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
        _disconnect(ray)
        raise RunError(
            f"Ray cannot start here: {first_line(error)}",
            fix="the same command again when this machine has less to do; or --ray ADDRESS of a cluster that runs",
        ) from error
