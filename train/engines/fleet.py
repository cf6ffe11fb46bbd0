"""Which servers play a run's rollouts, and how a version of the adapter comes to each of them.

`Listed` servers run already and share a folder with the trainer; a `Child` is one server that ends with this process.
Servers on a cluster are in `on_ray.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgrpo.errors import MsgrpoError, UsageError
from msgrpo.serve.adapters import write_version
from msgrpo.serve.preflight import free_port
from msgrpo.serve.server import Server
from msgrpo.serve.terminal import prepare
from msgrpo.serve.vllm_command import KEY_VARIABLE, Request
from msgrpo.train.config import TrainConfig
from msgrpo.train.sinks import Reporter

VERSIONS = "versions"  # the child's adapters, in the run's folder


class Fleet(Protocol):
    """The servers of a run. The first rank alone asks it."""

    def urls(self) -> list[str]:
        """The servers that serve now, at least one: waits for it. Asked before every version."""
        ...

    def publish(self, name: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Give every server a version, as a folder of that name in one move; who has not got it, and why."""
        ...

    def versions(self) -> list[str]:
        """The folders of versions that lie at the servers, unfinished ones too."""
        ...

    def forget(self, names: Sequence[str]) -> None:
        """Remove these folders."""
        ...

    def failure(self) -> MsgrpoError | None:
        """Why no server is left, where that is known."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class Listed:
    """Servers that run already, by their URLs; each can read a folder that the trainer can write."""

    def __init__(self, urls: Sequence[str], folder: Path) -> None:
        self._urls, self._folder = list(urls), folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the folder of versions {folder} cannot be made: {error.strerror}",
                fix="adapters=DIR in --rollouts: a folder that trainer and servers share",
            ) from error

    def urls(self) -> list[str]:
        return self._urls

    def publish(self, name: str, files: Mapping[str, bytes]) -> dict[str, str]:
        write_version(self._folder, name, files)
        return {}

    def versions(self) -> list[str]:
        return [folder.name for folder in self._folder.iterdir()]

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def failure(self) -> MsgrpoError | None:
        return None

    def close(self) -> None:
        """They go on without us."""


class Child(Listed):
    """A vLLM server that ends with this process, whatever happens to it."""

    def __init__(self, config: TrainConfig, dtype: str, out: Path, report: Reporter) -> None:
        self._server: Server | None = None
        vllm = config.vllm
        assert vllm is not None
        port = free_port()
        super().__init__([f"http://127.0.0.1:{port}"], out / VERSIONS)
        request = Request(
            base=config.base,
            port=port,
            runtime_adapters=self._folder,
            runtime_rank=config.lora_rank,
            gpu_share=vllm.gpu_share,
            max_model_len=vllm.max_model_len,
            dtype=dtype,
            key=os.environ.get(KEY_VARIABLE),
        )
        report.doing("starting vLLM")
        log = out / "vllm.log"
        self._server = Server(prepare(request, report.note), log)
        try:
            self._server.start()
            self._server.wait_ready(lambda stage: report.doing(f"starting vLLM: {stage}; its log is {log}"))
        except BaseException:
            self.close()
            raise

    def failure(self) -> MsgrpoError | None:
        """What its log says, when it has ended by itself."""
        return None if self._server is None else self._server.failure()

    def close(self) -> None:
        if self._server is not None:
            self._server.stop(at_once=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def check_one_machine(config: TrainConfig) -> None:
    """Raise UsageError for a child of one node that ranks on others would have to reach."""
    everywhere, here = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if config.vllm is not None and here is not None and everywhere != here:
        raise UsageError(
            f"rollouts=vllm starts a server for this machine's {here} processes; the run has {everywhere}",
            fix="start servers that all nodes reach, and --rollouts 'servers(at=http://… http://…, adapters=DIR)'",
        )
