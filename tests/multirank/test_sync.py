"""signal, wait, put_signal and barrier between ranks."""

import pytest
import torch
from jobs_sync import (
    COMPARE_TIMEOUT_S,
    COMPARISONS,
    check_served,
    compare,
    run_barrier,
    run_compare,
    run_count,
    run_handshake,
    run_ring,
    run_serve,
    run_timeout,
    wait_for_a_dead_peer,
)
from rank_counts import rank_counts
from tables import table

import iris_triton.interpreter
from iris_core.errors import PeerLostError


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2, 8]))
def test_ring(pool, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    for form in ("store", "put_signal"):
        results = pool.run(run_ring, num_ranks, form, rounds, device)
        assert results[-1] == [rounds - 1 + num_ranks], form


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_op_sem_and_scope_of_signals_and_waits(pool, num_ranks, device):
    assert [problems for problems, _ in pool.run(run_handshake, num_ranks, device)] == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[1]))
def test_added_signals_are_all_counted(pool, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    for dtype in ("int32", "int64"):
        assert pool.run(run_count, num_ranks, dtype, rounds, device)[0] == rounds * num_ranks, dtype


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2, 4]))
def test_whoever_comes_is_served(pool, num_ranks, device, tmp_path):
    """With ranks that are late at random: what was signalled is there behind wait_any, load_acquire and test."""
    rounds = 10 if device == "cpu" else 200
    served, *_ = pool.run(run_serve, num_ranks, rounds, str(tmp_path / "changes"), device)
    check_served(served, num_ranks, rounds)


@pytest.mark.parametrize("num_ranks", rank_counts(1, 4, seldom=[2, 8]))
def test_barrier_of_the_world(pool, num_ranks, device):
    rounds, launches = (4, 2) if device == "cpu" else (50, 3)
    assert pool.run(run_barrier, num_ranks, 0, 1, num_ranks, rounds, launches, device) == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [4])
def test_barrier_of_a_group(pool, num_ranks, device):
    for group in ((0, 2, 2), (1, 2, 2), (1, 1, 3), (2, 1, 1)):  # start, stride, size
        assert pool.run(run_barrier, num_ranks, *group, 4, 2, device) == [0] * num_ranks, group


@pytest.mark.parametrize("num_ranks", [2])
def test_a_wait_that_reaches_its_bound_is_reported_and_not_fatal(pool, num_ranks, device):
    (other, _), (text, names_address) = pool.run(run_timeout, num_ranks, device)
    assert other == f"rank 1 has reported: {text}"
    assert "rank 1" in text
    assert ">= 42" in text
    assert "IRIS_DEVICE_TIMEOUT" in text
    assert names_address


@pytest.mark.parametrize("num_ranks", [2])
def test_a_kernel_that_waits_for_a_dead_rank_raises(pool, num_ranks, device):
    with pytest.raises(PeerLostError, match=r"(?s)rank 1 ended with.*as it should be: rank 0: rank 1 ended"):
        pool.run(wait_for_a_dead_peer, num_ranks, device)


@pytest.mark.parametrize("num_ranks", [1])
def test_every_comparison(pool, num_ranks, device):
    for dtype in ("int32", "int64") if device == "cuda" else ("int64",):  # tests/gluon: int32
        (results,) = pool.run(run_compare, num_ranks, dtype, device)
        assert results.keys() == COMPARISONS.keys()
        for cmp, (seen, seen_late, took_late) in results.items():
            assert (seen, seen_late) == (5, 5), (dtype, cmp)
            assert took_late > 0.9 * COMPARE_TIMEOUT_S, (dtype, cmp)


@table("cmp", COMPARISONS)
def test_an_unbounded_wait_is_ended_by_the_cpu_executor(cmp):
    iris_triton.interpreter.enable()
    flag, out = torch.tensor([5]), torch.zeros(1, dtype=torch.int64)
    _, fails = COMPARISONS[cmp]
    with iris_triton.interpreter.configured(timeout_s=0.05), pytest.raises(TimeoutError, match="compare"):
        compare[(1,)](flag, fails, out, 0, cmp=cmp)
