"""Several processes in one run: each plays and computes its share, and all take the same step.

Started by `torchrun` or `accelerate launch`, which set RANK and WORLD_SIZE, or by Ray Train (`cluster.py`). Every
rank holds the same policy and draws the same random numbers; they differ only in which episodes they play and whose
gradient they compute. The adapter's gradients are summed in float32 before each step: 0.6 MB for nano, 239 MB for
the paper's preset (rank 32 on all linear layers of 3B), 1.7 GB for 72B. The first rank alone reads and writes files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from msgrpo.errors import RunError, UsageError, first_line
from msgrpo.models.loading import default_device
from msgrpo.text import counted
from msgrpo.train import peers
from msgrpo.train.launched import launched, processes
from msgrpo.train.peers import Peers

T = TypeVar("T")
HEARS_S = 0.5  # after which a wait for the other processes looks for a signal


class LostPeerError(RunError):
    """Another process of the run has ended, or is gone without a word."""


class Ranks:
    """This process among `count`; alone, everything here is the identity."""

    def __init__(self, rank: int = 0, count: int = 1, others: Peers | None = None) -> None:
        self.rank, self.count, self._others = rank, count, others

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's part of what all have: parts follow each other and differ in size by one at most."""
        low, high = (len(items) * (self.rank + i) // self.count for i in (0, 1))
        return items[low:high]

    def gather(self, items: Sequence[T]) -> list[T]:
        """All ranks' parts, in the order in which `share` dealt them."""
        if self.count == 1:
            return list(items)
        parts: list[Any] = [None] * self.count
        with self._all_there():
            dist.all_gather_object(parts, list(items))
        return [item for part in parts for item in part]

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.count == 1:
            return value
        box = [value]
        with self._all_there():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each parameter's gradient by its sum over the ranks: one all-reduce of all of them."""
        if self.count == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([gradient.float().flatten() for gradient in gradients])
        with self._all_there():
            dist.all_reduce(flat)
        for parameter, gradient, summed in zip(
            parameters, gradients, torch.split_with_sizes(flat, [g.numel() for g in gradients]), strict=True
        ):
            parameter.grad = summed.view_as(gradient).to(gradient.dtype)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around a computation that exchanges weights (`shard.py`): a peer that is gone is named there, too."""
        try:
            yield
        except RuntimeError as error:
            ended = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not ended and (self._others is None or self._others.why() is None):
                raise  # a fault of this process
            raise self._lost(error) from error

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        """A peer that is gone closes its connections: say that, not which call noticed."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> LostPeerError:
        why = self._others.why() if self._others is not None else None
        return LostPeerError(
            why or f"another process of this run has ended: {first_line(error)}",
            fix="its own message says why; then the same command with --resume goes on from the last checkpoint",
        )


ALONE = Ranks()


def _meet() -> None:
    """Open the process group in a thread: where torch itself waits for a process that never comes, for half an hour,
    it hears no Ctrl-C.
    """
    faults: list[BaseException] = []

    def meet() -> None:
        try:
            # On GPUs gloo carries what is no tensor: its connections can be closed when a process is gone.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except BaseException as error:  # raised where it is waited for
            faults.append(error)

    meeting = Thread(target=meet, name="msgrpo-meet", daemon=True)
    meeting.start()
    while meeting.is_alive():  # Python acts on a signal between two steps: one just before a wait would wait with it
        meeting.join(HEARS_S)
    if faults:
        raise faults[0]


def _take_gpu() -> None:
    """Compute on the GPU of this process's place on its machine. Raises UsageError where there are too few."""
    gpus, place = torch.cuda.device_count(), launched("LOCAL_RANK", 0)
    if place >= gpus:
        raise UsageError(
            f"this machine has {counted(gpus, 'GPU')}, none for its process {place} (LOCAL_RANK)",
            fix=f"a process for each GPU: torchrun --nproc-per-node {gpus} -m msgrpo.cli train …",
        )
    torch.cuda.set_device(place)


def _check_alike(devices: Sequence[str]) -> None:
    """Raise UsageError where some processes compute on GPUs: those would wait for the others' gradients for ever."""
    if len(set(devices)) > 1:
        raise UsageError(
            f"{devices.count('cuda')} of the {len(devices)} processes of this run have a GPU, and the others none",
            fix="take machines that are alike, or CPUs alone: CUDA_VISIBLE_DEVICES= on all of them",
        )


@contextmanager
def open_ranks() -> Iterator[Ranks]:
    """The ranks that a launcher started; one without a launcher. Ray Train has opened them, and closes them.

    Raises UsageError for what a launcher cannot mean, or this machine cannot do; RunError where they cannot meet.
    """
    if dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    count = processes()
    if count == 1:
        yield ALONE
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UsageError(
                f"RANK and WORLD_SIZE ({count}) are set, and {name} is not",
                fix=f"torchrun --nproc-per-node {count} -m msgrpo.cli train …, or unset RANK",
            )
    launched("RANK", 0, range(count))
    if torch.cuda.is_available():
        _take_gpu()
    before = peers.connections().keys()
    host, port = os.environ["MASTER_ADDR"], launched("MASTER_PORT", 0, range(1, 2**16))
    peers.use_network_towards(host, one_machine=launched("LOCAL_WORLD_SIZE", 0) == count)
    try:
        _meet()
    except RuntimeError as error:
        raise RunError(
            f"the processes of this run cannot meet at {host}:{port}: {first_line(error)}",
            fix="all must reach this address, at a port that is free: torchrun --master-port N",
        ) from error

    def end() -> None:
        """Close what leads to the others, later groups too, but not the store, by which this is noticed."""
        since = peers.connections().keys() - before
        peers.close({ends for ends in since if port not in (ends[0].port, ends[1].port)})

    # A connection to the store of its own: it must not wait for the trainer's.
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    others = Peers(store, dist.get_rank(), count, end)
    try:
        with others.listening():
            ranks = Ranks(dist.get_rank(), count, others)
            _check_alike(ranks.gather([default_device().type]))
            yield ranks
    finally:
        dist.destroy_process_group()
