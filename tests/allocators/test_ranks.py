"""Heaps of ranks that are processes: "vmem" on the pretended driver, with descriptors that are sent."""

import gc
import os
import resource

import torch

from iris_core.errors import IrisError
from iris_core.heap.heap import SymmetricHeap
from iris_core.testing.conformance import oracle
from iris_core.world import connect

from .cluster import make
from .fake_driver import GRANULE, FakeVmm

U8 = torch.uint8


def short_of_descriptors(rooms):
    """Rank 1 has few descriptors left while the heap grows; returns the error of each attempt.

    The pretended driver takes a descriptor for every piece of memory, so with more and more room the failure moves from
    the own memory over its export and the sockets to what peers send and its import.
    """
    world, driver = connect(None, 60.0), FakeVmm()
    rank = world.rank
    heap = SymmetricHeap(make(64 * GRANULE, rank, world.world_size, driver), world)
    heap.open()

    kept = heap.allocate(GRANULE, U8).fill_(1 + rank)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # what an earlier test has left
    highest, plugs = max(int(name) for name in os.listdir("/proc/self/fd")), [os.dup(1)]
    while plugs[-1] <= highest:  # free numbers below the highest would be more room than is meant
        plugs.append(os.dup(1))
    before, counts = oracle.open_descriptors(), driver.counts()
    errors = []
    for room in rooms:
        if rank == 1:
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + room, hard))
        try:
            more = heap.allocate(6 * GRANULE, U8)
            errors.append(None)
            break
        except IrisError as e:
            errors.append((type(e).__name__, str(e)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        left = oracle.open_descriptors() - before  # what an earlier test has left may go at any time
        assert (left, driver.counts()) == (set(), counts), room
    for plug in plugs:
        os.close(plug)
    heap.barrier_agreement()
    starts = [base + heap.offset_of(kept) for base in heap.heap_bases]
    seen = [(oracle.read_bytes(at, 1) + oracle.read_bytes(at + kept.nbytes - 1, 1)).hex() for at in starts]
    assert seen == ["0101", "0202", "0303"]
    heap.barrier_agreement()
    right = (rank + 1) % world.world_size  # a peer writes, the owner sees it
    oracle.write_bytes(heap.heap_bases[right] + heap.offset_of(more), bytes([64 + rank]))
    heap.barrier_agreement()
    assert more[0] == 64 + (rank - 1) % 3
    del kept, more
    world.barrier()
    heap.close()
    gc.collect()
    world.close()
    left = [name for name in oracle.open_descriptors() if "fake-vmm" in name]
    assert (driver.counts(), left) == ((0, 0, 0, 0), [])
    return errors


def test_a_rank_without_descriptors_is_the_same_error_everywhere_at_every_step(pool):
    errors, *others = pool.run(short_of_descriptors, 3, range(2, 80))
    assert others == [errors] * 2
    *refused, last = errors
    assert last is None, "the heap can be used as before"
    assert all("rank 1 could not" in text for _, text in refused)
    texts = "\n".join(text for _, text in refused)
    for step in ("get memory", "export its heap", "have come", "map the heap"):
        assert step in texts
