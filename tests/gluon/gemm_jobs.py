"""Rank jobs of test_gemm: the example's kernels on CPU ranks, where the executor computes TMA and wgmma."""

import functools
import importlib.util
import pathlib

import torch

from iris_core import Iris
from iris_gluon import IrisDeviceCtx, gemm

ROOT = pathlib.Path(__file__).parents[2]
TINY = gemm.GemmConfig(block_m=64, block_n=64, parts=2, stages=3, num_warps=4, group=2)


@functools.cache
def loaded(path):
    """A module of the repository that is no part of a package; the example's name is not one that can be imported."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem.lstrip("0123456789_"), ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example():
    """GEMM + all-scatter."""
    return loaded("examples/24_gluon_gemm_all_scatter.py")


def benchmark():
    """The plain product."""
    return loaded("benchmarks/gluon_gemm.py")


def matrix(rows, columns, seed, inner, dtype=torch.bfloat16, device="cpu"):
    """-1, 0 and 1, so many that sums of `inner` products are exact in 16 bits, in any order."""
    generator = torch.Generator(device).manual_seed(seed)
    density = min(1.0, (64 / inner) ** 0.5)
    values = torch.rand(rows, columns, generator=generator, device=device)
    return ((values < density / 2).float() - (values > 1 - density / 2).float()).to(dtype)


def wrong_elements(c, a, b):
    """How many elements of C are not exactly those of A @ B."""
    wanted = a.double() @ b.double()
    assert wanted.any()
    assert wanted.abs().max() <= 256
    return int((c.double() != wanted).sum())  # NaN is not equal


def scatter_by_core(m, n, k, programs, turned=False):
    """GEMM + all-scatter by the kernel for Hopper; n columns per rank.  Returns how many elements of C are wrong.

    If `turned`, the operands lie by columns.
    """
    with Iris("4MiB", device="cpu", backend="gluon") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        a, slabs = matrix(m, k, 1, k), [matrix(k, n, 2 + r, k) for r in range(world)]
        own = slabs[rank]
        if turned:
            a, own = a.t().contiguous().t(), own.t().contiguous().t()
        c = ctx.full((m, n * world), float("nan"), dtype=torch.bfloat16)
        ctx.barrier()
        example().on_hopper[(programs,)](
            IrisDeviceCtx, ctx.get_device_context(), *example().operands(TINY, a, own), c, m, n, k, c.stride(0),
            WORLD=world, TURNED_A=turned, TURNED_B=turned, **TINY.options,
        )  # fmt: skip
        ctx.barrier()
        return wrong_elements(c, a, torch.cat(slabs, dim=1))
