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


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1, 4, 8]))
@pytest.mark.parametrize("op", MOVES)
def test_every_dtype_mask_and_hint(pool, op, num_ranks, device):
    assert problems(pool.run(in_gluon, num_ranks, "jobs_rma", "run_rma", op, False, device)) == []


@pytest.mark.parametrize("num_ranks", rank_counts(seldom=[2]))  # the executor caches nothing
@pytest.mark.parametrize("op", MOVES)
def test_every_cache_modifier(pool, op, num_ranks, device):
    assert problems(pool.run(in_gluon, num_ranks, "jobs_rma", "run_rma", op, True, device)) == []


@pytest.mark.parametrize(
    ("op", "num_ranks"),
    [
        pytest.param(op, n, marks=[pytest.mark.exhaustive(device="cpu")] if n != 2 or op not in ("add", "cas") else [])
        for op in LEGAL
        for n in (1, 2, 4, 8)
    ],
)  # the others: test_atomics_leave_the_same_bytes_as_in_triton
def test_every_atomic_dtype_mask_sem_and_scope(pool, op, num_ranks, device):
    assert problems(pool.run(in_gluon, num_ranks, "jobs_atomics", "run_atomic", op, device)) == []


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2]))
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
def test_no_update_is_lost_between_processes(pool, dtype, num_ranks, device):
    rounds, programs = 8, 2  # few enough to be exact in bfloat16
    results = pool.run(in_gluon, num_ranks, "jobs_atomics", "run_contention", dtype, rounds, programs, device)
    (cells, counter), *_ = results
    updates = num_ranks * rounds * programs
    assert (cells, counter) == ([updates, -updates], updates)


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2, 8]))
@pytest.mark.parametrize("form", ["store", "put_signal"])
def test_ring(pool, form, num_ranks, device):
    rounds = 5 if device == "cpu" else 100
    results = pool.run(in_gluon, num_ranks, "jobs_sync", "run_ring", form, rounds, device)
    assert results[-1] == [rounds - 1 + num_ranks]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[1]))
def test_added_signals_are_all_counted(pool, num_ranks, dtype, device):
    rounds = 5 if device == "cpu" else 100
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
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_every_comparison(pool, dtype, num_ranks, device):
    (results,) = pool.run(in_gluon, num_ranks, "jobs_sync", "run_compare", dtype, device)
    for cmp in COMPARISONS:
        seen, seen_in_vain, took_in_vain = results[cmp]
        assert seen == seen_in_vain == 5
        assert took_in_vain > 0.9 * COMPARE_TIMEOUT_S


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[8]))
@pytest.mark.parametrize("op", list(LEGAL))
def test_atomics_leave_the_same_bytes_as_in_triton(pool, op, num_ranks, device):
    assert problems(pool.run(same_atomics, num_ranks, op, device)) == []


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1]))
def test_signals_waits_and_barriers_leave_the_same_bytes_as_in_triton(pool, num_ranks, device):
    results = pool.run(in_gluon, num_ranks, "jobs_sync", "run_handshake", device)
    assert [wrong for wrong, _ in results] == [[]] * num_ranks
    assert results == pool.run(run_handshake, num_ranks, device)


def test_the_backend_is_gluon(pool):
    assert pool.run(backend_name, 1, "cpu") == ["gluon"]
