"""Kernels of the portable collectives that must compile for every GPU target, and what must be in their assembly."""

import torch

from iris_core.types import CompileCase, DeviceType
from iris_triton.collectives.parts.barrier import barrier_alone, enter_alone
from iris_triton.collectives.pull import pull
from iris_triton.collectives.pull_reduce import pull_reduce
from iris_triton.collectives.push import push
from iris_triton.collectives.send_recv import move
from iris_triton.collectives.two_shot import two_shot

CUDA, HIP = DeviceType.CUDA, DeviceType.HIP
_I64, _U8 = torch.int64, torch.uint8
_SIZE = 4
_ADDRESS = 1 << 40
_ONE, _MATRIX = (1,), (33, 70)
RELEASE = {CUDA: r"st\.release\.sys\.global\.b64", HIP: r"(global|flat)_atomic_swap_x2"}
ACQUIRE = {CUDA: r"ld\.acquire\.sys\.global\.b64", HIP: r"(global|flat)_atomic_(add|cmpswap)_x2"}
WIDE_LOAD = {CUDA: r"ld\.global(\.L1::\w+)?\.v4\.b32", HIP: r"(global|flat|buffer)_load_dwordx4"}
WIDE_STORE = {CUDA: r"st\.global(\.L1::\w+)?\.v4\.b32", HIP: r"(global|flat|buffer)_store_dwordx4"}


def case(name, kernel, args, kwargs, patterns, **options):
    """A case whose assembly has these patterns, each one given for both vendors."""
    expect = {kind: tuple(pattern[kind] for pattern in patterns) for kind in (CUDA, HIP)}
    return CompileCase(name, kernel, args, kwargs, options, expect=expect)


def compile_cases():
    dense = {"SIZE": _SIZE, "IN_DIMS": 0, "OUT_DIMS": 0}
    shared = dense | {"STAGED": False, "SHARED": True, "STRIDING": False}
    staged = dense | {"STAGED": True, "SHARED": False, "STRIDING": False}
    direct = dense | {"DIRECT": True, "IN_STAGED": False}
    copied = dense | {"DIRECT": False, "IN_STAGED": True}
    stored = dense | {"DIRECT": True, "SHARDED": False, "TILES": False}
    plain = (_ONE, _ONE, _ONE, _ONE)
    strided = (_MATRIX, (140, 2), _MATRIX, (1, 33))
    parts = (1, 1, 100, 100, 100, 100, -1)
    moved = (_I64, _U8, None, _I64, 1, *parts, 1 << 20, 0, _ADDRESS)
    split = (_I64, _U8, _I64, _I64, 1, *parts, 1 << 20, 0, _ADDRESS)
    reduced = (_I64, _U8, _I64, 1, 1, 1, 4000, 4000, 0, 4000, 0, _ADDRESS)
    mailed = (_I64, _U8, _I64, 1, 2, 4096, 40_000, 2, 1024, 0, _ADDRESS)
    pushed = (_I64, _U8, _I64, 1, 1, 1, 4000, 1 << 62, 0, _ADDRESS)
    halved = (_I64, _U8, _I64, 1, 1, 1, 4000, 500, 500, 0, _ADDRESS)
    sized = (*moved, *plain, _SIZE, "staged", False, 0, 0, 2048, _I64, _I64, 100, 100, 100)
    tile = (70, 32, 64, 2, 2, 4)
    matrices = {"SIZE": _SIZE, "IN_DIMS": 2, "OUT_DIMS": 2}
    spread = matrices | {"DIRECT": False, "SHARDED": True, "TILES": True}
    bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8
    return [
        _case("pull-direct", pull, (bf16, bf16, *moved, *plain), dense, SOURCE="direct", SHARED=True, BLOCK=4096),
        _case("pull-strided", pull, (f32, f32, *split, *strided), matrices, wide=False,
              SOURCE="staged", SHARED=False, BLOCK=2048),
        _case("pull-device-sizes", pull, (f32, f32, *sized), {}),
        _case("reduce-direct", pull_reduce, (bf16, bf16, *reduced, *plain, None), shared, OP="sum", BLOCK=4096),
        _case("reduce-staged", pull_reduce, (f32, f32, *reduced, *plain, None), staged, OP="avg", BLOCK=2048),
        _case("reduce-tiles", pull_reduce, (f32, f32, *reduced, *plain, tile), shared | {"STRIDING": True}, wide=False,
              OP="max", BLOCK=2048),
        _case("two-shot-direct", two_shot, (bf16, bf16, *halved, *plain), direct, OP="sum", BLOCK=4096),
        _case("two-shot-staged", two_shot, (f32, f32, *halved, *plain), copied, OP="avg", BLOCK=2048),
        _case("push-members", push, (i8, i8, *pushed, *plain), stored, more=(WIDE_STORE,), BLOCK=8192),
        _case("push-tiles", push, (f32, f32, *pushed, *plain), stored | {"SHARDED": True, "TILES": True},
              more=(WIDE_STORE,), BLOCK=2048),
        _case("push-staged", push, (bf16, bf16, *pushed, *strided), spread, wide=False, BLOCK=4096),
        _case("meeting", barrier_alone, (_I64, _I64, 1, 1, 0, _ADDRESS), {"SIZE": _SIZE}, wide=False),
        _case("enter-alone", enter_alone, (_I64, _I64, 1, 1, 1, 0, _ADDRESS), {"SIZE": _SIZE}, wide=False),
        _case("send", move, (bf16, *mailed, _ONE, _ONE), {}, SENDS=True, PARTS=16, DIMS=0, BLOCK=4096),
        _case("receive", move, (bf16, *mailed, _MATRIX, (140, 2)), {}, wide=False,
              SENDS=False, PARTS=16, DIMS=2, BLOCK=4096),
    ]  # fmt: skip


def _case(name, kernel, args, common, *, wide=True, more=(), **constants):
    patterns = [RELEASE, ACQUIRE, *([WIDE_LOAD] if wide else []), *more]
    return case(f"collective-{name}", kernel, args, {**common, **constants}, patterns, num_warps=8)
