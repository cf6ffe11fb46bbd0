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
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from msgrpo.serve.preflight import free_port
from msgrpo.train import peers
from msgrpo.train.peers import Peers
from tests.test_train_ranks import LAKE, ROOT, TINY


def test_who_beats_no_more_is_silent_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on once those who beat have been heard: a machine that stands still silences nobody."""
    now = 0.0
    monkeypatch.setattr(peers, "BEAT_S", 0.02)
    monkeypatch.setattr(peers, "SILENT_S", 1.0)
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: now))
    store, ended = dist.HashStore(), threading.Event()

    def goes_on(*heard: int) -> None:
        nonlocal now
        now += 0.4
        deadline = time.monotonic() + 60
        while any(first._heard[other][1] < now for other in heard):
            assert time.monotonic() < deadline, first._heard
            time.sleep(0.01)

    with ExitStack() as stays, ExitStack() as leaves:
        first = stays.enter_context(Peers(store, 0, 3, ended.set).listening())
        stays.enter_context(Peers(store, 1, 3, lambda: None).listening())
        leaves.enter_context(Peers(store, 2, 3, lambda: None).listening())
        for _ in range(5):
            goes_on(1, 2)
        assert not ended.wait(0.6)  # in which it has looked twice
        assert first.why() is None
        leaves.close()
        for _ in range(5):
            goes_on(1)
        assert ended.wait(60.0)
        assert first.silent == [2]
        assert "nothing has been heard of process 2 of this run" in str(first.why())


def test_a_store_that_never_answers_is_silence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies on one of the machines: where that one is gone, asking waits for ever."""
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
    with launched:
        assert launched.stdout is not None
        for line in launched.stdout:
            said += line
            if "the first update took" in line:
                ranks = [p for p in psutil.Process(launched.pid).children() if "impatient" in " ".join(p.cmdline())]
                (second,) = [p for p in ranks if p.environ()["RANK"] == "1"]
                second.send_signal(signal.SIGSTOP)
            if "error:" in line:
                second.kill()  # torchrun would wait for it half a minute
    assert launched.returncode != 0
    assert "nothing has been heard of process 1 of this run for 5 s" in said
    assert "--resume" in said
