"""`msgrpo eval --ray`: chunks of episodes as tasks on a Ray cluster.

An episode is a function of its seeds and its agent, so a chunk whose worker is lost is simply played again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from msgrpo.agent import Agent
from msgrpo.episode import Episode, few_collections
from msgrpo.errors import EndpointError, GameFaultError, MsgrpoError, RunError, first_line
from msgrpo.evals.request import Given
from msgrpo.evals.run import play_one
from msgrpo.games import get_scenario
from msgrpo.signals import in_daemon_thread

RETRIES = 5  # of a task whose worker was lost
LOADED = ("nano", "base", "adapter")  # agents whose model the worker loads
MakeAgent = Callable[[], Agent]
_agents: dict[str, Agent] = {}  # of this worker: a model is loaded once


def play_chunk(spec: str, make: MakeAgent, folder: Path, chunk: Sequence[Given], regret: bool) -> Answers:
    """Play the episodes of a chunk, in a worker; as JSON, which any version of Python reads.

    A fault of one ends none of the others: what was played is kept.
    """
    if folder.is_dir():
        os.chdir(folder)  # names of agents may be relative to it
    if spec not in _agents:
        _agents[spec] = make()
    agent = _agents[spec]

    async def all_of_them() -> list[Episode | BaseException]:
        try:
            episodes = (play_one(agent, get_scenario(scenario), seeds, regret) for scenario, seeds in chunk)
            return await asyncio.gather(*episodes, return_exceptions=True)
        finally:
            await agent.close()

    with few_collections():
        ended = asyncio.run(all_of_them())
    answers: Answers = []
    for played in ended:
        if isinstance(played, Episode):
            answers.append(played.model_dump_json().encode())
        elif isinstance(played, MsgrpoError):
            answers.append(_Fault(played))
        else:
            raise played
    return answers


class OnRay:
    """Plays chunks on the cluster that is connected."""

    def __init__(self, make: Callable[[str], Agent]) -> None:
        self._make = make
        self._task: Any = ray.remote(play_or_say_why)
        self._has = ray.cluster_resources()  # by kind, when last asked

    @property
    def at_once(self) -> int:
        """How many chunks are on their way: enough that no core waits."""
        return 2 * max(1, int(self._has.get("CPU", 1)))

    async def play(self, spec: str, chunk: Sequence[Given], regret: bool) -> list[Episode | MsgrpoError]:
        """A model that is loaded there has a GPU of its own, where the cluster has any."""
        self._has = await in_daemon_thread(ray.cluster_resources)  # of a head that hangs no answer comes
        local = spec.partition(":")[0] in LOADED and self._has.get("GPU", 0) > 0
        task = self._task.options(max_retries=RETRIES, num_cpus=1, num_gpus=int(local))
        try:
            answers = await task.remote(spec, partial(self._make, spec), Path.cwd(), list(chunk), regret)
        except ray.exceptions.RayError as error:
            raise RunError(
                f"the cluster could not play {len(chunk)} episodes of {spec}: {first_line(error)}",
                fix="what was played before is kept; start the same command again to go on",
            ) from error
        return [
            answer.error() if isinstance(answer, _Fault) else Episode.model_validate_json(answer)
            for answer in answers
        ]


class _Fault:
    """An error of ours in a worker: an exception with arguments of its own does not travel."""

    def __init__(self, error: MsgrpoError) -> None:
        self._message, self._fix = error.message, error.fix
        self._kind = (error.kind, error.fatal) if isinstance(error, EndpointError) else None
        self._of_game = isinstance(error, GameFaultError)

    def error(self) -> MsgrpoError:
        if self._of_game:
            return GameFaultError(self._message, fatal=True, fix=self._fix)
        if self._kind is None:
            return RunError(self._message, fix=self._fix)
        return EndpointError(self._message, kind=self._kind[0], fatal=self._kind[1], fix=self._fix)


Answers = list[bytes | _Fault]


def play_or_say_why(spec: str, make: MakeAgent, folder: Path, chunk: Sequence[Given], regret: bool) -> Answers:
    try:
        return play_chunk(spec, make, folder, chunk, regret)
    except MsgrpoError as error:  # the agent cannot be made there
        return [_Fault(error)] * len(chunk)
