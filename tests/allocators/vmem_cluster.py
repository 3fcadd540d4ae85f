"""Ranks with a "vmem" heap each, on the pretended driver: as threads of this process, or as processes."""

from __future__ import annotations

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from iris_allocators.settings import VmemSettings
from iris_allocators.vmem.allocator import VmemAllocator
from iris_core.heap.heap import SymmetricHeap
from iris_core.types import CreateRequest, DeviceTarget, DeviceType

from .fake_driver import GRANULE, FakeVmm, as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.types import Segment

TIMEOUT_S = 60.0
CPU = DeviceTarget(DeviceType.CPU)


def make(
    nbytes: int = 8 * GRANULE, rank: int = 0, world_size: int = 1, driver: FakeVmm | None = None, **settings: Any
) -> VmemAllocator:
    """An allocator with granules of `GRANULE` unless `settings` say otherwise."""
    settings.setdefault("granule", GRANULE)
    request = CreateRequest(CPU, rank, world_size, nbytes, VmemSettings(**settings))
    return VmemAllocator(request, driver=driver or FakeVmm(), as_bytes=as_bytes)


def received(segments: Sequence[Segment]) -> list[Segment]:
    """Segments as a peer receives them: with descriptors of its own."""
    return [s if s.fd is None else dataclasses.replace(s, fd=os.dup(s.fd)) for s in segments]


class Hub:
    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)
        self.slots: list[Any] = [None] * world_size


class ThreadWorld:
    """One rank of a world of threads."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.world_size = len(hub.slots)
        self.local_members = tuple(range(self.world_size))
        self.num_segments = 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.hub.slots[self.rank] = obj
        self.hub.barrier.wait()
        out = list(self.hub.slots)
        self.hub.barrier.wait()
        return out

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        rows = [tuple(row) for row in self.all_gather_object([int(value) for value in values])]
        assert len({len(row) for row in rows}) == 1, f"ranks are in different exchanges: {rows}"
        return rows

    def exchange_segments(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        self.num_segments += len(segments)
        everyone = self.all_gather_object(segments)
        out = [list(row) if rank == self.rank else received(row) for rank, row in enumerate(everyone)]
        self.all_gather_object(None)  # nobody closes a descriptor before all have theirs
        return out

    def check_reachable(self, rank: int, what: str) -> None:
        """All are in this process."""

    def check_peers(self) -> None:
        """Threads do not end."""


class Cluster:
    """Ranks with an open heap each; `each` runs a function of (heap) on all of them at the same time."""

    def __init__(self, world_size: int, nbytes: int = 8 * GRANULE, total: int = 1 << 40, **settings: Any) -> None:
        hub = Hub(world_size)
        self.drivers = [FakeVmm(total) for _ in range(world_size)]
        self.worlds = [ThreadWorld(hub, rank) for rank in range(world_size)]
        self.allocators = [
            make(nbytes, rank, world_size, driver, **settings) for rank, driver in enumerate(self.drivers)
        ]
        self.heaps = [SymmetricHeap(a, w) for a, w in zip(self.allocators, self.worlds, strict=True)]
        self._pool = ThreadPoolExecutor(world_size)
        self.each(lambda heap: heap.open())

    def attempt(self, function: Callable[[SymmetricHeap], Any]) -> list[Any]:
        """Results by rank, an error standing for the result of a rank that raised."""
        futures = [self._pool.submit(function, heap) for heap in self.heaps]
        return [future.exception() or future.result() for future in futures]

    def each(self, function: Callable[[SymmetricHeap], Any]) -> list[Any]:
        """Results by rank; the error of the lowest rank that raised."""
        results = self.attempt(function)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    @property
    def used(self) -> list[int]:
        """Bytes in use of each rank's device."""
        return [driver.used for driver in self.drivers]

    @property
    def counts(self) -> list[tuple[int, int, int, int]]:
        """What each rank's driver counts."""
        return [driver.counts() for driver in self.drivers]

    def barriers(self, number: int = 2) -> None:
        """As many barriers of all ranks."""
        for _ in range(number):
            self.each(lambda heap: heap.barrier_agreement())

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *args: object) -> None:
        for heap in self.heaps:
            heap.close()
        self._pool.shutdown()
