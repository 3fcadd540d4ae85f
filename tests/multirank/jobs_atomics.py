"""Kernels and rank jobs of test_atomics: every atomic x dtype x mask x sem x scope."""

import numpy as np
import torch
import triton
import triton.language as tl
from jobs_common import compile_together

import iris_triton as iris
from iris_core import Iris
from iris_triton import DeviceContext
from iris_triton.language.blocks import lanes  # so that Gluon can compile the kernels, too
from iris_triton.testing.languages import invoke

LANES = 32
NUMEL = 27  # the last lanes are masked
SEMS = (None, "relaxed", "acquire", "release", "acq_rel")
SCOPES = (None, "cta", "gpu", "sys")
INTS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LEGAL = {
    "add": INTS + FLOATS, "sub": INTS + FLOATS, "xchg": (*INTS, torch.float32), "xor": INTS, "and": INTS, "or": INTS,
    "min": (*INTS, torch.float32), "max": (*INTS, torch.float32), "cas": INTS,
}  # fmt: skip
UNSIGNED = (torch.uint32, torch.uint64)
MORE = {op: UNSIGNED + ((torch.float64,) if torch.float32 in LEGAL[op] else ()) for op in LEGAL}
"""Tried by two ranks only, in one form."""
ORACLE = {
    "add": np.add, "sub": np.subtract, "xchg": lambda old, v: v, "xor": np.bitwise_xor, "and": np.bitwise_and,
    "or": np.bitwise_or, "min": np.minimum, "max": np.maximum,
}  # fmt: skip
"""What a cell holds afterwards."""


@triton.jit(do_not_specialize=["rank", "peer", "n"])
def atomic(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cells, operands, old, bases, context, rank,
    world: tl.constexpr, peer, n, masked: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One atomic on `peer`'s cells, by function or by method; what was there before goes to `old`.

    A function needs no `world`, and is given none, so that worlds of all sizes share its binaries.
    """
    api: tl.constexpr = (function, Context, name)
    i = lanes(LANES)
    v, ranks = tl.load(operands + i), (rank, peer, bases)
    if masked:
        mask = i < n
    else:
        mask: tl.constexpr = None
    if name == "atomic_cas":
        r = invoke(api, context, world, (cells + i, tl.load(old + i), v), ranks, (peer,), (sem, scope))
    else:
        r = invoke(api, context, world, (cells + i, v), ranks, (peer,), (mask, sem, scope))
    tl.store(old + i, r, mask=mask)


@triton.jit
def hammer(cells, bases, rank: tl.constexpr, world: tl.constexpr, rounds):
    """Every program of every rank adds 1 to the first cell of rank 0, subtracts 1 from the second."""
    for _ in range(rounds):
        iris.atomic_add(cells, 1, rank, 0, bases, sem="relaxed", scope="sys")
        iris.atomic_sub(cells + 1, 1, rank, 0, bases, sem="relaxed", scope="sys")


def before(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(LANES) * 5 + rank * 3) % 40 - 20).to(dtype)


def operand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(LANES) * 3 + rank * 11) % 40 - 20).to(dtype)


def array(tensor: torch.Tensor) -> np.ndarray:
    """The same numbers."""
    return (tensor.double() if tensor.dtype.is_floating_point else tensor).cpu().numpy()


def run_atomic(op: str, device: str = "cpu", orders_of_all_dtypes: bool = False) -> list[str]:
    """Try an atomic in all dtypes, masks and both forms, and with every sem and scope; return what went wrong.

    Args:
        op: name after "atomic_".
        device: where the ranks compute.
        orders_of_all_dtypes: try each sem and scope with every dtype and not with the first one alone.
    """
    problems = []
    with Iris("4MiB", device=device) as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        peer, pred = (rank + 1) % world, (rank - 1) % world
        launches = []
        more = MORE[op] if world == 2 else ()
        for dtype in (*LEGAL[op], *more):
            cells = ctx.empty(LANES, dtype=dtype)
            operands = operand(rank, dtype).to(ctx.device)
            old = torch.empty(LANES, dtype=dtype, device=ctx.device)
            orders = dtype not in more and (orders_of_all_dtypes or dtype is LEGAL[op][0])
            for form, masked, sem, scope in variants(op, orders):
                if dtype in more and (form, masked) != ("method", op != "cas"):
                    continue
                name = f"atomic_{op}"
                api = (getattr(iris, name), None, name) if form == "function" else (None, DeviceContext, name)
                where = ctx.get_heap_bases(), ctx.get_device_context(), rank, world if form == "method" else None, peer
                args = (*api, cells, operands, old, *where, NUMEL)
                launches.append((atomic, args, {"masked": masked, "sem": sem, "scope": scope, "LANES": LANES}))
        compile_together(ctx, launches)
        for kernel, args, variant in launches:
            function, _, _, cells, _, old, *_ = args
            form = "method" if function is None else "function"
            dtype, masked = cells.dtype, variant["masked"]
            base, v, there = map(array, (before(rank, dtype), operand(pred, dtype), before(peer, dtype)))
            even, changed = np.arange(LANES) % 2 == 0, np.arange(LANES) < (NUMEL if masked else LANES)
            # half of the comparisons of "cas" succeed
            compare = np.where(even, there, there + 1) if op == "cas" else np.full_like(there, 7)
            cells.copy_(before(rank, dtype))
            old.copy_(torch.from_numpy(compare).to(dtype))
            ctx.barrier()
            kernel[(1,)](*args, **variant)
            ctx.barrier()
            wanted = np.where(even, v, base) if op == "cas" else ORACLE[op](base, v)
            for found, right in ((cells, np.where(changed, wanted, base)), (old, np.where(changed, there, compare))):
                if not np.array_equal(array(found), right):
                    what = "cells" if found is cells else "returned"
                    problems.append(
                        f"rank {rank}: atomic_{op} {form} {dtype} {variant}: "
                        f"{what} {found.tolist()} instead of {right.tolist()}"
                    )
        ctx.barrier()
    return problems


def variants(op: str, orders: bool):
    """(form, masked, sem, scope); with or without every order."""
    for form in ("function", "method"):
        for masked in (False, True) if op != "cas" else (False,):
            yield form, masked, None, None
    if orders:
        for sem in SEMS:
            for scope in SCOPES:
                yield "method", op != "cas", sem, scope


def run_contention(dtype_name: str, rounds: int, programs: int, device: str = "cpu") -> list[float]:
    """All ranks hammer the same cells."""
    with Iris("4MiB", device=device) as ctx:
        cells = ctx.zeros(2, dtype=getattr(torch, dtype_name))
        ctx.barrier()
        hammer[(programs,)](cells, ctx.get_heap_bases(), ctx.cur_rank, ctx.num_ranks, rounds)
        ctx.barrier()
        return cells.tolist()
