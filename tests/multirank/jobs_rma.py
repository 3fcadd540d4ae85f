"""Kernels and rank jobs of test_rma: loads, stores and copies through every form of the device API."""

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
ONE_OF_EACH_SIZE = (torch.int8, torch.bfloat16, torch.float32, torch.int64)


@triton.jit(do_not_specialize=["rank", "peer", "far", "n"])
def rma(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, x, y, out, bases, context, rank,
    world: tl.constexpr, peer, far, n, masked: tl.constexpr, hint: tl.constexpr, BLOCK: tl.constexpr,
    load_cache: tl.constexpr = None, store_cache: tl.constexpr = None, volatile: tl.constexpr = False,
):  # fmt: skip
    """One operation between this rank, `peer` and (copy) `far`, by function or by method.

    A function needs no `world`, and is given none, so that worlds of all sizes share its binaries.
    """
    api: tl.constexpr = (function, Context, name)
    i = tl.program_id(0) * BLOCK + lanes(BLOCK, vector=2)
    if masked:
        mask = i < n
        other = 7
    else:
        mask: tl.constexpr = None
        other: tl.constexpr = None
    p, q, ranks = x + i, y + i, (rank, peer, bases)
    if name == "load":
        value = invoke(api, context, world, (p,), ranks, (peer,), (mask, other, load_cache, volatile, hint))
        tl.store(out + i, value)
    elif name == "store":  # the last arguments are in another order
        if Context is None:
            function(q, tl.load(p), rank, peer, bases, mask, hint, store_cache)
        else:
            invoke(api, context, world, (q, tl.load(p)), (), (peer,), (mask, store_cache, hint))
    elif name == "copy":
        words = (p, q, peer, far)
        invoke(api, context, world, words, (rank, bases), (), (mask, other, load_cache, store_cache, hint))
    else:
        invoke(api, context, world, (p, q), ranks, (peer,), (mask, other, load_cache, store_cache, hint))


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct per rank and position."""
    numbers = (torch.arange(4 * BLOCK) * 7 + rank * 31) % 120 - 60
    return numbers > 0 if dtype is torch.bool else numbers.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What torch can compare in any dtype."""
    return tensor.view(torch.uint8)


def run_rma(op: str, cache_modifiers: bool, device: str = "cpu") -> list[str]:
    """Try an operation in all dtypes, masks, hints and both forms; return what went wrong."""
    problems = []
    with Iris("8MiB", device=device) as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        peer, far = (rank + (world + 1) // 2) % world, (rank + 1) % world
        if op in ("load", "get"):
            source = peer
        elif op == "copy":  # rank r copies from r + half to r + 1, so ours came from rank - 1 + half
            source = (rank - 1 + (world + 1) // 2) % world
        else:
            source = (rank - (world + 1) // 2) % world
        launches = []
        more = MORE_DTYPES if world == 2 and not cache_modifiers else ()
        for dtype in (*(ONE_OF_EACH_SIZE if cache_modifiers else DTYPES), *more):
            x, y = ctx.empty(4 * BLOCK, dtype=dtype), ctx.empty(4 * BLOCK, dtype=dtype)
            x.copy_(values(rank, dtype))
            out = torch.empty(4 * BLOCK, dtype=dtype, device=ctx.device)
            for api in ((getattr(iris, op), None, op), (None, DeviceContext, op))[dtype in more :]:
                size = world if api[0] is None else None
                where = ctx.get_heap_bases(), ctx.get_device_context(), rank, size, peer, far
                args = (*api, x, y, out, *where, NUMEL)
                for variant in variants(op, cache_modifiers, device):
                    launches.append((rma, args, {**variant, "BLOCK": BLOCK}))
        compile_together(ctx, launches)
        for kernel, args, variant in launches:
            function, _, _, x, y, out, *_ = args
            form = "method" if function is None else "function"
            y.fill_(-3)
            out.fill_(-3)
            ctx.barrier()
            kernel[(4,)](*args, **variant)
            ctx.barrier()
            expected = values(source, x.dtype)
            if variant["masked"]:
                expected[NUMEL:] = 7 if op == "load" else -3
            found = (out if op == "load" else y).cpu()
            if not torch.equal(bits(found), bits(expected)):
                wrong = int((found.float() != expected.float()).sum())
                problems.append(f"rank {rank}: {op} {form} {x.dtype} {variant}: {wrong} wrong")
        ctx.barrier()
    return problems


def variants(op: str, cache_modifiers: bool, device: str):
    """Keyword arguments of the kernel: masks and hints, or each cache modifier that the operation takes."""
    if not cache_modifiers:
        yield {"masked": False, "hint": (16,)}
        yield {"masked": True, "hint": None}
        if device != "cpu":  # the executor only looks whether hints are true
            yield {"masked": False, "hint": None}
            yield {"masked": True, "hint": 16}
        return
    plain = {"masked": True, "hint": None}
    if op != "store":
        for modifier in (".ca", ".cg", ".cv"):
            yield {**plain, "load_cache": modifier}
    if op != "load":
        for modifier in (".wb", ".cg", ".cs", ".wt"):
            yield {**plain, "store_cache": modifier}
    if op == "load":
        yield {**plain, "volatile": True}
    elif op != "store":
        yield {**plain, "load_cache": ".cg", "store_cache": ".wt"}
