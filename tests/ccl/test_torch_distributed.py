"""Algorithms of torch.distributed, by name: NCCL on GPUs, gloo on CPU ranks."""

import itertools
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ccl_cases import OPS, Case, moving_cases, reducing_cases
from jobs_ccl import on_heap, run_cases
from jobs_common import unlike
from jobs_sequences import captured
from ops_cases import OPS as PRODUCTS
from ops_cases import Case as Product
from tables import raises

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.errors import PeerLostError, UnsupportedError
from iris_core.ops import FusedConfig
from iris_core.providers import torch_distributed
from iris_core.testing import RankPool

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
REDUCTIONS = ("sum", "product", "min", "max")


def name_on(device):
    return "gloo" if device == "cpu" else "nccl"


def collective_cases(size, name):
    """Each operation with each element type, wherever tensors lie, and in place."""
    config, known = {"algorithm": name}, [(op, name) for op in OPS]
    known = [case for case in (*reducing_cases(known=known), *moving_cases(known)) if case.dtype in DTYPES]
    for number, case in enumerate(each for each in known if each.reduction in REDUCTIONS):
        yield replace(case, place=("heap", "ordinary")[number % 2], root=number % size)
    for op in (op for op in OPS if op not in ("all_to_all", "broadcast")):
        yield Case(op, shape=(40, 101), in_place=True, root=size - 1, config=config)
    for op in ("all_gather", "reduce_scatter"):
        yield Case(op, "int32", stacked=True, place="skewed", config=config)
    for algorithm in (name, "two_shot", name):  # one behind the other, with and without a handle
        yield Case("all_reduce", shape=(40_001,), place="output only", config={"algorithm": algorithm})


def symmetric_cases():
    """Sums by one_shot and by two_shot, also of sizes and at places that torch's kernels refuse; the last in pieces."""
    ways = ("heap", False), ("ordinary", True), ("skewed", False), ("skewed", True)
    shapes = (1,), (40, 101), (1003,), (262_144,), (700_001,)
    for dtype, shape, (place, in_place) in itertools.product(("float32", "bfloat16"), shapes, ways):
        how = {"place": place, "in_place": in_place, "config": {"algorithm": "torch_symm"}}
        yield Case("all_reduce", dtype, shape=shape, **how)
    yield Case("all_reduce", shape=((16 << 20) + 5,), place="ordinary", config={"algorithm": "torch_symm"})


def product_cases(name):
    """Each operation with some element types, biases and places."""
    forms = ("float32", "heap", ""), ("bfloat16", "ordinary", "columns"), ("float16", "heap", "rows")
    for (dtype, place, bias), op in itertools.product(forms, PRODUCTS):
        how = {"place": place, "out_place": place, "bias": bias, "dim": 0 if "gather" in op else None}
        yield Product(op, name, (24, 20, 40), dtype, **how)


@on_heap("8MiB")
def refusals(ctx):
    """Calls that it cannot serve are refused by name, with the reason; others serve them if nothing is named."""
    name, size = name_on(ctx.device), ctx.num_ranks
    turned = list(reversed(range(size)))

    def zeros(*shape):
        return torch.zeros(shape, device=ctx.device)

    def refused(key, op, /, *tensors, fields=None, **how):
        fused = "matmul" in op
        engine, config = (ctx.ops, FusedConfig) if fused else (ctx.ccl, Config)
        call = partial(getattr(engine, op), *tensors, config=config(algorithm=name, **(fields or {})), **how)
        assert unlike((f"UnsupportedError: {key}", call)) == []
        assert fused or engine.explain(op, *tensors, **how).algorithm not in (name, "")

    x, y, square = zeros(8), zeros(8), zeros(8, 8)
    with mock.patch.object(dist, "is_initialized", return_value=False):
        refused("ccl.initialised", "all_reduce", y, x)
    refused("ccl.order", "all_reduce", y, x, group=turned)
    refused("ccl.contiguous", "all_reduce", y, zeros(16)[::2])
    refused("ccl.equal", "all_to_all", x, y, input_split_sizes=[4, 4], output_split_sizes=[4, 4])
    refused("names: float16", "all_reduce", y.short(), x.short())
    refused("names: bxor", "all_reduce", y.int(), x.int(), op="bxor")
    refused("names: comm_sms", "all_reduce", y, x, fields={"comm_sms": 2})
    refused("ccl.alone", "all_reduce", y, x, group=[ctx.cur_rank])
    refused("ccl.order", "matmul_all_reduce", zeros(8, 8), square, square, group=turned)
    refused("ccl.rows", "matmul_all_gather", zeros(8, 8 * size), square, square, gather_dim=1)
    refused("ccl.rows", "matmul_reduce_scatter", zeros(8, 8), square, square, layout="tiles")
    refused("ccl.output", "matmul_all_reduce", zeros(8, 16)[:, :8], square, square)
    refused("ccl.A", "all_gather_matmul", zeros(8 * size, 8), zeros(8, 16)[:, :8], square, gather_dim=0)
    symmetric = ctx.ops.explain("matmul_reduce_scatter", zeros(8 // size, 8), square, square)
    (torch_symm,) = (each for each in symmetric.candidates if each.name == "torch_symm")
    assert "NVIDIA" in torch_symm.reason
    one_gpu = {"current_device": int, "get_device_properties": lambda _: SimpleNamespace(uuid="of one GPU")}
    with mock.patch.multiple(torch.cuda, **one_gpu):
        connect = partial(torch_distributed.group_of, range(size), None, "nccl", ctx._world)
        assert unlike(("UnsupportedError: ccl.one GPU", connect)) == []
    own = zeros(size, 16)[:, ::2] if ctx.cur_rank == 1 else None  # the root's alone may lie anyhow
    ctx.ccl.gather(own, x + ctx.cur_rank, 1, config=Config(algorithm=name))
    ctx.ccl.scatter(y, own, 1, config=Config(algorithm=name))
    assert y.tolist() == [float(ctx.cur_rank)] * 8


def gloo_sum(dying=None):
    if dying == dist.get_rank():
        os._exit(7)
    with Iris("4MiB", device="cpu") as ctx:
        y = ctx.zeros(2)
        ctx.ccl.all_reduce(y, ctx.ones(2), config=Config(algorithm="gloo"))
        return y.tolist()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu(shared=False))])  # as NCCL refuses
def device(request):
    return request.param


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize("members", [(0, 1, 2), (0, 2)], ids=["all", "two of three"])
def test_results_are_right(pool, num_ranks, device, members):
    cases = [*collective_cases(len(members), name_on(device)), *product_cases(name_on(device))]
    job = partial(run_cases, handles=True)
    assert pool.run(job, num_ranks, device, cases, 2, members) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.multigpu(n, shared=False)) for n in (2, 4)])
def test_sums_in_symmetric_memory_of_torch_are_right(pool, num_ranks):
    """Beside collectives of NCCL, and in graphs."""
    cases = list(symmetric_cases())
    job, beside = partial(run_cases, handles=True), collective_cases(num_ranks, "nccl")
    assert pool.run(job, num_ranks, "cuda", [*cases, *beside], 2) == [[]] * num_ranks
    assert pool.run(captured, num_ranks, "cuda", cases[:-1], 4) == [[]] * num_ranks


def test_what_it_cannot_serve_is_refused_with_the_reason(pool):
    assert pool.run(refusals, 2, "cpu") == [None] * 2


def test_a_process_that_is_newer_than_others_meets_them(monkeypatch):
    monkeypatch.setattr("iris_core.testing.pool._GRACE_S", 0.5)  # for the rank that waits for the one that dies
    with RankPool(timeout_s=300, torch_distributed=True) as pool:
        assert pool.run(gloo_sum, 2) == [[2.0, 2.0]] * 2
        with pytest.raises(PeerLostError):
            pool.run(gloo_sum, 2, 1)
        assert pool.run(gloo_sum, 2) == [[2.0, 2.0]] * 2


def test_calls_of_gloo_are_not_captured(monkeypatch):
    """Of tensors on a GPU, which the host carries: a graph would not replay that."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    plan = torch_distributed._Plan(None, (0, 1), lambda **_: None, (1,), 1.0, True, "all_reduce", on_gpu=True)
    with raises(UnsupportedError, "ccl.gloo captured"):
        torch_distributed.TorchCollective("all_reduce", "gloo").launch(plan, torch.ones(1), torch.ones(1))
