"""The "vmem" allocator between processes: real descriptors and a real world, on the pretended driver."""

import pytest

from .fake_driver import GRANULE
from .vmem_jobs import exhausted, grow_shrink_import, short_of_descriptors


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_grow_shrink_import(pool, num_ranks):
    results = pool.run(grow_shrink_import, num_ranks)
    ranks = range(num_ranks)

    def ends(base):
        return [bytes([base + r, base + r]).hex() for r in ranks]

    for rank, (seen, left) in enumerate(results):
        first, second, written, shrunk, shared, changed, without, closed = seen
        assert first == ends(16)
        assert second == ends(32)
        assert written == 64 + (rank - 1) % num_ranks
        assert shrunk == (40, 40 * num_ranks), "freed memory is gone, own and peers'"
        assert shared == ends(48)
        assert changed == ends(80)
        assert without == 40 * num_ranks + 2, "the external memory itself has two mappings"
        assert closed == (0, 0, 0, 0)
        assert left == []


def test_memory_exhausted_on_one_rank(pool):
    results = pool.run(exhausted, 2)
    for rank, ((kind, text), used, seen, gone, counts) in enumerate(results):
        assert kind == "HeapExhaustedError", rank
        assert "rank 1: cpu has no room" in text
        assert used == 0
        assert seen == ["0101", "0202"]
        assert gone
        assert counts == (0, 0, 0, 0)
    assert f"allocate({20 * GRANULE}, uint8)" in results[0][0][1]


def test_a_rank_without_descriptors_is_the_same_error_everywhere_at_every_step(pool):
    results = pool.run(short_of_descriptors, 3, range(2, 80))
    errors = [errors for errors, _, _ in results]
    assert errors[0] == errors[1] == errors[2]
    *refused, last = errors[0]
    assert last is None, "the heap can be used as before"
    assert all("rank 1 could not" in text for _, text in refused)
    texts = "\n".join(text for _, text in refused)
    for step in ("get memory", "export its heap", "have come", "map the heap"):
        assert step in texts
    for _, seen, counts in results:
        assert seen == ["0101", "0202", "0303"]
        assert counts == (0, 0, 0, 0)
