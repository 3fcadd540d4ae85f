"""Sets of ranges, checked against plain sets, and what is committed and given back."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from iris_core.heap.backing import Backing, RangeSet
from iris_core.types import Capability
from iris_core.world import SingleWorld

from .fakes import MemoryAllocator

RANGE = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), RANGE), max_size=30), RANGE)
def test_a_range_set_is_a_set(steps: list[tuple[str, tuple[int, int]]], query: tuple[int, int]) -> None:
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


def test_only_whole_granules_are_given_back_and_only_when_committed() -> None:
    allocator = MemoryAllocator(10 * 4096 + 512, Capability.DECOMMIT)
    backing = Backing(allocator, SingleWorld())
    backing.commit(100, 3 * 4096)
    free = [(4000, 4000 + 3 * 4096)]
    assert not backing.release_idle(free)
    assert backing.release_idle(free)
    assert [call for call in allocator.calls if call[0] == "decommit"] == [("decommit", 4096, 2 * 4096)]
    assert backing.committed_bytes == 2 * 4096


def test_the_last_granule_may_be_shorter() -> None:
    allocator = MemoryAllocator(4096 + 512, Capability.DECOMMIT)
    backing = Backing(allocator, SingleWorld())
    backing.commit(4096, 512)
    for _ in range(2):
        backing.release_idle([(0, 4096 + 512)])
    assert [call for call in allocator.calls if call[0] == "decommit"] == [("decommit", 4096, 512)]


def test_memory_in_use_between_two_looks_is_kept() -> None:
    allocator = MemoryAllocator(1 << 16, Capability.DECOMMIT)
    backing = Backing(allocator, SingleWorld())
    backing.commit(0, 8 * 4096)
    backing.release_idle([(0, 8 * 4096)])
    backing.commit(4096, 100)  # the second granule is used and free again before the next look
    backing.release_idle([(0, 8 * 4096)])
    assert [call for call in allocator.calls if call[0] == "decommit"] == [
        ("decommit", 0, 4096),
        ("decommit", 2 * 4096, 6 * 4096),
    ]


def test_a_rest_inside_one_granule_is_nothing_to_give_back() -> None:
    ranges = RangeSet()
    ranges.add(0, 100)
    assert ranges.intersection(60, 50) == []
    allocator = MemoryAllocator(1 << 16, Capability.DECOMMIT)
    backing = Backing(allocator, SingleWorld())
    backing.commit(0, 1 << 16)
    backing.release_idle([(0, 1 << 16)])
    backing.commit(0, 4196)  # of what was idle, this leaves the rest of the second granule ...
    backing.commit(5000, (1 << 16) - 5000)  # ... and that ends before the granule does
    assert not backing.release_idle([(0, 1 << 16)])
    assert allocator.count("decommit") == 0
