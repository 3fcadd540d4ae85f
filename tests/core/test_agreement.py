"""Agreement of the ranks: what one rank does differently is found and named on all; what all agree on is reused."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_core.errors import HeapExhaustedError, SymmetryError
from iris_core.heap.blocks import HISTORY_LENGTH, History, Op

from .fakes import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.heap.heap import SymmetricHeap

F32 = torch.float32
KEPT: list[Any] = []  # tensors that must not be dropped while a test runs


@pytest.fixture(autouse=True)
def _keep_nothing() -> Any:
    yield
    KEPT.clear()


def keep(heap: SymmetricHeap, n: int, dtype: torch.dtype = F32) -> torch.Tensor:
    KEPT.append(heap.allocate(n, dtype))
    return KEPT[-1]


def diverge(c: Cluster, function: Callable[[SymmetricHeap], Any]) -> str:
    """Run a function that must make every rank raise the same SymmetryError; return the message."""
    errors = c.attempt(function)
    assert [type(e) for e in errors] == [SymmetryError] * len(c.heaps), errors
    assert len({str(e) for e in errors}) == 1
    return str(errors[0])


# -- divergence -------------------------------------------------------------------------------------------------------
def test_an_allocation_on_one_rank_only() -> None:
    def body(heap: SymmetricHeap) -> None:
        keep(heap, 4)
        if heap.rank == 1:
            keep(heap, 7, torch.int8)
        heap.barrier_agreement()

    with Cluster(3) as c:
        message = diverge(c, body)
        assert "diverged at call 2" in message
        assert "rank 1: allocate(7, int8), 7 bytes aligned to 256, at offset 256" in message
        assert "ranks 0, 2: barrier()" in message
        assert "if rank ==" in message


def test_different_sizes_are_found_at_the_call_that_differs() -> None:
    def body(heap: SymmetricHeap) -> None:
        keep(heap, 4)
        keep(heap, 4 + (heap.rank == 0))
        keep(heap, 9)
        heap.barrier_agreement()

    with Cluster(2) as c:
        message = diverge(c, body)
        assert "diverged at call 2" in message
        assert "rank 0: allocate(5, float32), 20 bytes aligned to 256, at offset 256" in message
        assert "rank 1: allocate(4, float32), 16 bytes aligned to 256, at offset 256" in message


def test_different_frees() -> None:
    def body(heap: SymmetricHeap) -> None:
        pair = keep(heap, 4), keep(heap, 5)
        heap.free(pair[heap.rank])
        heap.barrier_agreement()

    with Cluster(2) as c:
        message = diverge(c, body)
        assert "diverged at call 3" in message
        assert "rank 0: free of allocate(4, float32) at offset 0" in message
        assert "rank 1: free of allocate(5, float32) at offset 256" in message


def test_a_free_on_one_rank_only_is_not_reused_by_anyone() -> None:
    with Cluster(2) as c:
        tensors = c.each(lambda heap: heap.allocate(4, F32))
        c.heaps[0].free(tensors[0])
        message = diverge(c, lambda heap: heap.barrier_agreement())
        assert "rank 0: free of allocate(4, float32) at offset 0" in message
        assert c.heaps[0].offset_of(keep(c.heaps[0], 1)) == 256


def test_a_barrier_here_and_an_allocation_without_room_there() -> None:
    def body(heap: SymmetricHeap) -> None:
        keep(heap, 1024)
        if heap.rank == 0:
            heap.barrier_agreement()
        else:
            keep(heap, 3)

    with Cluster(2, 1 << 12) as c:
        message = diverge(c, body)
        assert "diverged at call 2" in message
        assert "rank 0: barrier()" in message
        assert "rank 1: allocate(3, float32), 12 bytes aligned to 256, which finds no free block" in message


def test_different_requests_without_room() -> None:
    def body(heap: SymmetricHeap) -> None:
        keep(heap, 1024)
        keep(heap, 1 + heap.rank)

    with Cluster(2, 1 << 12) as c:
        assert "rank 1: allocate(2, float32), 8 bytes" in diverge(c, body)


def test_a_refresh_here_and_a_barrier_there() -> None:
    with Cluster(2) as c:
        message = diverge(c, lambda h: h.refresh_peer_access() if h.rank else h.barrier_agreement())
        assert "rank 0: barrier()" in message
        assert "rank 1: refresh_peer_access()" in message


def test_a_kept_tensor_on_one_rank_only() -> None:
    def body(heap: SymmetricHeap) -> None:
        with heap.scope() as scope:
            t = keep(heap, 4)
            if heap.rank:
                scope.keep(t)
        heap.barrier_agreement()

    with Cluster(2) as c:
        assert "rank 0: free of allocate(4, float32) at offset 0" in diverge(c, body)


@pytest.mark.parametrize("ahead", [1, HISTORY_LENGTH + 50])
def test_a_difference_that_is_older_than_the_history(ahead: int) -> None:
    def body(heap: SymmetricHeap) -> None:
        if heap.rank == 0:
            for _ in range(ahead):
                heap.free(heap.allocate(4, F32))
        for _ in range(HISTORY_LENGTH):
            keep(heap, 4)
        heap.barrier_agreement()

    with Cluster(2, 1 << 20) as c:
        message = diverge(c, body)
        assert f"only the last {HISTORY_LENGTH} calls are kept" in message


def test_the_heap_can_be_used_after_a_divergence_was_reported() -> None:
    with Cluster(2) as c:
        keep(c.heaps[0], 4)
        diverge(c, lambda heap: heap.barrier_agreement())
        keep(c.heaps[1], 4)  # the other rank catches up
        c.each(lambda heap: heap.barrier_agreement())


def test_drops_are_not_lost_when_an_agreement_fails() -> None:
    with Cluster(2) as c:
        tensors = c.each(lambda heap: heap.allocate(4, F32))
        tensors.clear()
        late = c.heaps[0].allocate(4, F32)
        diverge(c, lambda heap: heap.barrier_agreement())
        KEPT.extend([late, c.heaps[1].allocate(4, F32)])
        c.each(lambda heap: heap.barrier_agreement())
        assert [[b.offset_bytes for b in heap.live_blocks()] for heap in c.heaps] == [[256], [256]]


# -- the digest -------------------------------------------------------------------------------------------------------
CALLS = [(Op.ALLOCATE, 40, 256, 0), (Op.FREE, 40, 0, 0), (Op.IMPORT, 4096, 4096, 8192)]


def digest(calls: list[tuple[int, int, int, int]]) -> int:
    history = History()
    for call in calls:
        history.record(*call, label=("zeros", (4,), "float32"))
    return history.digest


@given(st.permutations(CALLS), st.integers(0, 2), st.integers(0, 3), st.integers(1, 1 << 40))
def test_the_digest_sees_order_and_every_field(calls: list[Any], which: int, field: int, change: int) -> None:
    changed = [list(call) for call in calls]
    changed[which][field] += change
    assert digest(changed) != digest(calls)  # type: ignore[arg-type]
    assert (digest(calls) == digest(CALLS)) == (calls == CALLS)
    assert digest(calls[:2]) != digest(calls)


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "from iris_core.heap.blocks import History\nh = History()\n"
        f"for call in {[tuple(map(int, call)) for call in CALLS]}: h.record(*call, label=('zeros', 'float32'))\n"
        "print(h.digest)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs == [f"{digest(CALLS)}\n"] * 2


# -- any sequence of calls --------------------------------------------------------------------------------------------
NBYTES = 1 << 14
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(0, 5000), st.sampled_from([256, 512, 2048])),
        st.tuples(st.just("free"), st.integers(0, 30)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.integers(1, 7)),
        st.tuples(st.just("barrier")),
    ),
    max_size=30,
)


class Model:
    """What must be true of the heaps, worked out without them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.world_size = len(cluster.heaps)
        self.live: dict[int, list[torch.Tensor | None]] = {}  # offset -> tensor by rank, None where dropped
        self.sizes: dict[int, int] = {}  # offset -> rounded size, of everything that must not be handed out
        self.values: dict[int, int] = {}

    def agreed(self) -> None:
        """All ranks have agreed: what was freed or dropped everywhere is gone."""
        for offset in [o for o, tensors in self.live.items() if not any(t is not None for t in tensors)]:
            del self.live[offset]
        self.sizes = {offset: size for offset, size in self.sizes.items() if offset in self.live}

    def allocate(self, nbytes: int, alignment: int) -> None:
        before = self.cluster.num_exchanges
        results = self.cluster.attempt(lambda heap: heap.allocate(nbytes, torch.uint8, alignment=alignment))
        if self.world_size == 1 or self.cluster.num_exchanges != before:
            self.agreed()
        size = max(256, -(-nbytes // 256) * 256)
        if isinstance(results[0], Exception):
            assert [type(e) for e in results] == [HeapExhaustedError] * self.world_size
            assert not self._holes(size, alignment), "there was room"
            return
        offsets = {heap.offset_of(t) for heap, t in zip(self.cluster.heaps, results, strict=True)}
        assert len(offsets) == 1, "offsets differ between ranks"
        offset = offsets.pop()
        assert offset in self._holes(size, alignment), "handed out although in use, or not aligned"
        self.live[offset], self.sizes[offset] = list(results), size
        self.values[offset] = len(self.values) % 200
        for rank, t in enumerate(results):
            t.fill_(self.values[offset] + rank)

    def free(self, index: int) -> None:
        held = [offset for offset, tensors in sorted(self.live.items()) if all(t is not None for t in tensors)]
        if not held:
            return
        offset = held[index % len(held)]
        tensors = self.live.pop(offset)
        self.cluster.each(lambda heap: heap.free(tensors[heap.rank]))
        if self.world_size == 1:
            del self.sizes[offset]

    def drop(self, index: int, ranks: int) -> None:
        if self.live:
            tensors = self.live[sorted(self.live)[index % len(self.live)]]
            for rank in range(self.world_size):
                if ranks >> rank & 1:
                    tensors[rank] = None

    def barrier(self) -> None:
        self.cluster.each(lambda heap: heap.barrier_agreement())
        self.agreed()
        for heap in self.cluster.heaps:
            assert [b.offset_bytes for b in heap.live_blocks()] == sorted(self.live)
            stats = heap.stats()
            assert stats.allocated + stats.pending == sum(self.sizes.values()) == NBYTES - stats.free

    def check(self) -> None:
        for offset, tensors in self.live.items():
            for rank, t in enumerate(tensors):
                if t is not None:
                    assert torch.all(t == self.values[offset] + rank), "somebody wrote over a live block"

    def _holes(self, size: int, alignment: int) -> set[int]:
        """Offsets at which a block of this size would touch nothing that is in use."""
        return {
            offset
            for offset in range(0, NBYTES - size + 1, max(alignment, 256))
            if all(offset + size <= used or used + n <= offset for used, n in self.sizes.items())
        }


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 3), STEPS)
def test_any_sequence_of_calls(world_size: int, steps: list[Any]) -> None:
    with Cluster(world_size, NBYTES) as cluster:
        model = Model(cluster)
        for name, *args in [*steps, ("barrier",)]:
            getattr(model, name)(*args)
            model.check()
