"""Algorithms of torch.distributed, by name: NCCL on GPUs, gloo on CPU ranks."""

import jobs_torch_distributed as jobs
import pytest
from jobs_ccl import run_cases
from jobs_ops import run_cases as run_products

from iris_core.errors import PeerLostError
from iris_core.testing import RankPool

three_ranks = pytest.mark.parametrize("num_ranks", [3])
two_ranks = pytest.mark.parametrize("num_ranks", [2])
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


@two_ranks
def test_calls_beside_others(pool, num_ranks, device):
    assert pool.run(jobs.asynchronous, num_ranks, device) == [[[3.0]] * 3] * 2


@two_ranks
def test_what_it_cannot_serve_is_refused_with_the_reason(pool, num_ranks):
    uninitialised = "torch.distributed is not initialised (torch.distributed.init_process_group)"
    order, rows = "torch.distributed orders the members by rank", "its parts are rows, in torch's order"
    reasons = {
        "no torch.distributed": uninitialised, "no torch.distributed for products": uninitialised, "order": order,
        "strided input": "its tensors are contiguous", "strided output": "its tensors are contiguous",
        "splits": "it divides tensors in equal parts, along the first dimension",
        "dtype": "it is offered for float16, bfloat16, float32, float64, int8, uint8, int32, int64",
        "reduction": "it does not reduce by bxor", "average of integers": "it does not reduce by avg",
        "config": "it has no use for comm_sms of the config", "a rank alone": "a group of one rank has no peer",
        "order of products": order, "columns": rows, "tiles": rows, "output": "its output is contiguous",
        "A": "its A is contiguous", "torch_symm": "torch's symmetric memory is asked for on NVIDIA GPUs only",
    }  # fmt: skip
    for said, chosen in pool.run(jobs.refusals, num_ranks, "cpu"):
        assert {what: text.partition("cannot serve this call: ")[2] or text for what, text in said.items()} == reasons
        assert all(text.startswith("UnsupportedError") for what, text in said.items() if what != "torch_symm")
        assert not {"gloo", ""} & chosen  # if nothing is named


@pytest.mark.parametrize("num_ranks", [4])
def test_a_mesh_is_a_group_for_each_dimension(pool, num_ranks, device):
    for rank, said in enumerate(pool.run(jobs.meshes, num_ranks, device)):
        assert said.pop("dp") == [2.0 * (rank % 2) + 2] * 2
        assert said.pop("tp") == [4.0 * (rank // 2) + 1] * 2
        assert said["mesh"].startswith("GroupError")
        assert "of 2 dimensions; pass one of them: mesh[name]" in said["mesh"]
        assert said["collective"].startswith("TypeError: all_reduce: the output is a DTensor; pass this rank's part")
        assert "tensor.to_local()" in said["product"]


def test_a_process_that_is_newer_than_others_meets_them(monkeypatch):
    monkeypatch.setattr("iris_core.testing.pool._GRACE_S", 0.5)  # for the rank that waits for the one that dies
    with RankPool(timeout_s=300, torch_distributed=True) as pool:
        assert pool.run(jobs.gloo_sum, 2) == [[2.0, 2.0]] * 2
        with pytest.raises(PeerLostError):
            pool.run(jobs.gloo_sum, 2, 1)
        assert pool.run(jobs.gloo_sum, 2) == [[2.0, 2.0]] * 2
