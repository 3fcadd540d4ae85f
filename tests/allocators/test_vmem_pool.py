"""ctx.mem_pool(): torch's requests for segments, made by calling the C functions that torch is given."""

import contextlib
import ctypes
import gc
import weakref

import pytest
import torch
from tables import raises, says

from iris_core.errors import HeapExhaustedError, SymmetryError, UnsupportedError
from iris_core.heap import mempool
from iris_core.types import DeviceTarget, DeviceType

from .cluster import CPU, Cluster
from .fake_driver import GRANULE, FakeVmm

U8 = torch.uint8
TARGET = DeviceTarget(DeviceType.CUDA, 3)


class Pool:
    """Stands for torch.cuda.MemPool: knows the C functions and calls them as torch does, without Python's lock."""

    def __init__(self, allocator):
        types = (mempool._ALLOCATE, mempool._FREE)
        self._allocate, self._free = (kind(address) for kind, address in zip(types, allocator, strict=True))
        self.segments = {}

    def allocate(self, nbytes, device=3):
        if ptr := self._allocate(nbytes, device, None):
            self.segments[ptr] = nbytes
        return ptr

    def free(self, ptr):
        self._free(ptr, self.segments.pop(ptr), 3, None)


@pytest.fixture(autouse=True)
def entered(monkeypatch):
    """A torch with pools; what its `use_mem_pool` has been given."""
    entered = []
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *addresses: addresses, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *args: contextlib.nullcontext(entered.append(args)))
    return entered


@pytest.fixture
def pools(made):
    """Makes so many ranks, with a pool each, whose segments are freed after the test."""
    pools = []

    def make(world_size, **options):
        cluster = made.cluster(world_size, **options)
        pools.extend(mempool.make_mem_pool(heap, TARGET) for heap in cluster.heaps)
        return cluster, list(pools)

    yield make
    for pool in pools:
        for ptr in list(pool.segments):
            pool.free(ptr)


def test_segments_are_symmetric_and_reclaimed_when_all_ranks_have_given_them_back(pools):
    c, each = pools(2)
    before = c.each(lambda heap: heap.allocate(100, U8))
    ptrs = c.each(lambda heap: each[heap.rank].allocate(2 * GRANULE))
    assert [ptr - heap.heap_bases[heap.rank] for ptr, heap in zip(ptrs, c.heaps, strict=True)] == [512, 512]
    assert c.used == [3 * GRANULE] * 2
    for ptr in ptrs:
        ctypes.memset(ptr, 5, 2 * GRANULE)
    assert ctypes.string_at(c.heaps[0].translate(ptrs[0], 0, 1) + 2 * GRANULE - 1, 1) == b"\5"
    assert "mem_pool(131072)" in [block.label for block in c.heaps[0].live_blocks()]
    before.clear()
    for rank, allocated in ((0, 2 * GRANULE), (1, 0)):
        each[rank].free(ptrs[rank])
        c.barriers(3)
        assert c.heaps[1].stats().allocated == allocated
    assert (c.heaps[0].stats().allocated, c.used) == (0, [0, 0])


def test_a_scope_does_not_free_segments(pools):
    c, (pool,) = pools(1)
    (heap,) = c.heaps
    with heap.scope(), heap.scope():
        ptr = pool.allocate(1000)
        heap.allocate(8, U8)
    assert heap.stats().num_blocks == 1
    pool.free(ptr)


def operator(pool, nbytes):
    """What an operator of torch does: ask, ask again once the caches are empty, and give up with its own words."""
    with mempool.use_mem_pool(pool, TARGET):
        for _ in range(2):
            if ptr := pool.allocate(nbytes):
                return ptr
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_reason_is_raised_instead_of_torchs_error(pools, entered):
    c, each = pools(2)
    c.drivers[1].total = 2 * GRANULE
    before = c.each(lambda heap: operator(each[heap.rank], GRANULE))
    assert entered[0] in [(pool, "cuda:3") for pool in each]
    errors = c.attempt(lambda heap: operator(each[heap.rank], 3 * GRANULE))
    assert [type(e) for e in errors] == [HeapExhaustedError] * 2
    assert {(e.requested_bytes, e.free_bytes) for e in errors} == {(3 * GRANULE, GRANULE)}
    assert all(isinstance(e.__cause__, torch.OutOfMemoryError) for e in errors)
    errors = c.attempt(lambda heap: operator(each[heap.rank], (1 + heap.rank) * 2 * GRANULE))
    assert [type(e) for e in errors] == [SymmetryError] * 2
    assert before


def test_no_room_is_a_null_pointer_and_a_reason_that_is_not_raised_later(pools, caplog):
    c, (pool,) = pools(1)
    with raises(UnsupportedError, name="ctx.empty"):
        mempool.make_mem_pool(c.heap, CPU)

    def fails_elsewhere():
        with pytest.raises(torch.OutOfMemoryError, match="elsewhere"), mempool.use_mem_pool(pool, TARGET):
            raise torch.OutOfMemoryError("elsewhere")

    fails_elsewhere()
    with mempool.use_mem_pool(pool, TARGET):
        assert pool.allocate(100 * GRANULE) is None
        assert says("heap.out of memory") in caplog.text
        assert pool.allocate(100, device=2) is None
        assert "cuda:3" in caplog.text
        assert pool.allocate(GRANULE)
        fails_elsewhere()
    assert pool.allocate(100 * GRANULE) is None  # outside, as with torch's own context manager
    fails_elsewhere()


def alone():
    """One rank and its pool, of which nothing else knows."""
    cluster = Cluster([FakeVmm()])
    cluster.each(lambda heap: heap.open())
    return cluster, mempool.make_mem_pool(cluster.heaps[0], TARGET)


def test_segments_outlive_the_heap_and_the_pool_and_keep_neither(caplog):
    mempool._kept.clear()
    cluster, pool = alone()
    driver, heap = cluster.drivers[0], weakref.ref(cluster.heaps[0])
    ptr, free = pool.allocate(1000), pool._free
    cluster.close()
    assert pool.allocate(1000) is None
    assert "closed" in caplog.text
    del cluster
    gc.collect()
    assert heap() is None
    assert pool.allocate(1000) is None
    del pool
    gc.collect()
    second, _pool = alone()
    assert len(mempool._kept) == 2, "torch has the segment still"
    ctypes.memset(ptr, 1, 1000)
    assert driver.counts()[1] == 1
    free(ptr, 1000, 3, None)
    assert driver.counts() == (0, 0, 0, 0)
    third, _another = alone()
    assert len(mempool._kept) == 2, "nothing is kept of pools that are gone"
    second.close()
    third.close()
