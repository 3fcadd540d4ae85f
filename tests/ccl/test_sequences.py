"""Calls one after the other, beside each other, in groups and graphs, with handles that are dropped; messages."""

import jobs_sequences as jobs
import pytest
from ccl_cases import ENCODINGS, OPS, SMALL, Case, kinds
from devices import unprobed
from rank_counts import rank_counts


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    sets = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0], [2]]
    assert pool.run(jobs.in_groups, num_ranks, device, sets, 5 if device == "cuda" else 3) == [[]] * num_ranks


@pytest.mark.parametrize(("num_ranks", "slow"), [
    (3, False), *(pytest.param(n, False, marks=pytest.mark.exhaustive(device="cpu")) for n in (2, 8)), (4, True),
])  # fmt: skip
def test_back_to_back(pool, num_ranks, slow, device):
    many, few = ((500, 10), (20, 8)) if slow else ((10_000, 24), (30, 10))
    calls, kinds = many if device == "cuda" else few
    found = pool.run(jobs.back_to_back, num_ranks, device, calls, kinds, slow, timeout_s=300.0)
    assert found == [[]] * num_ranks


@pytest.mark.parametrize(("job", "num_ranks"), [
    *((jobs.in_tiles, n) for n in (1, 3)), *((jobs.freed_and_asked_for, n) for n in (1, 3)),
    *((jobs.leaves, n) for n in (1, 2)), (jobs.observed, 2), (jobs.messages, 3),
    pytest.param(jobs.messages, 2, marks=pytest.mark.exhaustive(device="cpu")),
])  # fmt: skip
def test_a_few_ranks(pool, job, num_ranks, device):
    assert pool.run(job, num_ranks, device) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[4]))
def test_barriers_finish_calls_and_frees_wait_for_them(pool, some, num_ranks, device):
    rounds = 12 if device == "cuda" else len(some(range(12), 2))
    assert pool.run(jobs.nobody_waits, num_ranks, device, num_ranks, rounds) == [None] * num_ranks


@pytest.mark.parametrize(("job", "num_ranks", "args"), [
    *((jobs.fails, 3, each) for each in (("barrier", 3), ("close", 3), ("group", 2), ("collective", 1), ("wait", 1))),
    (jobs.keeps_errors, 2, ()),
])  # fmt: skip
def test_errors_of_calls_that_no_caller_waits_for(pool, job, num_ranks, args):
    assert pool.run(job, num_ranks, *args) == [None] * num_ranks


@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replays_with_changing_data(pool, num_ranks):
    cases = [Case(op, "bfloat16", shape=(4099,), place=place) for op in OPS for place in ("heap", "ordinary", "skewed")]
    for algorithm in ("one_shot", "two_shot"):
        cases.append(Case("all_reduce", shape=(33, 5), in_place=True, config={"algorithm": algorithm}))
    cases += [Case(op, "bfloat16", shape=(4099,), config={"algorithm": name}) for op, name in kinds("portable")]
    assert pool.run(jobs.captured, num_ranks, "cuda", cases, 50, timeout_s=300.0) == [[]] * num_ranks


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_replays_of_packets(pool, encoding, num_ranks):
    """Each algorithm of packets in one piece and in several, with a workspace in which few messages go at once."""
    if reason := unprobed("cuda", [encoding]):
        pytest.skip(reason)
    cases = [
        Case(op, "float32", shape=(count,), config={"algorithm": name, "comm_sms": 2, "num_warps": 4})
        for op, name in kinds(encoding)
        for count in (77, 9001)
    ]
    assert pool.run(jobs.captured, num_ranks, "cuda", cases, 50, SMALL, timeout_s=300.0) == [[]] * num_ranks
