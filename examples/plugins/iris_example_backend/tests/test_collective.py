"""The collective: against torch on one process, for every reduction and type, and every refusal."""

import dataclasses

import pytest
import torch

from iris_core import Iris
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.registry import Registry
from iris_core.types import CollectiveRequest, CreateRequest, DeviceTarget, DeviceType, PluginKind
from iris_example_backend.settings import TwoShotSettings

CPU = DeviceTarget(DeviceType.CPU)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
REDUCE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def make_collective(rank=0, world_size=1, **settings):
    """As the core makes it: by its entry point."""
    registry = Registry()
    record = registry.resolve(PluginKind.COLLECTIVE, "example-two-shot")
    return registry.create(record, CreateRequest(CPU, rank, world_size, 1 << 20, TwoShotSettings(**settings)))


def request(shape=(7, 5), dtype="float32", rank=0, group_size=2, op="all_reduce", **options):
    nbytes = torch.empty(shape, dtype=getattr(torch, dtype)).nbytes
    return CollectiveRequest(op, shape, dtype, nbytes, rank, group_size, CPU, options)


def data(rank, shape, dtype):
    return ((torch.arange(35) * (rank + 3)) % 11 - 4).reshape(shape).to(getattr(torch, dtype))


def reduce_everything():
    """On each rank: what every case gives."""
    out = {}
    with Iris("1MiB", allocator="example", backend="example", device="cpu") as ctx:
        collective = make_collective(ctx.cur_rank, ctx.num_ranks)
        for dtype in DTYPES:
            for reduction in REDUCE:
                one = request((7, 5), dtype, ctx.cur_rank, ctx.num_ranks, reduction=reduction)
                plan = collective.prepare(one, ctx)
                tensor = data(ctx.cur_rank, (7, 5), dtype)
                result = torch.empty_like(tensor)
                collective.launch(plan, result, tensor)
                for _ in range(3):  # in place, of another shape, and with the workspace of before
                    again = data(ctx.cur_rank, (5, 7), dtype)
                    collective.launch(plan, again, again)
                    assert torch.equal(again.reshape(7, 5), result)
                out[dtype, reduction] = result
        del plan
        ctx.barrier()
        assert ctx.stats().num_blocks == 0  # workspaces go with their plans
    return out


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_against_torch(pool, num_ranks):
    results = pool.run(reduce_everything, num_ranks)
    for (dtype, reduction), result in results[0].items():
        inputs = torch.stack([data(rank, (7, 5), dtype) for rank in range(num_ranks)])
        expected = REDUCE[reduction](inputs, 0).to(getattr(torch, dtype))
        assert torch.equal(result, expected), (dtype, reduction)
        assert all(torch.equal(other[dtype, reduction], result) for other in results)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (request(op="all_gather"), "all_gather"),
        (request(dtype="uint8"), "uint8"),
        (request(reduction="product"), "'product'"),
        (request(config={"algorithm": "example-two-shot", "num_programs": 3}), "num_programs"),
        (request(shape=(2000,)), "max_nbytes"),
        (request(layout="tiles"), "'tiles'"),
        (request(group_size=1), "whole world"),
        (dataclasses.replace(request(group_size=2), members=(0, 2)), "whole world"),
        (dataclasses.replace(request(), target=DeviceTarget(DeviceType.CUDA)), "cuda"),
    ],
)
def test_what_is_not_supported(wrong, reason):
    collective = make_collective(world_size=2, max_nbytes=4096)
    assert collective.supports(request(config={"algorithm": "example-two-shot"}))
    answer = collective.supports(wrong)
    assert not answer
    assert reason in answer.reason
    with pytest.raises(UnsupportedError, match=reason):
        collective.prepare(wrong, None)


def test_wrong_tensors_are_refused():
    collective = make_collective()
    right = torch.zeros(7, 5)
    with Iris("1MiB", allocator="example", backend="example", device="cpu") as ctx:
        plan = collective.prepare(request(group_size=1), ctx)
        for wrong in (torch.zeros(7, 6), torch.zeros(7, 5, dtype=torch.float64), None):
            with pytest.raises(ArgumentError, match=r"planned for 35 elements of torch\.float32"):
                collective.launch(plan, right, wrong)
            with pytest.raises(ArgumentError):
                collective.launch(plan, wrong, right)


def test_larger_inputs_cost_more():
    collective = make_collective()
    assert 0 < collective.cost(request()) < collective.cost(request((1000, 1000)))
