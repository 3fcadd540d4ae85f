"""The symmetric heap on threads: what is handed out, and given back; sets of ranges."""

import gc
import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import raises, table

from iris_core.errors import HeapClosedError, HeapError, NotOnHeapError, UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.offsets import RangeSet

from .fakes import Cluster

F32, U8 = torch.float32, torch.uint8
RANGE = st.tuples(st.integers(0, 40), st.integers(0, 40))


def test_what_cannot_be_allocated(heap):
    for kind, key, n, alignment in (
        (UnsupportedError, "any", 1, 1 << 40), (ValueError, "heap.alignment", 1, 300),
        (ValueError, "heap.elements", -1, 1),
    ):  # fmt: skip
        with raises(kind, key):
            heap.allocate(n, F32, alignment=alignment)
    assert heap.live_blocks() == ()


@table("name", ["commit", "tensor"])
def test_a_failing_allocator_leaves_the_heap_unchanged(name):
    with Cluster(1) as c:
        keep = c.heap.allocate(10, F32)
        before = c.heap.stats(), c.heap.version
        c.allocators[0].fail[name] = OSError("no memory")
        with pytest.raises(OSError, match="no memory"):
            c.heap.allocate(100, F32)
        c.allocators[0].fail.clear()
        for figure in ("allocated", "free", "largest_free", "num_blocks"):
            assert c.stats(figure) == [getattr(before[0], figure)]
        assert c.heap.version == before[1]
        assert c.offsets([c.heap.allocate(100, F32)]) == [256]
        assert c.heap.is_symmetric(keep)


def test_free_of_tensors_that_are_not_the_heaps_own(heap):
    t = heap.allocate(10, F32)
    alias = torch.from_numpy(t.numpy())
    assert heap.is_symmetric(alias)
    with raises(HeapError, "heap.alias"):
        heap.free(alias)
    with raises(NotOnHeapError, name="free: the tensor"):
        heap.free(torch.zeros(10))
    assert len(heap.live_blocks()) == 1


@table("world_size", [1, 2])
def test_cycles_are_collected_before_giving_up(world_size, monkeypatch):
    # in one process a collection returns at once while another thread collects; ranks are processes
    lock, collect = threading.Lock(), gc.collect

    def collect_alone():
        with lock:
            return collect()

    def leak(heap):
        cycle = [heap.allocate(1024, F32)]
        cycle.append(cycle)

    monkeypatch.setattr(gc, "collect", collect_alone)
    with Cluster(world_size, 1 << 12) as c:
        gc.disable()
        try:
            c.each(leak)
            assert [t.numel() for t in c.allocate(1024, F32)] == [1024] * world_size
        finally:
            gc.enable()


def test_translate():
    with Cluster(2) as c:
        heap, (a, b) = c.heap, (c.allocators[0].base_ptr, c.allocators[1].base_ptr)
        last = a + heap.nbytes - 1
        found = [heap.translate(*each) for each in ((a + 17, 0, 1), (b, 1, 0), (last, 0, 0))]
        assert found == [b + 17, a, last]
        for ptr in (a - 1, a + heap.nbytes, 0):
            with pytest.raises(NotOnHeapError):
                heap.translate(ptr, 0, 1)
        for *ranks, wrong in ((0, 2, 2), (2, 0, 2), (-1, 0, -1)):
            with raises(ValueError, "no rank", rank=wrong, size=2):
                heap.translate(a, *ranks)


def test_symmetric_means_wholly_on_the_own_heap():
    with Cluster(2, (1 << 16) - 1) as c:  # the heap ends one byte earlier than the memory
        heap, (mine, theirs) = c.heap, c.allocate(16)
        assert heap.is_symmetric(mine)
        assert heap.on_symmetric_heap(mine[3:5])
        whole = torch.frombuffer(memoryview(c.allocators[0]._map), dtype=U8)
        for t in (whole[:-1], torch.as_strided(whole, (2, 2), (heap.nbytes - 2, 1))):
            assert heap.is_symmetric(t)
        over = torch.as_strided(whole, (2, 2), (heap.nbytes - 1, 1))
        others = (torch.ones(3), torch.eye(2).to_sparse(), torch.empty(3, device="meta"))
        for t in (whole, whole[-1:], over, theirs, *others):  # a peer's memory is not this rank's heap
            assert not heap.is_symmetric(t)
        with raises(NotOnHeapError, "heap.off heap"):
            heap.offset_of(whole, "all_reduce: the input")
        t = heap.allocate(100, F32)
        assert (heap.offset_of(t), heap.offset_of(t[10:]), heap.offset_of(t[10:], "x")) == (256, 296, 296)


def offsets(heap):
    return [block.offset_bytes for block in heap.live_blocks()]


def test_nested_scopes_free_what_was_not_kept(heap):
    outside = heap.allocate(1, U8)
    with pytest.raises(KeyError, match="mine"), heap.scope():  # noqa: PT012
        heap.allocate(1, U8)
        raise KeyError("mine")
    assert offsets(heap) == [0]
    with heap.scope() as outer:
        with heap.scope() as inner:
            a, b = inner.keep(heap.allocate(1, U8)), outer.keep(heap.allocate(1, U8))
            freed, dropped, _gone = (heap.allocate(1, U8) for _ in range(3))
            heap.free(freed)
            del dropped
            assert inner.keep(outside) is outside
            with pytest.raises(HeapError):
                inner.__enter__()
        assert offsets(heap) == [0, 256, 512]
        with pytest.raises(HeapError):
            inner.keep(a)
    assert offsets(heap) == [0, 512]
    assert heap.offset_of(b) == 512
    with raises(HeapError, "heap.freed", offset=256):
        heap.free(a)


def test_scopes_left_open_inside_end_with_the_outer_one(heap):
    with heap.scope():
        inner = heap.scope().__enter__()
        _t = heap.allocate(1, U8)
    assert offsets(heap) == []
    inner.__exit__(None, None, None)
    with heap.scope():
        t = heap.allocate(1, U8)
        heap.close()  # and then the scope ends quietly
    assert t.numel() == 1


def test_a_heap_is_opened_once():
    with Cluster(1) as c:
        with pytest.raises(HeapClosedError):
            SymmetricHeap(c.allocators[0], c.worlds[0]).allocate(1, F32)
        c.heap.close()
        c.heap.close()
        assert c.allocators[0].closed
        with raises(HeapError, "heap.once"):
            c.heap.open()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), RANGE), max_size=30), RANGE)
def test_a_range_set_is_a_set(steps, query):
    ranges, plain = RangeSet(), set()
    for name, (start, end) in steps:
        getattr(ranges, name)(start, end)
        plain = plain | set(range(start, end)) if name == "add" else plain - set(range(start, end))
    pieces = list(ranges)
    assert {i for start, end in pieces for i in range(start, end)} == plain
    assert all(start < end for start, end in pieces)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))
    assert bool(ranges) == bool(plain)
    wanted = set(range(*query))
    assert {i for start, end in ranges.intersection(*query) for i in range(start, end)} == plain & wanted
    assert ranges.covers(*query) == (wanted <= plain)
