"""The symmetric heap on threads: allocation, free, drops, exhaustion, addresses, close."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from tables import table

from iris_core.errors import (
    HeapClosedError,
    HeapError,
    HeapExhaustedError,
    NotOnHeapError,
    PeerLostError,
    UnsupportedError,
)
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.streams import HostStreams
from iris_core.types import Block

from .fakes import Cluster

F32 = torch.float32


def blocks(heap: SymmetricHeap) -> list[int]:
    """Offsets of the live blocks."""
    return [block.offset_bytes for block in heap.live_blocks()]


# -- allocation -------------------------------------------------------------------------------------------------------
@table("world_size", [1, 2, 4])
def test_same_offsets_on_every_rank(world_size: int) -> None:
    with Cluster(world_size) as c:
        held = []
        for n, dtype in [(10, F32), (100, torch.int8), (0, F32), (3, torch.complex128), (65, torch.bool)]:
            tensors = c.each(lambda heap, n=n, dtype=dtype: heap.allocate(n, dtype))
            held.append(tensors)
            assert {c.heaps[r].offset_of(t) for r, t in enumerate(tensors)} == {256 * (len(held) - 1)}
            assert all(t.shape == (n,) and t.dtype == dtype for t in tensors)
        assert blocks(c.heaps[0]) == [0, 256, 512, 768, 1024]
        assert c.num_exchanges == 4, "allocation must not communicate (opening takes four exchanges)"


def test_memory_is_the_tensors_own_and_writable() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        a, b = heap.allocate(64, F32), heap.allocate(64, F32)
        a.fill_(1)
        b.fill_(2)
        assert a.sum() == 64
        assert b.sum() == 128
        assert a.untyped_storage().nbytes() == 256
        assert not a._is_view()


@table("alignment", [1, 256, 1024, 4096])
def test_alignment_of_the_address(alignment: int) -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        tensors = [heap.allocate(3, F32, alignment=alignment) for _ in range(4)]
        assert all(t.data_ptr() % max(alignment, 256) == 0 for t in tensors)


def test_alignment_that_cannot_be_had() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        with pytest.raises(UnsupportedError, match="begin at multiples of"):
            heap.allocate(1, F32, alignment=1 << 40)
        with pytest.raises(ValueError, match="power of two, not 300"):
            heap.allocate(1, F32, alignment=300)
        with pytest.raises(ValueError, match="-1 elements"):
            heap.allocate(-1, F32)
        assert blocks(heap) == []


def test_empty_tensors_have_blocks_and_are_symmetric() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        a, b = heap.allocate(0, F32), heap.allocate(0, torch.int64)
        assert heap.is_symmetric(a)
        assert heap.is_symmetric(b)
        assert heap.offset_of(b) == 256
        assert not heap.is_symmetric(torch.empty(0))
        heap.free(a)
        assert blocks(heap) == [256]


def test_strided_tensors() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        t = heap.empty_strided((2, 3), (1, 2), F32, ("made", (2, 3)))
        assert t.stride() == (1, 2)
        assert t.untyped_storage().nbytes() == 24
        overlapping = heap.empty_strided((4, 4), (1, 1), F32, ("made", (4, 4)))
        assert overlapping.untyped_storage().nbytes() == 28
        assert [b.label for b in heap.live_blocks()] == ["made((2, 3))", "made((4, 4))"]


def test_allocate_symmetric_says_where_every_copy_lies() -> None:
    with Cluster(3) as c:
        c.each(lambda heap: heap.allocate(5, F32))
        for rank, (tensor, ptrs) in enumerate(c.each(lambda heap: heap.allocate_symmetric(2, 3, dtype=torch.int16))):
            assert tensor.shape == (2, 3)
            assert tensor.dtype == torch.int16
            assert ptrs.dtype == torch.int64
            assert ptrs[rank] == tensor.data_ptr()
            assert ptrs.tolist() == [a.base_ptr + 256 for a in c.allocators]
        assert c.each(lambda heap: heap.allocate_symmetric((4,)))[0][0].dtype == torch.get_default_dtype()


def test_observer_sees_every_allocation() -> None:
    seen: list[tuple[int, int]] = []
    with Cluster(1, on_allocated=lambda offset, nbytes: seen.append((offset, nbytes))) as c:
        _held = [c.heaps[0].allocate(10, F32), c.heaps[0].allocate(0, F32)]
    assert seen == [(0, 40), (256, 0)]


@pytest.mark.parametrize("name", ["commit", "tensor"])
def test_a_failing_allocator_leaves_the_heap_unchanged(name: str) -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        keep = heap.allocate(10, F32)
        before, version = heap.stats(), heap.version
        c.allocators[0].fail[name] = OSError("no memory")
        with pytest.raises(OSError, match="no memory"):
            heap.allocate(100, F32)
        c.allocators[0].fail.clear()
        after = heap.stats()
        assert (after.allocated, after.free, after.largest_free, after.num_blocks) == (
            before.allocated,
            before.free,
            before.largest_free,
            before.num_blocks,
        )
        assert heap.version == version
        assert heap.offset_of(heap.allocate(100, F32)) == 256
        assert heap.is_symmetric(keep)


# -- free -------------------------------------------------------------------------------------------------------------
def test_one_rank_reuses_at_once() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        t = heap.allocate(10, F32)
        heap.free(t)
        assert heap.offset_of(heap.allocate(10, F32)) == 0


def test_several_ranks_reuse_after_the_barrier() -> None:
    with Cluster(2) as c:
        tensors = c.each(lambda heap: heap.allocate(10, F32))
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        assert c.heaps[0].stats().pending == 256
        assert blocks(c.heaps[0]) == []
        assert [h.offset_of(t) for h, t in zip(c.heaps, c.each(lambda heap: heap.allocate(1, F32)), strict=True)] == [
            256,
            256,
        ]
        c.each(lambda heap: heap.barrier_agreement())
        assert c.heaps[0].stats().pending == 0
        again = c.each(lambda heap: heap.allocate(10, F32))
        assert [h.offset_of(t) for h, t in zip(c.heaps, again, strict=True)] == [0, 0]


def test_views_may_stand_for_their_tensor() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        t = heap.allocate(100, F32)
        heap.free(t.view(10, 10)[3:, 4:].t())
        assert blocks(heap) == []


@table("world_size", [1, 2])
@table("reused", [False, True])
def test_a_double_free_is_named(world_size: int, reused: bool) -> None:
    with Cluster(world_size) as c:
        tensors = c.each(lambda heap: heap.allocate(10, F32))
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        if reused:
            c.each(lambda heap: heap.barrier_agreement())
            others = c.each(lambda heap: heap.allocate(10, torch.int32))
        for error in c.attempt(lambda heap: heap.free(tensors[heap.rank])):
            assert type(error) is HeapError
            assert "free: allocate(10, float32) at offset 0 was freed before" in str(error)
        if reused:
            assert all(heap.offset_of(t) == 0 for heap, t in zip(c.heaps, others, strict=True))
            assert blocks(c.heaps[0]) == [0]


def test_free_of_tensors_that_are_not_the_heaps_own() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        t = heap.allocate(10, F32)
        with pytest.raises(NotOnHeapError, match="free: the tensor"):
            heap.free(torch.zeros(10))
        alias = torch.from_numpy(t.numpy())
        assert heap.is_symmetric(alias)
        with pytest.raises(HeapError, match="made from a pointer or by DLPack"):
            heap.free(alias)
        assert blocks(heap) == [0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_storage_of_a_freed_block_frees_nothing_later(world_size: int) -> None:
    with Cluster(world_size) as c:
        tensors = c.each(lambda heap: heap.allocate(10, F32))
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.each(lambda heap: heap.barrier_agreement())
        second = c.each(lambda heap: heap.allocate(10, F32))
        tensors.clear()  # the old storages go only now; their blocks belong to `second`
        c.each(lambda heap: heap.barrier_agreement())
        assert blocks(c.heaps[0]) == [0]
        assert c.heaps[0].is_symmetric(second[0])
        assert c.heaps[0].offset_of(c.each(lambda heap: heap.allocate(10, F32))[0]) == 256


# -- dropped ----------------------------------------------------------------------------------------------------------
def test_one_rank_reclaims_what_it_drops() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        for _ in range(1000):
            t = heap.allocate(1000, F32)
        assert heap.offset_of(t) in (0, 4096)
        assert heap.stats().num_blocks == 1
        del t
        heap.barrier_agreement()
        assert heap.stats().free == heap.nbytes


def test_a_drop_counts_when_all_ranks_have_dropped() -> None:
    with Cluster(3) as c:
        tensors = c.each(lambda heap: heap.allocate(10, F32))
        for rank in (2, 0, 1):
            assert blocks(c.heaps[0]) == [0]
            tensors[rank] = None
            c.each(lambda heap: heap.barrier_agreement())
        assert [blocks(heap) for heap in c.heaps] == [[], [], []]
        assert c.heaps[0].stats().free == c.heaps[0].nbytes


def test_dropped_blocks_are_pending_in_the_figures_of_the_rank_that_dropped() -> None:
    with Cluster(2) as c:
        tensors = c.each(lambda heap: heap.allocate(10, F32))
        tensors[1] = None
        for _ in range(2):  # before and after the other rank knows
            assert [(s.pending, s.allocated, s.num_blocks) for s in c.each(lambda heap: heap.stats())] == [
                (0, 256, 1),
                (256, 0, 0),
            ]
            c.each(lambda heap: heap.barrier_agreement())


def test_a_view_keeps_its_block() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        row = heap.allocate(100, F32).view(10, 10)[2]
        heap.barrier_agreement()
        assert blocks(heap) == [0]
        assert heap.offset_of(row) == 80


def test_storages_may_be_released_on_another_thread() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        held = [heap.allocate(10, F32) for _ in range(20)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        heap.barrier_agreement()
        assert blocks(heap) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_cycles_are_collected_before_giving_up(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # in one process a collection returns at once while another thread collects; ranks are processes
    lock, collect = threading.Lock(), gc.collect

    def collect_alone() -> int:
        with lock:
            return collect()

    monkeypatch.setattr(gc, "collect", collect_alone)
    with Cluster(world_size, 1 << 12) as c:
        gc.disable()
        try:

            def leak(heap: SymmetricHeap) -> None:
                cycle: list[object] = [heap.allocate(1024, F32)]
                cycle.append(cycle)

            c.each(leak)
            assert [t.numel() for t in c.each(lambda heap: heap.allocate(1024, F32))] == [1024] * world_size
        finally:
            gc.enable()


# -- exhaustion -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [1, 2])
def test_exhaustion_says_what_there_is_and_leaves_the_heap_usable(world_size: int) -> None:
    with Cluster(world_size, 1 << 12) as c:
        held = c.each(lambda heap: [heap.allocate(256, torch.uint8) for _ in range(16)])
        for rank in range(world_size):
            held[rank] = held[rank][::2] + held[rank][1::2]
        c.each(lambda heap: [heap.free(t) for t in held[heap.rank][:8]])
        for error in c.attempt(lambda heap: heap.allocate(257, torch.uint8)):
            assert type(error) is HeapExhaustedError
            assert isinstance(error, MemoryError)
            assert (error.requested_bytes, error.free_bytes, error.largest_free_bytes) == (512, 2048, 256)
            assert "allocate(257, uint8) needs 512 bytes" in str(error)
        assert len(c.each(lambda heap: [heap.allocate(256, torch.uint8) for _ in range(8)])[0]) == 8
        c.each(lambda heap: heap.barrier_agreement())


def test_what_cannot_fit_at_all_fails_without_asking_the_others() -> None:
    with Cluster(2, 1 << 12) as c:
        before = c.num_exchanges
        assert {type(e) for e in c.attempt(lambda heap: heap.allocate(4097, torch.uint8))} == {HeapExhaustedError}
        assert c.num_exchanges == before


def test_pressure_reclaims_what_was_freed_and_synchronises_first() -> None:
    waits: list[int] = []

    class Streams(HostStreams):
        def synchronize(self, stream: object = None) -> None:
            waits.append(1)

    with Cluster(2, 1 << 12, options_of=lambda rank: {"streams": Streams()}) as c:
        tensors = c.each(lambda heap: heap.allocate(4096, torch.uint8))
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        assert not waits
        again = c.each(lambda heap: heap.allocate(4096, torch.uint8))
        assert len(waits) == 2
        assert [h.offset_of(t) for h, t in zip(c.heaps, again, strict=True)] == [0, 0]


def test_exhaustion_mentions_what_only_some_ranks_dropped() -> None:
    with Cluster(2, 1 << 12) as c:
        tensors = c.each(lambda heap: heap.allocate(4096, torch.uint8))
        tensors[1] = None
        for error in c.attempt(lambda heap: heap.allocate(1, F32)):
            assert "4096 bytes have been dropped by some ranks but not by all" in str(error)


# -- addresses --------------------------------------------------------------------------------------------------------
def test_translate() -> None:
    with Cluster(2) as c:
        heap, (a, b) = c.heaps[0], (c.allocators[0].base_ptr, c.allocators[1].base_ptr)
        assert heap.translate(a + 17, 0, 1) == b + 17
        assert heap.translate(b, 1, 0) == a
        assert heap.translate(a + heap.nbytes - 1, 0, 0) == a + heap.nbytes - 1
        for ptr in (a - 1, a + heap.nbytes, 0):
            with pytest.raises(NotOnHeapError, match="does not lie in rank 0's heap"):
                heap.translate(ptr, 0, 1)
        for ranks in ((0, 2), (2, 0), (-1, 0)):
            with pytest.raises(ValueError, match="no rank"):
                heap.translate(a, *ranks)


def test_symmetric_means_wholly_on_the_own_heap() -> None:
    with Cluster(2) as c:
        mine, theirs = c.each(lambda heap: heap.allocate(16, F32))
        heap = c.heaps[0]
        assert heap.is_symmetric(mine)
        assert heap.on_symmetric_heap(mine[3:5])
        assert not heap.is_symmetric(theirs), "a peer's memory is not this rank's heap"
        assert not heap.is_symmetric(torch.ones(3))
        assert not heap.is_symmetric(torch.eye(2).to_sparse())
        assert not heap.is_symmetric(torch.empty(3, device="meta"))
        assert heap.is_symmetric(torch.frombuffer(memoryview(c.allocators[0]._map), dtype=torch.uint8))


def test_a_tensor_that_reaches_over_the_end_is_not_symmetric() -> None:
    with Cluster(1, (1 << 16) - 1) as c:  # the heap ends one byte earlier than the memory
        (heap,) = c.heaps
        whole = torch.frombuffer(memoryview(c.allocators[0]._map), dtype=torch.uint8)
        assert not heap.is_symmetric(whole)
        assert heap.is_symmetric(whole[:-1])
        assert not heap.is_symmetric(whole[-1:])
        assert not heap.is_symmetric(torch.as_strided(whole, (2, 2), (heap.nbytes - 1, 1)))
        assert heap.is_symmetric(torch.as_strided(whole, (2, 2), (heap.nbytes - 2, 1)))
        with pytest.raises(NotOnHeapError, match=r"all_reduce: the input: the tensor of shape .*ctx\.as_symmetric"):
            heap.offset_of(whole, "all_reduce: the input")


def test_offsets() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        _first, t = heap.allocate(1, F32), heap.allocate(100, F32)
        assert heap.offset_of(t) == 256
        assert heap.offset_of(t[10:]) == heap.offset_of(t[10:], "x") == 296
        with pytest.raises(NotOnHeapError):
            heap.offset_of(torch.ones(1))


# -- description and end ----------------------------------------------------------------------------------------------
def test_live_blocks_and_version() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        a, b = heap.allocate(10, F32), heap.allocate(3, torch.int8)
        assert heap.live_blocks() == (Block(0, 40, "allocate(10, float32)"), Block(256, 3, "allocate(3, int8)"))
        version = heap.version
        assert heap.live_blocks() is heap.live_blocks()
        heap.free(a)
        assert heap.version != version
        assert blocks(heap) == [256]
        del b
        version = heap.version
        heap.barrier_agreement()
        assert heap.version != version
        assert blocks(heap) == []


def test_stats() -> None:
    with Cluster(1, 1 << 12) as c:
        (heap,) = c.heaps
        held = [heap.allocate(256, torch.uint8) for _ in range(8)]
        heap.free(held[1])
        s = heap.stats()
        assert (s.reserved, s.committed, s.allocated, s.pending, s.free) == (4096, 4096, 1792, 0, 2304)
        assert (s.largest_free, s.peak, s.num_blocks) == (2048, 2048, 7)
        assert s.fragmentation == pytest.approx(1 - 2048 / 2304)
        _rest = [heap.allocate(2048, torch.uint8), heap.allocate(256, torch.uint8)]
        assert heap.stats().fragmentation == 0


def test_close() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        t = heap.allocate(10, F32).fill_(3)
        heap.close()
        heap.close()
        assert c.allocators[0].closed
        calls = [
            lambda: heap.allocate(1, F32), lambda: heap.free(t), lambda: heap.barrier_agreement(), lambda: heap.stats(),
            lambda: heap.is_symmetric(t), lambda: heap.translate(0, 0, 0), lambda: heap.as_symmetric(t),
            lambda: heap.scope(), lambda: heap.refresh_peer_access(), lambda: heap.allocate_symmetric(1),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(HeapClosedError, match="closed before this call"):
                call()
        assert t.sum() == 30
        with pytest.raises(HeapError, match="opened once"):
            heap.open()


def test_a_heap_must_be_opened() -> None:
    with Cluster(1) as c:
        heap = SymmetricHeap(c.allocators[0], c.worlds[0])
        with pytest.raises(HeapClosedError, match="not open yet"):
            heap.allocate(1, F32)


def test_check_peers() -> None:
    with Cluster(2) as c:
        c.heaps[0].check_peers()
        c.worlds[0].lost = [1]
        with pytest.raises(PeerLostError):
            c.heaps[0].check_peers()
