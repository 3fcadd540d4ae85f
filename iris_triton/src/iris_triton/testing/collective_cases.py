"""Kernels of the portable collectives that must compile for every GPU target, and what must be in their assembly."""

from __future__ import annotations

from typing import Any

import torch

from iris_core.types import CompileCase, DeviceType
from iris_triton.collectives.parts.barrier import meet_alone
from iris_triton.collectives.pull import pull
from iris_triton.collectives.pull_reduce import pull_reduce
from iris_triton.collectives.push import push_direct, push_staged
from iris_triton.collectives.send_recv import receive, send
from iris_triton.collectives.two_shot import two_shot_direct, two_shot_staged

_CUDA, _HIP = DeviceType.CUDA, DeviceType.HIP
_I64, _U8 = torch.int64, torch.uint8
_SIZE = 8
_ADDRESS = 1 << 40
_ONE, _MATRIX = (1,), (33, 70)
_RELEASE = {_CUDA: r"st\.release\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_swap_x2"}
_ACQUIRE = {_CUDA: r"ld\.acquire\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_(add|cmpswap)_x2"}
_WIDE_STORE = {
    _CUDA: r"st\.global(\.L1::\w+)?\.v4\.b32",
    _HIP: r"(global|flat|buffer)_store_dwordx4",
}
_WIDE = {
    _CUDA: r"ld\.global(\.L1::\w+)?\.v4\.b32",
    _HIP: r"(global|flat|buffer)_load_dwordx4",
}


def compile_cases() -> list[CompileCase]:
    """Return the kernels in representative forms."""
    dense: dict[str, Any] = {"SIZE": _SIZE, "IN_DIMS": 0, "OUT_DIMS": 0}
    plain = (_ONE, _ONE, _ONE, _ONE)
    strided = (_MATRIX, (140, 2), _MATRIX, (1, 33))
    parts = (1, 1, 100, 100, 100, 100, -1)
    moved = (_I64, _U8, None, _I64, 1, *parts, 1 << 20, 0, _ADDRESS)
    split = (_I64, _U8, _I64, _I64, 1, *parts, 1 << 20, 0, _ADDRESS)
    reduced = (_I64, _U8, _I64, 1, 1, 1, 4000, 4000, 0, 4000, 0, _ADDRESS)
    mailed = (_I64, _U8, _I64, 1, 2, 4096, 40_000, 2, 1024, 0, _ADDRESS)
    pushed = (_I64, _I64, 1, 1, 1, 1 << 20, 0, _ADDRESS)
    sending = {"SIZE": _SIZE, "IN_DIMS": 0}
    kept = (_I64, _U8, _I64, 1, 1, 1, 4000, 4000, 0, _ADDRESS)
    matrices = {"SIZE": _SIZE, "IN_DIMS": 2, "OUT_DIMS": 2}
    bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8
    return [
        _case("pull-direct", pull, (bf16, bf16, *moved, *plain), dense, SOURCE="direct", SHARED=True, BLOCK=8192),
        _case("pull-bytes", pull, (i8, i8, *moved, *plain), dense, SOURCE="staged", SHARED=True, BLOCK=8192),
        _case(
            "pull-strided", pull, (f32, f32, *split, *strided), matrices, wide=False,
            SOURCE="staged", SHARED=False, BLOCK=4096,
        ),
        _case("pull-nothing", pull, (f32, f32, *moved, *plain), dense, SOURCE="none", SHARED=True, BLOCK=4096),
        _case(
            "reduce-direct", pull_reduce, (bf16, bf16, *reduced, *plain, None), dense,
            OP="sum", STAGED=False, SHARED=True, STRIDING=False, BLOCK=4096,
        ),
        _case(
            "reduce-staged", pull_reduce, (i8, i8, *reduced, *plain, None), dense,
            OP="avg", STAGED=True, SHARED=False, STRIDING=False, BLOCK=4096,
        ),
        _case(
            "reduce-tiles", pull_reduce, (f32, f32, *reduced, *plain, (70, 32, 64, 2, 2, 4)), dense, wide=False,
            OP="max", STAGED=False, SHARED=True, STRIDING=True, BLOCK=2048,
        ),
        _case(
            "two-shot-direct", two_shot_direct, (bf16, bf16, _I64, _I64, 1, 1, 1, 4000, 500, 0, _ADDRESS),
            {"SIZE": _SIZE}, OP="sum", BLOCK=4096,
        ),
        _case(
            "two-shot-staged", two_shot_staged,
            (f32, f32, _I64, _U8, _I64, 1, 1, 1, 4000, 500, 500, 0, _ADDRESS, *plain), dense,
            OP="avg", IN_STAGED=True, BLOCK=2048,
        ),
        _case(
            "push-members", push_direct, (bf16, bf16, *pushed, *plain[:2]), sending, more=(_WIDE_STORE,),
            SHARDED=False, FORM="members", BLOCK=8192,
        ),
        _case(
            "push-tiles", push_direct, (i8, i8, *pushed, *plain[:2]), sending, more=(_WIDE_STORE,),
            SHARDED=False, FORM="tiles", BLOCK=8192,
        ),
        _case(
            "push-divided", push_direct, (f32, f32, *pushed, *plain[:2]), sending, more=(_WIDE_STORE,),
            SHARDED=True, FORM="divided", BLOCK=8192,
        ),
        _case(
            "push-staged", push_staged, (bf16, bf16, *kept, *strided), matrices, wide=False,
            SHARDED=True, FORM="tiles", BLOCK=4096,
        ),
        _case("meeting", meet_alone, (_I64, _I64, 1, 1, 0, _ADDRESS), {"SIZE": _SIZE}, wide=False),
        _case("send", send, (bf16, *mailed, _ONE, _ONE), {}, PARTS=16, DIMS=0, BLOCK=8192),
        _case("receive", receive, (bf16, *mailed, _MATRIX, (140, 2)), {}, wide=False, PARTS=16, DIMS=2, BLOCK=8192),
    ]  # fmt: skip


def _case(
    name: str,
    kernel: Any,
    args: tuple[Any, ...],
    common: dict[str, Any],
    *,
    wide: bool = True,
    more: tuple[dict[DeviceType, str], ...] = (),
    **constants: Any,
) -> CompileCase:
    patterns = [_RELEASE, _ACQUIRE, *([_WIDE] if wide else []), *more]
    return CompileCase(
        name=f"collective-{name}",
        kernel=kernel,
        args=args,
        kwargs={**common, **constants},
        options={"num_warps": 8},
        expect={kind: tuple(pattern[kind] for pattern in patterns) for kind in (_CUDA, _HIP)},
    )
