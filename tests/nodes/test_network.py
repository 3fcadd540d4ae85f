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


@pytest.mark.parametrize(("nodes", "job", "args", "answer"), [
    ("2x2", jobs.exchanges, ("cpu", TURNS, 1, "put_signal", 0, DELAY_S), 0),
    ("2x2", jobs.exchanges, ("cpu", TURNS, 2, "put and signal", 0, DELAY_S), 0),
    ("2x2", jobs.put_shapes, (torch.int64,), []), ("2x2", jobs.put_shapes, (torch.bool,), []),
    ("2x2", jobs.everyone, ("cpu", 3), True), ("2x1", jobs.refusals, (), ([], 0.0, [0, 0])),
    ("2x1", jobs.host_rounds, ("cpu", 6, 1), []), ("3x2", jobs.host_rounds, ("cpu", 6, 2), []),
    *(("2x2", jobs.host_refusals, (allocator,), ([], 0, [0.0])) for allocator in ("host", "nccl")),
    # nothing is different with another allocator, and on one node
    ("2x1", jobs.without_network, ("host",), ({}, 22)), ("1x2", jobs.without_network, ("nccl",), ({}, 22)),
])  # fmt: skip
def test_every_rank_says(pool, nodes, job, args, answer):
    """What the job's docstring says."""
    size = int(nodes[0]) * int(nodes[2])
    assert pool.run(jobs.divided, size, nodes, job, *args) == [answer] * size


@pytest.mark.parametrize(("wait", "flush", "found"), [
    (True, True, [[11], [10]]), (False, False, [[-1]] * 2), (True, False, [[-5]] * 2),
])  # fmt: skip
def test_a_missing_wait_and_a_missing_flush_are_seen(pool, wait, flush, found):
    """What was put has not arrived, or is what the source was changed to."""
    assert pool.run(jobs.divided, 2, "2x1", jobs.careless, wait, flush) == found


def test_a_backend_that_uses_no_network_is_named():
    """Before anything is launched."""
    here = OneSided()
    here.heap = SimpleNamespace(network=Network((1, 1), (2, 32)))
    here.backend = SimpleNamespace(info=SimpleNamespace(name="another"))
    with pytest.raises(CapabilityError, match="'another'"):
        here.launch_options()
