"""Allocators and ranks on pretended drivers, which have to leave nothing behind."""

import gc
from concurrent.futures import ThreadPoolExecutor

from tests.core import fakes

from iris_allocators.settings import TorchSettings, VmemSettings
from iris_allocators.torch_ipc import TorchAllocator
from iris_allocators.vmem.allocator import VmemAllocator
from iris_core.heap.heap import SymmetricHeap
from iris_core.testing.conformance import oracle
from iris_core.testing.conformance.plugin_jobs import received
from iris_core.types import CreateRequest, DeviceTarget, DeviceType

from .fake_driver import GRANULE, Expandable, FakeIpc, FakeVmm

CPU = DeviceTarget(DeviceType.CPU)


def nothing():
    """A release that nobody waits for."""


def make(nbytes=8 * GRANULE, rank=0, world_size=1, driver=None, **settings):
    """An allocator "vmem" with granules of `GRANULE` unless `settings` say otherwise."""
    request = CreateRequest(CPU, rank, world_size, nbytes, VmemSettings(**{"granule": GRANULE, **settings}))
    return VmemAllocator(request, driver=driver or FakeVmm())


def make_torch(nbytes, rank=0, world_size=1, driver=None):
    return TorchAllocator(CreateRequest(CPU, rank, world_size, nbytes, TorchSettings()), driver or FakeIpc())


class ThreadWorld(fakes.ThreadWorld):
    """One rank of a world of threads, which counts the segments that it sends."""

    num_segments = 0

    def exchange_segments(self, segments):
        self.num_segments += len(segments)
        assert sum(segment.fd is not None for segment in segments) * self.world_size <= 256, "open in this process"
        everyone = self.gather(segments)
        out = [list(row) if rank == self.rank else received(row) for rank, row in enumerate(everyone)]
        self.barrier()  # nobody closes a descriptor before all have theirs
        return out


class Cluster(fakes.Cluster):
    """Ranks as threads, with a heap on an allocator that `make` makes for each of `drivers`."""

    def __init__(self, drivers, make=make, nbytes=8 * GRANULE, **settings):
        hub = fakes.Hub(len(drivers))
        self.drivers = drivers
        self.worlds = [ThreadWorld(hub, rank) for rank in range(len(drivers))]
        self.allocators = [make(nbytes, rank, len(drivers), each, **settings) for rank, each in enumerate(drivers)]
        self.heaps = [SymmetricHeap(a, w) for a, w in zip(self.allocators, self.worlds, strict=True)]
        self._pool = ThreadPoolExecutor(len(drivers))

    @property
    def used(self):
        return [driver.used for driver in self.drivers]

    @property
    def counts(self):
        return [driver.counts() for driver in self.drivers]

    def barriers(self, number=2):
        for _ in range(number):
            self.each(lambda heap: heap.barrier_agreement())

    def close(self):
        for heap in self.heaps:
            heap.close()
        self._pool.shutdown()


class Made:
    """Makes what a test needs, and sees that nothing is left of it.

    Attributes:
        lost: drivers that have refused to take something back.
    """

    def __init__(self):
        self.lost, self._drivers, self._closing, self._pieces = [], [], [], []
        self._before = self.descriptors()

    def driver(self):
        self._drivers.append(FakeVmm())
        return self._drivers[-1]

    def allocator(self, *args, driver=None, **settings):
        self._closing.append(make(*args, driver=driver or self.driver(), **settings))
        return self._closing[-1]

    def cluster(self, world_size, opened=True, **options):
        cluster = Cluster([self.driver() for _ in range(world_size)], **options)
        self._closing.append(cluster)
        if opened:
            cluster.each(lambda heap: heap.open())
        return cluster

    def pieces(self, driver, *sizes):
        """Memory that is not the heap's, of pieces of so many granules."""
        self._pieces.append(Expandable(driver, *(size * GRANULE for size in sizes)))
        return self._pieces[-1]

    @staticmethod
    def descriptors():
        return {each for each in oracle.open_descriptors() if "fake-vmm" in each}

    def finish(self):
        """Close everything; fail if that leaves anything, except of the drivers in `lost`."""
        for each in self._closing:
            each.close()
        self._closing.clear()
        gc.collect()
        for each in self._pieces:
            each.close()
        left = [driver.counts() for driver in self._drivers if driver not in self.lost]
        assert not any(map(any, left)), f"handles, mappings, reservations and bytes that are left: {left}"
        assert self.lost or self.descriptors() == self._before
        self.__init__()
