"""signal, wait, put_signal and barrier between ranks, in each language."""

import pytest
from jobs_common import in_language
from jobs_sync import (
    COMPARE_TIMEOUT_S,
    COMPARISONS,
    backend_name,
    check_served,
    run_barrier,
    run_compare,
    run_count,
    run_handshake,
    run_ring,
    run_serve,
    run_timeout,
    wait_for_a_dead_peer,
)
from rank_counts import languages, rank_counts

from iris_core.errors import PeerLostError


@pytest.mark.parametrize(*languages(rank_counts(4, seldom=[2, 8])))
def test_ring(pool, language, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    for form in ("store", "put_signal"):
        results = pool.run(in_language, num_ranks, language, run_ring, form, rounds, device)
        assert results[-1] == [rounds - 1 + num_ranks], form


@pytest.mark.parametrize(*languages([1, 4], gluon=rank_counts(2, seldom=[1])))
def test_every_op_sem_and_scope_of_signals_and_waits(pool, language, num_ranks, device):
    assert pool.run(in_language, 1, language, backend_name) == [language]
    results = pool.run(in_language, num_ranks, language, run_handshake, device)
    assert [problems for problems, _ in results] == [[]] * num_ranks
    if language == "gluon":
        assert results == pool.run(run_handshake, num_ranks, device), "the same bytes as in Triton"


@pytest.mark.parametrize(*languages(rank_counts(4, seldom=[1])))
def test_added_signals_are_all_counted(pool, language, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    for dtype in ("int32", "int64"):
        counts = pool.run(in_language, num_ranks, language, run_count, dtype, rounds, device)
        assert counts[0] == rounds * num_ranks, dtype


@pytest.mark.parametrize(*languages(rank_counts(3, seldom=[2, 4])))
def test_whoever_comes_is_served(pool, language, num_ranks, device, tmp_path):
    """With ranks that are late at random: what was signalled is there behind wait_any, load_acquire and test."""
    rounds = 10 if device == "cpu" else 200
    args = language, run_serve, rounds, str(tmp_path / "changes"), device
    served, *_ = pool.run(in_language, num_ranks, *args)
    check_served(served, num_ranks, rounds)


@pytest.mark.parametrize(*languages(rank_counts(1, 4, seldom=[2, 8])))
def test_barrier_of_the_world(pool, language, num_ranks, device):
    args = 0, 1, num_ranks, *((4, 2) if device == "cpu" else (50, 3)), device
    assert pool.run(in_language, num_ranks, language, run_barrier, *args) == [0] * num_ranks


@pytest.mark.parametrize(*languages([4]))
def test_barrier_of_a_group(pool, language, num_ranks, device):
    rounds, launches = (50, 3) if (language, device) == ("gluon", "cuda") else (4, 2)
    for group in ((1, 2, 2), (0, 2, 2), (1, 1, 3), (2, 1, 1))[language == "gluon" :]:  # start, stride, size
        args = language, run_barrier, *group, rounds, launches, device
        assert pool.run(in_language, num_ranks, *args) == [0] * num_ranks, group


@pytest.mark.parametrize(*languages([2]))
def test_a_wait_that_reaches_its_bound_is_reported_and_not_fatal(pool, language, num_ranks, device):
    (other, _), (text, names_address) = pool.run(in_language, num_ranks, language, run_timeout, device)
    assert other == f"rank 1 has reported: {text}"
    for part in ("rank 1", ">= 42", "IRIS_DEVICE_TIMEOUT"):
        assert part in text
    assert names_address


@pytest.mark.parametrize("num_ranks", [2])
def test_a_kernel_that_waits_for_a_dead_rank_raises(pool, num_ranks, device):
    for language in ("triton", "gluon") if device == "cpu" else ("triton",):
        with pytest.raises(PeerLostError, match=r"(?s)rank 1 ended with.*as it should be: rank 0: rank 1 ended"):
            pool.run(in_language, num_ranks, language, wait_for_a_dead_peer, device)


@pytest.mark.parametrize(*languages([1]))
def test_every_comparison(pool, language, num_ranks, device):
    for dtype in ("int32", "int64") if device == "cuda" else ({"triton": "int64", "gluon": "int32"}[language],):
        (results,) = pool.run(in_language, num_ranks, language, run_compare, dtype, device)
        assert results.keys() == COMPARISONS.keys()
        for cmp, (seen, seen_late, took_late) in results.items():
            assert (seen, seen_late) == (5, 5), (dtype, cmp)
            assert took_late > 0.9 * COMPARE_TIMEOUT_S, (dtype, cmp)
