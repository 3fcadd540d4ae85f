"""Rank jobs of tests/gluon.  Most are those of tests/multirank, with Gluon's kernels in place of Triton's."""

import importlib
from unittest import mock

import jobs_atomics
import torch
from gluon_kernels import kernels_of
from jobs_common import environment

from iris_core import Iris
from iris_gluon.backend import GluonBackend

SOME_ORDERS = (("relaxed", "gpu"), ("acquire", "sys"), ("release", "cta"), ("acq_rel", "sys"))
"""sem and scope; all of them are tried by run_atomic."""


def in_gluon(module: str, job: str, *args):
    """Run a job of tests/multirank with the Gluon backend and Gluon's kernels."""
    jobs = importlib.import_module(module)
    with mock.patch.multiple(jobs, **kernels_of(jobs)), environment(IRIS_BACKEND="gluon"):
        return getattr(jobs, job)(*args)


def backend_name(device: str) -> str:
    """The backend that `in_gluon` opens contexts with."""
    with environment(IRIS_BACKEND="gluon"), Iris("1MiB", device=device) as ctx:
        assert isinstance(ctx.backend, GluonBackend)
        return ctx.backend.info.name


def same_atomics(device: str) -> list[str]:
    """Each atomic through both contexts on equal memory; returns where memory or old values differ."""
    problems = []
    kernels = {"triton": jobs_atomics.atomic, "gluon": kernels_of(jobs_atomics)["atomic"]}
    with Iris("8MiB", device=device, backend="gluon") as ctx:
        rank, world, lanes = ctx.cur_rank, ctx.num_ranks, jobs_atomics.LANES
        for op, legal in jobs_atomics.LEGAL.items():
            cases = [(dtype, None, None) for dtype in legal + jobs_atomics.MORE[op]]
            for dtype, sem, scope in cases + [(legal[0], *order) for order in SOME_ORDERS]:
                results = {}
                for language, kernel in kernels.items():
                    cells, operands = (_noise(ctx, lanes, dtype, seed) for seed in (rank, 100 + rank))
                    old = _noise(ctx, lanes, dtype, 200 + rank)
                    ctx.barrier()
                    kernel[(1,)](
                        op, "object", cells, operands, old, ctx.get_heap_bases(), ctx.get_device_context(), rank,
                        world, (rank + 1) % world, jobs_atomics.NUMEL, masked=op != "cas", sem=sem, scope=scope,
                        LANES=lanes,
                    )  # fmt: skip
                    ctx.barrier()
                    results[language] = [_bytes(tensor) for tensor in (cells, old)]
                if results["triton"] != results["gluon"]:
                    problems.append(f"rank {rank}: atomic_{op} {dtype} {sem} {scope}")
    return problems


def _noise(ctx, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A symmetric tensor of random numbers, not only of small integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        values = torch.randn(numel, generator=generator).to(dtype)
    else:
        values = torch.randint(-(2**7), 2**7, (numel,), generator=generator).to(dtype)
    tensor = ctx.empty(numel, dtype=dtype)
    tensor.copy_(values)
    return tensor


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
