"""Ranges of the heap: what is handed out, sets of ranges against plain sets, what is committed and given back."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from iris_core.errors import HeapError, HeapExhaustedError
from iris_core.heap.backing import Backing, RangeSet
from iris_core.heap.offsets import SubAllocator
from iris_core.types import Capability
from iris_core.world import SingleWorld

from .fakes import MemoryAllocator

NBYTES = 1 << 14

# what to do: (size, alignment) allocates, a number frees the live block at that place of the list
CALLS = st.lists(
    st.one_of(st.tuples(st.integers(0, 3000), st.sampled_from([1, 64, 256, 512, 4096])), st.integers(0, 50)),
    max_size=60,
)


@settings(deadline=None)
@given(CALLS)
def test_blocks_partition_the_range_and_are_the_smallest_that_fit(calls):
    """Of equals the first; what does not fit changes nothing."""
    sub, live = SubAllocator(NBYTES), {}  # offset -> requested size
    for call in calls:
        if isinstance(call, int):
            if live:
                offset = sorted(live)[call % len(live)]
                assert sub.free(offset) == sub.rounded(live.pop(offset))
            continue
        (size, alignment), fitting = call, []
        before = dict(sub._live), sub.free_blocks(), sub.peak_bytes
        for start, free in sub.free_blocks():
            aligned = -(-start // max(alignment, 256)) * max(alignment, 256)
            if aligned + sub.rounded(size) <= start + free:
                fitting.append((free, start, aligned))
        if fitting:
            assert sub.allocate(size, alignment) == min(fitting)[2]
            live[min(fitting)[2]] = size
        else:
            with pytest.raises(HeapExhaustedError) as caught:
                sub.allocate(size, alignment)
            found = caught.value.requested_bytes, caught.value.free_bytes, caught.value.largest_free_bytes
            assert found == (sub.rounded(size), *sub.free_below(NBYTES))
            assert before == (sub._live, sub.free_blocks(), sub.peak_bytes)
    assert {offset: max(256, -(-size // 256) * 256) for offset, size in live.items()} == sub._live
    position, free = 0, sub.free_blocks()
    for offset, size in sorted([*sub._live.items(), *free]):
        assert (offset, sub._live.get(offset, size)) == (position, size)
        position += size
    assert position == NBYTES
    assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(free)), "adjacent free blocks"
    assert sub.allocated_bytes == sum(sub._live.values()) <= sub.peak_bytes <= NBYTES
    assert sub.free_below(NBYTES) == (NBYTES - sub.allocated_bytes, max((size for _, size in free), default=0))


def test_requests_for_nothing_get_blocks_of_their_own_and_the_peak_is_the_most_at_any_time():
    sub = SubAllocator(1024)
    sub.free(sub.allocate(512))
    assert [sub.allocate(0), sub.peak_bytes, sub.allocated_bytes] == [0, 512, 256]
    assert [sub.allocate(0) for _ in range(3)] == [256, 512, 768]
    with pytest.raises(HeapExhaustedError):
        sub.allocate(0)


def test_blocks_end_below_the_limit():
    sub = SubAllocator(4096)
    sub.limit = 2048
    first = sub.allocate(1024)
    with pytest.raises(HeapExhaustedError):
        sub.allocate(1280)
    sub.limit = 4096
    assert sub.allocate(1280) == 1024
    sub.limit = 2560
    sub.free(first)
    assert sub.allocate(768) == 0


def test_what_is_no_block_no_alignment_and_no_range():
    sub = SubAllocator(1000)
    assert sub.nbytes == 768, "a tail smaller than a block is not used"
    with pytest.raises(HeapExhaustedError):
        sub.allocate(769)
    sub.free(sub.allocate(512))
    for offset in (0, 256, 300, -256):
        with pytest.raises(HeapError, match=f"offset {offset}"):
            sub.free(offset)
    for alignment in (0, -256, 3, 768):
        with pytest.raises(ValueError, match=f"power of two, not {alignment}"):
            sub.allocate(16, alignment)
    assert sub.free_blocks() == [(0, 768)]
    with pytest.raises(ValueError, match="too small"):
        SubAllocator(255)


# -- sets of ranges, and what is committed ----------------------------------------------------------------------------
RANGE = st.tuples(st.integers(0, 40), st.integers(0, 40))


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


END = 10 * 4096 + 512
WHOLE, FIRST, LAST = (0, END), (0, 8 * 4096), (10 * 4096, END)


@table(("committed", "idle", "between", "given_back"), [
    ([(100, 3 * 4096 + 100)], (4000, 4000 + 3 * 4096), [], [(4096, 2 * 4096)]),  # whole granules, if committed
    ([LAST], WHOLE, [], [(10 * 4096, 512)]),  # the last one may be shorter
    # used and free again before the next look: the second granule; of what is left, nothing is a whole granule
    ([FIRST], FIRST, [(4096, 4196)], [(0, 4096), (2 * 4096, 6 * 4096)]),
    ([WHOLE], WHOLE, [(0, 4196), (5000, END)], []),
])  # fmt: skip
def test_what_was_idle_at_two_looks_is_given_back(committed, idle, between, given_back):
    allocator = MemoryAllocator(END, Capability.DECOMMIT)
    backing = Backing(allocator, SingleWorld())
    for start, end in committed:
        backing.commit(start, end - start)
    assert not backing.release_idle([idle])
    for start, end in between:
        backing.commit(start, end - start)
    before = backing.committed_bytes
    assert backing.release_idle([idle]) == bool(given_back)
    assert [call[1:] for call in allocator.calls if call[0] == "decommit"] == given_back
    assert before - backing.committed_bytes == sum(4096 * -(-nbytes // 4096) for _, nbytes in given_back)
