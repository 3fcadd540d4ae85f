"""signal, wait, put_signal and barrier between ranks."""

import pytest
import torch
from jobs_sync import compare, run_barrier, run_count, run_ring, run_timeout, wait_for_a_dead_peer

import iris_triton.cpu
from iris_core.errors import PeerLostError


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("form", ["store", "put_signal"])
def test_ring(pool, form, num_ranks):
    rounds = 5
    results = pool.run(run_ring, num_ranks, form, rounds)
    assert results[-1] == [rounds - 1 + num_ranks]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_added_signals_are_all_counted(pool, num_ranks, dtype):
    assert pool.run(run_count, num_ranks, dtype, 5)[0] == 5 * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_barrier_of_the_world(pool, num_ranks):
    assert pool.run(run_barrier, num_ranks, 0, 1, num_ranks, 4, 2) == [0] * num_ranks


@pytest.mark.parametrize(("start", "stride", "size"), [(0, 2, 2), (1, 2, 2), (1, 1, 3), (2, 1, 1)])
def test_barrier_of_a_group(pool, start, stride, size):
    assert pool.run(run_barrier, 4, start, stride, size, 4, 2) == [0] * 4


def test_a_wait_that_reaches_its_bound_is_reported_and_not_fatal(pool):
    (quiet, _), (text, names_address) = pool.run(run_timeout, 2)
    assert quiet == ""
    assert "rank 1" in text
    assert ">= 42" in text
    assert "IRIS_DEVICE_TIMEOUT" in text
    assert names_address


def test_a_kernel_that_waits_for_a_dead_rank_raises(pool):
    with pytest.raises(PeerLostError, match=r"(?s)ranks \[1\] ended.*as it should be: rank 0: rank 1 ended"):
        pool.run(wait_for_a_dead_peer, 2)


@pytest.mark.parametrize("cmp", ["eq", "ne", "gt", "ge", "lt", "le"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_comparison(cmp, dtype):
    holds = {"eq": 5, "ne": 4, "gt": 4, "ge": 5, "lt": 6, "le": 5}[cmp]
    fails = {"eq": 4, "ne": 5, "gt": 5, "ge": 6, "lt": 5, "le": 4}[cmp]
    iris_triton.cpu.enable()
    flag, out = torch.tensor([5], dtype=dtype), torch.zeros(1, dtype=dtype)
    compare[(1,)](flag, holds, out, cmp=cmp)
    assert out.item() == 5
    with iris_triton.cpu.configured(timeout_s=0.2), pytest.raises(TimeoutError, match="compare"):
        compare[(1,)](flag, fails, out, cmp=cmp)
