"""Algorithms of torch.distributed, by name: NCCL on GPUs, gloo on CPU ranks."""

import jobs_torch_distributed as jobs
import pytest
from jobs_ccl import run_cases
from jobs_ops import run_cases as run_products

from iris_core.errors import PeerLostError
from iris_core.testing import RankPool

three_ranks = pytest.mark.parametrize("num_ranks", [3])
members = pytest.mark.parametrize("members", [(0, 1, 2), (0, 2)], ids=["all", "two of three"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu(shared=False))])  # as NCCL refuses
def device(request):
    return request.param


@three_ranks
@members
def test_results_are_right(pool, num_ranks, device, members):
    name = jobs.name_on(device)
    for wrong in pool.run(run_cases, num_ranks, device, list(jobs.collective_cases(len(members), name)), 2, members):
        assert wrong == []
    assert pool.run(run_products, num_ranks, device, list(jobs.product_cases(name)), 2, members) == [[]] * num_ranks


def test_what_it_cannot_serve_is_refused_with_the_reason(pool):
    assert pool.run(jobs.refusals, 2, "cpu") == [None] * 2


@pytest.mark.parametrize(("job", "num_ranks"), [(jobs.asynchronous, 2), (jobs.meshes, 4)])
def test_calls_beside_others_and_in_meshes(pool, job, num_ranks, device):
    assert pool.run(job, num_ranks, device) == [None] * num_ranks


def test_a_process_that_is_newer_than_others_meets_them(monkeypatch):
    monkeypatch.setattr("iris_core.testing.pool._GRACE_S", 0.5)  # for the rank that waits for the one that dies
    with RankPool(timeout_s=300, torch_distributed=True) as pool:
        assert pool.run(jobs.gloo_sum, 2) == [[2.0, 2.0]] * 2
        with pytest.raises(PeerLostError):
            pool.run(jobs.gloo_sum, 2, 1)
        assert pool.run(jobs.gloo_sum, 2) == [[2.0, 2.0]] * 2
