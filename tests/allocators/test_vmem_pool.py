"""ctx.mem_pool(): torch's requests for segments, made by calling the C functions that torch is given."""

import contextlib
import ctypes
import gc
import weakref

import pytest
import torch

from iris_core import Iris
from iris_core.errors import HeapExhaustedError, SymmetryError, UnsupportedError
from iris_core.heap import mempool
from iris_core.types import DeviceTarget, DeviceType

from .fake_driver import GRANULE
from .vmem_cluster import Cluster

U8 = torch.uint8
TARGET = DeviceTarget(DeviceType.CUDA, 3)


class Pool:
    """Stands for torch.cuda.MemPool: knows the C functions and calls them as torch does, without Python's lock."""

    def __init__(self, allocator):
        types = (mempool._ALLOCATE, mempool._FREE)
        self.allocate, self.free = (kind(address) for kind, address in zip(types, allocator, strict=True))


@pytest.fixture(autouse=True)
def torch_with_pools(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *addresses: addresses, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)


def pools(cluster):
    return [mempool.make_mem_pool(heap, TARGET) for heap in cluster.heaps]


def test_segments_are_symmetric_and_grow_the_heap():
    with Cluster(2) as c:
        each = pools(c)
        before = c.each(lambda heap: heap.allocate(100, U8))
        ptrs = c.each(lambda heap: each[heap.rank].allocate(2 * GRANULE, 3, None))
        assert [ptr - heap.heap_bases[heap.rank] for ptr, heap in zip(ptrs, c.heaps, strict=True)] == [512, 512]
        assert c.used == [3 * GRANULE] * 2
        for ptr in ptrs:
            ctypes.memset(ptr, 5, 2 * GRANULE)
        peer = c.heaps[0].translate(ptrs[0], 0, 1)
        assert ctypes.string_at(peer + 2 * GRANULE - 1, 1) == b"\5"
        c.barriers(1)
        assert "mem_pool(131072)" in [block.label for block in c.heaps[0].live_blocks()]
        before.clear()


def test_a_segment_that_torch_gives_back_is_reclaimed_when_all_ranks_have():
    with Cluster(2) as c:
        each = pools(c)
        ptrs = c.each(lambda heap: each[heap.rank].allocate(2 * GRANULE, 3, None))
        each[0].free(ptrs[0], 2 * GRANULE, 3, None)
        c.barriers()
        assert c.heaps[1].stats().allocated == 2 * GRANULE
        each[1].free(ptrs[1], 2 * GRANULE, 3, None)
        c.barriers(3)
        assert [heap.stats().allocated for heap in c.heaps] == [0, 0]
        assert c.used == [0, 0]


def test_a_scope_does_not_free_segments():
    with Cluster(1) as c:
        (heap,), (pool,) = c.heaps, pools(c)
        with heap.scope(), heap.scope():
            ptr = pool.allocate(1000, 3, None)
            heap.allocate(8, U8)
        assert heap.stats().num_blocks == 1
        pool.free(ptr, 1000, 3, None)


def test_no_room_is_a_null_pointer_and_a_reason(caplog):
    with Cluster(1) as c:
        (pool,) = pools(c)
        assert pool.allocate(100 * GRANULE, 3, None) is None
        assert "no segment of 6553600 bytes: Heap out of memory" in caplog.text
        assert pool.allocate(100, 2, None) is None
        assert "the pool is for cuda:3" in caplog.text
        assert pool.allocate(GRANULE, 3, None)


def operator(pool, nbytes):
    """What an operator of torch does: ask, ask again once the caches are empty, and give up with its own words."""
    for _ in range(2):
        if ptr := pool.allocate(nbytes, 3, None):
            return ptr
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_reason_is_raised_instead_of_torchs_error(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *args: contextlib.nullcontext(entered.append(args)))
    with Cluster(2) as c:
        each = pools(c)
        c.drivers[1].total = 2 * GRANULE

        def on_heap(heap, nbytes):
            with mempool.use_mem_pool(each[heap.rank], TARGET):
                return operator(each[heap.rank], nbytes)

        before = c.each(lambda heap: on_heap(heap, GRANULE))
        assert entered[0] in [(pool, "cuda:3") for pool in each]
        errors = c.attempt(lambda heap: on_heap(heap, 3 * GRANULE))
        assert [type(e) for e in errors] == [HeapExhaustedError] * 2
        assert all(f"rank 1: cpu has no room for {3 * GRANULE} more bytes" in str(e) for e in errors)
        assert {(e.requested_bytes, e.free_bytes) for e in errors} == {(3 * GRANULE, GRANULE)}
        assert all(isinstance(e.__cause__, torch.OutOfMemoryError) for e in errors)
        errors = c.attempt(lambda heap: on_heap(heap, (1 + heap.rank) * 2 * GRANULE))
        assert [type(e) for e in errors] == [SymmetryError] * 2
        assert before

        with pytest.raises(torch.OutOfMemoryError, match="of another pool"), mempool.use_mem_pool(each[0], TARGET):
            raise torch.OutOfMemoryError("of another pool")


def test_a_failure_that_was_dealt_with_is_not_raised_later(monkeypatch):
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *args: contextlib.nullcontext())
    with Cluster(1) as c:
        (pool,) = pools(c)
        with mempool.use_mem_pool(pool, TARGET):
            assert pool.allocate(100 * GRANULE, 3, None) is None
            assert pool.allocate(GRANULE, 3, None)
            with pytest.raises(torch.OutOfMemoryError, match="elsewhere"), mempool.use_mem_pool(pool, TARGET):
                raise torch.OutOfMemoryError("elsewhere")
        assert pool.allocate(100 * GRANULE, 3, None) is None  # outside, as with torch's own context manager
        with pytest.raises(torch.OutOfMemoryError, match="elsewhere"), mempool.use_mem_pool(pool, TARGET):
            raise torch.OutOfMemoryError("elsewhere")


def test_nothing_is_kept_of_pools_that_are_gone():
    mempool._kept.clear()
    held = []
    for _ in range(5):
        with Cluster(1) as c:
            (pool,) = pools(c)
            held.append((pool.free, pool.allocate(1000, 3, None)))
            del pool
    del c
    gc.collect()
    assert len(mempool._kept) == 5, "torch has their segments still"
    for free, ptr in held:
        free(ptr, 1000, 3, None)
    with Cluster(1) as c:
        assert pools(c)
        assert len(mempool._kept) == 1


def test_different_requests_are_noticed():
    with Cluster(2, nbytes=16 * GRANULE, granule=16 * GRANULE) as c:
        each = pools(c)
        first = c.each(lambda heap: heap.allocate(1, U8))
        c.each(lambda heap: each[heap.rank].allocate(100 + 1000 * heap.rank, 3, None))
        errors = c.attempt(lambda heap: heap.barrier_agreement())
        assert [type(e) for e in errors] == [SymmetryError] * 2
        assert "mem_pool(100)" in str(errors[0])
        first.clear()


def test_segments_outlive_the_heap_and_the_pool_and_keep_neither(caplog):
    cluster = Cluster(1)
    driver, heap = cluster.drivers[0], weakref.ref(cluster.heaps[0])
    (pool,) = pools(cluster)
    ptr = pool.allocate(1000, 3, None)
    cluster.__exit__()
    assert pool.allocate(1000, 3, None) is None
    assert "closed" in caplog.text
    del cluster
    gc.collect()
    assert heap() is None
    assert pool.allocate(1000, 3, None) is None
    ctypes.memset(ptr, 1, 1000)  # torch may still have tensors there
    assert driver.counts()[1] == 1
    pool.free(ptr, 1000, 3, None)
    assert driver.counts() == (0, 0, 0, 0)


def test_the_cpu_has_no_pools():
    with Iris(heap_size="1MiB", device="cpu") as ctx:
        with pytest.raises(UnsupportedError, match=r"ctx\.empty"):
            ctx.mem_pool()
        with pytest.raises(UnsupportedError, match=r"ctx\.empty"), ctx.use_mem_pool():
            pass
