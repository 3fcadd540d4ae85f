"""What test_vmem_ranks runs on ranks that are processes: the heap on "vmem", with the private channel."""

import gc
import os
import resource
import weakref

import torch

from iris_core.errors import HeapExhaustedError, IrisError
from iris_core.heap.heap import SymmetricHeap
from iris_core.testing.conformance import oracle
from iris_core.world import connect

from .fake_driver import GRANULE, Expandable, FakeVmm
from .vmem_cluster import make

U8 = torch.uint8
TIMEOUT_S = 60.0


class _Opened:
    """A rank's heap in a real world of processes."""

    def __init__(self, nbytes, total=1 << 40, granule=GRANULE):
        self.world = connect(None, TIMEOUT_S)
        self.driver = FakeVmm(total)
        self.allocator = make(nbytes, self.world.rank, self.world.world_size, self.driver, granule=granule)
        self.heap = SymmetricHeap(self.allocator, self.world)
        self.heap.open()

    def read(self, rank, offset, nbytes):
        return oracle.read_bytes(self.heap.heap_bases[rank] + offset, nbytes)

    def seen(self, tensor):
        """The first and the last byte of every rank's copy of a tensor."""
        offset = self.heap.offset_of(tensor)
        self.heap.barrier_agreement()
        ends = [(self.read(r, offset, 1) + self.read(r, offset + tensor.nbytes - 1, 1)).hex() for r in self.ranks]
        self.heap.barrier_agreement()
        return ends

    @property
    def ranks(self):
        return range(self.world.world_size)

    def close(self):
        self.world.barrier()
        self.heap.close()
        gc.collect()
        self.world.close()


def grow_shrink_import():
    """A whole life; returns what was seen at each stage, and the open descriptors it has left."""
    oracle_before = oracle.open_descriptors()
    ctx = _Opened(1 << 40, granule=GRANULE)
    heap, rank = ctx.heap, ctx.world.rank
    seen = []
    first = heap.allocate(3 * GRANULE, U8).fill_(16 + rank)
    seen.append(ctx.seen(first))
    second = heap.allocate(40 * GRANULE, U8).fill_(32 + rank)
    seen.append(ctx.seen(second))
    # a peer writes, the owner sees it
    right = (rank + 1) % ctx.world.world_size
    oracle.write_bytes(heap.heap_bases[right] + heap.offset_of(second), bytes([64 + rank]))
    heap.barrier_agreement()
    seen.append(second[0].item())
    heap.free(first)
    for _ in range(2):
        heap.barrier_agreement()
    seen.append((ctx.driver.used // GRANULE, ctx.driver.counts()[1]))
    external = Expandable(ctx.driver, 2 * GRANULE, GRANULE)
    source = external.tensor(GRANULE, (GRANULE // 4,)).view(U8).fill_(48 + rank)
    shared = heap.as_symmetric(source)
    seen.append(ctx.seen(shared))
    source.fill_(80 + rank)
    seen.append(ctx.seen(shared))
    heap.free(shared)
    heap.barrier_agreement()
    seen.append(ctx.driver.counts()[1])
    del first, second, shared, source
    ctx.close()
    external.close()
    seen.append(ctx.driver.counts())
    left = {name for name in oracle.open_descriptors() - oracle_before if "memfd" in name}
    return seen, sorted(left)


def short_of_descriptors(rooms):
    """Rank 1 may open only so many more files while the heap grows; returns the error of each attempt, and the end.

    The pretended driver takes a descriptor for every piece of memory, so with more and more room the failure moves from
    the own memory over its export and the sockets to what peers send and its import.
    """
    ctx = _Opened(64 * GRANULE)
    heap, rank = ctx.heap, ctx.world.rank
    kept = heap.allocate(GRANULE, U8).fill_(1 + rank)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what an earlier test has left
    highest, plugs = max(int(name) for name in os.listdir("/proc/self/fd")), [os.dup(1)]
    while plugs[-1] <= highest:  # free numbers below the highest would be more room than is meant
        plugs.append(os.dup(1))
    before, counts = oracle.open_descriptors(), ctx.driver.counts()
    errors = []
    for room in rooms:
        if rank == 1:
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + room, hard))
        try:
            heap.allocate(6 * GRANULE, U8)
            errors.append(None)
        except IrisError as e:
            errors.append((type(e).__name__, str(e)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if errors[-1] is None:
            break
        left = oracle.open_descriptors() - before  # what an earlier test has left may go at any time
        assert (left, ctx.driver.counts()) == (set(), counts), room
    for plug in plugs:
        os.close(plug)
    seen = ctx.seen(kept)
    del kept
    ctx.close()
    return errors, seen, ctx.driver.counts()


def exhausted():
    """Rank 1's device is full; returns the error, and what is seen of a smaller tensor afterwards."""
    ctx = _Opened(64 * GRANULE, total=(8 if int(os.environ["RANK"]) == 1 else 64) * GRANULE)
    try:
        ctx.heap.allocate(20 * GRANULE, U8)
        error = ("", "")
    except HeapExhaustedError as e:
        error = (type(e).__name__, str(e))
    used = ctx.driver.used
    small = ctx.heap.allocate(4 * GRANULE, U8).fill_(1 + ctx.world.rank)
    seen = ctx.seen(small)
    gone = weakref.ref(small)
    del small
    ctx.close()
    return error, used, seen, gone() is None, ctx.driver.counts()
