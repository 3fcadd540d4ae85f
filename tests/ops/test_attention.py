"""`ctx.ops.flash_decode`, `ctx.ops.ring_attention`: attention to keys and values that are divided among ranks."""

import jobs_attention as jobs
import jobs_corpus
import pytest

exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(("num_ranks", "group", "case"), [
    (3, None, (3, 6, 2, 16, 70, "float32", 3)),  # groups of three heads
    (4, [3, 1, 0], (2, 4, 4, 32, 40, "bfloat16", 1)),  # a piece for each
    (1, None, (2, 20, 1, 64, 90, "float16", None)),  # more heads than a tile
])  # fmt: skip
def test_decode(pool, device, num_ranks, group, case):
    """Case: sequences, heads, key heads, elements of a head, keys of a rank at most, dtype, pieces."""
    assert pool.run(jobs.decodes, num_ranks, device, group, case, 4) == [[]] * num_ranks


@pytest.mark.parametrize(("num_ranks", "group", "case"), [
    (3, None, (2, 2, 75, 16, "float32", False, False)), (4, [3, 1, 0], (4, 2, 97, 16, "float32", True, False)),
    (1, None, (2, 1, 70, 32, "bfloat16", True, True)),
    (2, None, (2, 1, 2, 16, "float16", True, False)),  # a member without tokens
    (3, None, (1, 1, 64, 16, "float32", False, True)),  # exactly a tile
])  # fmt: skip
def test_ring(pool, device, num_ranks, group, case):
    """Case: heads, key heads, tokens, elements of a head, dtype, causal, striped."""
    assert pool.run(jobs.rings, num_ranks, device, group, case, 2) == [[]] * num_ranks


DECODE_SMALL, RING_SMALL = (1, 2, 1, 16, 40, "float32", 2), (1, 1, 45, 16, "float32", False, False)


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=exhaustive)])
@pytest.mark.parametrize(("job", "case", "turns"), [(jobs.decodes, DECODE_SMALL, 6), (jobs.rings, RING_SMALL, 3)])
def test_programs_that_are_late(pool, tmp_path, job, case, turns, num_ranks):
    found = pool.run(jobs.late_inside, num_ranks, str(tmp_path / "changes"), case, turns, job)
    assert found == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=exhaustive), 3, pytest.param(4, marks=exhaustive)])
@pytest.mark.parametrize(("job", "case"), [("decodes", DECODE_SMALL), ("rings", RING_SMALL)])
def test_there_is_no_race(pool, tmp_path, job, case, num_ranks):
    path = tmp_path / "found"
    wrong = pool.run(jobs_corpus.checked, num_ranks, str(path), "jobs_attention", job, "cpu", None, case, 3)
    assert wrong == [[]] * num_ranks
    assert not path.exists() or path.read_text() == ""


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [[]] * 2
