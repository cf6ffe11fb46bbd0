"""A vLLM server as a child process: start it, wait until it answers, and stop it for certain."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from pydantic_core import from_json

from msgrpo.errors import ServeError
from msgrpo.loopback import bracketed
from msgrpo.loops import run_async
from msgrpo.models.bounded import BodyError
from msgrpo.models.http import Client, NoAnswerError, Response
from msgrpo.serve import supervisor
from msgrpo.serve.preflight import failure, stage
from msgrpo.serve.vllm_command import DRAIN_S, Launch, child_environment

STOP_S = 15.0  # the longest that stopping may take
_POLL_S = 0.2
TAKEN_S = 15.0  # how long another program may answer at our port before that is an error
ASK_S = 5.0  # for a server's whole answer about itself


class Server:
    """One launch. As a context manager it is stopped on exit, also after an error.

    The supervisor between this process and vLLM ends vLLM when our end of its pipe closes: by `stop`, or because
    this process died.
    """

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch = launch
        self.log = log
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._began_ns = 0
        self._memory: frozenset[str] = frozenset()
        self._scratch = ""
        self._port: socket.socket | None = None  # while this is held, no other server of ours starts at the port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(at_once=kind is KeyboardInterrupt)

    @property
    def pid(self) -> int:
        """The supervisor's process id, which is also the session of everything below it."""
        return self._running().pid

    def start(self) -> None:
        """Start the child; its output goes to the log file, which is written anew."""
        program = Path(supervisor.__file__)
        self._port = hold_port(self.launch.port)
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            output = self.log.open("wb")
        except OSError as error:
            self._port.close()
            raise ServeError(f"the log {self.log} cannot be written: {error.strerror}") from error
        with output:
            self._began_ns = os.fstat(output.fileno()).st_ctime_ns
            try:
                self._scratch = tempfile.mkdtemp(prefix="msgrpo-")
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", str(program), str(DRAIN_S + 1), self._scratch, *self.launch.command],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=child_environment(self.launch, os.environ),
                    start_new_session=True,
                )
            except OSError as error:
                self._port.close()
                shutil.rmtree(self._scratch, ignore_errors=True)
                raise ServeError(f"vLLM cannot be started: {error.strerror}") from error

    def wait_ready(self, on_stage: Callable[[str], None] = lambda _: None) -> None:
        """Return once every model of the launch is listed. `on_stage` is told what vLLM does meanwhile.

        Raises ServeError with the telling lines of the log when vLLM ends first.
        """
        child, taken_at, stages = self._running(), math.inf, _stages(self.log)
        while child.poll() is None:
            # Another server that starts at the same port may answer before ours fails: theirs is not our readiness.
            if supervisor.listens(child.pid, self.launch.port) and answers(self.launch.host, self.launch.port):
                with contextlib.suppress(NoAnswerError):  # on a busy machine an answer can be late: asked again
                    served = _models(self.launch.host, self.launch.port, self.launch.key)
                    missing = [name for name in self.launch.models if name not in served]
                    if missing:
                        raise ServeError(f"{self.launch.url} does not serve {missing[0]}, but {', '.join(served)}")
                    assert child.stdin is not None
                    self._memory = supervisor.shared_memory(child.pid, self._began_ns)
                    with contextlib.suppress(BrokenPipeError):  # it has just ended, which the next wait reports
                        child.stdin.write(supervisor.READY)
                    return
            if not supervisor.listens(child.pid, self.launch.port) and is_taken(self.launch.host, self.launch.port):
                taken_at = min(taken_at, time.monotonic())
                if time.monotonic() - taken_at > TAKEN_S:  # vLLM has bound the port as well, and would wait for ever
                    raise ServeError(
                        f"another program has taken port {self.launch.port} meanwhile",
                        fix=f"try --port {self.launch.port + 1}",
                    )
            on_stage(next(stages))
            time.sleep(_POLL_S)
        raise failure(f"vLLM did not start (exit status {child.returncode})", self.log)

    def wait(self) -> None:
        """Wait for ever; raise ServeError when vLLM ends by itself."""
        status = self._running().wait()
        raise failure(f"vLLM ended (exit status {status})", self.log)

    def failure(self) -> ServeError | None:
        """The error from the log if vLLM has ended by itself; None while it runs."""
        status = self._running().poll()
        return None if status is None else failure(f"vLLM ended (exit status {status})", self.log)

    def stop(self, *, at_once: bool = False) -> None:
        """Let requests in flight end for DRAIN_S, then end everything; a Ctrl-C meanwhile ends everything at once."""
        if self._port is not None:
            self._port.close()
        child = self._supervisor
        if child is None:
            return
        try:
            assert child.stdin is not None
            child.stdin.close()
            if at_once:
                child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is stopped (SIGSTOP)
                child.wait(STOP_S)
        except KeyboardInterrupt:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_S)
        finally:
            # The supervisor has done this, unless it was stopped, was killed or saw its child die too early.
            supervisor.end_session(child.pid, self._began_ns, self._memory)
            child.kill()
            child.wait()
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._supervisor = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._supervisor is None:
            raise ServeError("the server was not started")
        return self._supervisor


def _stages(log: Path) -> Iterator[str]:
    """What a starting vLLM does, each time that it is asked for. Its log is read once."""
    now, rest = stage(""), ""
    with log.open(errors="replace") as file:
        while True:
            lines = rest + file.read()
            now, rest = stage(lines, now), lines.rpartition("\n")[2]  # a line that has not ended is looked at again
            yield now


def hold_port(port: int) -> socket.socket:
    """Keep other servers of ours from starting at this port, until it is closed or this process ends.

    vLLM binds its port at once and listens at it half a minute later: till then two of them could bind the same one,
    and the second would wait for ever. Hosts are not told apart: 0.0.0.0 takes the port of every one. The name is
    the kernel's own; no file is left by a kill. Raises ServeError.
    """
    port_lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        port_lock.bind(f"\0msgrpo-serve-{port}")
    except OSError as error:
        port_lock.close()
        raise ServeError(
            f"another msgrpo serve runs, or is starting, at port {port}",
            fix=f"try --port {port + 1}; msgrpo serve --status --port {port} asks what runs there",
        ) from error
    return port_lock


def is_taken(host: str, port: int) -> bool:
    """Whether a program accepts connections at host:port."""
    try:
        with socket.create_connection((reachable(host), port), timeout=1):
            return True
    except (OSError, UnicodeError):
        return False


def reachable(host: str) -> str:
    """The address at which this machine reaches a server that listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def answers(host: str, port: int) -> bool:
    """Whether a server at host:port calls itself healthy."""
    try:
        return _get(host, port, "/health").status == 200
    except (NoAnswerError, BodyError):
        return False


def models(host: str, port: int, key: str | None = None) -> dict[str, str | None]:
    """Model name → its base's name (None for a base), as the server at host:port lists them.

    Raises ServeError when nothing answers there, or the key is wrong.
    """
    try:
        return _models(host, port, key)
    except NoAnswerError as error:
        why = str(error) if error.nobody else f"no whole answer comes from {host}:{port}: {error}"
        raise ServeError(why, fix="start it: msgrpo serve") from error


def _models(host: str, port: int, key: str | None) -> dict[str, str | None]:
    """As `models`; raises NoAnswerError where there is no whole answer."""
    try:
        response = _get(host, port, "/v1/models", key)
    except BodyError as error:
        raise _is_no_server(host, port, str(error)) from error
    if response.status in (401, 403):
        raise ServeError(f"the server at {host}:{port} wants another key", fix="set MSGRPO_API_KEY to its key")
    try:
        served = {entry["id"]: entry.get("parent") for entry in from_json(response.body)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _is_no_server(host, port, f"status {response.status}") from error
    if not all(isinstance(name, str) for name in served):
        raise _is_no_server(host, port, "a model's name is no text")
    return served


def _is_no_server(host: str, port: int, why: str) -> ServeError:
    return ServeError(f"what answers at {host}:{port} is no OpenAI-compatible server ({why})")


def _get(host: str, port: int, path: str, key: str | None = None) -> Response:
    url = f"http://{bracketed(reachable(host))}:{port}{path}"

    async def ask() -> Response:
        async with Client({"Authorization": f"Bearer {key}"} if key else {}, total_s=ASK_S) as client:
            return await client.ask("GET", url)

    return run_async(ask())
