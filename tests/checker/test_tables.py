"""Granules of addresses, histories of granules, and rows of tables, each against what is said plainly."""

import numpy as np
import pytest

from iris_core.errors import IrisError
from iris_core.world import World
from iris_triton.checker import shared
from iris_triton.checker.histories import ALL, ATOMIC_WRITE, READ, UNWRITTEN, WRITE, Histories, different, replaced
from iris_triton.checker.places import Heaps, place_of, range_of
from iris_triton.checker.shared import Tables
from iris_triton.checker.sites import Undefined
from iris_triton.checker.strands import Host, LaunchStrands


def bytes_of(place):
    """The bytes of a place, by offset."""
    granules = place.granules
    if isinstance(granules, slice):
        granules = np.arange(granules.start, granules.stop)
    masks = np.broadcast_to(place.masks, granules.shape)
    return {4 * int(g) + k for g, mask in zip(granules, masks, strict=True) for k in range(4) if mask >> k & 1}


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("spread", [64, 1 << 16, 1 << 30])
def test_a_place_has_the_bytes_of_its_elements(itemsize, spread):
    rng = np.random.default_rng(itemsize * spread)
    for count in (1, 2, 17, 64):
        for offsets in (
            rng.integers(0, spread, count) * itemsize,
            rng.integers(0, spread, count) * itemsize + itemsize // 2 % 4,  # crooked
            7 * itemsize + np.arange(count) * itemsize,
        ):
            wanted = {int(offset) + k for offset in offsets for k in range(itemsize)}
            assert bytes_of(place_of(0, offsets.astype(np.int64), itemsize)) == wanted


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 5, 8, 11])
def test_a_range_has_its_bytes(first, nbytes):
    assert bytes_of(range_of(0, first, nbytes)) == set(range(first, first + nbytes))


def test_addresses_are_those_of_the_rank_whose_heap_it_is():
    heaps = Heaps([0x9000, 0x1000, 0x5000], 0x1000)
    addresses = np.array([0x1000, 0x5004, 0x9FFC, 0x2000, 0x1008], np.uint64)
    found = {place.rank: bytes_of(place) for place in heaps.find(addresses, None, 4)}
    assert found == {0: {*range(4092, 4096)}, 1: {*range(4), *range(8, 12)}, 2: {*range(4, 8)}}
    assert heaps.find(addresses, np.array([False] * 3 + [True, False]), 4) == []
    assert heaps.rank_of(0x5000, 0x1000) == (2, 0)
    assert heaps.rank_of(0x5000, 0x1001) is None


@pytest.mark.parametrize("high", [9, 1 << 20])
def test_numbers_in_cells_are_found_and_replaced(high):
    cells = np.random.default_rng(1).choice([3, 5, high], 100).astype(np.uint32)
    assert different(cells) == sorted({3, 5, high})
    assert (replaced(cells, {3: 1, 5: 2, high: 7}) == np.where(cells == 3, 1, np.where(cells == 5, 2, 7))).all()


@pytest.fixture
def two():
    """Tables, and two programs of one launch, which nothing orders."""
    tables = Tables(World(), 1 << 16)
    launch = LaunchStrands(tables, 0, Host(tables, World()), (2, 1, 1))
    launch.begin((0, 0, 0))
    launch.begin((1, 0, 0))
    yield tables, launch.strands[0, 0, 0], launch.strands[1, 0, 0]
    tables.close()


def test_another_process_reads_the_same_histories(two):
    tables, one, other = two
    here, there = Histories(tables), Histories(tables)
    with tables:
        number = UNWRITTEN
        for turn in range(60):
            strand = (one, other)[turn % 2]
            kind = (READ, ATOMIC_WRITE, READ, WRITE)[turn % 7 % 4]
            number = here.after(number, kind, (ALL, 3, 12)[turn % 3], strand, turn)
            strand.tick(tables)
            mine, theirs = here.get(number), there.get(number)
            assert (mine.writes, mine.reads, mine.written) == (theirs.writes, theirs.reads, theirs.written)
            assert mine.depth < 40


def test_a_full_table_is_an_error(two):
    tables, *_ = two
    tables.counters[shared.CLOCKS] = 1 << 20
    with tables, pytest.raises(IrisError, match="clocks"):
        tables.take(shared.CLOCKS)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_undefined_lanes_are_known_after_arithmetic(dtype):
    undefined = Undefined()
    undefined.fill(np.dtype(np.float32), 5)
    lane = undefined.fill(np.dtype(dtype), 7)
    data = np.arange(8).astype(dtype)
    data[3] = lane
    with np.errstate(all="ignore"):
        # the largest of float64 is another NaN on some CPUs
        largest = [data.max(keepdims=True)] if dtype != np.float64 else []
        for result in (data * 2 + 1, data.sum(keepdims=True), np.sqrt(data), -data, *largest):
            for kept in (result, result.astype(np.float32), result.astype(np.float64)):
                is_used, line = undefined.find(kept, None)
                assert is_used
                assert line == (7 if kept.dtype == dtype == np.float32 else None) or dtype != np.float32
    assert undefined.find(data, np.arange(8) != 3) == (False, None)
    for other in (np.nan, -np.nan, np.inf, 0):
        data[3] = other
        assert undefined.find(data, None) == (False, None)
    assert undefined.find(np.full(4, -1, f"i{data.itemsize}").view(dtype), None) == (False, None)  # a block's poison


def test_undefined_lanes_of_other_types():
    undefined = Undefined()
    assert undefined.find(np.full(3, undefined.fill(np.dtype(np.uint16), 1)), None) == (True, None)  # bfloat16
    assert undefined.find(np.array([0x7FC0, 0xFFFF, 0], np.uint16), None) == (False, None)
    assert undefined.fill(np.dtype(np.int64), 1) > 1 << 29
    assert undefined.fill(np.dtype(np.int8), 1) is None
    assert undefined.find(np.arange(4), None) == (False, None)
