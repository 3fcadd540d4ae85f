"""Agreement of the ranks: what one rank does differently is found and named on all; what all agree on is reused."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import table

from iris_core.errors import HeapError, HeapExhaustedError, SymmetryError
from iris_core.heap.blocks import HISTORY_LENGTH
from iris_core.types import Block

from .fakes import Cluster

F32 = torch.float32


def keep(heap, n, dtype=F32):
    """Allocate what must not be dropped as long as there is the heap."""
    t = heap.allocate(n, dtype)
    heap.kept = [*getattr(heap, "kept", ()), t]
    return t


def kept(heap, odd):
    with heap.scope() as scope:
        t = keep(heap, 4)
        if not odd:
            scope.keep(t)


@table(("n", "step", "call", "mine", "others"), [  # a step gets the heap, and whether this is rank 1
    (4, lambda heap, odd: odd and keep(heap, 7, torch.int8), 2, "allocate(7, int8), 7 bytes", "barrier()"),
    (4, lambda heap, odd: (keep(heap, 4 + odd), keep(heap, 9)), 2,
     "allocate(5, float32), 20 bytes", "allocate(4, float32), 16 bytes"),
    (0, lambda heap, odd: heap.free((keep(heap, 4), keep(heap, 4))[odd]), 3,
     "free of allocate(4, float32) at offset 256", "free of allocate(4, float32) at offset 0"),
    (1 << 14, lambda heap, odd: odd and keep(heap, 3), 2, "allocate(3, float32), 12 bytes", "barrier()"),
    (1 << 14, lambda heap, odd: keep(heap, 1 + odd), 2,
     "allocate(2, float32), 8 bytes", "allocate(1, float32), 4 bytes"),
    (4, lambda heap, odd: odd and heap.refresh_peer_access(), 2, "refresh_peer_access()", "barrier()"),
    (0, kept, 2, "free of allocate(4, float32) at offset 0", "barrier()"),
])  # fmt: skip
def test_what_one_rank_does_differently_is_named_on_all(n, step, call, mine, others):
    def body(heap):
        if n:
            keep(heap, n)
        step(heap, heap.rank == 1)
        heap.barrier_agreement()

    with Cluster(3) as c:
        text = c.refused(SymmetryError, "heap.diverged", body, call=call)
        for part in (f"rank 1: {mine}", f"ranks 0, 2: {others}", "if rank =="):
            assert part in text


@table("ahead", [1, HISTORY_LENGTH + 50])
def test_a_difference_that_is_older_than_the_history(ahead):
    def body(heap):
        if heap.rank == 0:
            for _ in range(ahead):
                heap.free(heap.allocate(4, F32))
        for _ in range(HISTORY_LENGTH):
            keep(heap, 4)
        heap.barrier_agreement()

    with Cluster(2, 1 << 20) as c:
        c.refused(SymmetryError, "heap.history", body, count=HISTORY_LENGTH)


def test_the_heap_can_be_used_after_a_divergence_was_reported_and_drops_are_not_lost():
    with Cluster(2) as c:
        tensors = c.allocate(4)
        c.heap.free(tensors[0])
        c.refused(SymmetryError, "names", lambda heap: heap.barrier_agreement(), name="rank 0: free")
        assert c.heap.offset_of(c.heap.allocate(1, F32)) == 256, "a free on one rank is not reused"
        c.heaps[1].free(tensors[1])  # the other rank catches up
        c.heaps[1].allocate(1, F32)
        c.barrier()
        tensors = c.allocate(4)
        tensors.clear()
        keep(c.heap, 4)
        c.refused(SymmetryError, "names", lambda heap: heap.barrier_agreement(), name="rank 0: allocate")
        keep(c.heaps[1], 4)
        c.barrier()
        assert c.blocks() == [[256], [256]]


NBYTES = 1 << 14
DTYPES = st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 1500), DTYPES, st.sampled_from([256, 512, 2048])),
        st.tuples(st.just("free"), st.integers(0, 30)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.integers(1, 7)),
        st.tuples(st.just("barrier")),
    ),
    max_size=30,
)


class Model:
    """What must be true of the heaps, worked out without them."""

    def __init__(self, cluster):
        self.cluster, self.world_size = cluster, len(cluster.heaps)
        self.live = {}  # offset -> tensor by rank, None where dropped
        self.sizes = {}  # offset -> rounded size, of everything that must not be handed out
        self.blocks, self.values = {}, {}
        self.freed = []  # their storages go later, when other blocks may be in their place
        self.peak, self.seen = 0, ((), -1)

    def agreed(self):
        """All ranks have agreed: what was freed or dropped everywhere is gone."""
        for offset in [o for o, tensors in self.live.items() if not any(t is not None for t in tensors)]:
            del self.live[offset]
        self.sizes = {offset: size for offset, size in self.sizes.items() if offset in self.live}

    def allocate(self, n, dtype, alignment):
        before, nbytes = self.cluster.num_exchanges, n * dtype.itemsize
        calm = self.sizes.keys() == self.live.keys() and not any(t is None for row in self.live.values() for t in row)
        results = self.cluster.attempt(lambda heap: heap.allocate(n, dtype, alignment=alignment))
        if self.world_size == 1 or self.cluster.num_exchanges != before:
            self.agreed()
        size, label = max(256, -(-nbytes // 256) * 256), f"allocate({n}, {str(dtype)[6:]})"
        if isinstance(results[0], Exception):
            assert [type(e) for e in results] == [HeapExhaustedError] * self.world_size
            assert all(label in str(e) and e.requested_bytes == size for e in results)
            assert not self._holes(size, alignment), "there was room"
            if size <= NBYTES:
                assert {(e.free_bytes, e.largest_free_bytes) for e in results} == {self._free()}
            else:
                assert self.cluster.num_exchanges == before, "the others need not be asked"
            return
        offsets = {heap.offset_of(t) for heap, t in zip(self.cluster.heaps, results, strict=True)}
        assert len(offsets) == 1, "offsets differ between ranks"
        offset = offsets.pop()
        assert offset in self._holes(size, alignment), "handed out although in use, or not aligned"
        assert not calm or offset + size > NBYTES // 2 or self.cluster.num_exchanges == before, "it communicates"
        self.live[offset], self.sizes[offset] = list(results), size
        self.blocks[offset], self.values[offset] = Block(offset, nbytes, label), len(self.values) % 200
        self.peak = max(self.peak, sum(self.sizes.values()))
        for rank, t in enumerate(results):
            assert (t.shape, t.dtype, t._is_view()) == ((n,), dtype, False)
            assert t.untyped_storage().nbytes() == (nbytes or 256)
            t.fill_(self.values[offset] + rank)

    def free(self, index):
        held = [offset for offset, tensors in sorted(self.live.items()) if all(t is not None for t in tensors)]
        if not held:
            return
        offset = held[index % len(held)]
        tensors = self.live.pop(offset)
        self.freed.append((offset, tensors))
        self.cluster.each(lambda heap: heap.free(tensors[heap.rank][index % 2 :]))  # or a view in its place
        if self.world_size == 1:
            del self.sizes[offset]

    def drop(self, index, ranks):
        for offset, tensors in self.freed:
            free = lambda heap, tensors=tensors: heap.free(tensors[heap.rank])
            self.cluster.refused(HeapError, "heap.freed", free, offset=offset)
        self.freed.clear()
        if self.live:
            tensors = self.live[sorted(self.live)[index % len(self.live)]]
            tensors[:] = [None if ranks >> rank & 1 else t for rank, t in enumerate(tensors)]

    def barrier(self):
        self.check_pending()
        self.cluster.each(lambda heap: heap.barrier_agreement())
        self.agreed()
        self.check_pending()
        free, largest = self._free()
        for heap in self.cluster.heaps:
            assert heap.live_blocks() == tuple(self.blocks[offset] for offset in sorted(self.live))
            assert heap.live_blocks() is heap.live_blocks()
            stats = heap.stats()
            assert stats.allocated + stats.pending == sum(self.sizes.values()) == NBYTES - stats.free
            assert (stats.free, stats.largest_free, stats.peak) == (free, largest, self.peak)
            assert (stats.reserved, stats.committed) == (NBYTES, NBYTES)
            assert stats.fragmentation == pytest.approx(1 - largest / free if free else 0)
        self.seen, before = (heap.live_blocks(), heap.version), self.seen
        assert (self.seen[0] == before[0]) or self.seen[1] != before[1]

    def check_pending(self):
        """Expect what one rank alone has dropped to be pending in its own figures, and in no others."""
        for rank, heap in enumerate(self.cluster.heaps):
            gone = [offset for offset, tensors in self.live.items() if tensors[rank] is None]
            freed = self.sizes.keys() - self.live.keys()
            assert heap.stats().pending == sum(self.sizes[offset] for offset in {*gone, *freed})
            assert heap.stats().num_blocks == len(self.live) - len(gone)

    def check(self):
        for offset, tensors in self.live.items():
            for rank, t in enumerate(tensors):
                assert t is None or torch.all(t == self.values[offset] + rank), "a live block was overwritten"

    def _free(self):
        """How many bytes are free, and the most of them in a row."""
        ends = [0, *(offset + size for offset, size in sorted(self.sizes.items()))]
        holes = [start - end for end, start in zip(ends, [*sorted(self.sizes), NBYTES], strict=True)]
        return sum(holes), max(holes)

    def _holes(self, size, alignment):
        """Offsets at which a block of this size would touch nothing that is in use."""
        return {
            offset
            for offset in range(0, NBYTES - size + 1, max(alignment, 256))
            if all(offset + size <= used or used + n <= offset for used, n in self.sizes.items())
        }


FULL, EVERY_SECOND = [("allocate", 1024, torch.uint8, 256)] * 16, [("free", index) for index in range(8)]


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 3), STEPS)
@example(1, [*FULL, *EVERY_SECOND, ("allocate", 1025, torch.uint8, 256)])
@example(2, [*FULL, *EVERY_SECOND, ("allocate", 1025, torch.uint8, 256)])
def test_any_sequence_of_calls(world_size, steps):
    with Cluster(world_size, NBYTES) as cluster:
        model = Model(cluster)
        for name, *args in [*steps, ("barrier",)]:
            getattr(model, name)(*args)
            model.check()
