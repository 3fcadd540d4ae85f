"""The device functions between ranks: the jobs and expectations of tests/multirank, with Gluon's kernels."""

import pytest
from gluon_jobs import backend_name, in_gluon, same_atomics
from jobs_atomics import LEGAL
from jobs_sync import COMPARE_TIMEOUT_S, COMPARISONS, check_served, run_handshake
from rank_counts import rank_counts

from iris_core.errors import PeerLostError

MOVES = ["load", "store", "get", "put", "copy"]


def problems(results):
    return [line for lines in results for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1, 4, 8]))
def test_every_dtype_mask_and_hint(pool, num_ranks, device, request):
    """On the CPU a copy: test_conformance moves by every function, tests/multirank every dtype."""
    few = device == "cpu" and not request.config.getoption("exhaustive")
    for op in MOVES[4 if few else 0 :]:
        assert problems(pool.run(in_gluon, num_ranks, "jobs_rma", "run_rma", op, False, device)) == []


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", rank_counts(seldom=[2]))  # the executor caches nothing
def test_every_cache_modifier(pool, num_ranks, device):
    for op in MOVES:
        assert problems(pool.run(in_gluon, num_ranks, "jobs_rma", "run_rma", op, True, device)) == []


@pytest.mark.parametrize("num_ranks", rank_counts(seldom=[1, 2, 4, 8]))  # on the CPU: as in Triton, see below
@pytest.mark.parametrize("op", LEGAL)
def test_every_atomic_dtype_mask_sem_and_scope(pool, op, num_ranks, device):
    assert problems(pool.run(in_gluon, num_ranks, "jobs_atomics", "run_atomic", op, device)) == []


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2]))
def test_no_update_is_lost_between_processes(pool, num_ranks, device):
    rounds, programs = 8, 2  # few enough to be exact in bfloat16
    updates = num_ranks * rounds * programs
    for dtype in ("int32", "float32", "bfloat16"):
        results = pool.run(in_gluon, num_ranks, "jobs_atomics", "run_contention", dtype, rounds, programs, device)
        (cells, counter), *_ = results
        assert (cells, counter) == ([updates, -updates], updates), dtype


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2, 8]))
def test_ring(pool, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    for form in ("store", "put_signal"):
        results = pool.run(in_gluon, num_ranks, "jobs_sync", "run_ring", form, rounds, device)
        assert results[-1] == [rounds - 1 + num_ranks]


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[1]))
def test_added_signals_are_all_counted(pool, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    for dtype in ("int32", "int64"):
        counts = pool.run(in_gluon, num_ranks, "jobs_sync", "run_count", dtype, rounds, device)
        assert counts[0] == rounds * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2, 4]))
def test_whoever_comes_is_served(pool, num_ranks, device, tmp_path):
    rounds = 10 if device == "cpu" else 200
    served, *_ = pool.run(in_gluon, num_ranks, "jobs_sync", "run_serve", rounds, str(tmp_path / "changes"), device)
    check_served(served, num_ranks, rounds)


@pytest.mark.parametrize(
    ("num_ranks", "start", "stride", "size"),
    [
        (1, 0, 1, 1),
        pytest.param(2, 0, 1, 2, marks=pytest.mark.exhaustive(device="cpu")),
        (4, 0, 1, 4),
        pytest.param(8, 0, 1, 8, marks=pytest.mark.exhaustive(device="cpu")),
        (4, 0, 2, 2),
        (4, 1, 1, 3),
        pytest.param(4, 2, 1, 1, marks=pytest.mark.exhaustive(device="cpu")),
    ],
)
def test_barrier_of_a_group(pool, num_ranks, start, stride, size, device):
    rounds, launches = (4, 2) if device == "cpu" else (50, 3)
    bad = pool.run(
        in_gluon, num_ranks, "jobs_sync", "run_barrier", start, stride, size, rounds, launches, device
    )  # fmt: skip
    assert bad == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
def test_a_wait_that_reaches_its_bound_is_reported_and_not_fatal(pool, num_ranks, device):
    (other, _), (text, names_address) = pool.run(in_gluon, num_ranks, "jobs_sync", "run_timeout", device)
    assert other == f"rank 1 has reported: {text}"
    assert "rank 1" in text
    assert ">= 42" in text
    assert names_address


def test_a_kernel_that_waits_for_a_dead_rank_raises(pool):
    with pytest.raises(PeerLostError, match=r"(?s)rank 1 ended with.*as it should be: rank 0: rank 1 ended"):
        pool.run(in_gluon, 2, "jobs_sync", "wait_for_a_dead_peer")


@pytest.mark.parametrize("num_ranks", [1])
def test_every_comparison(pool, num_ranks, device):
    for dtype in ("int32", "int64") if device == "cuda" else ("int32",):  # tests/multirank: int64
        (results,) = pool.run(in_gluon, num_ranks, "jobs_sync", "run_compare", dtype, device)
        for cmp in COMPARISONS:
            seen, seen_in_vain, took_in_vain = results[cmp]
            assert seen == seen_in_vain == 5
            assert took_in_vain > 0.9 * COMPARE_TIMEOUT_S


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[8]))
def test_atomics_leave_the_same_bytes_as_in_triton(pool, num_ranks, device):
    assert problems(pool.run(same_atomics, num_ranks, device)) == []


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1]))
def test_signals_waits_and_barriers_leave_the_same_bytes_as_in_triton(pool, num_ranks, device):
    assert pool.run(backend_name, 1, "cpu") == ["gluon"]
    results = pool.run(in_gluon, num_ranks, "jobs_sync", "run_handshake", device)
    assert [wrong for wrong, _ in results] == [[]] * num_ranks
    assert results == pool.run(run_handshake, num_ranks, device)
