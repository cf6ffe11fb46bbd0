"""`msgrpo eval --ray`: chunks of episodes as tasks on a Ray cluster.

An episode is a function of its seeds and its agent, so a chunk whose worker is lost is simply played again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from msgrpo.agent import Agent
from msgrpo.episode import Episode
from msgrpo.errors import EndpointError, MsgrpoError
from msgrpo.evals.run import Given, play_one
from msgrpo.games import get_scenario

RETRIES = 5  # of a task whose worker was lost
MakeAgent = Callable[[], Agent]
_agents: dict[bytes, Agent] = {}  # of this worker: a model is loaded once


def play_chunk(name: bytes, make: MakeAgent, folder: Path, chunk: Sequence[Given], regret: bool) -> list[bytes]:
    """Play the episodes of a chunk, in a worker; as JSON, which any version of Python reads."""
    if folder.is_dir():
        os.chdir(folder)  # names of agents may be relative to it
    if name not in _agents:
        _agents[name] = make()
    agent = _agents[name]

    async def all_of_them() -> list[Episode]:
        try:
            return await asyncio.gather(
                *(play_one(agent, get_scenario(scenario), seeds, regret) for scenario, seeds in chunk)
            )
        finally:
            await agent.close()

    return [episode.model_dump_json().encode() for episode in asyncio.run(all_of_them())]


class OnRay:
    """Plays chunks on the cluster that is connected."""

    def __init__(self, make: Callable[[str], Agent]) -> None:
        self._make = make
        self._task: Any = ray.remote(_told).options(max_retries=RETRIES, num_cpus=1)

    @property
    def at_once(self) -> int:
        """How many chunks are on their way: enough that no core waits."""
        return 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))

    async def play(self, spec: str, chunk: Sequence[Given], regret: bool) -> list[Episode]:
        make = self._make
        found = await self._task.remote(spec.encode(), _Maker(make, spec), Path.cwd(), list(chunk), regret)
        if isinstance(found, _Fault):
            raise EndpointError(found.message, kind=found.kind, fatal=True, fix=found.fix)
        return [Episode.model_validate_json(line) for line in found]


class _Maker:
    """Makes an agent, in whatever process."""

    def __init__(self, make: Callable[[str], Agent], spec: str) -> None:
        self._make, self._spec = make, spec

    def __call__(self) -> Agent:
        return self._make(self._spec)


class _Fault:
    """An error of ours in a worker: an exception with arguments of its own does not travel."""

    def __init__(self, error: MsgrpoError) -> None:
        self.message, self.fix = error.message, error.fix
        self.kind = error.kind if isinstance(error, EndpointError) else "worker"


def _told(name: bytes, make: MakeAgent, folder: Path, chunk: Sequence[Given], regret: bool) -> list[bytes] | _Fault:
    try:
        return play_chunk(name, make, folder, chunk, regret)
    except MsgrpoError as error:
        return _Fault(error)
