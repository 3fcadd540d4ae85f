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


def scatter_any_strides():
    """GEMM + all-scatter by the example's function; returns what was wrong."""
    wrong = []
    with Iris("4MiB", device="cpu", backend="gluon") as ctx:
        rank, world, m, n, k = ctx.cur_rank, ctx.num_ranks, 70, 33, 40
        rows, columns = ctx.zeros(m, n * world), ctx.zeros(n * world, m).t()
        a, b = matrix(m, 2 * k, 1, k, torch.float32), matrix(k, 2 * n, 2 + rank, k, torch.float32)
        whole = torch.cat([matrix(k, 2 * n, 2 + r, k, torch.float32)[:, ::2] for r in range(world)], dim=1)
        for name, left, right, c in (
            ("parts of rows", a[:, :k], b[:, ::2], rows),
            ("by columns", a[:, :k].t().contiguous().t(), b[:, ::2].t().contiguous().t(), columns),
        ):
            ctx.barrier()
            example().gemm_all_scatter(ctx, left, right, c)
            ctx.barrier()
            if wrong_elements(c, left, whole):
                wrong.append(f"rank {rank}: {name}")
        for reason, left, right, c in (
            ("does not make", a, b, rows),
            ("c must lie on the symmetric heap", a[:, :k], b[:, ::2], torch.zeros(m, n * world)),
        ):
            said = ""
            try:
                example().gemm_all_scatter(ctx, left, right, c)
            except ValueError as error:
                said = str(error)
            if reason not in said:
                wrong.append(f"rank {rank}: {said!r} instead of {reason!r}")
    return wrong
