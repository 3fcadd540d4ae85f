"""The symmetric heap on the "vmem" allocator: growth, giving back, imports; ranks are threads, the driver pretends."""

import gc
import weakref

import pytest
import torch

from iris_core import Iris
from iris_core.errors import (
    HeapError,
    HeapExhaustedError,
    IrisError,
    PeerAccessError,
    RankMismatchError,
    UnsupportedError,
)
from iris_core.heap.heap_state import NOT_OPEN
from iris_core.testing.conformance import oracle

from .fake_driver import GRANULE, Expandable
from .vmem_cluster import Cluster, Hub, ThreadWorld

U8 = torch.uint8
NOTHING = (0, 0, 0, 0)


def seen_everywhere(cluster, tensors):
    """Whether every rank reads every rank's bytes at the tensor's offset of that rank's heap."""
    for heap in cluster.heaps:
        for rank, tensor in enumerate(tensors):
            ptr = heap.translate(heap.heap_bases[heap.rank] + heap.offset_of(tensors[heap.rank]), heap.rank, rank)
            if oracle.read_bytes(ptr, tensor.nbytes) != bytes(tensor.numpy().tobytes()):
                return False
    return True


def test_memory_comes_when_it_is_used_and_goes_when_it_is_free():
    with Cluster(3) as c:
        assert c.used == [0, 0, 0]
        tensors = c.each(lambda heap: heap.allocate(2 * GRANULE, U8).fill_(heap.rank + 1))
        assert c.used == [2 * GRANULE] * 3
        assert seen_everywhere(c, tensors)
        more = c.each(lambda heap: heap.allocate(3 * GRANULE, U8).fill_(heap.rank + 5))
        assert seen_everywhere(c, more)
        assert [world.num_segments for world in c.worlds] == [5, 5, 5], "each piece is described once"
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.barriers()
        assert c.used == [3 * GRANULE] * 3
        assert [driver.counts()[1] for driver in c.drivers] == [9, 9, 9], "peers' mappings are gone as well"
        assert seen_everywhere(c, more)
        tensors = c.each(lambda heap: heap.allocate(2 * GRANULE, U8).fill_(heap.rank + 9))
        assert seen_everywhere(c, tensors)
        tensors.clear()
        more.clear()
    gc.collect()
    assert c.counts == [NOTHING] * 3


def test_allocating_in_what_is_there_does_not_communicate():
    with Cluster(2, granule=4 * GRANULE, nbytes=16 * GRANULE) as c:
        _first = c.each(lambda heap: heap.allocate(1, U8))
        segments = [world.num_segments for world in c.worlds]
        _rest = [c.each(lambda heap: heap.allocate(1000, U8)) for _ in range(50)]
        assert [world.num_segments for world in c.worlds] == segments == [1, 1]
        assert c.used == [4 * GRANULE] * 2


@pytest.mark.parametrize("full", [0, 1])
def test_memory_exhausted_on_one_rank_is_the_same_error_everywhere_and_nothing_leaks(full):
    with Cluster(2) as c:
        kept = c.each(lambda heap: heap.allocate(GRANULE, U8).fill_(heap.rank))
        c.drivers[full].total = 3 * GRANULE
        before = oracle.open_descriptors()
        errors = c.attempt(lambda heap: heap.allocate(5 * GRANULE, U8))
        assert [type(e) for e in errors] == [HeapExhaustedError] * 2
        assert all(f"rank {full}: cpu has no room" in str(e) for e in errors)
        assert f"rank {full} could not get memory for allocate({5 * GRANULE}, uint8)" in str(errors[1 - full])
        assert {(e.requested_bytes, e.free_bytes) for e in errors} == {(5 * GRANULE, 2 * GRANULE)}
        assert c.used == [GRANULE] * 2
        assert oracle.open_descriptors() == before
        more = c.each(lambda heap: heap.allocate(2 * GRANULE, U8).fill_(heap.rank + 3))
        assert seen_everywhere(c, kept)
        assert seen_everywhere(c, more)
        assert c.heaps[0].offset_of(more[0]) == GRANULE
        c.barriers()
        kept.clear()
        more.clear()
        errors.clear()
    gc.collect()
    assert c.counts == [NOTHING] * 2


@pytest.mark.parametrize(
    ("name", "which"), [("export_fd", 1), ("import_fd", 1), ("import_fd", 2), ("map", 3), ("set_access", 2)]
)
def test_growth_that_peers_cannot_see_is_undone_everywhere(name, which):
    with Cluster(3) as c:
        kept = c.each(lambda heap: heap.allocate(GRANULE, U8).fill_(heap.rank))
        counts, descriptors = c.counts, oracle.open_descriptors()
        c.drivers[1].fail_next[name] = which
        errors = c.attempt(lambda heap: heap.allocate(1, U8))
        assert not c.drivers[1].fail_next
        assert [type(e) for e in errors] == [PeerAccessError] * 3
        assert len({str(e) for e in errors}) == 1
        assert str(errors[0]).startswith("rank 1 could not")
        assert f"{name} failed with" in str(errors[0])
        assert c.counts == counts
        assert oracle.open_descriptors() == descriptors
        more = c.each(lambda heap: heap.allocate(10, U8).fill_(heap.rank + 3))
        assert seen_everywhere(c, more)
        assert seen_everywhere(c, kept)


@pytest.mark.parametrize("peer", [0, 2])
def test_no_access_to_a_peer_names_it_on_every_rank(peer):
    """Devices that do not reach each other: the driver maps the memory and refuses access to it."""
    with Cluster(3) as c:
        counts = c.counts
        c.drivers[1].fail_with = (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        c.drivers[1].fail_next["set_access"] = 2 if peer == 0 else 3  # the first is for the own memory
        errors = c.attempt(lambda heap: heap.allocate(1, U8))
        assert [type(e) for e in errors] == [PeerAccessError] * 3
        assert all(f"cpu cannot map the memory of rank {peer} (set_access" in str(e) for e in errors)
        assert all("PEER_ACCESS_UNSUPPORTED" in str(e) and "nvidia-smi topo -p2p r" in str(e) for e in errors)
        errors.clear()
        assert c.counts == counts
        tensors = c.each(lambda heap: heap.allocate(1, U8).fill_(heap.rank))
        assert seen_everywhere(c, tensors)


@pytest.mark.parametrize("which", [1, 2, 3, 4])
def test_a_failed_give_back_is_told_and_the_ranks_stay_together(which):
    with Cluster(2) as c:
        tensors = c.each(lambda heap: heap.allocate(2 * GRANULE, U8))
        c.each(lambda heap: heap.free(tensors[heap.rank]))
        c.barriers(1)
        c.drivers[0].fail_next["unmap"] = which
        errors = c.attempt(lambda heap: heap.barrier_agreement())
        assert [type(e) for e in errors] == [HeapError] * 2
        assert {str(e).partition(" with ")[0] for e in errors} == {"rank 0 could not give memory back: unmap failed"}
        again = c.each(lambda heap: heap.allocate(2 * GRANULE, U8).fill_(heap.rank + 1))
        assert c.used == [2 * GRANULE] * 2
        assert seen_everywhere(c, again)


def life(c, sources):
    """Grow, import, free, give back, import again, grow again; what each call raised, by rank."""
    errors = []

    def call(function, given=()):
        if not all(isinstance(each, torch.Tensor) for each in given):
            return given
        returned = c.attempt(function)
        errors.append([each if isinstance(each, Exception) else None for each in returned])
        return returned

    grown = call(lambda heap: heap.allocate(3 * GRANULE, U8))
    shared = call(lambda heap: heap.as_symmetric(sources[heap.rank]))
    call(lambda heap: heap.free(grown[heap.rank]), grown)
    call(lambda heap: heap.free(shared[heap.rank]), shared)
    call(lambda heap: heap.barrier_agreement())
    call(lambda heap: heap.barrier_agreement())
    shared = call(lambda heap: heap.as_symmetric(sources[heap.rank]))
    call(lambda heap: heap.free(shared[heap.rank]), shared)
    call(lambda heap: heap.allocate(6 * GRANULE, U8))  # needs the import's place
    return errors


def num_failures(errors):
    """How many calls failed; each has to raise the same on both ranks, and to name rank 0."""
    failures = [pair for pair in errors if any(pair)]
    for one, two in failures:
        assert isinstance(one, IrisError), one
        assert (type(one), str(one)) == (type(two), str(two))
        assert str(one).startswith("rank 0 c")
    return len(failures)


def test_whichever_driver_call_fails_the_ranks_raise_the_same_and_go_on():
    number, num_calls = 1, 1000
    while number <= num_calls:
        with Imports(nbytes=6 * GRANULE) as i:
            c, driver = i.cluster, i.cluster.drivers[0]
            sources = i.tensors(0, (8,))
            before = len(driver.calls)
            driver.fail_at = before + number
            errors = life(c, sources)
            if len(driver.calls) < driver.fail_at:
                num_calls = len(driver.calls) - before
            else:
                i.lost_a_handle = driver.calls[driver.fail_at - 1] == "release"
            driver.fail_at = None
            assert num_failures(errors) == (number <= num_calls), number
            errors.clear()
            c.barriers(2)
            assert [heap.stats().free for heap in c.heaps] == [6 * GRANULE] * 2
            again = c.each(lambda heap: heap.allocate(6 * GRANULE, U8).fill_(heap.rank + 1))
            assert seen_everywhere(c, again), number
            again.clear()
        number += 1
    assert num_calls > 80


def test_ranks_with_different_granules_are_told_so():
    with Cluster(2) as c:
        c.allocators[1].granularity = 2 * GRANULE
        for heap in c.heaps:
            heap._state.closed = NOT_OPEN
        errors = c.attempt(lambda heap: heap.open())
        assert [type(e) for e in errors] == [RankMismatchError] * 2
        assert f"rank 0 {GRANULE}, rank 1 {2 * GRANULE}" in str(errors[0])


def test_a_growth_with_many_pieces_goes_in_parts():
    with Cluster(2, nbytes=300 * GRANULE) as c:
        tensors = c.each(lambda heap: heap.allocate(300 * GRANULE, U8).fill_(heap.rank + 1))
        assert [world.num_segments for world in c.worlds] == [300, 300]
        assert seen_everywhere(c, tensors)


# -- existing tensors -------------------------------------------------------------------------------------------------
class Imports:
    """A cluster and, per rank, memory that is not the heap's."""

    def __init__(self, *sizes, nbytes=16 * GRANULE):
        self.cluster = Cluster(2, nbytes=nbytes)
        self.pieces = [Expandable(driver, *(sizes or (2 * GRANULE, GRANULE))) for driver in self.cluster.drivers]
        self.mine = [sum(sizes or (3 * GRANULE,))] * 2
        self.lost_a_handle = False  # the driver has refused to take one back

    def tensors(self, start, shape):
        return [pieces.tensor(start, shape).fill_(rank + 1) for rank, pieces in enumerate(self.pieces)]

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.cluster.__exit__()
        gc.collect()
        for pieces in self.pieces:
            pieces.close()
        if args[0] is None and not self.lost_a_handle:
            assert self.cluster.counts == [NOTHING] * 2


def test_imported_memory_is_seen_by_peers_and_changes_there():
    with Imports() as i:
        c = i.cluster
        sources = i.tensors(GRANULE + 256, (GRANULE // 4,))
        shared = c.each(lambda heap: heap.as_symmetric(sources[heap.rank]))
        assert seen_everywhere(c, shared)
        sources[0].fill_(77)
        assert seen_everywhere(c, shared)
        assert shared[0][0] == 77
        assert all(heap.is_symmetric(t) for heap, t in zip(c.heaps, shared, strict=True))
        assert c.used == i.mine, "nothing was copied"
        c.each(lambda heap: heap.free(shared[heap.rank]))
        c.barriers()
        assert [driver.counts()[1] for driver in c.drivers] == [2, 2], "only the external memory's own mappings stay"
        shared.clear()


def test_imports_of_the_same_memory_map_it_once():
    with Imports() as i:
        c = i.cluster
        whole = i.tensors(0, (3 * GRANULE // 4,))
        shared = c.each(lambda heap: heap.as_symmetric(whole[heap.rank]))
        maps = [driver.calls.count("map") for driver in c.drivers]
        stats = c.heaps[0].stats()
        parts = c.each(lambda heap: [heap.as_symmetric(whole[heap.rank][k : k + 9]) for k in range(0, 100, 10)])
        again = c.each(lambda heap: heap.as_symmetric(whole[heap.rank]))
        assert [driver.calls.count("map") for driver in c.drivers] == maps
        assert c.heaps[0].stats().allocated == stats.allocated, "they take no room"
        assert c.heaps[0].stats().num_blocks == 12
        assert again[0].data_ptr() == shared[0].data_ptr()
        assert all(seen_everywhere(c, [parts[0][k], parts[1][k]]) for k in range(10))

        c.each(lambda heap: heap.free(shared[heap.rank]))
        assert c.heaps[0].stats().pending == 0, "others hold the memory still"
        c.barriers()
        assert seen_everywhere(c, again)
        with pytest.raises(HeapError, match="freed before"):
            c.heaps[0].free(shared[0])
        c.each(lambda heap: heap.free(again[heap.rank]))
        parts.clear()  # dropped, not freed
        assert c.heaps[0].stats().pending == stats.allocated
        c.barriers()
        assert c.heaps[0].stats().allocated == 0
        assert [driver.counts()[1] for driver in c.drivers] == [2, 2]
        shared.clear()
        again.clear()


def test_memory_that_only_one_rank_has_on_the_heap_gets_a_new_place_everywhere():
    with Imports(GRANULE, GRANULE, GRANULE) as i:
        c = i.cluster
        # rank 1's second tensor is in memory that it has imported already, rank 0's is not
        firsts = [i.pieces[0].tensor(0, (8,)), i.pieces[1].tensor(GRANULE, (8,))]
        seconds = [i.pieces[0].tensor(GRANULE + 64, (8,)).fill_(1), i.pieces[1].tensor(GRANULE + 64, (8,)).fill_(2)]
        one = c.each(lambda heap: heap.as_symmetric(firsts[heap.rank]))
        two = c.each(lambda heap: heap.as_symmetric(seconds[heap.rank]))
        assert [heap.offset_of(t) for heap, t in zip(c.heaps, two, strict=True)] == [GRANULE + 64] * 2
        assert seen_everywhere(c, two)
        c.each(lambda heap: heap.free(one[heap.rank]))
        c.barriers()
        assert seen_everywhere(c, two)
        one.clear()
        two.clear()


def test_the_source_of_an_import_lives_until_no_rank_needs_it():
    with Imports() as i:
        c = i.cluster
        sources = i.tensors(0, (8,))
        marks = [weakref.ref(pieces.last.mark) for pieces in i.pieces]
        for pieces in i.pieces:
            pieces.last = None
        shared = c.each(lambda heap: heap.as_symmetric(sources[heap.rank]))
        sources.clear()
        shared[0] = None  # rank 1 holds its own, and may still use rank 0's
        c.barriers()
        assert [mark() is not None for mark in marks] == [True, True]
        shared.clear()
        c.barriers()
        assert [mark() is not None for mark in marks] == [False, False]


def test_an_import_takes_the_place_of_memory_that_is_free_but_still_committed():
    with Imports() as i:
        c = i.cluster
        fill = c.each(lambda heap: heap.allocate(16 * GRANULE, U8))
        c.each(lambda heap: heap.free(fill[heap.rank]))
        c.barriers(1)
        assert c.used == [16 * GRANULE + mine for mine in i.mine], "freed a moment ago, not given back yet"
        sources = i.tensors(0, (100,))
        shared = c.each(lambda heap: heap.as_symmetric(sources[heap.rank]))
        assert seen_everywhere(c, shared)
        assert c.used == [14 * GRANULE + mine for mine in i.mine]
        c.barriers()
        assert c.used == i.mine
        assert seen_everywhere(c, shared)
        fill.clear()
        shared.clear()


@pytest.mark.parametrize("which", [1, 2, 3, 4])
def test_a_place_whose_memory_could_not_be_given_back_is_usable_later(which):
    with Imports() as i:
        c = i.cluster
        fill = c.each(lambda heap: heap.allocate(16 * GRANULE, U8))
        c.each(lambda heap: heap.free(fill[heap.rank]))
        fill.clear()
        c.barriers(1)
        sources = i.tensors(0, (100,))
        c.drivers[0].fail_next["unmap"] = which
        errors = c.attempt(lambda heap: heap.as_symmetric(sources[heap.rank]))
        assert all(isinstance(e, IrisError) and "unmap" in str(e) for e in errors)
        errors.clear()
        for _ in range(2):
            shared = c.each(lambda heap: heap.as_symmetric(sources[heap.rank]))
            assert seen_everywhere(c, shared)
            shared.clear()
            c.barriers()


def test_a_failing_undo_of_an_import_keeps_the_ranks_together():
    with Imports() as i:
        c = i.cluster
        sources = i.tensors(0, (100,))
        c.drivers[1].fail_next["map"] = 1
        c.drivers[0].fail_next["unmap"] = 1  # rank 0 has mapped its memory and takes it off again
        errors = c.attempt(lambda heap: heap.as_symmetric(sources[heap.rank]))
        assert "while taking it off the heap again: unmap failed" in errors[0].__notes__[0]
        assert "map failed" in str(errors[1])
        errors.clear()
        c.barriers()  # the histories and the free lists are equal
        shared = c.each(lambda heap: heap.as_symmetric(sources[heap.rank]))
        assert seen_everywhere(c, shared)
        assert [heap.offset_of(t) for heap, t in zip(c.heaps, shared, strict=True)] == [0, 0]
        shared.clear()


def test_a_view_whose_memory_holds_other_values_is_refused_by_every_allocator():
    with Imports() as i, Iris("1MiB", device="cpu") as ctx:
        c = i.cluster
        sources = [pieces.tensor(0, (4,), torch.complex64).fill_(1 + 2j) for pieces in i.pieces]
        for view in (torch.conj, lambda t: t.conj().imag):
            errors = c.attempt(lambda heap, view=view: heap.as_symmetric(view(sources[heap.rank])))
            with pytest.raises(UnsupportedError, match=r"resolve_conj\(\)\.resolve_neg\(\)") as caught:
                ctx.as_symmetric(view(sources[0]))
            told = f"ranks 0, 1 cannot import the tensor that was passed to as_symmetric: {caught.value}"
            assert [str(e) for e in errors] == [told] * 2
        resolved = ctx.as_symmetric(sources[0].conj().resolve_conj())
        assert resolved.tolist() == [1 - 2j] * 4


@pytest.mark.parametrize(
    ("name", "which"),
    [
        *(("retain", 1), ("retain", 2), ("address_range", 1), ("export_fd", 1), ("map", 1), ("set_access", 1)),
        *(("export_fd", 3), ("import_fd", 1), ("map", 2), ("set_access", 2)),  # in the exchange
    ],
)
def test_an_import_that_fails_on_one_rank_leaves_nothing_on_any(name, which):
    with Imports() as i:
        c = i.cluster
        sources = i.tensors(0, (100,))
        gc.collect()
        counts, descriptors = c.counts, oracle.open_descriptors()
        c.drivers[1].fail_next[name] = which
        errors = c.attempt(lambda heap: heap.as_symmetric(sources[heap.rank]))
        assert not c.drivers[1].fail_next
        assert all(isinstance(e, IrisError) for e in errors)
        assert "rank 1" in str(errors[0])
        assert name in str(errors[1])
        errors.clear()
        gc.collect()
        assert c.counts == counts
        assert oracle.open_descriptors() == descriptors
        assert all(heap.stats().allocated == 0 for heap in c.heaps)
        shared = c.each(lambda heap: heap.as_symmetric(sources[heap.rank]))
        assert seen_everywhere(c, shared)
        shared.clear()


def test_an_empty_tensor_becomes_one_on_the_heap():
    with Cluster(2) as c:
        empty = c.each(lambda heap: heap.as_symmetric(torch.empty(0, 3)))
        assert [tuple(t.shape) for t in empty] == [(0, 3)] * 2
        assert all(heap.is_symmetric(t) for heap, t in zip(c.heaps, empty, strict=True))


def in_group(cluster, members, take):
    """Results of a function of (heap, the members' world) on some ranks, an error standing for a result."""
    hub = Hub(len(members))
    worlds = {member: ThreadWorld(hub, rank) for rank, member in enumerate(members)}
    return cluster.attempt(lambda heap: take(heap, worlds[heap.rank]) if heap.rank in worlds else None)


def regions_of(cluster, members, nbytes, fill):
    """A region of some ranks, filled, by rank; its offset is the same on all of them."""

    def take(heap, world):
        offset, tensor = heap.take_for_group(world, members, nbytes, "a test")
        tensor.fill_(fill + heap.rank)
        return offset, tensor

    return in_group(cluster, members, take)


def peers_read(cluster, members, results):
    """Whether the members read each other's bytes."""
    for reader in members:
        bases = cluster.heaps[reader].heap_bases
        for member in members:
            offset, tensor = results[member]
            if oracle.read_bytes(bases[member] + offset, tensor.nbytes) != bytes(tensor.numpy().tobytes()):
                return False
    return True


def test_memory_of_groups_is_mapped_by_their_members_alone():
    with Cluster(3, nbytes=16 * GRANULE) as c:
        kept = c.each(lambda heap: heap.allocate(GRANULE, U8).fill_(heap.rank + 1))
        first = regions_of(c, (2, 0), 2 * GRANULE + 5, 10)
        assert c.used == [4 * GRANULE, GRANULE, 4 * GRANULE]
        second = regions_of(c, (0, 1), GRANULE, 20)
        third = regions_of(c, (1, 2), GRANULE, 30)
        places = [first[0][0], first[2][0], second[0][0], second[1][0], third[1][0], third[2][0]]
        assert places == [13 * GRANULE] * 2 + [12 * GRANULE] * 2 + [11 * GRANULE] * 2
        more = c.each(lambda heap: heap.allocate(8 * GRANULE, U8).fill_(heap.rank + 5))  # beyond the first limit
        errors = c.attempt(lambda heap: heap.allocate(3 * GRANULE, U8))
        assert [type(e) for e in errors] == [HeapExhaustedError] * 3
        c.barriers()
        assert peers_read(c, (2, 0), first)
        assert peers_read(c, (0, 1), second)
        assert peers_read(c, (1, 2), third)
        assert seen_everywhere(c, kept)
        assert seen_everywhere(c, more)
        for tensors in (kept, more, first, second, third, errors):
            tensors.clear()
    gc.collect()
    assert c.counts == [NOTHING] * 3


@pytest.mark.parametrize("name", ["create", "import_fd", "map"])
def test_memory_of_a_group_that_one_member_cannot_have_is_given_back_by_all(name):
    with Cluster(3) as c:
        kept = c.each(lambda heap: heap.allocate(GRANULE, U8).fill_(heap.rank))
        counts, descriptors = c.counts, oracle.open_descriptors()
        c.drivers[2].fail_next[name] = 1
        errors = regions_of(c, (0, 2), 2 * GRANULE, 10)
        assert errors[1] is None
        assert isinstance(errors[0], HeapError | PeerAccessError)
        assert type(errors[0]) is type(errors[2])
        assert str(errors[0]).startswith("rank 2 could not")
        assert c.counts == counts
        assert oracle.open_descriptors() == descriptors
        again = regions_of(c, (0, 2), 2 * GRANULE, 10)
        assert peers_read(c, (0, 2), again)
        assert seen_everywhere(c, kept)
