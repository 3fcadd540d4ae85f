"""The symmetric heap on the "vmem" allocator: growth, giving back, imports; ranks are threads, the driver pretends."""

import gc
import itertools
import re
import weakref

import pytest
import torch
from tables import raises, says, table

from iris_core import errors
from iris_core.testing.conformance import oracle

from .cluster import ThreadWorld, make
from .fake_driver import GRANULE

U8 = torch.uint8


def fill(cluster, granules):
    return cluster.each(lambda heap: heap.allocate(int(granules * GRANULE), U8).fill_(heap.rank + 1))


def imported(cluster, sources):
    return cluster.each(lambda heap: heap.as_symmetric(sources[heap.rank]))


def read_alike(cluster, copies):
    """Whether ranks read each other's bytes: of a tensor at an offset of each one's heap, (offset, tensor) by rank."""
    return all(
        oracle.read_bytes(cluster.heaps[reader].heap_bases[rank] + offset, tensor.nbytes) == tensor.numpy().tobytes()
        for reader in copies
        for rank, (offset, tensor) in copies.items()
    )


def seen_everywhere(cluster, *tensors_by_rank):
    """Whether every rank reads every rank's bytes at the tensors' offset, which is the same on all."""
    for tensors in tensors_by_rank:
        (offset,) = set(cluster.offsets(tensors))
        if not read_alike(cluster, {rank: (offset, tensor) for rank, tensor in enumerate(tensors)}):
            return False
    return True


@table("multicast", [False, True])
def test_memory_comes_when_it_is_used_and_goes_when_it_is_free(made, multicast):
    """Also what multicast addresses reach: at every moment, what all ranks have."""
    c = made.cluster(3, multicast=multicast)

    def held():
        """Bytes in use of each rank's device, of which multicast reaches all."""
        assert bound(c) == [(multicast, used * multicast) for used in c.used]
        return c.used

    assert held() == [0, 0, 0]
    tensors = fill(c, 2)
    assert held() == [2 * GRANULE] * 3
    assert seen_everywhere(c, tensors)
    more = fill(c, 3)
    assert seen_everywhere(c, more)
    assert [world.num_segments for world in c.worlds] == [5 + multicast, 5, 5], "each piece is described once"
    c.free(tensors)
    c.barriers(1)
    assert held() == [5 * GRANULE] * 3, "it may be needed again at once"
    c.barriers(1)
    assert held() == [3 * GRANULE] * 3
    assert [driver.counts()[1] for driver in c.drivers] == [9 + multicast] * 3, "peers' mappings are gone as well"
    assert seen_everywhere(c, more, fill(c, 2))


def test_many_pieces_are_described_in_several_exchanges(made, monkeypatch):
    """Of as many as there may be open descriptors at a time."""
    monkeypatch.setattr("iris_allocators.vmem.allocator._MAX_OPEN_FDS", 6)
    c = made.cluster(3)
    assert seen_everywhere(c, fill(c, 7))
    assert [world.num_segments for world in c.worlds] == [7] * 3


def life(made, c, sources, failing):
    """Grow, import, free, import again, give back, grow again; what the calls that failed have raised, by rank.

    A growth or an import that fails leaves everything as it was.
    """
    failures = []

    def call(function, given=(), undone=False):
        if not all(isinstance(each, torch.Tensor) for each in given):
            return given
        before = c.counts, made.descriptors(), c.heaps[0].stats().allocated
        returned = c.attempt(function)
        if any(isinstance(each, Exception) for each in returned):
            failures.append([(type(each), str(each)) for each in returned])
            if undone and failing.calls[failing.fail_at - 1] != "release":
                returned = [str(each) for each in returned]  # their tracebacks would keep tensors alive
                gc.collect()
                assert (c.counts, made.descriptors(), c.heaps[0].stats().allocated) == before
        return returned

    grown = call(lambda heap: heap.allocate(3 * GRANULE, U8), undone=True)
    shared = call(lambda heap: heap.as_symmetric(sources[heap.rank]), undone=True)
    call(lambda heap: heap.free(grown[heap.rank]), grown)
    call(lambda heap: heap.free(shared[heap.rank]), shared)
    call(lambda heap: heap.barrier_agreement())
    shared = call(lambda heap: heap.as_symmetric(sources[heap.rank]))  # in the place of memory that is committed still
    call(lambda heap: heap.barrier_agreement())
    call(lambda heap: heap.free(shared[heap.rank]), shared)
    call(lambda heap: heap.allocate(6 * GRANULE, U8))  # needs the import's place
    return failures


@table("rank, multicast", [(0, False), (1, True)])
def test_whichever_driver_call_fails_the_ranks_raise_the_same_and_go_on(made, rank, multicast):
    for number in itertools.count(1):
        c = made.cluster(2, nbytes=6 * GRANULE, multicast=multicast)
        sources, driver = external(made, c)[1], c.drivers[rank]
        driver.fail_at = len(driver.calls) + number
        failures = life(made, c, sources, driver)
        name = driver.calls[driver.fail_at - 1] if len(driver.calls) >= driver.fail_at else ""
        driver.fail_at = None
        if name == "release":  # a handle is lost
            made.lost.append(driver)
        assert len(failures) == bool(name), number
        for one, two in failures:
            assert one == two
            assert issubclass(one[0], errors.IrisError)
            assert re.match(f"rank {rank} c.*{name} failed", one[1])
            if one[0] is errors.PeerAccessError and "could not map" in one[1]:
                assert re.search(f"rank {1 - rank} .*nvidia-smi topo -p2p r", one[1])
        c.barriers(2)
        assert [heap.stats().free for heap in c.heaps] == [6 * GRANULE] * 2
        assert seen_everywhere(c, fill(c, 6)), number
        assert bound(c) == [(multicast, 6 * GRANULE * multicast)] * 2, number
        del c, sources, driver
        made.finish()
        if not name:
            break
    assert number > (101 if multicast else 81)


def bound(cluster):
    """Whether each rank has multicast addresses, and how many bytes of its heap they reach."""
    bases = [heap.multicast_base != 0 for heap in cluster.heaps]
    return [
        (has, sum(size for size, _ in driver.bound.values()))
        for has, driver in zip(bases, cluster.drivers, strict=True)
    ]


def test_multicast_reaches_imported_memory_until_the_heap_is_closed(made):
    c = made.cluster(3, multicast=True)
    kept = fill(c, 3)
    pieces = [made.pieces(driver, 2, 1) for driver in c.drivers]
    shared = imported(c, [each.tensor(0, (8,)) for each in pieces])
    assert bound(c) == [(True, 5 * GRANULE)] * 3, "and the piece that the tensor lies in"
    for heap in c.heaps:
        heap.close()
    assert [driver.bound for driver in c.drivers] == [{}] * 3, "although tensors live on"
    kept[0].fill_(1)
    del shared, kept


@pytest.mark.parametrize("rank", [0, 1])
def test_whichever_step_of_opening_multicast_fails_no_rank_opens(made, rank):
    names = []
    while True:
        c = made.cluster(2, opened=False, multicast=True)
        for allocator in c.allocators:
            allocator.commit(0, GRANULE)  # as the system area
        driver = c.drivers[rank]
        driver.fail_at = len(driver.calls) + len(names) + 1
        raised = c.attempt(lambda heap: heap.open())
        if not any(raised):
            assert bound(c) == [(True, GRANULE)] * 2
            break
        name, driver.fail_at = driver.calls[driver.fail_at - 1], None
        assert {(type(each), str(each)) for each in raised} == {(type(raised[0]), str(raised[0]))}
        assert re.match(says("allocators.by rank", rank=rank, name=name), str(raised[0]))
        if name == "release":  # a handle is lost
            made.lost.append(driver)
        names.append(name)
        del raised, driver
        c.close()  # what is left is found by `made`
        made.finish()
    assert {"add_device", "map", "reserve", "set_access", "bind"} <= set(names)
    assert ("create_multicast" in names) == (rank == 0)


def test_what_not_all_ranks_have_or_ask_for_is_refused(made):
    drivers = made.driver(), made.driver()
    drivers[1].has_multicast = False
    with raises(errors.UnsupportedError, name="multicast"):
        make(rank=1, world_size=2, driver=drivers[1], multicast=True)
    assert made.allocator(driver=drivers[1], multicast=True).nbytes, "a world of one needs none"
    c = made.cluster(2, make=lambda *of: make(*of, multicast=of[1] == 1), opened=False)
    c.refused(errors.RankMismatchError, "allocators.multicast", lambda heap: heap.open())
    other = made.cluster(2, make=lambda *of: make(*of, granule=(1 + of[1]) * GRANULE), opened=False)
    other.refused(errors.RankMismatchError, "allocators.granules", lambda heap: heap.open())
    assert not any(driver.bound for driver in c.drivers)
    drivers[0].multicast_granule = 4 * GRANULE
    assert made.allocator(8 * GRANULE, 0, 2, driver=drivers[0], granule=None, multicast=True).granularity == 4 * GRANULE


def external(made, cluster, start=0, shape=(8,), sizes=(2, 1)):
    """Memory that is not the heaps', by rank, and a tensor in each."""
    pieces = [made.pieces(driver, *sizes) for driver in cluster.drivers]
    return pieces, [each.tensor(start, shape).fill_(rank + 1) for rank, each in enumerate(pieces)]


@pytest.fixture
def c(made):
    return made.cluster(2, nbytes=16 * GRANULE)


def test_imports_of_the_same_memory_map_it_once(made, c):
    _, whole = external(made, c, 0, (3 * GRANULE // 4,))
    shared = imported(c, whole)
    maps = [driver.calls.count("map") for driver in c.drivers]
    stats = c.heaps[0].stats()
    parts = [imported(c, [each[k : k + 9] for each in whole]) for k in range(0, 100, 10)]
    again = imported(c, whole)
    assert [driver.calls.count("map") for driver in c.drivers] == maps
    assert c.heaps[0].stats().allocated == stats.allocated, "they take no room"
    assert c.heaps[0].stats().num_blocks == 12
    assert again[0].data_ptr() == shared[0].data_ptr()
    assert seen_everywhere(c, *parts)
    c.free(shared)
    assert c.heaps[0].stats().pending == 0, "others hold the memory still"
    c.barriers()
    assert seen_everywhere(c, again)
    with raises(errors.HeapError, "heap.freed", offset=0):
        c.heaps[0].free(shared[0])
    c.free(again)
    parts.clear()  # dropped, not freed
    assert c.heaps[0].stats().pending == stats.allocated
    c.barriers()
    assert c.heaps[0].stats().allocated == 0
    assert [driver.counts()[1] for driver in c.drivers] == [2, 2]


def test_memory_that_only_one_rank_has_on_the_heap_gets_a_new_place_everywhere(made, c):
    """Rank 1's second tensor is in memory that it has imported already, rank 0's is not."""
    (mine, theirs), _ = external(made, c, sizes=(1, 1, 1))
    one = imported(c, [mine.tensor(0, (8,)), theirs.tensor(GRANULE, (8,))])
    two = imported(c, [each.tensor(GRANULE + 64, (8,)).fill_(rank) for rank, each in enumerate((mine, theirs))])
    assert c.offsets(two) == [GRANULE + 64] * 2
    assert seen_everywhere(c, two)
    c.free(one)
    c.barriers()
    assert seen_everywhere(c, two)


def test_the_source_of_an_import_lives_until_no_rank_needs_it(made, c):
    pieces, sources = external(made, c)
    marks = [weakref.ref(each.last.mark) for each in pieces]
    for each in pieces:
        each.last = None
    shared = imported(c, sources)
    sources.clear()
    shared[0] = None  # rank 1 holds its own, and may still use rank 0's
    c.barriers()
    assert [mark() is not None for mark in marks] == [True, True]
    shared.clear()
    c.barriers()
    assert [mark() is not None for mark in marks] == [False, False]


def test_a_failing_undo_of_an_import_keeps_the_ranks_together(made, c):
    _, sources = external(made, c, 0, (100,))
    c.drivers[1].fail_next["map"] = 1
    c.drivers[0].fail_next["unmap"] = 1  # rank 0 has mapped its memory and takes it off again
    raised = c.attempt(lambda heap: heap.as_symmetric(sources[heap.rank]))
    assert says("allocators.undo") in raised[0].__notes__[0]
    assert re.search(says("allocators.failed", name="map"), str(raised[1]))
    raised.clear()
    c.barriers()  # the histories and the free lists are equal
    shared = imported(c, sources)
    assert seen_everywhere(c, shared)
    assert c.offsets(shared) == [0, 0]


def regions_of(cluster, members, nbytes):
    """A region of some ranks, (its offset, a tensor in it) by rank, or the error of a member."""
    taken = cluster.take(members, nbytes, ThreadWorld)
    for rank, each in enumerate(taken):
        if isinstance(each, tuple):
            each[1].fill_(10 * members[0] + rank + 1)
    return {member: taken[member] for member in sorted(members)}


def test_memory_of_groups_is_mapped_by_their_members_alone(made):
    c = made.cluster(3, nbytes=16 * GRANULE)
    kept, groups = fill(c, 1), ((2, 0), (0, 1), (1, 2))
    first = regions_of(c, groups[0], 2 * GRANULE + 5)
    assert c.used == [4 * GRANULE, GRANULE, 4 * GRANULE]
    regions = [first, *(regions_of(c, members, GRANULE) for members in groups[1:])]
    assert [{offset // GRANULE for offset, _ in region.values()} for region in regions] == [{13}, {12}, {11}]
    more = fill(c, 8)  # beyond the first limit
    raised = c.attempt(lambda heap: heap.allocate(3 * GRANULE, U8))
    assert [type(e) for e in raised] == [errors.HeapExhaustedError] * 3
    c.barriers()
    assert all(read_alike(c, region) for region in regions)
    assert seen_everywhere(c, kept, more)


@table("name, kind", [("create", errors.HeapError), ("import_fd", errors.PeerAccessError), ("map", errors.HeapError)])
def test_memory_of_a_group_that_one_member_cannot_have_is_given_back_by_all(made, name, kind):
    c = made.cluster(3)
    kept = fill(c, 1)
    counts, descriptors = c.counts, made.descriptors()
    c.drivers[2].fail_next[name] = 1
    one, two = regions_of(c, (0, 2), 2 * GRANULE).values()
    assert (type(one), type(two)) == (kind, kind)
    assert str(one).startswith("rank 2 could not")
    assert (c.counts, made.descriptors()) == (counts, descriptors)
    assert read_alike(c, regions_of(c, (0, 2), 2 * GRANULE))
    assert seen_everywhere(c, kept)
