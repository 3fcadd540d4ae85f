"""Kernels that put and signal to other nodes: the emulated network of CPU ranks that IRIS_NODES divides."""

from types import SimpleNamespace

import jobs_network as jobs
import pytest
import torch

from iris_core.device.one_sided import OneSided
from iris_core.errors import CapabilityError
from iris_core.types import Network

TURNS, DELAY_S = 8, 0.1
"""So much longer than a turn takes: what comes too early then is seen."""


@pytest.mark.parametrize(("distance", "form"), [(1, "put_signal"), (2, "put and signal")])
def test_random_exchanges_arrive_whole(pool, distance, form):
    assert pool.run(jobs.divided, 4, "2x2", jobs.exchanges, "cpu", TURNS, distance, form, 0, DELAY_S) == [0] * 4


@pytest.mark.parametrize(("wait", "flush", "found"), [
    (True, True, [[11], [10]]), (False, False, [[-1]] * 2), (True, False, [[-5]] * 2),
])  # fmt: skip
def test_a_missing_wait_and_a_missing_flush_are_seen(pool, wait, flush, found):
    """What was put has not arrived, or is what the source was changed to."""
    assert pool.run(jobs.divided, 2, "2x1", jobs.careless, wait, flush) == found


def test_wrong_accesses_are_named(pool):
    """And tracing leaves the words of the network as they are."""
    assert pool.run(jobs.divided, 2, "2x1", jobs.refusals) == [([], 0.0, [0, 0])] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_blocks_of_any_shape_are_put_and_got(pool, dtype):
    assert pool.run(jobs.divided, 4, "2x2", jobs.put_shapes, dtype) == [[]] * 4


def test_programs_of_all_ranks_add_to_words(pool):
    for seen, at_last, expected in pool.run(jobs.divided, 4, "2x2", jobs.everyone, "cpu", 3):
        assert seen == at_last == expected


@pytest.mark.parametrize(("nodes", "ranks", "distance"), [("2x1", 2, 1), ("3x2", 6, 2)])
def test_the_host_puts_gets_and_signals(pool, nodes, ranks, distance):
    assert pool.run(jobs.divided, ranks, nodes, jobs.host_rounds, "cpu", 6, distance) == [[]] * ranks


@pytest.mark.parametrize("allocator", ["host", "nccl"])
def test_the_host_is_refused_what_no_network_carries(pool, allocator):
    """With the way out where there is none, and by name what it does not do."""
    assert pool.run(jobs.divided, 4, "2x2", jobs.host_refusals, allocator) == [([], 0, [0.0])] * 4


def test_without_a_network_nothing_is_different(pool):
    """Neither with another allocator, nor on one node."""
    far = pool.run(jobs.divided, 2, "2x1", jobs.without_network, "host")
    near = pool.run(jobs.divided, 2, "1x2", jobs.without_network, "nccl")
    assert far == near == [({}, 22)] * 2


def test_a_backend_that_uses_no_network_is_named():
    """Before anything is launched."""
    here = OneSided()
    here.heap = SimpleNamespace(network=Network((1, 1), (2, 32)))
    here.backend = SimpleNamespace(info=SimpleNamespace(name="another"))
    with pytest.raises(CapabilityError, match="'another'"):
        here.launch_options()
