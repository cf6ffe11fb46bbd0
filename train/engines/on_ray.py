"""Servers as actors on a Ray cluster: Ray places them and starts them again, the object store carries versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from msgrpo.errors import MsgrpoError, ServeError, first_line
from msgrpo.serve.host import ENVIRONMENT, About, Host
from msgrpo.serve.vllm_command import Request
from msgrpo.train.sinks import Reporter
from msgrpo.train.stopping import StopRequested

ASK_S = 2.0  # a host that is gone or starts again answers nothing
RECEIVE_S = 120.0  # 1.7 GB over a slow network
STOP_S = 20.0
Actor = Any  # ray has no type for a handle


class _Host(Host):
    """`Host` as Ray makes it: it asks Ray where it is, and whether it was there before."""

    def __init__(self, request: Request) -> None:
        context = ray.get_runtime_context()
        super().__init__(request, ray.util.get_node_ip_address(), again=context.was_current_actor_reconstructed)


def start_hosts(count: int, request: Request, *, gpus: bool) -> list[Actor]:
    """Ask Ray for so many servers. An actor is always on one node, so its GPUs are, too."""
    options = {
        "num_cpus": 1,
        "num_gpus": request.tensor_parallel_size if gpus else 0,
        "max_restarts": -1,
        "runtime_env": {"env_vars": ENVIRONMENT},
    }
    actor = ray.remote(_Host).options(**options)
    return [actor.remote(request) for _ in range(count)]


def stop_hosts(hosts: Sequence[Actor]) -> None:
    """End their vLLM first: an actor that Ray ends has no time for it."""
    ray.wait([host.stop.remote() for host in hosts], num_returns=len(hosts), timeout=STOP_S)
    for host in hosts:
        ray.kill(host)


class OnRay:
    """The fleet of a run whose servers are hosts on a cluster."""

    def __init__(self, hosts: Sequence[Actor], report: Reporter, stopping: Callable[[], bool]) -> None:
        self._hosts, self._report, self._stopping = list(hosts), report, stopping
        self._noted: set[str] = set()  # errors of servers, each told once
        self._at: dict[str, Actor] = {}  # who serves at a URL
        self._never: dict[Actor, About] = {}  # actors that could not be made: Ray does not try again

    def urls(self) -> list[str]:
        while True:
            known = self._all("about", timeout=ASK_S) | self._never
            self._at = {about.url: host for host, about in known.items() if about.url is not None}
            failed = [about for about in known.values() if about.error]
            for about in failed:
                if about.error not in self._noted:
                    self._noted.add(about.error)
                    self._report.note(f"a server on {about.node} cannot start: {about.error}")
            if self._at:
                return sorted(self._at)
            self._report.doing(f"waiting for a server: {waiting(self._hosts, known)}")
            if len(failed) == len(self._hosts):
                raise ServeError(failed[0].error, fix=failed[0].fix)
            if self._stopping():
                raise StopRequested
            time.sleep(1.0)

    def publish(self, name: str, files: Mapping[str, bytes]) -> dict[str, str]:
        whole = ray.put(dict(files))
        sent = {host.receive.remote(name, whole): url for url, host in self._at.items()}
        done, others = ray.wait(list(sent), num_returns=len(sent), timeout=RECEIVE_S)
        without = {sent[one]: f"it has not taken {name} within {RECEIVE_S:.0f} s" for one in others}
        for one in done:
            try:
                why = ray.get(one)
            except ray.exceptions.RayError as error:
                why = f"its actor is gone: {first_line(error)}"
            if why is not None:
                without[sent[one]] = why
        return without

    def versions(self) -> list[str]:
        return [name for names in self._all("versions", timeout=ASK_S).values() for name in names]

    def forget(self, names: Sequence[str]) -> None:
        self._all("forget", list(names), timeout=ASK_S)

    def failure(self) -> MsgrpoError | None:
        return None

    def close(self) -> None:
        """Whoever started the hosts ends them: ranks that begin again find them running."""

    def _all(self, method: str, *given: object, timeout: float) -> dict[Actor, Any]:
        """What the hosts answer; without those that are gone or start again."""
        asked = {getattr(host, method).remote(*given): host for host in self._hosts}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
        answers = {}
        for one in done:
            try:
                answers[asked[one]] = ray.get(one)
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed:
                    reason = str(error).strip().splitlines()[-1]
                    self._never[asked[one]] = About("a node of the cluster", 0, None, error=reason)
                self._report.doing(f"a server's actor does not answer: {first_line(error)}")
        return answers


def waiting(hosts: Sequence[Actor], known: Mapping[Actor, About]) -> str:
    """What servers that do not serve yet are doing."""
    silent = len(hosts) - len(known)
    stages = [about.error or about.stage or "vLLM begins" for about in known.values() if about.url is None]
    return "; ".join([*dict.fromkeys(stages), *([f"{silent} have no place yet, or start again"] if silent else [])])
