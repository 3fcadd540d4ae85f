"""Kernels and rank jobs of test_atomics: every atomic x dtype x mask x sem x scope."""

import sys

import torch
import triton
import triton.language as tl
from gluon_kernels import kernels_of
from jobs_common import compile_together

import iris_triton as iris
from iris_core import Iris
from iris_gluon import IrisDeviceCtx
from iris_triton import DeviceContext
from iris_triton.language.blocks import lanes  # so that Gluon can compile the kernels, too
from iris_triton.testing.languages import invoke

LANES = 32
MAX_TRIES = tl.constexpr(1 << 20)  # a second or more, of a single try to get a lock
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
SOME_ORDERS = (("relaxed", "gpu"), ("acquire", "sys"), ("release", "cta"), ("acq_rel", "sys"))
"""sem and scope with which both languages are compared."""
SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}


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
    v = tl.load(operands + i)
    if name == "atomic_cas":
        words = (cells + i, tl.load(old + i), v)
        tl.store(old + i, invoke(api, context, world, words, (rank, peer, bases), (peer,), (sem, scope)))
    elif masked:
        r = invoke(api, context, world, (cells + i, v), (rank, peer, bases), (peer,), (i < n, sem, scope))
        tl.store(old + i, r, mask=i < n)
    else:
        r = invoke(api, context, world, (cells + i, v), (rank, peer, bases), (peer,), (None, sem, scope))
        tl.store(old + i, r)


@triton.jit
def hammer(cells, bases, rank: tl.constexpr, world: tl.constexpr, rounds):
    """Every program of every rank adds 1 to the first cell of rank 0, subtracts 1 from the second."""
    for _ in range(rounds):
        iris.atomic_add(cells, 1, rank, 0, bases, sem="relaxed", scope="sys")
        iris.atomic_sub(cells + 1, 1, rank, 0, bases, sem="relaxed", scope="sys")


@triton.jit
def locked_increment(lock, counter, bases, rank: tl.constexpr, world: tl.constexpr, rounds):
    """A spin lock on rank 0 by cas and xchg; the counter is read and written without atomics under it.

    Who never gets the lock gives up, and the counter stays too small.
    """
    for _ in range(rounds):
        holder = iris.atomic_cas(lock, 0, 1, rank, 0, bases, sem="acquire", scope="sys")
        tries = 0
        while (holder != 0) & (tries < MAX_TRIES):
            holder = iris.atomic_cas(lock, 0, 1, rank, 0, bases, sem="acquire", scope="sys")
            tries += 1
        if holder == 0:
            value = iris.load(counter, rank, 0, bases, volatile=True)
            iris.store(counter, value + 1, rank, 0, bases)
            iris.atomic_xchg(lock, 0, rank, 0, bases, sem="release", scope="sys")


def before(rank: int, dtype: torch.dtype, more: int = 0) -> torch.Tensor:
    return ((torch.arange(LANES) * 5 + rank * 3) % 40 - 20 + more).to(dtype)


def operand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(LANES) * 3 + rank * 11) % 40 - 20).to(dtype)


def after(op: str, old: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The oracle: what the cell holds afterwards."""
    if old.dtype in SIGNED:  # torch computes little with them; with the highest bit flipped they compare as signed ones
        flip = torch.iinfo(SIGNED[old.dtype]).min if op in ("min", "max") else 0
        return (after(op, signed(old) ^ flip, signed(v) ^ flip) ^ flip).view(old.dtype)
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


def signed(tensor: torch.Tensor) -> torch.Tensor:
    """An unsigned tensor's bits as signed numbers; others as they are."""
    return tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))


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
            compare = torch.full((LANES,), -7).to(dtype)
            even = torch.arange(LANES) % 2 == 0
            if op == "cas":  # half of the comparisons succeed
                compare = torch.where(even, signed(before(peer, dtype)), signed(before(peer, dtype, 1))).view(dtype)
            cells.copy_(before(rank, dtype))
            old.copy_(compare)
            ctx.barrier()
            kernel[(1,)](*args, **variant)
            ctx.barrier()
            base, v = before(rank, dtype), operand(pred, dtype)
            old_wanted = before(peer, dtype)
            if op == "cas":
                cells_wanted = torch.where(even, signed(v), signed(base)).view(dtype)
            else:
                cells_wanted = after(op, base, v)
            if masked:
                cells_wanted[NUMEL:] = base[NUMEL:]
                old_wanted[NUMEL:] = compare[NUMEL:]
            what = f"rank {rank}: atomic_{op} {form} {dtype} {variant}"
            if not torch.equal(signed(cells.cpu()), signed(cells_wanted)):
                problems.append(f"{what}: cells {cells.tolist()} instead of {cells_wanted.tolist()}")
            if not torch.equal(signed(old.cpu()), signed(old_wanted)):
                problems.append(f"{what}: returned {old.tolist()} instead of {old_wanted.tolist()}")
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


def same_in_both(device: str) -> list[str]:
    """Each atomic in Triton and in Gluon on equal memory; return where memory or old values differ."""
    problems = []
    kernels = {DeviceContext: atomic, IrisDeviceCtx: kernels_of(sys.modules[__name__])["atomic"]}
    with Iris("8MiB", device=device, backend="gluon") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        for op, legal in LEGAL.items():
            cases = [(dtype, None, None) for dtype in legal + MORE[op]]
            for dtype, sem, scope in cases + [(legal[0], *order) for order in SOME_ORDERS]:
                results = []
                for context, kernel in kernels.items():
                    cells, operands, old = (noise(ctx, dtype, seed + rank) for seed in (0, 100, 200))
                    ctx.barrier()
                    kernel[(1,)](
                        None, context, f"atomic_{op}", cells, operands, old, ctx.get_heap_bases(),
                        ctx.get_device_context(), rank, world, (rank + 1) % world, NUMEL, masked=op != "cas", sem=sem,
                        scope=scope, LANES=LANES,
                    )  # fmt: skip
                    ctx.barrier()
                    results.append([each.cpu().view(torch.uint8).tolist() for each in (cells, old)])
                if results[0] != results[1]:
                    problems.append(f"rank {rank}: atomic_{op} {dtype} {sem} {scope}")
    return problems


def noise(ctx: Iris, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A symmetric tensor of random numbers, not only of small integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        values = torch.randn(LANES, generator=generator)
    else:
        values = torch.randint(-(2**7), 2**7, (LANES,), generator=generator)
    tensor = ctx.empty(LANES, dtype=dtype)
    tensor.copy_(values.to(dtype))
    return tensor
