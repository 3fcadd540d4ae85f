"""Multicast addresses: what kernels do with them on Hopper, and that no other vendor's GPU gets such a kernel."""

import re

import pytest
import torch
import triton
import triton.language as tl
from tables import table

from iris_triton.collectives.nvls import nvls
from iris_triton.language.multimem import multimem_fence, multimem_load_reduce, multimem_store
from iris_triton.testing.compile_only import assembly, compile_for

F32, BF16, F16, I64 = torch.float32, torch.bfloat16, torch.float16, torch.int64
KINDS = {F32: r"add\.v4\.f32", BF16: r"add\.acc::f32\.v4\.bf16x2", F16: r"add\.acc::f32\.v4\.f16x2"}
REDUCE, STORE = r"multimem\.ld_reduce\.relaxed\.sys\.global\.", r"multimem\.st\.relaxed\.sys\.global\.v4\.f32"
ADDRESS = 1 << 40


@triton.jit
def sum_to_all(data, out, me, bases, multicast, count, W: tl.constexpr, BLOCK: tl.constexpr):
    """Add up all ranks' `data` and store the sums into all ranks' `out`, 16 bytes for each lane."""
    UNIT: tl.constexpr = 128 // data.dtype.element_ty.primitive_bitwidth
    place = tl.arange(0, BLOCK) * UNIT
    words = multimem_load_reduce(data + place, me, bases, multicast, place < count, W)
    multimem_fence()
    multimem_store(out + place, words, me, bases, multicast, place < count, W)


@table("dtype", KINDS)
def test_device_functions(dtype):
    args = (dtype, dtype, 1, I64, ADDRESS, 1000)
    compiled = compile_for(sum_to_all, args, {"W": 4, "BLOCK": 256, "num_warps": 4})
    fenced = rf"{REDUCE}{KINDS[dtype]} (.|\n)*fence\.proxy\.alias(.|\n)*{STORE} "
    assert re.search(fenced, assembly(compiled))
    assert compiled.asm["cubin"], "the assembler takes it"
    with pytest.raises(triton.CompilationError) as caught:
        compile_for(sum_to_all, args, {"W": 4, "BLOCK": 256, "num_warps": 4}, "gfx942")
    assert "multimem instructions are for NVIDIA" in str(caught.value.__cause__ or caught.value)


@table("dtype, sums, to_all, direct", [
    (BF16, True, True, True), (F32, True, True, False), (F16, True, False, False), (torch.int8, False, True, False),
])  # fmt: skip
def test_collectives(dtype, sums, to_all, direct):
    args = (dtype, dtype, I64, torch.uint8, I64, 1, 1, 1, 4000, 1000, 1000, ADDRESS, 0, ADDRESS, (1,), (1,), (1,), (1,))
    forms = {"SUMS": sums, "TO_ALL": to_all, "DIRECT": direct, "IN_DIMS": 0, "OUT_DIMS": 0, "BLOCK": 4096}
    compiled = compile_for(nvls, args, {"SIZE": 4, **forms, "num_warps": 8})
    text = assembly(compiled)
    assert bool(re.search(REDUCE + KINDS[dtype] if sums else REDUCE, text)) == sums
    assert bool(re.search(STORE, text)) == to_all
    assert len(re.findall(r"fence\.proxy\.alias", text)) >= 1 + (not direct)
    assert compiled.asm["cubin"]
