"""Notices a process of the run that is gone without a word: a pulled cable and a frozen machine close no connection.

Every process raises a counter in the launcher's store every few seconds and reads the others'. Whoever has not been
heard of for `SILENT_S` is gone; time in which this process itself stood still does not count, since a job that is
suspended and goes on later has lost nobody. The connections between the processes are then closed from this side, so
whatever waits for that process fails as it does for one that was killed.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

BEAT_S = 5.0  # between two beats
LOOK_S = 1.0  # between two looks at who has beaten
SILENT_S = 40.0  # without a beat: a process that computes beats all the same, so this is long


class Peers:
    """The other processes of a run, for as long as `listening` lasts."""

    def __init__(self, store: Any, rank: int, count: int, end: Callable[[], None]) -> None:
        self._store, self._rank, self._end = store, rank, end
        self._looks = 0
        self._heard = {other: (0, 0) for other in range(count) if other != rank}  # its last beat, and at which look
        self._over = threading.Event()
        self.silent: list[int] = []  # who is gone

    def why(self) -> str | None:
        """What has happened to the others; None while all are there."""
        if not self.silent:
            return None
        who = ", ".join(map(str, self.silent))
        return f"nothing has been heard of process {who} of this run for {SILENT_S:.0f} s: it or its network is gone"

    @contextmanager
    def listening(self) -> Iterator[Peers]:
        """Beat and listen. Asking a store that is itself gone may wait for ever, so another thread judges."""
        threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._judge)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()

    def _beat(self) -> None:
        for beat in itertools.count(1):
            with suppress(RuntimeError):  # the store's process is gone, too: nobody is heard of any more
                self._store.set(f"beat/{self._rank}", str(beat))
                for other, (last, _) in self._heard.items():
                    now = int(self._store.get(f"beat/{other}")) if self._store.check([f"beat/{other}"]) else last
                    if now != last:
                        self._heard[other] = (now, self._looks)
            if self._over.wait(BEAT_S):
                return

    def _judge(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()
            if self.silent:
                self._end()
                return

    def look(self) -> None:
        """Find who is silent. Time is counted in looks: while this process stands still, it does not look."""
        self._looks += 1
        self.silent = [other for other, (_, at) in self._heard.items() if (self._looks - at) * LOOK_S > SILENT_S]


Connection = tuple[Any, Any]


def connections() -> dict[Connection, int]:
    """This process's open TCP connections by their two addresses, with their file descriptors."""
    sockets = psutil.Process().net_connections("tcp")
    return {(one.laddr, one.raddr): one.fd for one in sockets if one.status == psutil.CONN_ESTABLISHED}


def use_network_of(address: str) -> None:
    """Let gloo and nccl use the network that has this address of ours: by themselves they look the host's name up,
    which often leads to loopback, where no other machine is.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def use_network_towards(host: str, *, one_machine: bool) -> None:
    """The same with the network that leads to `host`; loopback only where all processes are on one machine: a host's
    own name often leads there, and the other machines could not reach it.
    """
    with suppress(OSError):  # a name that does not resolve: opening the process group says so
        address = address_towards(host)
        if one_machine or not ipaddress.ip_address(address).is_loopback:
            use_network_of(address)


def address_towards(host: str) -> str:
    """This machine's address on the network that leads to `host`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        own_address: str = probe.getsockname()[0]
    return own_address


def close(chosen: set[Connection]) -> None:
    """Shut those of them that are still open: who waits at one is told that it has ended."""
    for ends, descriptor in connections().items():
        if ends in chosen:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:  # it may have ended since
                copy.shutdown(socket.SHUT_RDWR)
