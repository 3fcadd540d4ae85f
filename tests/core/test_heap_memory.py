"""Memory that grows, is given back, is shared with peers, or is imported."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tables import table

from iris_core.errors import (
    DeviceError,
    HeapError,
    HeapExhaustedError,
    LayoutError,
    PeerAccessError,
    SymmetryError,
    UnsupportedError,
)
from iris_core.heap import regions
from iris_core.heap.streams import HostStreams
from iris_core.types import Capability, Segment

from .fakes import Cluster, Hub, ThreadWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.heap.heap import SymmetricHeap

F32 = torch.float32


def blocks(heap: SymmetricHeap) -> list[int]:
    """Offsets of the live blocks."""
    return [block.offset_bytes for block in heap.live_blocks()]


# -- memory that comes and goes ---------------------------------------------------------------------------------------
def test_growth_is_exchanged_once_per_granule() -> None:
    with Cluster(2, 1 << 16, Capability.GROWTH) as c:
        start = c.num_exchanges
        _a = c.each(lambda heap: heap.allocate(1, F32))
        grown = c.num_exchanges
        assert grown > start
        assert c.allocators[0].count("import_peer") == 2
        _b = c.each(lambda heap: heap.allocate(1, F32))
        assert c.num_exchanges == grown
        _c = c.each(lambda heap: heap.allocate(4096, torch.uint8))
        assert c.num_exchanges > grown
        assert c.heaps[0].heap_bases == tuple(a.base_ptr for a in c.allocators)


def test_growth_that_fails_on_one_rank_fails_on_all() -> None:
    with Cluster(2, 1 << 16, Capability.GROWTH) as c:
        c.allocators[1].fail["commit"] = OSError("device is full")
        here, there = c.attempt(lambda heap: heap.allocate(10, F32))
        assert type(here) is type(there) is HeapError
        assert str(here) == str(there) == "rank 1 could not get memory for allocate(10, float32): device is full"
        assert type(there.__cause__) is OSError
        c.allocators[1].fail.clear()
        tensors = c.each(lambda heap: heap.allocate(10, F32))
        assert [h.offset_of(t) for h, t in zip(c.heaps, tensors, strict=True)] == [0, 0]
        c.each(lambda heap: heap.barrier_agreement())


def test_growth_that_fails_on_one_rank_is_undone_on_the_others() -> None:
    with Cluster(3, 1 << 16, Capability.GROWTH, Capability.DECOMMIT) as c:
        _kept = c.each(lambda heap: heap.allocate(4096, torch.uint8))
        c.allocators[2].fail["commit"] = HeapExhaustedError(
            "rank 2: the device is full", requested_bytes=8192, free_bytes=10, largest_free_bytes=9
        )
        errors = c.attempt(lambda heap: heap.allocate(8192, torch.uint8))
        assert [type(e) for e in errors] == [HeapExhaustedError] * 3
        assert all("rank 2: the device is full" in str(e) for e in errors)
        assert [(e.requested_bytes, e.free_bytes, e.largest_free_bytes) for e in errors] == [(8192, 10, 9)] * 3
        assert [a.committed_bytes for a in c.allocators] == [4096] * 3


def test_exchanges_go_on_while_a_rank_has_more() -> None:
    with Cluster(2, 1 << 16, Capability.GROWTH) as c:
        _first = c.each(lambda heap: heap.allocate(1, F32))
        exchanged = [a.count("exchanged") for a in c.allocators]
        c.allocators[1].more = 2
        _second = c.each(lambda heap: heap.allocate(4096, torch.uint8))
        assert [a.count("exchanged") - n for a, n in zip(c.allocators, exchanged, strict=True)] == [3, 3]


def test_a_heap_that_cannot_be_exported_fails_everywhere() -> None:
    with Cluster(2) as c:
        c.allocators[0].fail["export"] = OSError("too many open files")
        c.allocators[0].generation += 1
        errors = c.attempt(lambda heap: heap.refresh_peer_access())
        assert [type(e) for e in errors] == [PeerAccessError] * 2
        assert {str(e) for e in errors} == {"rank 0 could not export its heap: too many open files"}


@table("provides", [(Capability.DECOMMIT,), (Capability.DECOMMIT, Capability.GROWTH)])
@table("world_size", [1, 2])
def test_memory_that_stays_free_is_given_back(world_size: int, provides: tuple[Capability, ...]) -> None:
    with Cluster(world_size, 1 << 16, *provides) as c:
        tensors = c.each(lambda heap: [heap.allocate(10000, torch.uint8) for _ in range(2)])
        assert c.heaps[0].stats().committed == 5 * 4096
        c.each(lambda heap: heap.free(tensors[heap.rank][0]))
        c.each(lambda heap: heap.barrier_agreement())
        assert c.allocators[0].count("decommit") == 0, "it may be wanted again"
        c.each(lambda heap: heap.barrier_agreement())
        assert [a.calls[-1] if len(provides) == 1 else None for a in c.allocators] == [
            ("decommit", 0, 8192) if len(provides) == 1 else None
        ] * world_size
        assert c.heaps[0].stats().committed == 3 * 4096  # the third granule is shared with the second tensor
        c.each(lambda heap: heap.barrier_agreement())
        assert c.allocators[0].count("decommit") == 1
        back = c.each(lambda heap: heap.allocate(10000, torch.uint8))
        assert c.heaps[0].offset_of(back[0]) == 0
        assert c.heaps[0].stats().committed == 5 * 4096


@pytest.mark.parametrize("provides", [(Capability.DECOMMIT,), (Capability.DECOMMIT, Capability.GROWTH)])
def test_memory_that_one_rank_cannot_give_back_is_told_everywhere(provides: tuple[Capability, ...]) -> None:
    with Cluster(3, 1 << 16, *provides) as c:
        tensors = c.each(lambda heap: heap.allocate(10000, torch.uint8))
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.each(lambda heap: heap.barrier_agreement())
        c.allocators[1].fail["decommit"] = OSError("not now")
        errors = c.attempt(lambda heap: heap.barrier_agreement())
        assert [type(e) for e in errors] == [HeapError] * 3
        assert {str(e) for e in errors} == {"rank 1 could not give memory back: not now"}
        c.each(lambda heap: heap.barrier_agreement())
        assert c.heaps[0].offset_of(c.each(lambda heap: heap.allocate(10000, torch.uint8))[0]) == 0


def test_memory_that_a_rank_alone_cannot_give_back_is_its_own_error() -> None:
    with Cluster(1, 1 << 16, Capability.IMPORT_TENSOR, Capability.DECOMMIT) as c:
        (heap,) = c.heaps
        shared = heap.as_symmetric(torch.ones(4))
        c.allocators[0].fail["decommit"] = OSError("not now")
        with pytest.raises(OSError, match="not now"):
            heap.free(shared)
        c.allocators[0].fail.clear()
        assert heap.stats().free == heap.nbytes
        assert heap.offset_of(heap.as_symmetric(torch.ones(4))) == 0


@table("call", ["barrier", "allocate", "as_symmetric"])
def test_a_device_that_fails_on_one_rank_is_told_everywhere(call: str) -> None:
    """While memory of others is taken off the heap, or may have to be."""
    failing = []

    class Streams(HostStreams):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

        def synchronize(self, stream: object = None) -> None:
            if self.rank in failing:
                raise RuntimeError("an illegal memory access was encountered")

    provides = (Capability.IMPORT_TENSOR, Capability.DECOMMIT)
    with Cluster(2, 1 << 16, *provides, options_of=lambda rank: {"streams": Streams(rank)}) as c:
        shared = c.each(lambda heap: heap.as_symmetric(torch.ones(4)))
        if call != "as_symmetric":
            c.each(lambda heap: heap.free(shared[heap.rank]))
        failing.append(1)
        calls: dict[str, Callable[[SymmetricHeap], object]] = {
            "barrier": lambda heap: heap.barrier_agreement(),
            "allocate": lambda heap: heap.allocate(1 << 16, torch.uint8),
            "as_symmetric": lambda heap: heap.as_symmetric(torch.ones(5)),
        }
        errors = c.attempt(calls[call])
        assert [type(e) for e in errors] == [HeapError if call == "as_symmetric" else DeviceError] * 2
        assert len({str(e) for e in errors}) == 1
        assert str(errors[0]).startswith("rank 1 c")
        assert str(errors[0]).endswith("an illegal memory access was encountered")
        failing.clear()
        c.each(lambda heap: heap.barrier_agreement())


def test_memory_that_is_used_again_is_not_given_back() -> None:
    with Cluster(1, 1 << 16, Capability.DECOMMIT) as c:
        (heap,) = c.heaps
        for _ in range(5):
            heap.free(heap.allocate(16384, torch.uint8))
            heap.barrier_agreement()
        assert c.allocators[0].count("decommit") == 0


def test_refresh_exchanges_only_what_is_new() -> None:
    with Cluster(2) as c:
        imports = c.allocators[0].count("import_peer")
        c.each(lambda heap: heap.refresh_peer_access())
        assert c.allocators[0].count("import_peer") == imports
        c.allocators[1].generation += 1
        c.each(lambda heap: heap.refresh_peer_access())
        assert c.allocators[0].count("import_peer") == imports + 1


def test_peers_that_cannot_be_mapped_fail_everywhere_and_leak_no_descriptor() -> None:
    with Cluster(3) as c:
        c.allocators[0].fail["import_peer"] = OSError("no access")
        for allocator in c.allocators:
            allocator.generation += 1
        received: list[int] = []

        def exchange(self: ThreadWorld, segments: list[Segment]) -> list[list[Segment]]:
            self.all_gather_object(None)
            rows = [[Segment(0, 1 << 16, payload=a.export()[0].payload)] for a in c.allocators]
            if self.rank == 0:
                received.extend(os.dup(2) for _ in range(2))
                rows[1:] = [[Segment(0, 1 << 16, fd=fd)] for fd in received]
            return rows

        for world in c.worlds:
            world.exchange_segments = exchange.__get__(world)  # type: ignore[method-assign]
        errors = c.attempt(lambda heap: heap.refresh_peer_access())
        assert [type(e) for e in errors] == [PeerAccessError] * 3
        assert {str(e) for e in errors} == {"rank 0 could not map the heap of a peer: no access"}
        os.close(received[0])  # import_peer was given this one, and the fake does not close it
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(received[1])


def test_an_allocator_that_moves_a_peer_is_caught() -> None:
    with Cluster(2) as c:
        c.allocators[1].base_ptr += 4096
        c.allocators[1].generation += 1
        errors = c.attempt(lambda heap: heap.refresh_peer_access())
        assert "moved rank 1's heap" in str(errors[0])
        assert type(errors[1]) is PeerAccessError


# -- memory of groups -------------------------------------------------------------------------------------------------
def take(c: Cluster, members: Sequence[int], nbytes: int, kind: type[ThreadWorld] = ThreadWorld) -> list[Any]:
    """Offset of what some ranks get, by rank, an error standing for it."""
    hub = Hub(len(members))
    worlds = {member: kind(hub, rank) for rank, member in enumerate(members)}
    return c.attempt(
        lambda heap: (
            heap.take_for_group(worlds[heap.rank], members, nbytes, "a test")[0] if heap.rank in worlds else None
        )
    )


@pytest.mark.parametrize("freed", [True, False])
def test_memory_is_reclaimed_before_groups_lose_room(freed: bool) -> None:
    with Cluster(3, 1 << 16) as c:
        for _ in range(40):
            tensors = c.each(lambda heap: heap.allocate(6000, torch.uint8))
            if freed:
                c.each(lambda heap, tensors=tensors: heap.free(tensors[heap.rank]))
            tensors.clear()
        assert take(c, (0, 1), 1 << 15) == [1 << 15, 1 << 15, None]


def test_groups_lose_no_more_room_than_allocations_need() -> None:
    with Cluster(3, 1 << 16) as c:
        _kept = c.each(lambda heap: [heap.allocate(nbytes, torch.uint8) for nbytes in (28 << 10, 8 << 10)])
        errors = c.attempt(lambda heap: heap.allocate(40 << 10, torch.uint8))
        assert [type(e) for e in errors] == [HeapExhaustedError] * 3
        assert take(c, (0, 1), 28 << 10) == [36 << 10, 36 << 10, None]


def test_what_groups_have_is_not_free() -> None:
    with Cluster(3, 1 << 16) as c:
        first = c.each(lambda heap: heap.allocate(24 << 10, torch.uint8))
        _second = c.each(lambda heap: heap.allocate(4 << 10, torch.uint8))
        assert take(c, (0, 1), 24 << 10) == [40 << 10, 40 << 10, None]
        c.each(lambda heap: heap.free(first[heap.rank]))
        c.each(lambda heap: heap.barrier_agreement())
        stats = [heap.stats() for heap in c.heaps]
        assert [(s.free, s.largest_free, s.fragmentation) for s in stats] == [
            *[(36 << 10, 24 << 10, 1 - 24 / 36)] * 2,
            (60 << 10, 36 << 10, 1 - 36 / 60),
        ]
        errors = c.attempt(lambda heap: heap.allocate(28 << 10, torch.uint8))
        assert [(e.free_bytes, e.largest_free_bytes) for e in errors] == [(36 << 10, 24 << 10)] * 3
        assert "24576 bytes at its end" in str(errors[2])
        labels = [[block.label for block in heap.live_blocks()] for heap in c.heaps]
        assert [row[1:] for row in labels] == [["a test"], ["a test"], []]


def test_a_group_takes_memory_while_allocations_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(2, 1 << 16) as c:
        hub, places, worlds = Hub(2), [0, 0], {}  # what another thread does behind the agreement of all ranks
        for rank, heap in enumerate(c.heaps):
            worlds[heap._state] = ThreadWorld(hub, rank)
        own = regions.raise_limit

        def raise_limit(state: Any, *args: Any) -> bool:
            if not state.groups:
                world = worlds[state]
                places[world.rank] = regions.take(state, world, (0, 1), 28 << 10, "a test")
            return own(state, *args)

        monkeypatch.setattr(regions, "raise_limit", raise_limit)
        _kept = c.each(lambda heap: heap.allocate(30 << 10, torch.uint8))
        errors = c.attempt(lambda heap: heap.allocate(7 << 10, torch.uint8))
        assert [type(e) for e in errors] == [HeapExhaustedError] * 2
        assert places == [36 << 10] * 2
        c.each(lambda heap: heap.allocate(6 << 10, torch.uint8))


def test_allocations_get_more_while_a_group_takes_memory() -> None:
    with Cluster(2, 1 << 16) as c:
        kept: list[torch.Tensor] = []

        class Allocating(ThreadWorld):
            """A member whose other thread allocates behind the first exchange of a group."""

            def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
                rows = super().all_gather_ints(values)
                if self.num_exchanges == 1:
                    kept.append(c.heaps[self.rank].allocate(40 << 10, torch.uint8))
                return rows

        assert [type(e) for e in take(c, (0, 1), 32 << 10, Allocating)] == [HeapExhaustedError] * 2
        assert take(c, (0, 1), 24 << 10) == [40 << 10] * 2


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_all_groups_take_memory_at_once(num_ranks: int) -> None:
    """Each in a thread of its own, and allocations beside them: everyone gets there in a fixed number of steps."""
    ranks = range(num_ranks)
    groups = [members for size in range(2, num_ranks + 1) for members in itertools.permutations(ranks, size)][::3]

    class Late(ThreadWorld):
        """A member that is late now and then."""

        def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
            time.sleep(random.choice((0, 0, 1e-4, 2e-3)))
            return super().all_gather_ints(values)

    with Cluster(num_ranks, 1 << 20) as c, ThreadPoolExecutor(sum(map(len, groups))) as threads:
        c.worlds[0].hub.barrier = threading.Barrier(num_ranks)  # who waits for its turn is not lost
        kept, futures = [], []
        for members in groups:
            hub = Hub(len(members))
            hub.barrier = threading.Barrier(len(members))
            worlds = [Late(hub, number) for number in range(len(members))]
            calls = [
                (c.heaps[member].take_for_group, world, members, 4096, "a test")
                for member, world in zip(members, worlds, strict=True)
            ]
            futures.append((members, worlds, [threads.submit(*call) for call in random.sample(calls, len(calls))]))
        for _ in range(8):
            kept += c.each(lambda heap: heap.allocate(96 << 10, torch.uint8))
        taken: dict[int, list[int]] = {rank: [] for rank in ranks}
        for members, worlds, results in futures:
            (offset,) = {result.result()[0] for result in results}
            assert {world.num_exchanges for world in worlds} == {len(members) + 2}
            for member in members:
                taken[member].append(offset)
        for heap in c.heaps:
            starts = sorted(taken[heap.rank])
            assert starts == [block.offset_bytes for block in heap._state.groups]
            assert all(one + 4096 <= other for one, other in itertools.pairwise(starts))
            assert starts[0] >= heap._state.offsets.limit >= 768 << 10


def test_groups_of_one_rank_take_memory_at_the_same_time() -> None:
    with Cluster(3, 1 << 16) as c:
        hub = Hub(2)

        class Taking(ThreadWorld):
            """A member whose other thread takes memory for another group behind the first exchange of this one."""

            def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
                rows = super().all_gather_ints(values)
                if self.num_exchanges == 1 and self.rank == 0:
                    c.heaps[0].take_for_group(ThreadWorld(hub, 0), (0, 2), 4096, "another test")
                elif self.num_exchanges == 1:  # rank 2, of which this thread is as good as any
                    c.heaps[2].take_for_group(ThreadWorld(hub, 1), (0, 2), 4096, "another test")
                return rows

        assert take(c, (0, 1), 4096, Taking) == [56 << 10, 56 << 10, None]
        assert [[b.offset_bytes >> 10 for b in heap.live_blocks()] for heap in c.heaps] == [[56, 60], [56], [60]]


def test_groups_of_one_rank_take_ranges_of_the_system_area_at_the_same_time() -> None:
    with Cluster(3, 1 << 16, usable_nbytes=1 << 15) as c:
        areas = [heap.system_area for heap in c.heaps]
        hub, second = Hub(2), []

        class Taking(ThreadWorld):
            """A member of a first group, some of whose threads take a range for (0, 2) behind its first exchange."""

            def all_gather_object(self, obj: Any) -> list[Any]:
                rows = super().all_gather_object(obj)
                if self.num_exchanges == 1:
                    second.append(areas[2 * self.rank].reserve(ThreadWorld(hub, self.rank), 1000, "another test"))
                return rows

        first_hub = Hub(2)
        first = c.attempt(
            lambda heap: (
                areas[heap.rank].reserve(Taking(first_hub, heap.rank), 1000, "a test") if heap.rank < 2 else None
            )
        )
        assert first == [1024, 1024, None]
        assert second == [0, 0]
        assert [sorted(area._used) for area in areas] == [[(0, 1024), (1024, 2048)], [(1024, 2048)], [(0, 1024)]]


class Interrupted(ThreadWorld):
    """A member that is interrupted once it has got memory."""

    def all_gather_ints(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        if self.num_exchanges == 1:
            raise KeyboardInterrupt
        return super().all_gather_ints(values)


@pytest.mark.parametrize("provides", [(Capability.DECOMMIT,), (Capability.DECOMMIT, Capability.GROWTH)])
def test_a_group_that_is_interrupted_takes_nothing_from_others(provides: tuple[Capability, ...]) -> None:
    with Cluster(2, 1 << 16, *provides) as c:
        places = take(c, (0,), 1000)
        interrupted = take(c, (0,), 1000, Interrupted)
        assert type(interrupted[0]) is KeyboardInterrupt
        assert c.allocators[0].committed_bytes == 4096
        again = take(c, (0,), 1000)
        assert 0 < again[0] <= places[0] - 1000


# -- as_symmetric -----------------------------------------------------------------------------------------------------
def test_as_symmetric_copies_where_memory_cannot_be_imported() -> None:
    with Cluster(2) as c:
        source = torch.arange(12.0).view(3, 4).t().requires_grad_()
        for heap, t in zip(c.heaps, c.each(lambda heap: heap.as_symmetric(source)), strict=True):
            assert torch.equal(t, source)
            assert t.stride() == source.stride()
            assert not t.requires_grad
            assert [b.label for b in heap.live_blocks()] == ["as_symmetric((4, 3), float32)"]
        with pytest.raises(LayoutError, match="sparse"):
            c.each(lambda heap: heap.as_symmetric(torch.eye(3).to_sparse()))
        kept = c.each(lambda heap: heap.allocate(4, F32))
        again = c.each(lambda heap: heap.as_symmetric(kept[heap.rank]))
        assert all(one is two for one, two in zip(kept, again, strict=True))


COPIES, IMPORTS = (), (Capability.IMPORT_TENSOR, Capability.DECOMMIT)


@table("provides", [COPIES, IMPORTS])
@table(("wrong", "kind", "complaint"), [
    (lambda heap: torch.eye(3).to_sparse(), LayoutError, "only torch.strided tensors"),
    (lambda heap: torch.empty(3, 3, device="meta"), DeviceError, "on meta, but this rank's heap is on cpu"),
    (lambda heap: torch.ones(3, 3, dtype=torch.cfloat).conj(), UnsupportedError, "lazily conjugated"),
    (lambda heap: [1.0], TypeError, "takes a torch tensor, not list"),
])  # fmt: skip
def test_a_tensor_that_cannot_be_had_on_one_rank_is_the_same_error_everywhere(
    provides: tuple[Capability, ...], wrong: Callable[..., torch.Tensor], kind: type[Exception], complaint: str
) -> None:
    with Cluster(3, 1 << 16, *provides) as c:
        errors = c.attempt(lambda heap: heap.as_symmetric(wrong(heap) if heap.rank == 1 else torch.ones(3, 3)))
        assert [type(e) for e in errors] == [kind] * 3
        assert len({str(e) for e in errors}) == 1
        assert str(errors[0]).startswith("rank 1 cannot import the tensor that was passed to as_symmetric: ")
        assert complaint in str(errors[0])
        errors.clear()
        assert [heap.stats().free for heap in c.heaps] == [1 << 16] * 3
        c.each(lambda heap: heap.barrier_agreement())


@table("provides", [COPIES, IMPORTS])
@table(("other", "told"), [
    (lambda heap: torch.ones(9), "float32 of shape (9,), strides (1,), not on the heap"),
    (lambda heap: torch.ones(0, 8), "float32 of shape (0, 8), strides (8, 1), not on the heap"),
    (lambda heap: torch.ones(8, 1).t(), "float32 of shape (1, 8), strides"),
    (lambda heap: torch.ones(8, dtype=torch.int32), "int32 of shape (8,), strides (1,), not on the heap"),
    (lambda heap: heap.allocate(8, F32), "float32 of shape (8,), strides (1,), on the heap at offset 0"),
])  # fmt: skip
def test_tensors_that_differ_between_the_ranks_do_not_become_symmetric(
    provides: tuple[Capability, ...], other: Callable[[SymmetricHeap], torch.Tensor], told: str
) -> None:
    with Cluster(3, 1 << 16, *provides) as c:
        tensors = c.each(other)
        errors = c.attempt(lambda heap: heap.as_symmetric(tensors[2] if heap.rank == 2 else torch.ones(8)))
        assert [type(e) for e in errors] == [SymmetryError] * 3
        assert len({str(e) for e in errors}) == 1
        assert "\n  ranks 0, 1: float32 of shape (8,), strides (1,), not on the heap\n" in str(errors[0])
        assert f"\n  rank 2: {told}" in str(errors[0])
        c.each(lambda heap: heap.barrier_agreement())


@pytest.mark.parametrize("provides", [COPIES, IMPORTS])
def test_strides_count_only_where_somebody_moves(provides: tuple[Capability, ...]) -> None:
    with Cluster(2, 1 << 16, *provides) as c:
        wide = torch.ones(4, 4)
        for pair in [(wide, wide.t().contiguous()), (wide[:1], torch.ones(1, 4)), (wide[:, :0], torch.ones(4, 0))]:
            tensors = c.each(lambda heap, pair=pair: heap.as_symmetric(pair[heap.rank]))
            assert all(torch.equal(t, each) for t, each in zip(tensors, pair, strict=True))
        errors = c.attempt(lambda heap: heap.as_symmetric(wide.t() if heap.rank else wide))
        assert [type(e) for e in errors] == [SymmetryError] * 2
        assert "rank 1: float32 of shape (4, 4), strides (1, 4)" in str(errors[0])


@pytest.mark.parametrize("provides", [COPIES, IMPORTS])
def test_tensors_at_different_offsets_are_not_symmetric(provides: tuple[Capability, ...]) -> None:
    with Cluster(2, 1 << 16, *provides) as c:
        tensors = c.each(lambda heap: heap.allocate(8, F32))
        errors = c.attempt(lambda heap: heap.as_symmetric(tensors[heap.rank][4 * heap.rank :][:4]))
        assert "rank 1: float32 of shape (4,), strides (1,), on the heap at offset 16" in str(errors[0])
        same = c.each(lambda heap: heap.as_symmetric(tensors[heap.rank][4:]))
        assert [t.data_ptr() for t in same] == [t[4:].data_ptr() for t in tensors]


def test_as_symmetric_imports_where_it_can() -> None:
    with Cluster(2, 1 << 16, Capability.IMPORT_TENSOR, Capability.DECOMMIT) as c:
        _first = c.each(lambda heap: heap.allocate(1, F32))
        imported = c.each(lambda heap: heap.as_symmetric(torch.full((5,), float(heap.rank))))
        assert [t.tolist() for t in imported] == [[0.0] * 5, [1.0] * 5]
        assert [h.offset_of(t) for h, t in zip(c.heaps, imported, strict=True)] == [4096, 4096]
        assert c.allocators[0].count("import_peer") == 2, "peers must map the new memory"
        c.each(lambda heap: heap.free(imported[heap.rank]))
        assert c.allocators[0].count("decommit") == 0
        c.each(lambda heap: heap.barrier_agreement())
        assert ("decommit", 4096, 4096) in c.allocators[0].calls
        assert blocks(c.heaps[0]) == [0]


@pytest.mark.parametrize("name", ["import_extent", "import_tensor"])
def test_an_import_that_fails_on_one_rank_fails_on_all(name: str) -> None:
    with Cluster(2, 1 << 16, Capability.IMPORT_TENSOR, Capability.DECOMMIT) as c:
        c.allocators[0].fail[name] = UnsupportedError("not my memory")
        mine, other = c.attempt(lambda heap: heap.as_symmetric(torch.ones(3)))
        assert type(mine) is type(other) is UnsupportedError
        assert str(other) == "rank 0 cannot import the tensor that was passed to as_symmetric: not my memory"
        assert all(heap.stats().free == heap.nbytes for heap in c.heaps)
        assert c.allocators[1].count("decommit") == c.allocators[1].count("import_tensor")
        c.allocators[0].fail.clear()
        imported = c.each(lambda heap: heap.as_symmetric(torch.ones(3)))
        assert [h.offset_of(t) for h, t in zip(c.heaps, imported, strict=True)] == [0, 0]


def test_imports_must_begin_at_the_same_place() -> None:
    with Cluster(2, 1 << 16, Capability.IMPORT_TENSOR, Capability.DECOMMIT) as c:
        c.allocators[0].import_delta = 512
        errors = c.attempt(lambda heap: heap.as_symmetric(torch.ones(3)))
        assert [type(e) for e in errors] == [UnsupportedError] * 2
        c.allocators[1].import_delta = 512
        imported = c.each(lambda heap: heap.as_symmetric(torch.ones(3)))
        assert [h.offset_of(t) for h, t in zip(c.heaps, imported, strict=True)] == [512, 512]
        c.each(lambda heap: heap.free(imported[heap.rank]))
        c.each(lambda heap: heap.barrier_agreement())
        assert c.heaps[0].stats().free == c.heaps[0].nbytes


def test_imports_of_the_same_memory_share_a_block() -> None:
    with Cluster(2, 1 << 16, Capability.IMPORT_TENSOR, Capability.DECOMMIT) as c:
        sources = [torch.full((4,), float(rank)) for rank in range(2)]
        one, two = (c.each(lambda heap: heap.as_symmetric(sources[heap.rank])) for _ in range(2))
        assert blocks(c.heaps[0]) == [0, 0]
        assert one[0].data_ptr() == two[0].data_ptr()
        assert c.heaps[0].stats().allocated == 4096
        c.each(lambda heap: heap.free(one[heap.rank]))
        c.each(lambda heap: heap.barrier_agreement())
        assert c.heaps[0].stats().allocated == 4096
        assert c.allocators[0].count("decommit") == 0
        c.each(lambda heap: heap.free(two[heap.rank]))
        assert c.heaps[0].stats().pending == 4096
        c.each(lambda heap: heap.barrier_agreement())
        assert c.heaps[0].stats().free == c.heaps[0].nbytes
        assert c.allocators[0].count("decommit") == 1
