"""Run a command, and make sure that none of its processes outlives the process that asked for it.

Started as its own program, in its own session, with a pipe from its parent as standard input. The parent writes
one byte once the server is ready; the pipe's end, by closing or by the parent's death (kill -9 too), means stop:

- a ready server gets SIGTERM and the drain time; one that still starts, when vLLM can lose a SIGTERM, gets neither;
- then every process of the session is killed; the shared memory that they had mapped and their folder for temporary
  files are removed.

SIGTERM to the supervisor itself skips the drain time. psutil says which processes and sockets there are. The
inodes of mapped shared memory are read from /proc: psutil names mapped files by path, and a semaphore's path is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

READY = b"r"
_PR_SET_PDEATHSIG = 1  # prctl(2)
_SHARED_MEMORY = "/dev/shm/"  # where Linux keeps shared memory
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_GONE_S = 5.0  # how long killed processes may take to disappear


class _StopNowError(Exception):
    """SIGTERM arrived."""


def session_processes(session: int) -> list[int]:
    """The living processes of a session, without its leader."""
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it ended meanwhile
            if pid != session and os.getsid(pid) == session and psutil.Process(pid).status() not in _ENDED:
                pids.append(pid)
    return pids


def shared_memory(session: int, since_ns: int) -> frozenset[str]:
    """The files of /dev/shm that processes of a session have mapped and that are newer than it.

    Found by inode: a named semaphore is created under another name and then linked.
    """
    inodes = set()
    for pid in session_processes(session):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in maps if _SHARED_MEMORY in line}
    paths = set()
    for entry in os.scandir(_SHARED_MEMORY):
        with contextlib.suppress(FileNotFoundError):
            if entry.inode() in inodes and entry.stat().st_ctime_ns >= since_ns:
                paths.add(entry.path)
    return frozenset(paths)


def listens(session: int, port: int) -> bool:
    """Whether a process of a session has a listening socket at `port`."""
    for pid in session_processes(session):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            for socket in psutil.Process(pid).net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN and socket.laddr.port == port:
                    return True
    return False


def end_session(session: int, since_ns: int, memory: frozenset[str] = frozenset()) -> None:
    """Kill every process of a session but its leader, wait until they are gone, and remove their shared memory.

    `memory` names files of processes that are gone already.
    """
    memory = memory | shared_memory(session, since_ns)
    deadline = time.monotonic() + _GONE_S
    while (processes := session_processes(session)) and time.monotonic() < deadline:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in memory:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def supervise(command: list[str], drain_s: float, scratch: str) -> int:
    """Run `command` until it ends or standard input does. Returns its exit status (negative: a signal).

    `scratch` is a new folder for its sockets and rendezvous files; it is removed at the end.
    """
    me = os.getpid()
    memory: frozenset[str] = frozenset()
    child = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_now)
    began_ns = os.stat(scratch).st_ctime_ns
    try:
        environment = os.environ | {"TMPDIR": scratch}
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment, process_group=0, preexec_fn=_end_with_parent
        )
        became_ready = _next_byte(child) == READY
        memory = shared_memory(me, began_ns)
        if became_ready and _next_byte(child) == b"":
            child.terminate()
            child.wait(drain_s)
    except (_StopNowError, subprocess.TimeoutExpired):
        pass  # the code below ends it, as all other processes
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_session(me, began_ns, memory)
        shutil.rmtree(scratch, ignore_errors=True)
    return child.wait() if child is not None else -signal.SIGTERM


def _end_with_parent() -> None:
    """Run in the child: ask the kernel to kill it if this process is killed and cannot end it itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop_now(number: int, frame: FrameType | None) -> None:
    raise _StopNowError


def _next_byte(child: subprocess.Popen[bytes]) -> bytes | None:
    """The parent's next bytes: b"" once its end of the pipe is closed; None if the child ends first."""
    pidfd = os.pidfd_open(child.pid)
    try:
        readable, _, _ = select.select([0, pidfd], [], [])
        return None if pidfd in readable else os.read(0, 1)
    finally:
        os.close(pidfd)


if __name__ == "__main__":
    status = supervise(sys.argv[3:], float(sys.argv[1]), sys.argv[2])
    sys.exit(status if status >= 0 else 128 - status)
