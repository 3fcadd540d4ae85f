"""Kernels that put and signal to other nodes: the emulated network of CPU ranks that IRIS_NODES divides."""

from types import SimpleNamespace

import jobs_network as jobs
import pytest
import torch

from iris_core.device.one_sided import OneSided
from iris_core.errors import CapabilityError
from iris_core.types import Network

TURNS = 200


@pytest.mark.parametrize("form", ["put_signal", "put and signal"])
@pytest.mark.parametrize(("nodes", "distance"), [("2x1", 1), ("2x2", 1), ("2x2", 2)])
def test_random_exchanges_arrive_whole(pool, nodes, distance, form):
    ranks = {"2x1": 2, "2x2": 4}[nodes]
    assert pool.run(jobs.divided, ranks, nodes, jobs.exchanges, "cpu", TURNS, distance, form) == [0] * ranks


def test_a_kernel_that_waits_and_flushes_gets_what_was_sent(pool):
    assert pool.run(jobs.divided, 2, "2x1", jobs.careless, True, True) == [[11], [10]]


def test_a_missing_wait_is_seen(pool):
    """What was put has not arrived."""
    assert pool.run(jobs.divided, 2, "2x1", jobs.careless, False, False) == [[-1], [-1]]


def test_a_missing_flush_is_seen(pool):
    """What was put is what the source was changed to."""
    assert pool.run(jobs.divided, 2, "2x1", jobs.careless, True, False) == [[-5], [-5]]


def test_wrong_accesses_are_named(pool):
    assert pool.run(jobs.divided, 2, "2x1", jobs.refusals) == [([], 0.0, [0, 0])] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool])
def test_blocks_of_any_shape_are_put(pool, dtype):
    assert pool.run(jobs.divided, 4, "2x2", jobs.put_shapes, dtype) == [[]] * 4


@pytest.mark.parametrize("nodes", ["2x1", "2x2"])
def test_near_and_far_ranks_add_to_one_word(pool, nodes):
    ranks = {"2x1": 2, "2x2": 4}[nodes]
    total = 3 * ranks * (ranks + 1) // 2
    assert pool.run(jobs.divided, ranks, nodes, jobs.everyone, "cpu", 3) == [(total, total)] * ranks


def test_without_a_network_nothing_is_different(pool):
    """Neither with another allocator, nor on one node."""
    far = pool.run(jobs.divided, 2, "2x1", jobs.without_network, "host")
    near = pool.run(jobs.divided, 2, "1x2", jobs.without_network, "nccl")
    assert far == near == [({}, 22)] * 2


def test_tracing_leaves_the_words_of_the_network(pool):
    assert pool.run(jobs.divided, 2, "2x1", jobs.traced) == [(True, 2)] * 2


def test_a_backend_that_uses_no_network_is_named():
    """Before anything is launched."""
    here = OneSided()
    here.heap = SimpleNamespace(network=Network((1, 1), (2, 32)))
    here.backend = SimpleNamespace(info=SimpleNamespace(name="another"))
    with pytest.raises(CapabilityError, match="'another'"):
        here.launch_options()
