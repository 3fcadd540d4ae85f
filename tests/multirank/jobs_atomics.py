"""Kernels and rank jobs of test_atomics: every atomic x dtype x mask x sem x scope."""

import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core import Iris
from iris_triton import DeviceContext

LANES = 32
NUMEL = 27  # the last lanes are masked
SEMS = (None, "relaxed", "acquire", "release", "acq_rel")
SCOPES = (None, "cta", "gpu", "sys")
INTS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LEGAL = {
    "add": INTS + FLOATS,
    "sub": INTS + FLOATS,
    "xchg": (*INTS, torch.float32),
    "xor": INTS,
    "and": INTS,
    "or": INTS,
    "min": (*INTS, torch.float32),
    "max": (*INTS, torch.float32),
    "cas": INTS,
}


@triton.jit
def atomic(
    op: tl.constexpr, form: tl.constexpr, cells, operands, old, bases, context, rank: tl.constexpr, world: tl.constexpr,
    peer, n, masked: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One atomic on `peer`'s cells; what was there before goes to `old`."""
    i = tl.arange(0, LANES)
    v = tl.load(operands + i)
    p = cells + i
    if masked:
        mask = i < n
    else:
        mask = None
    if form == "functional":
        if op == "add":
            r = iris.atomic_add(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "sub":
            r = iris.atomic_sub(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "xchg":
            r = iris.atomic_xchg(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "xor":
            r = iris.atomic_xor(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "and":
            r = iris.atomic_and(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "or":
            r = iris.atomic_or(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "min":
            r = iris.atomic_min(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "max":
            r = iris.atomic_max(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "cas":
            r = iris.atomic_cas(p, tl.load(old + i), v, rank, peer, bases, sem, scope)
    else:
        ctx = DeviceContext.initialize(context, rank, world)
        if op == "add":
            r = ctx.atomic_add(p, v, peer, mask, sem, scope)
        elif op == "sub":
            r = ctx.atomic_sub(p, v, peer, mask, sem, scope)
        elif op == "xchg":
            r = ctx.atomic_xchg(p, v, peer, mask, sem, scope)
        elif op == "xor":
            r = ctx.atomic_xor(p, v, peer, mask, sem, scope)
        elif op == "and":
            r = ctx.atomic_and(p, v, peer, mask, sem, scope)
        elif op == "or":
            r = ctx.atomic_or(p, v, peer, mask, sem, scope)
        elif op == "min":
            r = ctx.atomic_min(p, v, peer, mask, sem, scope)
        elif op == "max":
            r = ctx.atomic_max(p, v, peer, mask, sem, scope)
        elif op == "cas":
            r = ctx.atomic_cas(p, tl.load(old + i), v, peer, sem, scope)
    if masked:
        tl.store(old + i, r, mask=mask)
    else:
        tl.store(old + i, r)


@triton.jit
def hammer(cells, bases, rank: tl.constexpr, world: tl.constexpr, rounds):
    """Every program of every rank adds 1 to the first cell of rank 0, subtracts 1 from the second."""
    for _ in range(rounds):
        iris.atomic_add(cells, 1, rank, 0, bases, sem="relaxed", scope="sys")
        iris.atomic_sub(cells + 1, 1, rank, 0, bases, sem="relaxed", scope="sys")


@triton.jit
def locked_increment(lock, counter, bases, rank: tl.constexpr, world: tl.constexpr, rounds):
    """A spin lock on rank 0 by cas and xchg; the counter is read and written without atomics under it."""
    for _ in range(rounds):
        while iris.atomic_cas(lock, 0, 1, rank, 0, bases, sem="acquire", scope="sys") != 0:
            pass
        value = iris.load(counter, rank, 0, bases, volatile=True)
        iris.store(counter, value + 1, rank, 0, bases)
        iris.atomic_xchg(lock, 0, rank, 0, bases, sem="release", scope="sys")


def before(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(LANES) * 5 + rank * 3) % 40 - 20).to(dtype)


def operand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(LANES) * 3 + rank * 11) % 40 - 20).to(dtype)


def after(op: str, old: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The oracle: what the cell holds afterwards."""
    return {
        "add": lambda: old + v,
        "sub": lambda: old - v,
        "xchg": lambda: v,
        "xor": lambda: old ^ v,
        "and": lambda: old & v,
        "or": lambda: old | v,
        "min": lambda: torch.minimum(old, v),
        "max": lambda: torch.maximum(old, v),
    }[op]()


def run_atomic(op: str, device: str = "cpu") -> list[str]:
    """Try an atomic in all dtypes, masks, sems, scopes and both forms; return what went wrong."""
    problems = []
    with Iris("4MiB", device=device) as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        peer, pred = (rank + 1) % world, (rank - 1) % world
        for dtype in LEGAL[op]:
            cells = ctx.empty(LANES, dtype=dtype)
            operands = operand(rank, dtype).to(ctx.device)
            for form, masked, sem, scope in variants(op):
                cells.copy_(before(rank, dtype))
                old = torch.full((LANES,), -7, dtype=dtype)
                if op == "cas":  # half of the comparisons succeed
                    old = torch.where(torch.arange(LANES) % 2 == 0, before(peer, dtype), before(peer, dtype) + 1)
                compare = old.clone()
                old = old.to(ctx.device)
                ctx.barrier()
                atomic[(1,)](
                    op, form, cells, operands, old, ctx.get_heap_bases(), ctx.get_device_context(), rank, world,
                    peer, NUMEL, masked=masked, sem=sem, scope=scope, LANES=LANES,
                )  # fmt: skip
                ctx.barrier()
                base, v = before(rank, dtype), operand(pred, dtype)
                if op == "cas":
                    cells_wanted = torch.where(torch.arange(LANES) % 2 == 0, v, base)
                    old_wanted = before(peer, dtype)
                else:
                    cells_wanted = after(op, base, v)
                    old_wanted = before(peer, dtype)
                if masked:
                    cells_wanted[NUMEL:] = base[NUMEL:]
                    old_wanted[NUMEL:] = compare[NUMEL:]
                what = f"rank {rank}: atomic_{op} {form} {dtype} masked={masked} sem={sem} scope={scope}"
                if not torch.equal(cells.cpu(), cells_wanted):
                    problems.append(f"{what}: cells {cells.tolist()} instead of {cells_wanted.tolist()}")
                if not torch.equal(old.cpu(), old_wanted):
                    problems.append(f"{what}: returned {old.tolist()} instead of {old_wanted.tolist()}")
                ctx.barrier()
    return problems


def variants(op: str):
    for form in ("functional", "object"):
        for masked in (False, True) if op != "cas" else (False,):
            yield form, masked, None, None
    for sem in SEMS:
        for scope in SCOPES:
            yield "object", op != "cas", sem, scope


def run_contention(dtype_name: str, rounds: int, programs: int, device: str = "cpu") -> tuple[list[float], int]:
    """All ranks hammer the same cells, then take turns under a lock."""
    dtype = getattr(torch, dtype_name)
    with Iris("4MiB", device=device) as ctx:
        cells = ctx.zeros(2, dtype=dtype)
        lock, counter = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        args = (ctx.get_heap_bases(), ctx.cur_rank, ctx.num_ranks, rounds)
        hammer[(programs,)](cells, *args)
        locked_increment[(programs,)](lock, counter, *args)
        ctx.barrier()
        return cells.tolist(), counter.item()
