"""Sets of ranges, checked against plain sets, and what is committed and given back."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tables import table

from iris_core.heap.backing import Backing, RangeSet
from iris_core.types import Capability
from iris_core.world import SingleWorld

from .fakes import MemoryAllocator

RANGE = st.tuples(st.integers(0, 40), st.integers(0, 40))


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
