"""Tile-level collectives between ranks: exact results, launches in a row without barriers, late ranks, time-outs."""

import re

import jobs_tiles as jobs
import pytest
from jobs_tiles import LAUNCHES, OPS, RAISED, WITH_LOCKS, Case
from rank_counts import rank_counts

LANGUAGES = ["triton", "gluon"]
DTYPES = ["float32", "float16", "bfloat16", "int32"]
RANKS = [2, 3, 4, 8, 1]

MIXED = [
    Case("one_shot", "float32", src_dtype="bfloat16", dst_dtype="bfloat16"),
    Case("two_shot", "bfloat16", src_dtype="float32", dst_dtype="bfloat16"),
    Case("ring", "bfloat16", src_dtype="float32", dst_dtype="bfloat16"),
    Case("ring", "float32", src_dtype="float16", dst_dtype="float32"),
    Case("atomic", "bfloat16", dst_dtype="float32"),
    Case("spinlock", "float16", dst_dtype="float32"),
    Case("ring", "float32", in_place=True),
]
"""Tensors of different types."""


def cases_of(language, ranks, device="cpu"):
    """Every operation once; together they get every dtype and form.

    On 8 ranks each language has half of them, and on 4 CPU ranks the other half.  On some numbers of ranks, kernels
    raise flags as in AMD's Iris, an int32 for each tile, or tensors differ in type.
    """
    cases = []
    for i, op in enumerate(OPS):
        mine = i % 2 == LANGUAGES.index(language)
        if (ranks == 8 and not mine) or (ranks == 4 and mine and device == "cpu"):
            continue
        turn = RANKS.index(ranks) + i + 2 * LANGUAGES.index(language)
        form = "memory" if op in WITH_LOCKS and turn % 3 == 1 else "tile"
        in_place = op in RAISED and turn % 3 != 1 and turn % 2 == 0
        cases.append(Case(op, DTYPES[turn % 4], form, strided=turn % 2 == 1, in_place=in_place))
    if ranks in (2, 3) or (ranks == 4 and device != "cpu"):
        cases += [Case(op, DTYPES[(ranks + i) % 4], form="raised", strided=i % 2 == 1) for i, op in enumerate(RAISED)]
    if ranks == 3:
        cases += [case for case in MIXED if language == "triton" or case.op == "ring"]
    return cases


def check(sums, cases):
    """Where all ranks get the same, they have the same bytes."""
    assert len(sums[0]) == LAUNCHES * len(cases)
    for i, case in enumerate(cases):
        if case.op in ("one_shot", "two_shot", "owner", "ring", "all_gather_rows", "all_gather_columns"):
            first, *others = (one[i * LAUNCHES : (i + 1) * LAUNCHES] for one in sums)
            assert others == [first] * len(others), case
            assert len(set(first)) == LAUNCHES  # the data did change


@pytest.mark.parametrize("num_ranks", rank_counts(1, 3, 4, seldom=[2, 8]))
@pytest.mark.parametrize("language", LANGUAGES)
def test_launches_in_a_row(pool, language, num_ranks, device):
    cases = cases_of(language, num_ranks, device)
    check(pool.run(jobs.run_cases, num_ranks, language, cases, device, timeout_s=300.0), cases)


@pytest.mark.parametrize("num_ranks", [3])
def test_no_kernel_waits_for_one_that_has_not_begun(pool, num_ranks, device):
    for op in ["two_shot", "reduce_scatter", "spinlock", "atomic"]:
        assert all(pool.run(jobs.one_after_the_other, num_ranks, "triton", op, device))


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2]))
@pytest.mark.parametrize("language", LANGUAGES)
def test_algorithms_may_share_their_locks(pool, language, num_ranks, device):
    """Their calls are counted with 64 bits; numbers are those of variants."""
    ops = ["one_shot", "two_shot", 3, "ring", "owner", 2, 1, "two_shot", "ring", "one_shot"]
    for wrong, stamp in pool.run(jobs.sequence, num_ranks, language, ops, 2**31 - 32, device):
        assert wrong == []
        assert stamp >> 3 == 2**28 - 4 + len(ops)


@pytest.mark.parametrize("num_ranks", [2])
def test_a_wait_in_vain_ends_and_is_reported(pool, num_ranks, device):
    for op in ["one_shot", "two_shot", "ring", "spinlock"]:
        (text, untouched), (other, _) = pool.run(jobs.nobody_else_calls, num_ranks, "triton", op, device)
        assert "rank 0" in text
        kind, _, said = text.partition(": ")
        assert (kind, other) == ("DeviceTimeoutError", f"DeviceTimeoutError: rank 0 has reported: {said}")
        assert untouched or op != "spinlock"  # what the lock protects stays as it is


def test_mistakes_are_found_by_the_executor(pool):
    mistakes = [("all_to_all", "float32", 11), ("ring", "bfloat16", 0)]
    texts = [r"AssertionError: .*must have world_size \* N_per_rank columns", "AssertionError: .*in different memory"]
    for said in pool.run(jobs.mistaken, 2, "triton", mistakes):
        assert all(re.search(text, line, re.DOTALL) for text, line in zip(texts, said, strict=True)), said


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("language", LANGUAGES)
def test_fifty_replays_of_a_graph(pool, language, num_ranks):
    for op in ["one_shot", "two_shot", "owner", "ring"]:
        assert pool.run(jobs.replayed, num_ranks, language, op, 50, "cuda", timeout_s=300.0) == [[]] * num_ranks
