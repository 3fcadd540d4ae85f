"""Kernels of the collectives in Gluon that must compile for every GPU target, and what must be in their assembly."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl

from iris_core.types import CompileCase, DeviceType
from iris_gluon.collectives.all_reduce import two_shot
from iris_gluon.collectives.push import push

_CUDA, _HIP = DeviceType.CUDA, DeviceType.HIP
_I64, _U8 = torch.int64, torch.uint8
_SIZE = 8
_ADDRESS = 1 << 40
_ONE = (1,)
_RELEASE = {_CUDA: r"st\.release\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_swap_x2"}
_ACQUIRE = {_CUDA: r"ld\.acquire\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_(add|cmpswap)_x2"}
_WIDE_LOAD = {_CUDA: r"ld\.global(\.L1::\w+)?\.v4\.b32", _HIP: r"(global|flat|buffer)_load_dwordx4"}
_WIDE_STORE = {_CUDA: r"st\.global\.v4\.b32", _HIP: r"(global|flat|buffer)_store_dwordx4"}


def compile_cases() -> list[CompileCase]:
    """Return the kernels in representative forms."""
    bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8
    moved = (_I64, _U8, _I64, _I64, 1, 1, 1 << 20, 0, _ADDRESS)
    two = (_I64, _U8, _I64, 1, 1, 4000, 500, 512, 0, _ADDRESS)
    columns = (_SIZE, 33, 64)
    rows = (64, 64 * _SIZE, 1)
    return [
        _case("push-direct", push, (bf16, bf16, *moved), DIRECT=True, BLOCK=8192),
        _case("push-landing", push, (i8, i8, *moved), DIRECT=False, BLOCK=16384),
        _case("push-columns", push, (bf16, bf16, *moved), (columns, rows, columns, rows), DIRECT=True, BLOCK=8192),
        _case(
            "push-strided", push, (f32, f32, *moved), ((33, 70), (140, 2), (33, 70), (1, 33)), wide=False,
            DIRECT=False, INDEX=gl.int64, BLOCK=4096,
        ),
        _case("two-shot-direct", two_shot, (bf16, bf16, *two), OP="sum", IN_DIRECT=True, OUT_DIRECT=True, BLOCK=4096),
        _case("two-shot-landing", two_shot, (f32, f32, *two), OP="avg", IN_DIRECT=False, OUT_DIRECT=False, BLOCK=2048),
        _case("two-shot-reading", two_shot, (bf16, bf16, *two), OP="max", IN_DIRECT=True, OUT_DIRECT=False, BLOCK=4096),
    ]  # fmt: skip


def _case(
    name: str,
    kernel: Any,
    args: tuple[Any, ...],
    layouts: tuple[tuple[int, ...], ...] = (_ONE, _ONE, _ONE, _ONE),
    *,
    wide: bool = True,
    **constants: Any,
) -> CompileCase:
    dims = len(layouts[0]) if len(layouts[0]) > 1 else 0
    common = {"SIZE": _SIZE, "IN_DIMS": dims, "IN_WIDE": wide, "OUT_DIMS": dims, "OUT_WIDE": wide, "INDEX": gl.int32}
    patterns = [_RELEASE, _ACQUIRE, *([_WIDE_LOAD, _WIDE_STORE] if wide else [])]
    return CompileCase(
        name=f"collective-gluon-{name}",
        kernel=kernel,
        args=(*args, *layouts),
        kwargs={**common, **constants},
        options={"num_warps": 8},
        expect={kind: tuple(pattern[kind] for pattern in patterns) for kind in (_CUDA, _HIP)},
    )
