"""Scopes: what they free, what they keep, and how they nest."""

import pytest
import torch
from tables import table

from iris_core.errors import HeapError, HeapExhaustedError

from .fakes import Cluster


def offsets(heap):
    return [block.offset_bytes for block in heap.live_blocks()]


def test_nested_scopes_free_what_was_not_kept(heap):
    outside = heap.allocate(1, torch.uint8)
    with heap.scope() as outer:
        with heap.scope() as inner:
            a, b = inner.keep(heap.allocate(1, torch.uint8)), outer.keep(heap.allocate(1, torch.uint8))
            freed, dropped, _gone = (heap.allocate(1, torch.uint8) for _ in range(3))
            heap.free(freed)
            del dropped
            assert inner.keep(outside) is outside
            with pytest.raises(HeapError, match="open already"):
                inner.__enter__()
        assert offsets(heap) == [0, 256, 512]
        with pytest.raises(HeapError, match="not open"):
            inner.keep(a)
    assert offsets(heap) == [0, 512]
    assert heap.offset_of(b) == 512
    with pytest.raises(HeapError, match="freed before"):
        heap.free(a)


@table("world_size", [1, 2])
def test_a_scope_frees_when_an_error_passes(world_size):
    def body(heap):
        with heap.scope():
            heap.allocate(1, torch.uint8)
            raise KeyError("mine")

    with Cluster(world_size) as c:
        c.refused(KeyError, "mine", body)
        assert c.blocks() == [[]] * world_size
        c.barrier()
        assert c.stats("free") == [c.heap.nbytes] * world_size


def test_scopes_left_open_inside_end_with_the_outer_one(heap):
    with heap.scope():
        inner = heap.scope().__enter__()
        _t = heap.allocate(1, torch.uint8)
    assert offsets(heap) == []
    inner.__exit__(None, None, None)
    with heap.scope():
        t = heap.allocate(1, torch.uint8)
        heap.close()  # and then the scope ends quietly
    assert t.numel() == 1


def test_a_scope_takes_dropped_blocks_on_all_ranks_whoever_dropped_them():
    with Cluster(2) as c:

        def body(heap):
            with heap.scope():
                held = heap.allocate(10, torch.uint8)
                if heap.rank == 1:
                    del held
                heap.barrier_agreement()  # one vote of two
            heap.barrier_agreement()

        c.each(body)
        c.each(body)
        assert c.stats("free") == [c.heap.nbytes] * 2
        _everything = c.allocate(c.heap.nbytes)
        text = c.refused(HeapExhaustedError, "", lambda heap: heap.allocate(1, torch.uint8))
        assert "dropped by some ranks" not in text, "the vote went with the block"
