"""Memory that grows, is given back, is shared with peers, or is imported."""

import itertools
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from tables import says, table

from iris_core import errors
from iris_core.heap.streams import HostStreams
from iris_core.types import Capability

from .fakes import Cluster, Hub, ThreadWorld

F32, U8 = torch.float32, torch.uint8
COPIES, IMPORTS = (), (Capability.IMPORT_TENSOR, Capability.DECOMMIT)
GIVES_BACK = [(Capability.DECOMMIT,), (Capability.DECOMMIT, Capability.GROWTH)]


@table(("call", "kind"), [
    (lambda heap: heap.barrier_agreement(), errors.DeviceError),
    (lambda heap: heap.allocate(1 << 16, U8), errors.DeviceError),
    (lambda heap: heap.as_symmetric(torch.ones(5)), errors.HeapError),
])  # fmt: skip
def test_a_device_that_fails_on_one_rank_is_told_everywhere(call, kind):
    """While memory of others is taken off the heap, or may have to be."""
    failing = []

    def streams(rank):
        def synchronize(stream=None):
            if rank in failing:
                raise RuntimeError("an illegal memory access")

        made = HostStreams()
        made.synchronize = synchronize
        return made

    with Cluster(2, 1 << 16, *IMPORTS, options_of=lambda rank: {"streams": streams(rank)}) as c:
        shared = c.each(lambda heap: heap.as_symmetric(torch.ones(4)))
        if kind is errors.DeviceError:
            c.free(shared)
        failing.append(1)
        c.refused(kind, "heap.fault", call)
        failing.clear()
        c.barrier()


def take(c, members, nbytes, kind=ThreadWorld):
    """Offset of what some ranks get, by rank, an error standing for it."""
    return [each[0] if isinstance(each, tuple) else each for each in c.take(members, nbytes, kind)]


def meanwhile(do):
    """The kind of a member of whose process another thread does something behind the first exchange of a group."""

    class Meanwhile(ThreadWorld):
        def gather(self, value):
            rows = super().gather(value)
            if self.num_exchanges == 1:
                do(self.rank)
            return rows

    return Meanwhile


def test_groups_lose_no_more_room_than_allocations_need_and_what_they_have_is_not_free():
    with Cluster(3, 1 << 16) as c:
        first, _second = c.allocate(24 << 10), c.allocate(4 << 10)
        c.refused(errors.HeapExhaustedError, "any", lambda heap: heap.allocate(40 << 10, U8))
        assert take(c, (0, 1), 24 << 10) == [40 << 10, 40 << 10, None]
        c.free(first)
        c.barrier()
        assert c.stats("free") == [36 << 10, 36 << 10, 60 << 10]
        assert c.stats("largest_free") == [24 << 10, 24 << 10, 36 << 10]
        assert c.stats("fragmentation") == [1 - 24 / 36, 1 - 24 / 36, 1 - 36 / 60]
        raised = c.attempt(lambda heap: heap.allocate(28 << 10, U8))
        assert [(e.free_bytes, e.largest_free_bytes) for e in raised] == [(36 << 10, 24 << 10)] * 3
        assert says("heap.of a group") in str(raised[2])
        labels = [[block.label for block in heap.live_blocks()] for heap in c.heaps]
        assert [row[1:] for row in labels] == [["a test"], ["a test"], []]


def test_allocations_get_more_while_a_group_takes_memory():
    with Cluster(2, 1 << 16) as c:
        kept = []
        allocating = meanwhile(lambda rank: kept.append(c.heaps[rank].allocate(40 << 10, U8)))
        assert [type(e) for e in take(c, (0, 1), 32 << 10, allocating)] == [errors.HeapExhaustedError] * 2
        assert take(c, (0, 1), 24 << 10) == [40 << 10] * 2


def test_all_groups_take_memory_at_once():
    """Each in a thread of its own, and allocations beside them: everyone gets there in a fixed number of steps."""
    num_ranks, ranks = 4, range(4)
    groups = [members for size in range(2, num_ranks + 1) for members in itertools.permutations(ranks, size)][::3]

    class Late(ThreadWorld):
        def all_gather_ints(self, values):
            time.sleep(random.choice((0, 0, 1e-4, 2e-3)))
            return super().all_gather_ints(values)

    with Cluster(num_ranks, 1 << 20) as c, ThreadPoolExecutor(sum(map(len, groups))) as threads:
        c.worlds[0].hub.barrier = threading.Barrier(num_ranks)  # who waits for its turn is not lost
        kept, futures = [], []
        for members in groups:
            hub = Hub(len(members))
            hub.barrier = threading.Barrier(len(members))
            worlds = {member: Late(hub, number) for number, member in enumerate(members)}
            take_part = lambda each, worlds=worlds, members=members: c.heaps[each].take_for_group(
                worlds[each], members, 4096, "a test"
            )
            futures.append((worlds, [threads.submit(take_part, each) for each in random.sample(members, len(members))]))
        kept += [c.allocate(96 << 10) for _ in range(8)]
        taken = {rank: [] for rank in ranks}
        for worlds, results in futures:
            (offset,) = {result.result()[0] for result in results}
            assert {world.num_exchanges for world in worlds.values()} == {len(worlds) + 2}
            for member in worlds:
                taken[member].append(offset)
        for heap in c.heaps:
            starts = sorted(taken[heap.rank])
            assert starts == [block.offset_bytes for block in heap._state.groups]
            assert all(one + 4096 <= other for one, other in itertools.pairwise(starts))
            assert starts[0] >= heap._state.offsets.limit >= 768 << 10


def test_groups_of_one_rank_take_ranges_of_the_system_area_at_the_same_time():
    with Cluster(3, 1 << 16, usable_nbytes=1 << 15) as c:
        areas = [heap.system_area for heap in c.heaps]
        hub, first_hub, second = Hub(2), Hub(2), []
        reserve = lambda place, world: areas[place].reserve(world, 1000, "a test")
        taking = meanwhile(lambda rank: second.append(reserve(2 * rank, ThreadWorld(hub, rank))))
        first = c.each(lambda heap: reserve(heap.rank, taking(first_hub, heap.rank)) if heap.rank < 2 else None)
        assert (first, second) == ([1024, 1024, None], [0, 0])
        assert [list(area._used) for area in areas] == [[(0, 2048)], [(1024, 2048)], [(0, 1024)]]


class Interrupted(ThreadWorld):
    def all_gather_ints(self, values):
        if self.num_exchanges == 1:
            raise KeyboardInterrupt
        return super().all_gather_ints(values)


@table("provides", GIVES_BACK)
def test_a_group_that_is_interrupted_takes_nothing_from_others(provides):
    with Cluster(2, 1 << 16, *provides) as c:
        places = take(c, (0,), 1000)
        assert type(take(c, (0,), 1000, Interrupted)[0]) is KeyboardInterrupt
        assert c.allocators[0].committed_bytes == 4096
        assert 0 < take(c, (0,), 1000)[0] <= places[0] - 1000


@table("provides", [COPIES, IMPORTS])
@table(("wrong", "kind"), [
    (lambda: torch.eye(3).to_sparse(), errors.LayoutError), (lambda: [1.0], TypeError),
    (lambda: torch.empty(3, 3, device="meta"), errors.DeviceError),
    (lambda: torch.ones(3, 3, dtype=torch.cfloat).conj(), errors.UnsupportedError),
])  # fmt: skip
def test_a_tensor_that_cannot_be_had_on_one_rank_is_the_same_error_everywhere(provides, wrong, kind):
    with Cluster(3, 1 << 16, *provides) as c:
        use = lambda heap: heap.as_symmetric(wrong() if heap.rank == 1 else torch.ones(3, 3))
        c.refused(kind, "heap.import", use)
        assert c.stats("free") == [1 << 16] * 3
        c.barrier()


@table("provides", [COPIES, IMPORTS])
@table(("other", "stated"), [
    (lambda heap: torch.ones(9), r"float32 of shape \(9,\)"),
    (lambda heap: torch.ones(0, 8), r"float32 of shape \(0, 8\)"),
    (lambda heap: torch.ones(8, 1).t(), r"float32 of shape \(1, 8\)"),
    (lambda heap: torch.ones(8, dtype=torch.int32), r"int32 of shape \(8,\)"),
    (lambda heap: heap.allocate(8, F32), says("heap.at", tensor="float32 of shape (8,)", offset=0)),
])  # fmt: skip
def test_tensors_that_differ_between_the_ranks_do_not_become_symmetric(provides, other, stated):
    with Cluster(3, 1 << 16, *provides) as c:
        tensors = [torch.ones(8), torch.ones(8), c.each(other)[2]]
        text = c.refused(errors.SymmetryError, "any", lambda heap: heap.as_symmetric(tensors[heap.rank]))
        assert re.search(rf"\n  ranks 0, 1: float32 of shape \(8,\), .*\n  rank 2: {stated}", text)
        c.barrier()


@table("provides", [COPIES, IMPORTS])
def test_strides_and_offsets_count_only_where_somebody_moves(provides):
    with Cluster(2, 1 << 16, *provides) as c:
        wide, turned = torch.ones(4, 4), torch.arange(12.0).view(3, 4).t().requires_grad_()
        for pair in [(wide, wide.t().contiguous()), (wide[:1], torch.ones(1, 4)), (wide[:, :0], torch.ones(4, 0))]:
            tensors = c.each(lambda heap, pair=pair: heap.as_symmetric(pair[heap.rank]))
            assert all(torch.equal(t, each) for t, each in zip(tensors, pair, strict=True))
        if not provides:
            copied = c.each(lambda heap: heap.as_symmetric(turned))
            assert [(t.tolist(), t.stride(), t.requires_grad) for t in copied] == [(turned.tolist(), (1, 4), False)] * 2
        words = "rank 1: float32 of shape (4, 4), strides (1, 4)"
        turned = lambda heap: heap.as_symmetric(wide.t() if heap.rank else wide)
        c.refused(errors.SymmetryError, "names", turned, name=words)
        on_heap, first = c.allocate(32), c.allocate(32)
        at = c.offsets(first)[1] + 16
        moved = lambda heap: heap.as_symmetric(first[heap.rank][16 * heap.rank :][:16])
        c.refused(errors.SymmetryError, "heap.at", moved, tensor="rank 1: uint8 of shape (16,)", offset=at)
        same = c.each(lambda heap: heap.as_symmetric(on_heap[heap.rank][4:]))
        assert [t.data_ptr() for t in same] == [t[4:].data_ptr() for t in on_heap]


def test_imports_must_begin_at_the_same_place():
    with Cluster(2, 1 << 16, *IMPORTS) as c:
        c.allocators[0].import_delta = 512
        raised = c.attempt(lambda heap: heap.as_symmetric(torch.ones(3)))
        assert [type(e) for e in raised] == [errors.UnsupportedError] * 2
        c.allocators[1].import_delta = 512
        imported = c.each(lambda heap: heap.as_symmetric(torch.ones(3)))
        assert c.offsets(imported) == [512, 512]
        c.free(imported)
        c.barrier()
        assert c.stats("free") == [c.heap.nbytes] * 2
