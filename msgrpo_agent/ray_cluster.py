"""A connection to a Ray cluster. Ray is imported when one is opened, and only then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgrpo.errors import RunError, UsageError
from msgrpo.extras import needs

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing about a run goes to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}


@contextmanager
def connected(address: str) -> Iterator[bool]:
    """A connection for as long: to the cluster at `address`, or by `auto` to the one of this machine, else to a new
    one. Yields whether it is a new one, which ends with the connection. Raises UsageError where none answers.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with needs("--ray", "ray"):
        import ray
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    is_new = False
    try:
        ray.init(address, **quiet)
    except ConnectionError as error:
        if address != "auto":
            raise UsageError(
                f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}",
                fix="--ray auto, or the address that `ray start --head` has shown",
            ) from error
        is_new = True
        _start(ray, quiet)
    try:
        yield is_new
    finally:
        ray.shutdown()


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
