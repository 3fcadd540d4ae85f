"""Tile-level collectives that must compile for every GPU, and what must be in their assembly."""

import torch
import triton
from compile_kernels import CUDA, HIP, case
from jobs_tiles import run

from iris_triton.context import DeviceContext

LOADS = {CUDA: r"ld\.global\.v[24]\.b(32|64)", HIP: r"global_load_dwordx4"}
STORES = {CUDA: r"st\.global\.v[24]\.b(32|64)", HIP: r"global_store_dwordx4"}
TELL = {
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
_PAIRS = {CUDA: LOADS[CUDA], HIP: r"global_load_dword"}  # AMD's compiler loads as it adds

_EXPECTED = {
    "gather": (LOADS,), "all_to_all": (LOADS,), "all_gather_columns": (STORES,), "default": (_ADD, _PAIRS),
    "atomic": (_ADD,), "spinlock": (_LOCK, LOADS, STORES, TELL), 1: (TELL, _WAIT, LOADS),
    "one_shot": (TELL, _WAIT, LOADS), "two_shot": (_WAIT, _COUNT, LOADS, STORES, TELL),
    "owner": (TELL, _WAIT, LOADS, STORES), "ring": (TELL, _WAIT, LOADS, STORES),
    "reduce_scatter": (_WAIT, _COUNT, LOADS, STORES, TELL), "await": (_WAIT,),
}  # fmt: skip
_RAISED = {
    "one_shot": (_WAIT, LOADS), "two_shot": (_WAIT, LOADS, STORES), "owner": (_WAIT, LOADS, STORES),
    "reduce_scatter": (_WAIT, LOADS),
}  # fmt: skip
"""With int32 locks, whose flags the kernel raises itself."""
_KERNEL = triton.jit(run.fn)  # for sizes that are multiples of 16
_WITHOUT_DATA = ("gather", "all_to_all", "default", 1)


def compile_cases(Context=DeviceContext, in_language=lambda kernel: kernel):
    counted = [(f"tile-{op}", op, torch.int64, patterns) for op, patterns in _EXPECTED.items()]
    raised = [(f"tile-{op}-raised", op, torch.int32, patterns) for op, patterns in _RAISED.items()]
    shape = 4096, 4096, *(4096, 1) * 2, 4096, 4096, 4096, 1
    return [
        case(
            name, in_language(_KERNEL),
            (Context, op, "memory" if op in _WITHOUT_DATA else "tile", *(torch.bfloat16,) * 3, locks, torch.int64, 4,
             *shape, 512),
            {"BLOCK_M": 32, "BLOCK_N": 64, "VECTOR": 8, "OTHER": 8}, patterns,
        )
        for name, op, locks, patterns in counted + raised
    ]  # fmt: skip
