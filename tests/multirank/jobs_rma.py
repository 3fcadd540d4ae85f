"""Kernels and rank jobs of test_rma: loads, stores, copies and atomics through every form of the device API.

tests/compile has the kernels for every GPU.
"""

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

BLOCK = 256
NUMEL = 4 * BLOCK - 19  # the last program is partly masked
DTYPES = (torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
MORE_DTYPES = (torch.bool, torch.uint8, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn)
"""Tried by two ranks only, in one form."""

LANES, CHANGED = 32, 27  # of atomics: the last lanes are masked
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


@triton.constexpr_function
def per_access(element_type):
    """Elements in 16 bytes."""
    return 128 // element_type.primitive_bitwidth


@triton.jit(do_not_specialize=["rank", "peer", "far"])
def rma(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, x, y, out, bases, context, rank,
    world: tl.constexpr, peer, far, n, masked: tl.constexpr, hint: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One operation between this rank, `peer` and (copy) `far`, by function or by method.

    A function needs no `world`, and is given none, so that worlds of all sizes share its binaries.
    """
    api: tl.constexpr = (function, Context, name)
    i = tl.program_id(0) * BLOCK + lanes(BLOCK, vector=per_access(x.dtype.element_ty))
    if masked:
        mask = i < n
        other = 7
    else:
        mask: tl.constexpr = None
        other: tl.constexpr = None
    p, q, ranks = x + i, y + i, (rank, peer, bases)
    if name == "load":
        value = invoke(api, context, world, (p,), ranks, (peer,), (mask, other, None, False, hint))
        tl.store(out + i, value)
    elif name == "store":  # the last arguments are in another order
        if Context is None:
            function(q, tl.load(p), rank, peer, bases, mask, hint)
        else:
            invoke(api, context, world, (q, tl.load(p)), (), (peer,), (mask, None, hint))
    elif name == "copy":
        words = (p, q, peer, far)
        invoke(api, context, world, words, (rank, bases), (), (mask, other, None, None, hint))
    else:
        invoke(api, context, world, (p, q), ranks, (peer,), (mask, other, None, None, hint))


@triton.jit(do_not_specialize=["rank", "peer", "n"])
def atomic(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cells, operands, old, bases, context, rank,
    world: tl.constexpr, peer, n, masked: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One atomic on `peer`'s cells, by function or by method; what was there before goes to `old`."""
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


def api_of(name: str, form: str) -> tuple:
    """The first arguments of a kernel: a function, or the context's class, with the name."""
    return (getattr(iris, name), None, name) if form == "function" else (None, DeviceContext, name)


def where(ctx, form: str) -> tuple:
    """What a device function is told about ranks and memory."""
    return ctx.get_heap_bases(), ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks if form == "method" else None


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct per rank and position."""
    numbers = (torch.arange(4 * BLOCK) * 7 + rank * 31) % 120 - 60
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


def run_rma(op: str, device: str = "cpu") -> None:
    """Try an operation in all dtypes, masks, hints and both forms."""
    launches = []
    with Iris("8MiB", device=device) as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        half = (world + 1) // 2
        # copy: rank r copies from r + half to r + 1, so ours came from rank - 1 + half
        source = (rank + {"load": half, "get": half, "copy": half - 1}.get(op, -half)) % world
        more = MORE_DTYPES if world == 2 else ()
        for number, dtype in enumerate((*DTYPES, *more)):
            x, y = ctx.empty(4 * BLOCK, dtype=dtype), ctx.empty(4 * BLOCK, dtype=dtype)
            x.copy_(values(rank, dtype))
            out = torch.empty(4 * BLOCK, dtype=dtype, device=ctx.device)
            forms = ("function", "method")[dtype in more :]
            if device == "cpu":  # where the kit calls both, with one type
                forms = [forms[(number + len(op)) % len(forms)]]
            for form in forms:
                args = *api_of(op, form), x, y, out, *where(ctx, form), (rank + half) % world, (rank + 1) % world, NUMEL
                for variant in variants(device):
                    launches.append((rma, args, {**variant, "BLOCK": BLOCK}))
        compile_together(ctx, launches)
        for kernel, args, variant in launches:
            _, Context, _, x, y, out, *_ = args
            y.fill_(-3)
            out.fill_(-3)
            ctx.barrier()
            kernel[(4,)](*args, **variant)
            ctx.barrier()
            expected = values(source, x.dtype)
            if variant["masked"]:
                expected[NUMEL:] = 7 if op == "load" else -3
            found = (out if op == "load" else y).cpu()
            case = op, Context, x.dtype, variant, found.float() != expected.float()
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), case
        ctx.barrier()


def variants(device: str):
    yield {"masked": False, "hint": (16,)}
    yield {"masked": True, "hint": None}
    if device != "cpu":  # the executor only looks whether hints are true
        yield {"masked": False, "hint": None}
        yield {"masked": True, "hint": 16}


def before(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(LANES) * 5 + rank * 3) % 40 - 20).to(dtype)


def operand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(LANES) * 3 + rank * 11) % 40 - 20).to(dtype)


def array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.double() if tensor.dtype.is_floating_point else tensor).cpu().numpy()


def run_atomic(op: str, device: str = "cpu") -> None:
    """Try an atomic in all dtypes, masks and both forms, and the first dtype with every sem and scope."""
    launches = []
    with Iris("4MiB", device=device) as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        peer, pred = (rank + 1) % world, (rank - 1) % world
        more = MORE[op] if world == 2 else ()
        for dtype in (*LEGAL[op], *more):
            cells, operands = ctx.empty(LANES, dtype=dtype), operand(rank, dtype).to(ctx.device)
            old = torch.empty(LANES, dtype=dtype, device=ctx.device)
            for form, masked, sem, scope in orders_of(op, dtype is LEGAL[op][0]):
                if dtype in more and (form, masked) != ("method", op != "cas"):
                    continue
                args = *api_of(f"atomic_{op}", form), cells, operands, old, *where(ctx, form), peer, CHANGED
                launches.append((atomic, args, {"masked": masked, "sem": sem, "scope": scope, "LANES": LANES}))
        compile_together(ctx, launches)
        for kernel, args, variant in launches:
            _, Context, _, cells, _, old, *_ = args
            dtype, masked = cells.dtype, variant["masked"]
            base, v, there = map(array, (before(rank, dtype), operand(pred, dtype), before(peer, dtype)))
            even, changed = np.arange(LANES) % 2 == 0, np.arange(LANES) < (CHANGED if masked else LANES)
            # half of the comparisons of "cas" succeed
            compare = np.where(even, there, there + 1) if op == "cas" else np.full_like(there, 7)
            cells.copy_(before(rank, dtype))
            old.copy_(torch.from_numpy(compare).to(dtype))
            ctx.barrier()
            kernel[(1,)](*args, **variant)
            ctx.barrier()
            wanted = np.where(even, v, base) if op == "cas" else ORACLE[op](base, v)
            case = op, Context, dtype, variant
            assert array(cells).tolist() == np.where(changed, wanted, base).tolist(), case
            assert array(old).tolist() == np.where(changed, there, compare).tolist(), case
        ctx.barrier()


def orders_of(op: str, orders: bool):
    """(form, masked, sem, scope); with or without every order."""
    for form in ("function", "method"):
        for masked in (False, True) if op != "cas" else (False,):
            yield form, masked, None, None
    if orders:
        yield from (("method", op != "cas", sem, scope) for sem in SEMS for scope in SCOPES)


def run_contention(dtype_name: str, rounds: int, programs: int, device: str = "cpu") -> list[float]:
    with Iris("4MiB", device=device) as ctx:
        cells = ctx.zeros(2, dtype=getattr(torch, dtype_name))
        ctx.barrier()
        hammer[(programs,)](cells, ctx.get_heap_bases(), ctx.cur_rank, ctx.num_ranks, rounds)
        ctx.barrier()
        return cells.tolist()
