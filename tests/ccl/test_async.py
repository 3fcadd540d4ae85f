"""Asynchronous calls that no caller waits for, and the heap: barriers, frees, scopes, errors, and the end."""

import pytest
from jobs_async import fails, freed_and_asked_for, keeps_errors, leaves, nobody_waits
from rank_counts import rank_counts


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[4]))
def test_barriers_finish_calls_and_frees_wait_for_them(pool, some, num_ranks, device):
    rounds = 12 if device == "cuda" else len(some(range(12), 2))
    assert pool.run(nobody_waits, num_ranks, device, num_ranks, rounds) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_block_that_a_call_uses_is_not_handed_out(pool, num_ranks, device):
    assert pool.run(freed_and_asked_for, num_ranks, device) == [(True, [0.0])] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_end_waits_for_calls(pool, num_ranks, device):
    assert pool.run(leaves, num_ranks, device) == [[float(num_ranks)]] * num_ranks


@pytest.mark.parametrize(("how", "learn"), [("barrier", 3), ("close", 3), ("group", 2), ("collective", 1), ("wait", 1)])
def test_errors_of_calls_that_no_caller_waits_for(pool, how, learn):
    """One that a caller got is not raised again."""
    for rank, result in enumerate(pool.run(fails, 3, how)):
        said = result if how == "close" else result[0]
        kind = "DeadlockError: " if how == "wait" else "DeviceError: "
        assert len(said) == (3 if how == "wait" else 1) * (rank < learn)
        assert all(text.startswith(kind) for text in said)
        assert how == "wait" or all("all_reduce" in text and "DeadlockError" in text for text in said)
        assert rank == 0 or all("rank 0" in text for text in said)
        assert how == "close" or result[1] == ([2.0] * 4 if rank < 2 else [0.0] * 4)


@pytest.mark.parametrize("num_ranks", [2])
def test_a_barrier_that_was_not_launched_keeps_no_place(pool, num_ranks):
    assert pool.run(keeps_errors, num_ranks) == [("DeviceError", False), ("", False)]
