"""The sub-allocator: same calls, same offsets; no overlap; everything comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from iris_core.errors import HeapError, HeapExhaustedError
from iris_core.heap.offsets import SubAllocator

NBYTES = 1 << 14

# what to do: (size, alignment) allocates, a number frees the live block at that place of the list
CALLS = st.lists(
    st.one_of(st.tuples(st.integers(0, 3000), st.sampled_from([1, 64, 256, 512, 4096])), st.integers(0, 50)),
    max_size=60,
)


def play(calls: list) -> tuple[SubAllocator, dict[int, int], list[int | None]]:
    """Carry the calls out; return the allocator, what is live (offset -> requested size) and every offset given."""
    sub = SubAllocator(NBYTES)
    live: dict[int, int] = {}
    offsets: list[int | None] = []
    for call in calls:
        if isinstance(call, tuple):
            size, alignment = call
            try:
                offset = sub.allocate(size, alignment)
            except HeapExhaustedError:
                offsets.append(None)
                continue
            assert offset % max(alignment, 256) == 0
            assert offset not in live
            live[offset] = size
            offsets.append(offset)
        elif live:
            offset = sorted(live)[call % len(live)]
            assert sub.free(offset) == sub.rounded(live.pop(offset))
    return sub, live, offsets


@given(CALLS)
def test_blocks_partition_the_range(calls: list) -> None:
    sub, live, _ = play(calls)
    assert sorted(sub._live) == sorted(live)
    pieces = sorted([*sub._live.items(), *sub.free_blocks()])
    position = 0
    for offset, size in pieces:
        assert offset == position
        position += size
    assert position == NBYTES
    for offset, size in live.items():
        assert sub.size_of(offset) == max(256, -(-size // 256) * 256)
    free = sub.free_blocks()
    assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(free)), "adjacent free blocks"
    assert sub.allocated_bytes == sum(sub._live.values())
    assert sub.free_below(NBYTES) == (NBYTES - sub.allocated_bytes, max((size for _, size in free), default=0))
    assert sub.allocated_bytes <= sub.peak_bytes <= NBYTES


@given(CALLS)
def test_same_calls_give_the_same_offsets(calls: list) -> None:
    assert play(calls)[2] == play(calls)[2]


@given(CALLS, st.integers(0, 3000), st.sampled_from([256, 1024]))
def test_takes_the_smallest_block_that_fits_and_of_equals_the_first(calls: list, size: int, alignment: int) -> None:
    sub, _, _ = play(calls)
    need = sub.rounded(size)
    fitting = []
    for start, free in sub.free_blocks():
        aligned = -(-start // alignment) * alignment
        if aligned + need <= start + free:
            fitting.append((free, start, aligned))
    if fitting:
        assert sub.allocate(size, alignment) == min(fitting)[2]
    else:
        before = (dict(sub._live), sub.free_blocks(), sub.peak_bytes)
        with pytest.raises(HeapExhaustedError) as caught:
            sub.allocate(size, alignment)
        assert (caught.value.requested_bytes, caught.value.free_bytes) == (need, NBYTES - sub.allocated_bytes)
        assert caught.value.largest_free_bytes == sub.free_below(NBYTES)[1]
        assert before == (sub._live, sub.free_blocks(), sub.peak_bytes)


@given(CALLS)
def test_everything_comes_back(calls: list) -> None:
    sub, live, _ = play(calls)
    for offset in live:
        sub.free(offset)
    assert sub.free_blocks() == [(0, NBYTES)]
    assert sub.allocate(NBYTES) == 0


def test_requests_for_nothing_get_blocks_of_their_own() -> None:
    sub = SubAllocator(1024)
    assert [sub.allocate(0) for _ in range(4)] == [0, 256, 512, 768]
    with pytest.raises(HeapExhaustedError):
        sub.allocate(0)


def test_peak_is_the_most_at_any_time() -> None:
    sub = SubAllocator(4096)
    a = sub.allocate(1024)
    sub.allocate(256)
    sub.free(a)
    sub.allocate(256)
    assert (sub.peak_bytes, sub.allocated_bytes) == (1280, 512)


def test_blocks_end_below_the_limit() -> None:
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


def test_a_tail_smaller_than_a_block_is_not_used() -> None:
    sub = SubAllocator(1000)
    assert sub.nbytes == 768
    with pytest.raises(HeapExhaustedError):
        sub.allocate(769)


@table("offset", [0, 256, 300, -256])
def test_free_of_what_is_no_block(offset: int) -> None:
    sub = SubAllocator(4096)
    sub.free(sub.allocate(512))
    with pytest.raises(HeapError, match=f"offset {offset}"):
        sub.free(offset)
    assert sub.free_blocks() == [(0, 4096)]


@table("alignment", [0, -256, 3, 768])
def test_alignment_must_be_a_power_of_two(alignment: int) -> None:
    with pytest.raises(ValueError, match=f"power of two, not {alignment}"):
        SubAllocator(4096).allocate(16, alignment)


def test_tiny_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        SubAllocator(255)
