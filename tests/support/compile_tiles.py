"""Tile-level collectives that must compile for every GPU, and what must be in their assembly."""

import torch
import triton
import triton.language as tl
from compile_collectives import CUDA, HIP, case

from iris_triton.context import DeviceContext
from iris_triton.testing.languages import open_context
from iris_triton.tiles.reductions import AllReduceConfig
from iris_triton.tiles.views import Tile, TileView, make_tensor_view

_WORLD = 4


@triton.constexpr_function
def per_access(element_type):
    """Elements in 16 bytes."""
    return 128 // element_type.primitive_bitwidth


@triton.constexpr_function
def default_layout(shape, vector):
    """Triton's tiles have no layout; the cases in Gluon put another function in place of this one."""
    return None


@triton.jit
def tile_collective(
    Context: tl.constexpr, op: tl.constexpr, x, src, dst, locks, context, peer, M, N, stride_m, stride_n, n_per_rank,
    W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """One tile-level collective, a method or one of the forms below, on the tile of the program's number."""
    ctx = open_context(Context, context, W)
    layout: tl.constexpr = default_layout([BLOCK_M, BLOCK_N], vector=per_access(x.dtype.element_ty))
    x_view = make_tensor_view(x, M, N, stride_m, stride_n)
    tiles_n = tl.cdiv(N, BLOCK_N)
    place = TileView(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, BLOCK_M, BLOCK_N, layout)
    tile = Tile(place.pid_m, place.pid_n, BLOCK_M, BLOCK_N, place.partial(x_view))
    src = make_tensor_view(src, M, N, stride_m, stride_n)
    dst = make_tensor_view(dst, M, N, stride_m, stride_n)
    if op == "all_gather":
        ctx.all_gather(tile, dst, 1)
    elif op == "gather":
        ptr, mask = dst.tile_ptr(place)
        tl.store(ptr, ctx.gather(place, src, peer), mask=mask)
    elif op == "all_to_all":
        ctx.all_to_all(place, src, dst, n_per_rank)
    elif op == "all_reduce":
        ctx.all_reduce(place, src, dst)
        ctx.all_reduce(place, src, dst, config=AllReduceConfig("one_shot", locks), tile_id=3)
    elif op == "all_reduce_atomic":
        ctx.all_reduce_atomic(tile, dst)
    elif op == "all_reduce_two_shot_by_owner":
        ctx.all_reduce_two_shot(tile, src, dst, locks, ctx.rank, peer)
    elif op == "all_reduce_spinlock" or op == "await_tile":
        getattr(Context, op)(ctx, tile, dst, locks)
    else:
        getattr(Context, op)(ctx, tile, src, dst, locks)


_LOADS = {CUDA: r"ld\.global\.v[24]\.b(32|64)", HIP: r"global_load_dwordx4"}
_STORES = {CUDA: r"st\.global\.v[24]\.b(32|64)", HIP: r"global_store_dwordx4"}
_TELL = {
    CUDA: r"bar\.sync[\s\S]*st\.release\.sys\.global\.b",
    HIP: r"s_waitcnt vmcnt\(0\)[\s\S]*s_barrier[\s\S]*buffer_wbl2 sc0 sc1[\s\S]*global_atomic_swap",
}
_WAIT = {
    CUDA: r"ld\.acquire\.sys\.global\.b[\s\S]*globaltimer",
    HIP: r"sc1[\s\S]*buffer_inv sc0 sc1[\s\S]*s_memrealtime",
}
_COUNT = {
    CUDA: r"bar\.sync[\s\S]*atom\.global\.(sys\.acq_rel|acq_rel\.sys)\.add\.",
    HIP: r"buffer_wbl2 sc0 sc1[\s\S]*global_atomic_(add|cmpswap)\S* .* sc1[\s\S]*buffer_inv sc0 sc1",
}
_LOCK = {CUDA: r"atom\.global\.(sys\.acquire|acquire\.sys)\.exch\.", HIP: r"global_atomic_swap\S* .* sc1"}
_ADD = {CUDA: r"(atom|red)\.global\.(sys\.relaxed|relaxed\.sys)\.add\.", HIP: r"global_atomic_(add|pk_add|cmpswap)"}

_EXPECTED = {
    "all_gather": (_STORES,), "gather": (_LOADS,), "all_to_all": (_LOADS,), "all_reduce": (_ADD, _LOADS, _TELL, _WAIT),
    "all_reduce_atomic": (_ADD,), "all_reduce_spinlock": (_LOCK, _LOADS, _STORES, _TELL),
    "all_reduce_one_shot": (_TELL, _WAIT, _LOADS), "all_reduce_two_shot": (_WAIT, _COUNT, _LOADS, _STORES, _TELL),
    "all_reduce_two_shot_by_owner": (_TELL, _WAIT, _LOADS, _STORES), "all_reduce_ring": (_TELL, _WAIT, _LOADS, _STORES),
    "reduce_scatter": (_WAIT, _COUNT, _LOADS, _STORES, _TELL), "await_tile": (_WAIT,),
}  # fmt: skip


_RAISED = {
    "all_reduce_one_shot": (_WAIT, _LOADS),
    "all_reduce_two_shot": (_WAIT, _LOADS, _STORES),
    "all_reduce_two_shot_by_owner": (_WAIT, _LOADS, _STORES),
    "reduce_scatter": (_WAIT, _LOADS),
}
"""With int32 locks, whose flags the kernel raises itself."""


def compile_cases(Context=DeviceContext, in_language=lambda kernel: kernel):
    """Return a case for every tile-level collective."""
    counted = [(f"tile-{op}", op, torch.int64, patterns) for op, patterns in _EXPECTED.items()]
    raised = [(f"tile-{op}-raised", op, torch.int32, patterns) for op, patterns in _RAISED.items()]
    return [
        case(
            name, in_language(tile_collective),
            (Context, op, *(torch.bfloat16,) * 3, locks, torch.int64, 3, 4096, 4096, 4096, 1, 512),
            {"W": _WORLD, "BLOCK_M": 32, "BLOCK_N": 64}, patterns,
        )
        for name, op, locks, patterns in counted + raised
    ]  # fmt: skip
