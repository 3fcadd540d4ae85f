"""Allocator "nccl" on GPUs: peers of the node by address, and puts and signals to another "node" of the same host.

Where NCCL or nccl4py are not installed, or NCCL finds no network for kernels, the tests are skipped with that reason.
"""

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
    with RankPool(
        timeout_s=150.0, environ={"IRIS_DEVICE_TIMEOUT": "30", **request.param}, torch_distributed=True
    ) as pool:
        yield pool


@pytest.mark.multigpu(shared=False)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("ranks", [{}], indirect=True)
def test_peers_of_the_node_are_reached_by_address(ranks, num_ranks):
    """Writes, reads, additions and signals between all pairs, and a collective, bit for bit."""
    for problems, wrong in ranks.run(jobs.same_node, num_ranks):
        assert problems == []
        assert wrong == 0


def divided(ranks, *job):
    """What a job finds on two "nodes"."""
    results = ranks.run(jobs.divided, 2, "2x1", jobs.or_reason, *job)
    if isinstance(results[0], str):
        pytest.skip(results[0])
    return results


@pytest.mark.parametrize("ranks", [SOCKETS], indirect=True)
@pytest.mark.parametrize("form", ["put_signal", "put and signal"])
def test_random_exchanges_between_nodes_arrive_whole(ranks, form):
    assert divided(ranks, jobs.exchanges, "cuda", 10_000, 1, form) == [0, 0]


@pytest.mark.parametrize("ranks", [SOCKETS], indirect=True)
def test_programs_of_both_nodes_add_to_words(ranks):
    assert divided(ranks, jobs.everyone, "cuda", 3) == [True, True]


@pytest.mark.parametrize("ranks", [SOCKETS], indirect=True)
def test_the_host_puts_gets_and_signals_between_nodes(ranks):
    assert divided(ranks, jobs.host_rounds, "cuda", 50, 1) == [[], []]
