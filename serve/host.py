"""A vLLM server on whatever node of a Ray cluster it is placed: the class of its actor.

An actor that Ray starts again has another address, so everything begins in `__init__`, and `about` says where it
serves. When vLLM ends by itself, so does the actor's process, and Ray starts it again. Versions of an adapter come
as bytes and lie in a folder of this node; no disk is shared.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgrpo.serve.adapters import write_version
from msgrpo.serve.preflight import free_port
from msgrpo.serve.server import Server
from msgrpo.serve.terminal import prepare
from msgrpo.serve.vllm_command import KEY_VARIABLE, Request

AGAIN_S = 15.0  # before a server that could not be started again is tried once more
# Ray ends an actor's children by SIGKILL before the actor: that is our supervisor, and vLLM would be left behind.
ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}


@dataclass(frozen=True)
class About:
    """What a host says of itself: where it serves, or what it still does, or why it cannot."""

    node: str
    pid: int  # of the actor
    server: int | None  # the supervisor of vLLM
    url: str | None = None
    stage: str = ""
    error: str = ""
    fix: str = ""


class Host:
    """`request` is what to serve; its host, port, key and folder of versions are this node's own."""

    def __init__(self, request: Request, node: str, *, again: bool = False) -> None:
        self._again = again
        self._folder = Path(tempfile.mkdtemp(prefix="msgrpo-versions-"))
        self._about = About(node, os.getpid(), None)
        key = os.environ.get(KEY_VARIABLE)
        address = node if key else "127.0.0.1"  # without a key nobody else may reach it
        self._request = replace(
            request, host=address, port=free_port(address), key=key, runtime_adapters=self._folder
        )
        self._server: Server | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def about(self) -> About:
        return self._about

    def receive(self, name: str, files: Mapping[str, bytes]) -> str | None:
        """Take a version, as a folder of that name in one move; why it cannot be written, else None."""
        try:
            write_version(self._folder, name, files)
        except OSError as error:
            return f"its node cannot write the version {name}: {error.strerror or error}"
        return None

    def versions(self) -> list[str]:
        return [folder.name for folder in self._folder.iterdir()]

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def stop(self) -> None:
        """End vLLM, and leave nothing of it."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(at_once=True)
        self._clean()

    def _clean(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.with_suffix(".log").unlink(missing_ok=True)

    def _run(self) -> None:
        """Start vLLM, wait until it ends, and end this process then, unless it was stopped."""
        server = None
        try:
            server = self._server = Server(prepare(self._request, self._say), self._folder.with_suffix(".log"))
            server.start()
            self._about = replace(self._about, server=server.pid)
            server.wait_ready(self._say)
            self._about = replace(self._about, url=server.launch.url.removesuffix("/v1"))
            server.wait()
        except Exception as error:  # also of the disk, or of a program that cannot be started
            if server is not None and self._server is None:
                return  # stopped
            message, fix = getattr(error, "message", f"{type(error).__name__}: {error}"), getattr(error, "fix", None)
            print(f"{message}\n  {fix or ''}", file=sys.stderr, flush=True)  # into Ray's log of this actor
            if self._about.url is None and not self._again:  # it has never served: this comes again
                self._about = replace(self._about, error=message, fix=fix or "")
                return
            if self._about.url is None:
                time.sleep(AGAIN_S)  # the one before may still hold the GPU's memory
            if server is not None:
                server.stop(at_once=True)
            self._clean()
            os._exit(1)

    def _say(self, stage: str) -> None:
        self._about = replace(self._about, stage=stage)
