"""Heaps of ranks that are processes: "vmem" on the pretended driver, with descriptors that are sent."""

from .jobs import short_of_descriptors


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
    for rank, (_, (kept, written, shrunk, imported), left) in enumerate(results):
        assert kept == ["0101", "0202", "0303"]
        assert written == 64 + (rank - 1) % 3
        assert shrunk == (1, 3), "freed memory is gone, own and peers'"
        assert imported == ["3030", "3131", "3232"]
        assert left == ((0, 0, 0, 0), [])
