"""Rank jobs of test_torch_distributed: algorithms of torch.distributed, by name."""

import itertools
import os
from unittest import mock

import torch
import torch.distributed as dist
from ccl_cases import Case
from jobs_ccl import on_heap, said_by
from ops_cases import Case as Product
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.ops import FusedConfig

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
REDUCTIONS = ("sum", "product", "min", "max")


def name_on(device):
    """The name of the algorithms on a device."""
    return "gloo" if device == "cpu" else "nccl"


def collective_cases(size, name):
    """Each operation with each element type, wherever tensors lie, and in place."""
    config = {"algorithm": name}
    for number, (op, dtype) in enumerate(itertools.product(("all_reduce", "reduce_scatter"), DTYPES)):
        for i in range(2):
            reduction = REDUCTIONS[(number + 2 * i + number // 8) % 4]
            yield Case(op, dtype, reduction, shape=(5, 3), place=("heap", "ordinary")[i], config=config)
    for number, (op, dtype) in enumerate(itertools.product(("all_gather", "all_to_all", "broadcast"), DTYPES)):
        yield Case(op, dtype, shape=(5, 3), place=("heap", "ordinary")[number % 2], root=number % size, config=config)
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        yield Case(op, shape=(40, 101), in_place=True, config=config)
    for op in ("all_gather", "reduce_scatter"):
        yield Case(op, "int32", stacked=True, place="skewed", config=config)
    yield Case("all_reduce", shape=(40_001,), place="output only", config=config)


def product_cases(name):
    """Each operation with some element types, biases and places."""
    for number, dtype in enumerate(("float32", "bfloat16", "float16")):
        place = ("heap", "ordinary", "heap")[number]
        how = {"place": place, "out_place": place, "bias": ("", "columns", "rows")[number]}
        yield Product("matmul_all_reduce", name, (24, 20, 40), dtype, **how)
        yield Product("all_gather_matmul", name, (24, 20, 40), dtype, dim=0, **how)
        yield Product("matmul_all_gather", name, (24, 20, 40), dtype, dim=0, **how)
        yield Product("matmul_reduce_scatter", name, (24, 20, 40), dtype, **how)


@on_heap("8MiB")
def asynchronous(ctx):
    """Calls beside the current stream, by torch.distributed and by ours in turn."""
    found, device, torchs = [], ctx.device, name_on(ctx.device)
    x, y = torch.full((64,), ctx.cur_rank + 1.0, device=device), torch.zeros(64, device=device)
    for algorithm in (torchs, "two_shot", torchs):
        ctx.ccl.all_reduce(y.zero_(), x, async_op=True, config=Config(algorithm=algorithm)).wait()
        found.append(y.unique().tolist())
    return found


@on_heap("8MiB")
def refusals(ctx):
    """Why calls that it cannot serve are refused, by name; and what serves collectives if nothing is named."""
    name, said, chosen, size = name_on(ctx.device), {}, set(), ctx.num_ranks
    turned = list(reversed(range(size)))

    def zeros(*shape):
        return torch.zeros(shape, device=ctx.device)

    def ask(what, op, /, *tensors, fields=None, **how):
        """What each call says; all members make it."""
        fused = "matmul" in op
        engine, config = (ctx.ops, FusedConfig) if fused else (ctx.ccl, Config)
        said[what] = said_by(getattr(engine, op), *tensors, config=config(algorithm=name, **(fields or {})), **how)
        chosen.add(None if fused else engine.explain(op, *tensors, **how).algorithm)

    x, y, whole, square = zeros(8), zeros(8), zeros(16 * size)[::2], zeros(8, 8)
    with mock.patch.object(dist, "is_initialized", return_value=False):
        ask("no torch.distributed", "all_reduce", y, x)
        ask("no torch.distributed for products", "matmul_all_reduce", zeros(8, 8), square, square)
    ask("order", "all_reduce", y, x, group=turned)
    ask("strided input", "all_reduce", y, zeros(16)[::2])
    ask("strided output", "all_gather", whole, x)
    ask("splits", "all_to_all", x, y, input_split_sizes=[4, 4], output_split_sizes=[4, 4])
    ask("dtype", "all_reduce", y.short(), x.short())
    ask("reduction", "all_reduce", y.int(), x.int(), op="bxor")
    ask("average of integers", "all_reduce", y.int(), x.int(), op="avg")
    ask("config", "all_reduce", y, x, fields={"comm_sms": 2})
    ask("a rank alone", "all_reduce", y, x, group=[ctx.cur_rank])
    ask("order of products", "matmul_all_reduce", zeros(8, 8), square, square, group=turned)
    ask("columns", "matmul_all_gather", zeros(8, 8 * size), square, square, gather_dim=1)
    ask("output", "matmul_all_reduce", zeros(8, 16)[:, :8], square, square)
    ask("A", "all_gather_matmul", zeros(8 * size, 8), zeros(8, 16)[:, :8], square, gather_dim=0)
    ask("tiles", "matmul_reduce_scatter", zeros(8, 8), square, square, layout="tiles")
    symmetric = ctx.ops.explain("matmul_reduce_scatter", zeros(8 // size, 8), square, square)
    said["torch_symm"] = next(each.reason for each in symmetric.candidates if each.name == "torch_symm")
    return said, chosen


@on_heap("8MiB")
def meshes(ctx):
    """Sums over each dimension of a mesh of 2 x 2 ranks, and what wrong groups and tensors say."""
    mesh = init_device_mesh(ctx.device.partition(":")[0], (2, 2), mesh_dim_names=("dp", "tp"))
    part = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    said, y = {}, ctx.zeros(2)
    for name in ("dp", "tp"):
        ctx.ccl.all_reduce(y, torch.full((2,), float(ctx.cur_rank), device=ctx.device), group=mesh[name])
        ctx.device_barrier(mesh[name])
        ctx.barrier(group=mesh[name])
        said[name] = y.tolist()
    said["mesh"] = said_by(ctx.ccl.all_reduce, y, y, group=mesh)
    said["collective"] = said_by(ctx.ccl.all_reduce, part, part)
    return said | {"product": said_by(ctx.ops.matmul_all_reduce, ctx.zeros(4, 4), part, part)}


def gloo_sum(dying=None):
    """Return a sum that gloo makes; or end the process of a rank."""
    if dying == dist.get_rank():
        os._exit(7)
    with Iris("4MiB", device="cpu") as ctx:
        y = ctx.zeros(2)
        ctx.ccl.all_reduce(y, ctx.ones(2), config=Config(algorithm="gloo"))
        return y.tolist()
