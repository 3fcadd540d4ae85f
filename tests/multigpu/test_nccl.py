"""Allocator "nccl" on GPUs: peers of the node by address, and puts and signals to another "node" of the same host."""

import importlib.util

import jobs_network as jobs
import pytest

from iris_core.testing import RankPool

SOCKETS = {"NCCL_GIN_ENABLE": "1", "NCCL_GIN_TYPE": "2", "NCCL_NET": "Socket"}
"""NCCL's proxy threads and sockets carry what kernels put: no network card is needed."""

pytestmark = [
    pytest.mark.multigpu(2, shared=False),
    pytest.mark.skipif(importlib.util.find_spec("nccl") is None, reason="nccl4py is not installed"),
]


@pytest.fixture
def ranks(request):
    """Ranks of their own, which see NCCL's variables from their start."""
    environ = {"IRIS_DEVICE_TIMEOUT": "30", **request.param}
    with RankPool(timeout_s=150.0, environ=environ, torch_distributed=True) as pool:
        yield pool


@pytest.mark.multigpu(shared=False)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("ranks", [{}], indirect=True)
def test_peers_of_the_node_are_reached_by_address(ranks, num_ranks):
    """Writes, reads, additions and signals between all pairs, and a collective, bit for bit."""
    assert ranks.run(jobs.same_node, num_ranks) == [([], 0)] * num_ranks


@pytest.mark.parametrize("ranks", [SOCKETS], indirect=True)
@pytest.mark.parametrize(("job", "args", "wanted"), [
    *((jobs.exchanges, ("cuda", 10_000, 1, form), [0, 0]) for form in ("put_signal", "put and signal")),
    (jobs.everyone, ("cuda", 3), [True, True]),  # programs of both nodes add to words
    (jobs.host_rounds, ("cuda", 50, 1), [None, None]),  # the host puts, gets and signals
])  # fmt: skip
def test_two_nodes(ranks, job, args, wanted):
    found = ranks.run(jobs.divided, 2, "2x1", jobs.or_reason, job, *args)
    if isinstance(found[0], str):
        pytest.skip(found[0])
    assert found == wanted
