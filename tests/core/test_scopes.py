"""Scopes: what they free, what they keep, and how they nest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from iris_core.errors import HeapError, HeapExhaustedError

from .fakes import Cluster

if TYPE_CHECKING:
    from iris_core.heap.heap import SymmetricHeap

F32 = torch.float32


def blocks(heap: SymmetricHeap) -> list[int]:
    """Offsets of the live blocks."""
    return [block.offset_bytes for block in heap.live_blocks()]


# -- scopes -----------------------------------------------------------------------------------------------------------
def test_a_scope_frees_what_was_not_kept() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        outside = heap.allocate(1, F32)
        with heap.scope() as scope:
            kept = scope.keep(heap.allocate(1, F32))
            freed, dropped = heap.allocate(1, F32), heap.allocate(1, F32)
            heap.free(freed)
            del dropped
            assert scope.keep(outside) is outside
        assert blocks(heap) == [0, 256]
        with pytest.raises(HeapError, match="not open"):
            scope.keep(kept)


def test_nested_scopes() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        with heap.scope() as outer:
            with heap.scope() as inner:
                a = inner.keep(heap.allocate(1, F32))
                b = outer.keep(heap.allocate(1, F32))
                _gone = heap.allocate(1, F32)
            assert blocks(heap) == [0, 256]
        assert blocks(heap) == [256]
        assert heap.offset_of(b) == 256
        with pytest.raises(HeapError, match="freed before"):
            heap.free(a)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scope_frees_when_an_error_passes(world_size: int) -> None:
    def body(heap: SymmetricHeap) -> None:
        with heap.scope():
            heap.allocate(1, F32)
            raise KeyError("mine")

    with Cluster(world_size) as c:
        assert [type(e) for e in c.attempt(body)] == [KeyError] * world_size
        assert blocks(c.heaps[0]) == []
        c.each(lambda heap: heap.barrier_agreement())
        assert c.heaps[0].stats().free == c.heaps[0].nbytes


def test_a_scope_is_entered_once_and_ends_quietly_after_close() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        with heap.scope() as scope:
            with pytest.raises(HeapError, match="open already"):
                scope.__enter__()
            t = heap.allocate(1, F32)
            heap.close()
        assert t.numel() == 1


def test_scopes_left_open_inside_end_with_the_outer_one() -> None:
    with Cluster(1) as c:
        (heap,) = c.heaps
        with heap.scope():
            inner = heap.scope().__enter__()
            _t = heap.allocate(1, F32)
        assert blocks(heap) == []
        inner.__exit__(None, None, None)
        _u = heap.allocate(1, F32)
        assert blocks(heap) == [0]


def test_a_scope_takes_dropped_blocks_on_all_ranks_whoever_dropped_them() -> None:
    with Cluster(2) as c:

        def body(heap: SymmetricHeap) -> None:
            with heap.scope():
                held = heap.allocate(10, F32)
                if heap.rank == 1:
                    del held
                heap.barrier_agreement()  # one vote of two
            heap.barrier_agreement()

        c.each(body)
        c.each(body)
        assert all(heap.stats().free == heap.nbytes for heap in c.heaps)
        _everything = c.each(lambda heap: heap.allocate(heap.nbytes, torch.uint8))
        for error in c.attempt(lambda heap: heap.allocate(1, F32)):
            assert type(error) is HeapExhaustedError
            assert "dropped by some ranks" not in str(error), "the vote went with the block"
