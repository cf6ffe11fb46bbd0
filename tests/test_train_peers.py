"""A process that is gone without a word is noticed, and what waits for it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from msgrpo.serve.preflight import free_port
from msgrpo.train import peers
from msgrpo.train.peers import Peers
from tests.command_line import ended
from tests.test_train_ranks import LAKE, ROOT, TINY


def test_who_beats_no_more_is_silent_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five looks are the bound. All are looked at only once those who beat have been heard."""
    monkeypatch.setattr(peers, "BEAT_S", 0.02)
    monkeypatch.setattr(peers, "LOOK_S", 3600.0)  # it looks when it is told to
    monkeypatch.setattr(peers, "SILENT_S", 5 * 3600.0)
    store = dist.HashStore()

    def look(*heard: int) -> None:
        deadline = time.monotonic() + 60
        while any(first._heard[other][1] < first._looks for other in heard):
            assert time.monotonic() < deadline, first._heard
            time.sleep(0.01)
        first.look()

    with ExitStack() as stays, ExitStack() as leaves:
        first = stays.enter_context(Peers(store, 0, 3, lambda: None).listening())
        stays.enter_context(Peers(store, 1, 3, lambda: None).listening())
        leaves.enter_context(Peers(store, 2, 3, lambda: None).listening())
        for _ in range(12):
            look(1, 2)
        assert first.why() is None
        leaves.close()
        for _ in range(7):
            look(1)
        assert first.silent == [2]
        assert "nothing has been heard of process 2 of this run" in str(first.why())


def test_a_store_that_never_answers_is_silence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies on one of the machines: where that one is gone, asking waits for ever."""
    monkeypatch.setattr(peers, "LOOK_S", 0.05)
    monkeypatch.setattr(peers, "SILENT_S", 0.2)
    ended, never = threading.Event(), threading.Event()

    class Stuck:
        def set(self, key: str, value: str) -> None:
            never.wait()
            raise RuntimeError("the store is closed")

    with Peers(Stuck(), 1, 3, ended.set).listening() as others:
        assert ended.wait(60.0)
        assert others.silent == [0, 2]
    never.set()


def test_only_the_chosen_connections_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        pairs = []
        for _ in range(2):
            known = peers.connections().keys()
            near = stack.enter_context(socket.create_connection(listening.getsockname()))
            pairs.append((near, stack.enter_context(listening.accept()[0]), peers.connections().keys() - known))
        (gone, _, chosen), (stays, far, _) = pairs
        peers.close(set(chosen))
        assert gone.recv(1) == b""
        far.sendall(b"x")
        assert stays.recv(1) == b"x"


def test_the_network_is_that_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # what a person has set stays
    peers.use_network_of(peers.address_towards("127.0.0.1"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_loopback_is_nothing_that_other_machines_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a host's own name leads to 127.0.1.1, its rank took loopback and the others their network."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    peers.use_network_towards("127.0.0.1", one_machine=False)
    peers.use_network_towards("no.such.name.invalid", one_machine=True)  # the process group will say so
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    peers.use_network_towards("127.0.0.1", one_machine=True)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


SILENT = """
import os, signal
from msgrpo.train import peers
peers.BEAT_S = 0.5
if os.environ["RANK"] == "0":
    peers.SILENT_S = 5.0
from msgrpo.train.ranks import LostPeerError, open_ranks
from msgrpo.train.shard import Lockstep

with open_ranks() as ranks:
    steps = Lockstep()
    steps.at("a forward pass")
    if not ranks.first:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with ranks.exchanging():
            steps.at("a forward pass")
    except LostPeerError as error:
        print(error.message, flush=True)
"""


SUSPENDED = """
import sys, threading
import torch.distributed as dist
from msgrpo.train import peers
peers.BEAT_S, peers.LOOK_S, peers.SILENT_S = 0.1, 0.2, 6.0  # a busy machine starves a process for two seconds
rank = int(sys.argv[1])
port = 0 if rank == 0 else int(input())
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
print(store.port, flush=True)
with peers.Peers(store, rank, 2, lambda: None).listening() as others:
    for line in sys.stdin:
        print(others.silent, sorted(others._heard.items()), flush=True)
"""


def test_a_run_that_is_suspended_as_a_whole_goes_on_later() -> None:
    """Each took the time in which it was stopped itself for the others' silence, and the run ended."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SUSPENDED, str(rank)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for rank in (0, 1)
    ]  # fmt: skip

    def say(process: subprocess.Popen[str], line: str) -> str:
        assert process.stdin is not None
        process.stdin.write(line)
        return heard(process)

    def heard(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "it has ended"
        return line

    with both[0], both[1]:
        try:
            say(both[1], heard(both[0]))  # the port at which they meet
            while any("(0, 0)" in say(process, "?\n") for process in both):  # until each has heard the other
                time.sleep(0.05)
            for number, seconds in ((signal.SIGSTOP, 8.0), (signal.SIGCONT, 2.0)):
                for process in both:
                    process.send_signal(number)
                time.sleep(seconds)  # stopped, for longer than the bound; then long enough to look
            assert [say(process, "?\n").startswith("[]") for process in both] == [True, True]
        finally:
            for process in both:
                process.kill()


@pytest.mark.slow
def test_a_silent_rank_of_a_shared_base_is_noticed_too(tmp_path: Path) -> None:
    """Its group is opened later than the run's own, and its connections were not closed: it waited half an hour."""
    (tmp_path / "silent.py").write_text(SILENT)
    port = free_port()
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, second = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "silent.py")],
            cwd=ROOT,
            env=os.environ | shared | {"OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    with first, second:
        try:
            output, _ = first.communicate(timeout=240)
        finally:
            first.kill()
            second.kill()
    assert "nothing has been heard of process 1 of this run for 5 s" in output


@pytest.mark.slow
def test_a_rank_that_falls_silent_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """SIGSTOP closes no connection, like a pulled cable; the bound is shortened, or this would take a minute."""
    (tmp_path / "impatient.py").write_text(
        "import os\n"
        "from msgrpo.train import peers\n"
        "peers.BEAT_S = 0.5\n"
        "if os.environ['RANK'] == '0': peers.SILENT_S = 5.0\n"
        "from msgrpo.cli import main\n"
        "main()\n"
    )
    settings = [part for setting in TINY for part in ("--set", setting)]
    launched = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(tmp_path / "impatient.py"), "train", LAKE, "--steps", "1000", "--out", str(tmp_path / "run")),
            *settings,
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = ""
    with ended(launched):
        assert launched.stdout is not None
        for line in launched.stdout:
            said += line
            print(line, end="")  # for a test that fails here
            if "the first update took" in line:
                ranks = [p for p in psutil.Process(launched.pid).children() if "impatient" in " ".join(p.cmdline())]
                (second,) = [p for p in ranks if p.environ()["RANK"] == "1"]
                second.send_signal(signal.SIGSTOP)
            if "error:" in line:
                second.kill()  # torchrun would wait for it half a minute
    assert launched.returncode != 0
    assert "nothing has been heard of process 1 of this run for 5 s" in said
    assert "--resume" in said
