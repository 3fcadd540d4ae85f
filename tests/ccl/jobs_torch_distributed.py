"""Rank jobs of test_torch_distributed: algorithms of torch.distributed, by name."""

import itertools
import os
from unittest import mock

import jobs_ccl
import jobs_ops
import torch
import torch.distributed as dist
from ccl_cases import Case
from ops_cases import Case as Product
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.errors import IrisError, UnsupportedError
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


def collectives(device, members):
    """What is wrong with any of them, on some ranks."""
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        is_member, size = ctx.cur_rank in members, len(members)
        rank = members.index(ctx.cur_rank) if is_member else 0
        group = None if size == ctx.num_ranks else members
        for case in collective_cases(size, name_on(device)):
            with ctx.scope():
                tensors = jobs_ccl.Tensors(ctx, case, rank, size)
                for turn in range(2 * is_member):
                    inputs = tensors.fill(turn)
                    jobs_ccl.call(ctx, case, tensors, group, members)
                    wrong += jobs_ccl.verify(case, tensors, inputs, f" (turn {turn})")
        ctx.barrier()
    return wrong


def product_cases(name):
    """Each operation with some element types, biases and places."""
    for number, dtype in enumerate(("float32", "bfloat16", "float16")):
        place = ("heap", "ordinary", "heap")[number]
        how = {"place": place, "out_place": place, "bias": ("", "columns", "rows")[number]}
        yield Product("matmul_all_reduce", name, (24, 20, 40), dtype, **how)
        yield Product("all_gather_matmul", name, (24, 20, 40), dtype, dim=0, **how)
        yield Product("matmul_all_gather", name, (24, 20, 40), dtype, dim=0, **how)
        yield Product("matmul_reduce_scatter", name, (24, 20, 40), dtype, **how)


def products(device, members):
    """The same of the pairs of a product and a collective."""
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        is_member, size = ctx.cur_rank in members, len(members)
        rank = members.index(ctx.cur_rank) if is_member else 0
        for case in product_cases(name_on(device)):
            with ctx.scope():
                tensors = jobs_ops.Tensors(ctx, case, rank, size)
                for turn in range(2 * is_member):
                    tensors.fill(turn)
                    jobs_ops.call(ctx, case, tensors, None if size == ctx.num_ranks else members)
                    wrong += jobs_ops.verify(case, tensors, turn, f" (turn {turn})")
        ctx.barrier()
    return wrong


def asynchronous(device):
    """Calls beside the current stream, by torch.distributed and by ours in turn."""
    found = []
    with Iris("8MiB", device=device) as ctx:
        x, y = torch.full((64,), ctx.cur_rank + 1.0, device=device), torch.zeros(64, device=device)
        for algorithm in (name_on(device), "two_shot", name_on(device)):
            ctx.ccl.all_reduce(y.zero_(), x, async_op=True, config=Config(algorithm=algorithm)).wait()
            found.append(y.unique().tolist())
        ctx.barrier()
    return found


def refusals(device):
    """Why calls that it cannot serve are refused, by name; and what serves them if nothing is named."""
    name, said, chosen = name_on(device), {}, set()
    with Iris("8MiB", device=device) as ctx:
        x, y, whole = (torch.zeros(n, device=device) for n in (8, 8, 8 * ctx.num_ranks))

        def ask(what, name_of_op, *tensors, fields=None, **how):
            """What each call says; all members make it."""
            try:
                getattr(ctx.ccl, name_of_op)(*tensors, config=Config(algorithm=name, **(fields or {})), **how)
                said[what] = "nothing"
            except UnsupportedError as error:
                said[what] = str(error)
            chosen.add(ctx.ccl.explain(name_of_op, *tensors, **how).algorithm)

        with mock.patch.object(dist, "is_initialized", return_value=False):
            ask("no torch.distributed", "all_reduce", y, x)
        ask("order", "all_reduce", y, x, group=list(reversed(range(ctx.num_ranks))))
        ask("strided input", "all_reduce", y, torch.zeros(16, device=device)[::2])
        ask("strided output", "all_gather", torch.zeros(2 * len(whole), device=device)[::2], x)
        ask("splits", "all_to_all", x, y, input_split_sizes=[4, 4], output_split_sizes=[4, 4])
        ask("dtype", "all_reduce", y.short(), x.short())
        ask("reduction", "all_reduce", y.int(), x.int(), op="bxor")
        ask("average of integers", "all_reduce", y.int(), x.int(), op="avg")
        ask("config", "all_reduce", y, x, fields={"comm_sms": 2})
        ask("a rank alone", "all_reduce", y, x, group=[ctx.cur_rank])
        ctx.barrier()
    return said, chosen


def refused_products(device):
    """The same of products."""
    name, said = name_on(device), {}
    with Iris("8MiB", device=device) as ctx:
        square, size = torch.ones(8, 8, device=device), ctx.num_ranks
        wide = torch.ones(8, 16, device=device)

        def ask(what, op, *tensors, **how):
            try:
                getattr(ctx.ops, op)(*tensors, config=FusedConfig(algorithm=name), **how)
                said[what] = "nothing"
            except UnsupportedError as error:
                said[what] = str(error)

        with mock.patch.object(dist, "is_initialized", return_value=False):
            ask("no torch.distributed", "matmul_all_reduce", square.clone(), square, square)
        ask("order", "matmul_all_reduce", square.clone(), square, square, group=list(reversed(range(size))))
        ask("columns", "matmul_all_gather", torch.ones(8, 8 * size, device=device), square, square, gather_dim=1)
        ask("output", "matmul_all_reduce", wide[:, :8], square, square)
        ask("A", "all_gather_matmul", torch.ones(8 * size, 8, device=device), wide[:, :8], square, gather_dim=0)
        tiles = torch.zeros(8, 8, device=device)
        ask("tiles", "matmul_reduce_scatter", tiles, square, square, layout="tiles")
        symmetric = ctx.ops.explain("matmul_reduce_scatter", torch.ones(8 // size, 8, device=device), square, square)
        said["torch_symm"] = next(each.reason for each in symmetric.candidates if each.name == "torch_symm")
        ctx.barrier()
    return said


def meshes(device):
    """Sums over each dimension of a mesh of 2 x 2 ranks, and what wrong groups and tensors say."""
    said = {}
    with Iris("8MiB", device=device) as ctx:
        mesh = init_device_mesh(ctx.device.partition(":")[0], (2, 2), mesh_dim_names=("dp", "tp"))
        part = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        y = ctx.zeros(2)
        for name in ("dp", "tp"):
            ctx.ccl.all_reduce(y, torch.full((2,), float(ctx.cur_rank), device=ctx.device), group=mesh[name])
            ctx.device_barrier(mesh[name])
            ctx.barrier(group=mesh[name])
            said[name] = y.tolist()
        wrong = {
            "mesh": lambda: ctx.ccl.all_reduce(y, y, group=mesh),
            "collective": lambda: ctx.ccl.all_reduce(part, part),
            "product": lambda: ctx.ops.matmul_all_reduce(ctx.zeros(4, 4), part, part),
        }
        for name, call in wrong.items():
            try:
                call()
            except (IrisError, TypeError) as e:
                said[name] = f"{type(e).__name__}: {e}"
    return said


def gloo_sum(dying=None):
    """Return a sum that gloo makes; or end the process of a rank."""
    if dying == dist.get_rank():
        os._exit(7)
    with Iris("4MiB", device="cpu") as ctx:
        y = ctx.zeros(2)
        ctx.ccl.all_reduce(y, ctx.ones(2), config=Config(algorithm="gloo"))
        return y.tolist()
