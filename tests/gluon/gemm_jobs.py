"""Rank jobs of test_gemm: the example's kernels on CPU ranks, where the executor computes TMA and wgmma."""

import importlib.util
import pathlib

import torch

from iris_core import Iris
from iris_gluon import IrisDeviceCtx, gemm

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "24_gluon_gemm_all_scatter.py"
TINY = gemm.GemmConfig(block_m=64, block_n=64, parts=2, stages=3, num_warps=4, group=2)


def example():
    """The module of the example; its name is not one that can be imported."""
    spec = importlib.util.spec_from_file_location("gluon_gemm_all_scatter_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def matrix(rows, columns, seed, dtype=torch.bfloat16):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def largest_row_error(c, a, b):
    """The largest relative error of a row, by its norm; NaN where C has one."""
    wanted = a.float() @ b.float()
    return ((c.float() - wanted).norm(dim=1) / wanted.norm(dim=1)).max().item()


def scatter_by_core(m, n, k, programs):
    """GEMM + all-scatter by the kernel for Hopper; n columns per rank.  Returns the largest error of a row of C."""
    with Iris("4MiB", device="cpu", backend="gluon") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        a, slabs = matrix(m, k, 1), [matrix(k, n, 2 + r) for r in range(world)]
        c = ctx.full((m, n * world), float("nan"), dtype=torch.bfloat16)
        ctx.barrier()
        example().on_hopper[(programs,)](
            IrisDeviceCtx, ctx.get_device_context(), *TINY.operands(a, slabs[rank]), c, m, n, k, c.stride(0),
            WORLD=world, **TINY.options,
        )  # fmt: skip
        ctx.barrier()
        return largest_row_error(c, a, torch.cat(slabs, dim=1))
