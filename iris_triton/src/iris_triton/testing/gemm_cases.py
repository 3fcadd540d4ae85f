"""Kernels of the fused operations that must compile for every GPU target, and what must be in their assembly."""

from __future__ import annotations

from typing import Any

import torch

from iris_core.types import CompileCase, DeviceType
from iris_triton.gemm.copy_engine_product import await_word
from iris_triton.gemm.fetch_product import fetch_product
from iris_triton.gemm.matmul_accumulate import matmul_accumulate
from iris_triton.gemm.matmul_reduce import matmul_reduce
from iris_triton.gemm.matmul_ring import matmul_ring
from iris_triton.gemm.parts.sum_slots import sum_slots
from iris_triton.gemm.pull_product import pull_product
from iris_triton.gemm.push_product import push_product

_CUDA, _HIP = DeviceType.CUDA, DeviceType.HIP
_I64 = torch.int64
_ADDRESS = 1 << 40
_END = (0, _ADDRESS)  # timeout, status
_PRODUCT = {_CUDA: r"wgmma\.mma_async|mma\.sync", _HIP: r"v_mfma"}
_COPIES = {_CUDA: r"cp\.async\.c[ag]\.shared\.global.*, 0x10", _HIP: r"(global|flat|buffer)_load_dwordx4"}
_STORES = {_CUDA: r"st\.global(\.\w+)*\.v4\.b32", _HIP: r"(global|flat|buffer)_store_dwordx4"}
_ADDS = {_CUDA: r"(atom|red)\.global\.sys\.relaxed\.add\.f32", _HIP: r"(global|flat)_atomic_(add_f32|cmpswap) "}
_RELEASE = {_CUDA: r"st\.release\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_swap_x2"}
_ACQUIRE = {_CUDA: r"ld\.acquire\.sys\.global\.b64", _HIP: r"(global|flat)_atomic_(add|cmpswap)_x2"}


def compile_cases() -> list[CompileCase]:
    """Return the kernels in representative forms."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    wide = {"A_ALIGNED": True, "B_ALIGNED": True}
    both = {"B_ALIGNED": True, "OUT_ALIGNED": True}
    reduced = wide | {"OUT_ALIGNED": True}
    plain = (8192, 8192, 4096, 4096, 1, 8192, 1, 8192, 1, 1, 8, 32, 64)  # sizes, strides, tiles, tiles of an owner
    turned = (8192, 8192, 4096, 1, 8192, 1, 4096, 8192, 1, 1, 8, 32, 64)  # A and B transposed
    round_trip = (*plain[:8], *plain[9:])  # the output's columns are one behind the other
    odd = (8190, 8195, 4097, 4097, 1, 8195, 1, 8195, 1, 1, 8, 32, 64)
    shard = (1024, 8192, 4096, 4096)  # rows, columns of B, columns, stride of rows
    rest = (8192, 1, 8192, 1, 1, 8, 32)  # strides of B, of the output, of the bias; tiles
    small: dict[str, Any] = {"BM": 32, "BN": 32, "BK": 32, "EVEN_K": False}
    return [
        _case("reduce-rows", matmul_reduce, (f16, f16, f16, f16, _I64, f16, _I64, 1, 1, *turned, *_END),
              reduced, FORM="rows", BIAS="rows"),
        _case("reduce-two-shot", matmul_reduce, (bf16, bf16, bf16, bf16, _I64, bf16, _I64, 1, 1, *plain, *_END),
              reduced, FORM="two_shot", BIAS="columns"),
        _case("reduce-one-shot", matmul_reduce, (f32, f32, f32, None, _I64, f32, _I64, 1, 1, *odd, *_END),
              dict.fromkeys(reduced, False), wide=False, FORM="one_shot", BIAS="none", **small),
        _case("atomic", matmul_accumulate, (bf16, bf16, bf16, bf16, _I64, f32, _I64, _I64, 1, 1, *round_trip, *_END),
              wide, also=_ADDS, LOCKED=False, BIAS="columns"),
        _case("spinlock", matmul_accumulate, (f16, f16, f16, None, _I64, f32, _I64, _I64, 1, 1, *round_trip, *_END),
              wide, LOCKED=True, BIAS="none", XCDS=8, CHUNK=4),
        _case("ring", matmul_ring,
              (bf16, bf16, bf16, bf16, _I64, f32, _I64, _I64, _I64, 1, 1, *plain[:-1], 32, 2, 1, *_END),
              reduced, BIAS="rows"),
        _case("push", push_product, (bf16, bf16, bf16, None, _I64, _I64, 1, 1, *plain[:8], *plain[9:12], *_END),
              wide, DIM=0, BIAS="none"),
        _case("pull", pull_product, (bf16, bf16, bf16, bf16, _I64, _I64, 1, 1, *shard, *rest, *_END),
              both, DIM=1, BIAS="rows"),
        _case("fetch", fetch_product,
              (bf16, bf16, bf16, None, bf16, _I64, _I64, _I64, 1, 1, *shard, 4096, *rest, *_END),
              both, DIM=0, BIAS="none", FETCHERS=16),
        _sum("rows", (bf16, bf16, bf16, _I64, _I64, 1, 1, 1024, 8184, 1024, 0, 8184, 1, 1, 8, *_END),
             FORM="rows", TELLS=False, BIAS="columns"),
        _sum("two-shot", (bf16, None, bf16, _I64, _I64, 1, 1, 1024, 8184, 1024, 1024, 8184, 1, 0, 8, *_END),
             FORM="two_shot", TELLS=True, BIAS="none"),
        CompileCase(
            name="operation-await-word", kernel=await_word, args=(torch.int32, 1, 1, *_END), kwargs={},
            options={"num_warps": 1},
            expect={_CUDA: (r"ld\.acquire\.sys\.global\.b32",), _HIP: (r"global_load_dword .* sc1",)},
        ),
    ]  # fmt: skip


def _sum(name: str, args: tuple[Any, ...], **constants: Any) -> CompileCase:
    wide = {
        _CUDA: (r"ld\.global(\.\w+)*\.v4\.b32", _STORES[_CUDA]),
        _HIP: (r"(global|flat|buffer)_load_dwordx4", _STORES[_HIP]),
    }
    return CompileCase(
        name=f"operation-sum-{name}",
        kernel=sum_slots,
        args=args,
        kwargs={"SIZE": 8, "SLOTS_WIDE": True, "OUT_WIDE": True, "BM": 2, "BN": 1024, **constants},
        options={"num_warps": 4},
        expect=wide,
    )


def _case(
    name: str,
    kernel: Any,
    args: tuple[Any, ...],
    common: dict[str, Any],
    *,
    wide: bool = True,
    also: dict[DeviceType, str] | None = None,
    **constants: Any,
) -> CompileCase:
    tiles = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "EVEN_K": True, "PRECISION": "ieee"}
    loads = {"A_CACHE": "", "B_CACHE": "", "STAGES": 2, "XCDS": 1, "CHUNK": 1}
    patterns = [_PRODUCT, _RELEASE, _ACQUIRE, *([_COPIES, _STORES] if wide else []), *([also] if also else [])]
    if constants.get("PRECISION", "ieee") == "ieee" and args[1] is torch.float32:
        patterns.remove(_PRODUCT)  # of float32 there is no such instruction on NVIDIA
    return CompileCase(
        name=f"operation-{name}",
        kernel=kernel,
        args=args,
        kwargs={"SIZE": 8, **tiles, **loads, **common, **constants},
        options={"num_warps": 8},
        expect={kind: tuple(pattern[kind] for pattern in patterns) for kind in (_CUDA, _HIP)},
    )
