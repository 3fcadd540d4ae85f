"""`ctx.ops.flash_decode`, `ctx.ops.ring_attention`: attention to keys and values that are divided among ranks."""

import json
import pathlib
import re

import jobs_attention as jobs
import jobs_corpus
import pytest

exhaustive = pytest.mark.exhaustive

# sequences, heads, key heads, elements of a head, keys of a rank at most, dtype, pieces
DECODE = {
    "groups of three": (3, 6, 2, 16, 70, "float32", 3),
    "a piece for each": (2, 4, 4, 32, 40, "bfloat16", 1),
    "more heads than a tile": (2, 20, 1, 64, 90, "float16", None),
}
# heads, key heads, tokens, elements of a head, dtype, causal, striped
RING = {
    "full": (2, 2, 75, 16, "float32", False, False),
    "causal, in groups": (4, 2, 97, 16, "float32", True, False),
    "striped": (2, 1, 70, 32, "bfloat16", True, True),
    "more ranks than tokens": (2, 1, 2, 16, "float16", True, False),
    "striped, and exactly a tile": (1, 1, 64, 16, "float32", False, True),
}
RANKS = [(1, None), (2, None), (3, None), (4, [3, 1, 0])]


def some_of(cases):
    """Every case on one number of ranks; on all with --exhaustive."""
    for i, case in enumerate(cases):
        for j, (num_ranks, group) in enumerate(RANKS):
            marks = [] if j == (i + 2) % len(RANKS) else [exhaustive]
            yield pytest.param(case, num_ranks, group, marks=marks, id=f"{case}-{num_ranks}")


@pytest.mark.parametrize(("case", "num_ranks", "group"), list(some_of(DECODE)))
def test_decode(pool, device, case, num_ranks, group):
    assert pool.run(jobs.decodes, num_ranks, device, group, DECODE[case], 4) == [[]] * num_ranks


@pytest.mark.parametrize(("case", "num_ranks", "group"), list(some_of(RING)))
def test_ring(pool, device, case, num_ranks, group):
    assert pool.run(jobs.rings, num_ranks, device, group, RING[case], 2) == [[]] * num_ranks


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


SOURCES = pathlib.Path(jobs.decode_kernels.__file__).parent
SIGNAL = re.compile(r"(ctx\.signal\([^()\n]*)\)")
SIGNALS = "signal_members(ctx, arrived + me * rows + row, turn, members, SIZE)"
RELAXED = 'for peer in range(SIZE): ctx.signal(arrived + me * rows + row, turn, tl.load(members + peer), sem="relaxed")'
DECODES, RINGS = ("flash_decode.py", "decodes", DECODE_SMALL), ("ring_attention.py", "rings", RING_SMALL)
MISTAKES = [
    (2, *DECODES, "half = turn % 2 * SIZE", "half = turn % 1 * SIZE"), (3, *RINGS, "readers * (n // 2))", "0)"),
    (3, *RINGS, "ctx.wait(taken + item, message - 2)", "ctx.wait(taken + item, 0)"),
    (2, *RINGS, "ctx.wait(came + item, message)", "ctx.wait(came + item, 0)"),
    (2, *DECODES, SIGNALS, RELAXED), (2, *RINGS, "signals", ""),
]  # fmt: skip
"""Ranks that show it, what they run, and the change."""


@pytest.mark.parametrize(("num_ranks", "name", "job", "case", "right", "wrong"), MISTAKES)
def test_a_mistake_is_reported(pool, tmp_path, num_ranks, name, job, case, right, wrong):
    """Without one of the waits, with one half, or with relaxed signals: the checker finds it, whatever the results."""
    source, path, found = (SOURCES / name).read_text(), tmp_path / name, tmp_path / "found"
    if wrong:
        assert source.count(right) == 1
        path.write_text(source.replace(right, wrong))
    else:
        path.write_text(SIGNAL.sub(r'\1, sem="relaxed")', source))
    ranks, turns = num_ranks, num_ranks + 1
    pool.run(jobs_corpus.checked, ranks, str(found), "jobs_attention", job, "cpu", None, case, turns, str(path))
    kinds = {json.loads(line)["kind"] for line in found.read_text().splitlines()}
    assert kinds & {"race", "counter"}


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [[]] * 2
