"""What `iris doctor` runs with this backend: write, read, atomics and signals between every two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iris_core.diagnosis import PairCheck
from iris_core.errors import DeviceTimeoutError
from iris_example_backend import language as ex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from iris_core.api import Iris

NUMEL, ADDITIONS = 1000, 50


@ex.kernel
def write(source: Any, inbox: Any, rank: int, peer: int, bases: Any) -> None:
    """Put a message into the caller's row of the peer's inbox."""
    i = np.arange(NUMEL)
    ex.put(source + i, inbox + rank * NUMEL + i, rank, peer, bases)


@ex.kernel
def read(offered: Any, found: Any, rank: int, peer: int, bases: Any) -> None:
    """Get what the peer offers."""
    i = np.arange(NUMEL)
    ex.get(offered + i, found + i, rank, peer, bases)


@ex.kernel
def add(counters: Any, rank: int, world: int, peer: int, bases: Any) -> None:
    """Add 1 to the caller's counter on the peer, and to the last one, to which all ranks add."""
    ex.atomic_add(counters + np.array([rank, world]), 1, rank, peer, bases)


@ex.kernel
def hand_over(source: Any, inbox: Any, flags: Any, found: Any, rank: int, peer: int, sender: int, bases: Any) -> None:
    """Send a message with a signal, and take the one that comes from `sender`."""
    i = np.arange(NUMEL)
    ex.put_signal(source + i, inbox + rank * NUMEL + i, flags + rank, 1, rank, peer, bases)
    ex.wait(flags + sender, 1)
    (found + i).store((inbox + sender * NUMEL + i).load())


def self_test(ctx: Iris, begin: Callable[[str, int | None], None]) -> Iterator[PairCheck]:
    """Yield what this rank can say; see `iris_core.protocols.SupportsSelfTest`.

    Every rank works on rank + distance, all at the same time; a world of one works on itself.
    """
    rank, world, bases = ctx.cur_rank, ctx.num_ranks, ctx.get_heap_bases()
    distances = range(1, world) if world > 1 else range(1)
    inbox, flags = ctx.zeros(world, NUMEL, dtype=torch.int32), ctx.zeros(world, dtype=torch.int64)
    counters = ctx.zeros(world + 1, dtype=torch.int64)
    offered = ctx.empty(NUMEL, dtype=torch.int32)
    offered.copy_(_message(rank, rank))
    found = torch.zeros(NUMEL, dtype=torch.int32)

    def meet() -> None:
        begin("barrier", None)
        ctx.barrier()

    meet()
    for distance in distances:
        peer = (rank + distance) % world
        begin("write", peer)
        write[(1,)](_message(rank, peer), inbox, rank, peer, bases)
        begin("read", peer)
        read[(1,)](offered, found, rank, peer, bases)
        yield PairCheck("read", rank, peer, _difference(found, _message(peer, peer)))
        begin("atomic_add", peer)
        add[(ADDITIONS,)](counters, rank, world, peer, bases)
    meet()
    lost = ADDITIONS * len(distances) - int(counters[world])
    for distance in distances:
        sender = (rank - distance) % world
        yield PairCheck("write", sender, rank, _difference(inbox[sender], _message(sender, rank)))
        own = ADDITIONS - int(counters[sender])
        problem = f"lost {own} additions to a word of its own, {lost} of all ranks to a shared one"
        yield PairCheck("atomic_add", sender, rank, problem if own or lost else "")
    inbox.zero_()
    meet()
    for distance in distances:
        peer, sender = (rank + distance) % world, (rank - distance) % world
        begin("signal", peer)
        try:
            hand_over[(1,)](_message(rank, peer), inbox, flags, found, rank, peer, sender, bases)
        except DeviceTimeoutError as error:
            yield PairCheck("signal", sender, rank, f"did not arrive: {error}")
        else:
            yield PairCheck("signal", sender, rank, _difference(found, _message(sender, rank)))
    meet()


def _message(sender: int, receiver: int) -> torch.Tensor:
    """int32[NUMEL] that differs from pair to pair and has no zeros."""
    return torch.arange(1, NUMEL + 1, dtype=torch.int32) + 10_000 * (100 * sender + receiver)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = int((found != expected).sum())
    return f"has {wrong} of {NUMEL} words wrong" if wrong else ""
