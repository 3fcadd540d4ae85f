"""A world of threads and an allocator in private memory: several ranks in one process, without torch.distributed."""

import contextlib
import ctypes
import mmap
import re
import struct
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from tables import says

from iris_core.errors import UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.tensors import TensorFactories
from iris_core.types import Capability, PeerMapping, PluginInfo, PluginKind, Segment
from iris_core.world.exchange import Frame
from iris_core.world.group import World, _Kind

TIMEOUT_S = 60.0


class Hub:
    def __init__(self, world_size):
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)
        self.slots = [None] * world_size

    def gather(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        out = list(self.slots)
        self.barrier.wait()
        return out


class ThreadWorld(World):
    """One rank of a world of threads; counts its exchanges, in which descriptors are not sent."""

    def __init__(self, hub, rank):
        super().__init__(ranks=range(len(hub.slots)), rank=rank)
        self.hub, self.num_exchanges = hub, 0

    def gather(self, value):
        self.num_exchanges += 1
        return self.hub.gather(self.rank, value)

    def _frames(self, kind, mine, fds=(), timeout_s=None):
        rows = self.gather((kind, mine))
        assert len({(each, kind == _Kind.INTEGERS and len(data)) for each, data in rows}) == 1, rows
        return [Frame(kind, b"", data) for _, data in rows]


class MemoryAllocator:
    """A heap in private memory that can pretend to grow, decommit and import, and to fail at each of them."""

    has_more = False
    granularity = 4096

    def __init__(self, nbytes, *provides: Capability):
        self.info = PluginInfo("memory", PluginKind.ALLOCATOR, "for tests", provides=frozenset(provides))
        self.nbytes, self.generation, self.import_delta, self.closed = nbytes, 0, 0, False
        self.calls, self.fail = [], {}
        self._map = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._view = memoryview(self._map)
        self.base_ptr = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._grows = Capability.GROWTH in provides
        self._granules = set()

    def commit(self, offset_bytes, nbytes):
        self._call("commit", offset_bytes, nbytes)
        granules = self._granules_of(offset_bytes, nbytes)
        if self._grows and granules - self._granules:
            self.generation += 1
        self._granules |= granules

    def decommit(self, offset_bytes, nbytes):
        self._call("decommit", offset_bytes, nbytes)
        assert offset_bytes % self.granularity == 0
        assert nbytes % self.granularity == 0 or offset_bytes + nbytes == self.nbytes
        self._granules -= self._granules_of(offset_bytes, nbytes)

    def _granules_of(self, offset_bytes, nbytes):
        return set(range(offset_bytes // self.granularity, -(-(offset_bytes + nbytes) // self.granularity)))

    @property
    def committed_bytes(self):
        return len(self._granules) * self.granularity

    def exchanged(self):
        """All is sent in one part."""

    def tensor(self, offset_bytes, nbytes, on_release):
        self._call("tensor", offset_bytes, nbytes)
        part = self._view[offset_bytes : offset_bytes + nbytes]
        out = torch.frombuffer(part, dtype=torch.uint8)
        weakref.finalize(part, on_release).atexit = False
        return out

    def import_extent(self, tensor):
        self._call("import_extent")
        nbytes = tensor.untyped_storage().nbytes() + self.import_delta
        return -(-nbytes // self.granularity) * self.granularity, self.import_delta, -1

    def import_tensor(self, offset_bytes, tensor, on_release):
        """Copy: private memory cannot be mapped twice; enough to test what the heap does around it."""
        self._call("import_tensor", offset_bytes)
        if not tensor.is_contiguous():
            raise UnsupportedError("strided")
        self.generation += 1
        raw = self.tensor(offset_bytes + self.import_delta, tensor.nbytes, on_release)
        return raw.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def export(self):
        self._call("export")
        return (Segment(0, self.nbytes, payload=struct.pack("q", self.base_ptr)),)

    def import_peer(self, rank, segments):
        self._call("import_peer", rank)
        return PeerMapping(rank, struct.unpack("q", segments[0].payload)[0], segments[0].nbytes)

    def close(self):
        self.closed = True

    def count(self, name):
        return sum(call[0] == name for call in self.calls)

    def _call(self, name, *args):
        self.calls.append((name, *args))
        if name in self.fail:
            raise self.fail[name]


class Cluster(contextlib.AbstractContextManager):
    """Ranks with an open heap each; `each` runs a function on all of them at the same time.

    Options of the heaps may be given for all, or by `options_of(rank)`.
    """

    def __init__(self, world_size, nbytes=1 << 16, *provides, options_of=lambda rank: {}, **options):
        hub = Hub(world_size)
        self.worlds = [ThreadWorld(hub, rank) for rank in range(world_size)]
        self.allocators = [MemoryAllocator(nbytes, *provides) for _ in self.worlds]
        self.heaps = [
            SymmetricHeap(allocator, world, **options, **options_of(world.rank))
            for allocator, world in zip(self.allocators, self.worlds, strict=True)
        ]
        self._pool = ThreadPoolExecutor(world_size)
        self.each(lambda heap: heap.open())

    def each(self, function):
        """Results by rank; the error of the lowest rank that raised."""
        results = self.attempt(function)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def attempt(self, function):
        """Results by rank, an error standing for the result of a rank that raised."""
        futures = [self._pool.submit(function, heap) for heap in self.heaps]
        return [future.exception() or future.result() for future in futures]

    def refused(self, kind, key, function, *keys, **values):
        """Every rank must raise the same error of exactly this kind, which says what keys stand for: the text."""
        errors = self.attempt(function)
        assert [type(error) for error in errors] == [kind] * len(self.heaps), errors
        (text,) = {str(error) for error in errors}
        assert re.search(says(key, *keys, **values), text), text
        return text

    def take(self, members, nbytes, kind=ThreadWorld):
        """Offset and memory of what a group takes, by rank, an error standing for them; None for other ranks."""
        hub = Hub(len(members))
        worlds = {member: kind(hub, rank) for rank, member in enumerate(members)}
        take = lambda heap: heap.take_for_group(worlds[heap.rank], members, nbytes, "a test")
        return self.attempt(lambda heap: take(heap) if heap.rank in worlds else None)

    def allocate(self, n, dtype=torch.uint8):
        return self.each(lambda heap: heap.allocate(n, dtype))

    def free(self, tensors):
        self.each(lambda heap: heap.free(tensors[heap.rank]))

    def barrier(self):
        self.each(lambda heap: heap.barrier_agreement())

    def offsets(self, tensors):
        return [heap.offset_of(t) for heap, t in zip(self.heaps, tensors, strict=True)]

    def blocks(self):
        return [[block.offset_bytes for block in heap.live_blocks()] for heap in self.heaps]

    def stats(self, name):
        return [getattr(heap.stats(), name) for heap in self.heaps]

    @property
    def heap(self):
        return self.heaps[0]

    @property
    def num_exchanges(self):
        return self.worlds[0].num_exchanges

    def __exit__(self, *args):
        self._pool.shutdown()


class Context(TensorFactories):
    def __init__(self, heap):
        self.heap, self.device = heap, "cpu"
