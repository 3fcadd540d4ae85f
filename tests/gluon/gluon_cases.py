"""Kernels in Gluon that must compile for every GPU target, and what must be in their assembly.

The cases of the language and of tiles are Triton's, whose kernels serve both languages: blocks of four elements per
thread and more keep their 16-byte accesses, whatever the layout's warp size.
"""

import dataclasses
import functools

import compile_language
import compile_tiles
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.types import CompileCase, DeviceType
from iris_gluon.collectives.all_reduce import two_shot
from iris_gluon.collectives.push import push
from iris_gluon.context import IrisDeviceCtx
from iris_gluon.layouts import default_layout
from iris_triton.testing.languages import in_gluon

_CUDA, _HIP = DeviceType.CUDA, DeviceType.HIP
_I64, _U8 = torch.int64, torch.uint8
_SIZE = 4
_ADDRESS = 1 << 40
_ONE = (1,)
_RELEASE = {_CUDA: r"st\.release\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_swap_x2"}
_ACQUIRE = {_CUDA: r"ld\.acquire\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_(add|cmpswap)_x2"}
_WIDE_LOAD = {_CUDA: r"ld\.global(\.L1::\w+)?\.v4\.b32", _HIP: r"(global|flat|buffer)_load_dwordx4"}
_WIDE_STORE = {_CUDA: r"st\.global\.v4\.b32", _HIP: r"(global|flat|buffer)_store_dwordx4"}


@gluon.jit
def from_argument(IrisDeviceCtx: gl.constexpr, context, x):
    """The form of AMD's Iris: the class is an argument."""
    ctx = IrisDeviceCtx.initialize(context)
    i = gl.arange(0, 1024, layout=default_layout([1024], vector=4))
    ctx.store(x + i, 1.0, (ctx.cur_rank + 1) % ctx.num_ranks)


def compile_cases():
    """Return a case for every device function in representative element types, for tiles and for collectives."""
    (stores,) = (case for case in compile_language.compile_cases() if case.name == "initialize")
    arguments = (IrisDeviceCtx, torch.int64, torch.float32)
    translated = functools.cache(functools.partial(in_gluon, default_layout=default_layout))
    return [
        *compile_language.language_cases(IrisDeviceCtx, functools.cache(in_gluon)),
        *compile_tiles.compile_cases(IrisDeviceCtx, translated),
        dataclasses.replace(stores, kernel=from_argument, args=arguments, kwargs={}),
        *_collectives(),
    ]


def _collectives():
    """The kernels of the collectives in representative forms."""
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
            "push-strided", push, (f32, f32, *moved), ((33, 70), (140, 2), (33, 70), (1, 33)), DIRECT=False, BLOCK=4096,
        ),
        _case("two-shot-direct", two_shot, (bf16, bf16, *two), OP="sum", IN_DIRECT=True, OUT_DIRECT=True, BLOCK=4096),
        _case("two-shot-landing", two_shot, (f32, f32, *two), OP="avg", IN_DIRECT=False, OUT_DIRECT=False, BLOCK=2048),
        _case("two-shot-reading", two_shot, (bf16, bf16, *two), OP="max", IN_DIRECT=True, OUT_DIRECT=False, BLOCK=4096),
    ]  # fmt: skip


def _case(name, kernel, args, layouts=(_ONE, _ONE, _ONE, _ONE), **constants):
    dims = len(layouts[0]) if len(layouts[0]) > 1 else 0
    common = {"SIZE": _SIZE, "IN_DIMS": dims, "OUT_DIMS": dims}
    patterns = [_RELEASE, _ACQUIRE, *([] if dims else [_WIDE_LOAD, _WIDE_STORE])]
    return CompileCase(
        name=f"collective-gluon-{name}",
        kernel=kernel,
        args=(*args, *layouts),
        kwargs={**common, **constants},
        options={"num_warps": 8},
        expect={kind: tuple(pattern[kind] for pattern in patterns) for kind in (_CUDA, _HIP)},
    )
