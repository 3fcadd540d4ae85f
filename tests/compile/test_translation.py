"""What address translation must keep: alignment, contiguity, and 64 bits of distance."""

import re

import torch
import triton
import triton.language as tl
from tables import table

from iris_triton import language
from iris_triton.testing.compile_only import TARGETS, assembly, compile_for

VECTOR = {"sm_90": r"st\.global\.v4\.b32", "gfx942": r"global_store_dwordx4", "gfx950": r"global_store_dwordx4"}
SINGLE = {"sm_90": r"st\.global\.b32", "gfx942": r"global_store_dword ", "gfx950": r"global_store_dword "}


@triton.jit
def fill(x, bases, me, peer, shift, hint: tl.constexpr, BLOCK: tl.constexpr):
    language.store(x + shift + tl.arange(0, BLOCK), 1.0, me, peer, bases, hint=hint)


@triton.jit
def fill_2d(x, bases, me, peer, stride, hint: tl.constexpr, BLOCK: tl.constexpr):
    where = x + tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK)[None, :]
    language.store(where, 1.0, me, peer, bases, hint=hint)


@triton.jit
def fill_from_table(x, bases, ranks, BLOCK: tl.constexpr):
    """Neither rank is known to the compiler."""
    language.store(x + tl.arange(0, BLOCK), 1.0, tl.load(ranks), tl.load(ranks + 1), bases)


@triton.jit
def reload(x, out, bases, modifier: tl.constexpr, volatile: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = language.load(x + i, 0, 1, bases, cache_modifier=modifier, volatile=volatile)
    tl.store(out + i, value)


@triton.jit
def refill(x, bases, modifier: tl.constexpr, BLOCK: tl.constexpr):
    language.store(x + tl.arange(0, BLOCK), 1.0, 0, 1, bases, cache_modifier=modifier)


@table("target", TARGETS)
def test_unknown_alignment_needs_a_hint(target):
    def text(kernel, hint, block):  # neither a shift by 7 elements nor rows of 7 are aligned
        args = (torch.float32, torch.int64, 3, 5, 7)
        return assembly(compile_for(kernel, args, {"hint": hint, "BLOCK": block}, target))

    for hint, found, lacking in ((None, SINGLE, VECTOR), (16, VECTOR, SINGLE)):
        assert re.search(found[target], text(fill, hint, 1024))
        assert not re.search(lacking[target], text(fill, hint, 1024))
    assert not re.search(VECTOR[target], text(fill_2d, None, 64))
    assert re.search(VECTOR[target], text(fill_2d, (1, 16), 64))
    args = (torch.float32, torch.int64, torch.int32)  # ranks that the compiler does not know
    assert re.search(VECTOR[target], assembly(compile_for(fill_from_table, args, {"BLOCK": 1024}, target)))


@table("target, dtype", [("sm_90", torch.float32), ("gfx942", torch.bool), ("gfx950", torch.int8),
                         ("gfx942", torch.float16), ("gfx950", torch.float64)])  # fmt: skip
def test_distance_is_added_as_64_bits(target, dtype):
    # A tensor of less than 2 GiB, of which Triton assumes that 32-bit offsets reach all that its pointer leads to.
    small = torch.empty(4096, dtype=dtype)
    compiled = compile_for(fill, (small, torch.int64, 3, 5, 0), {"hint": None, "BLOCK": 1024}, target)
    assert re.search(r"arith\.shrsi .* : i64", compiled.asm["ttir"])
    assert re.search(r"tt\.addptr .*, tensor<1024xi64>", compiled.asm["ttir"])
    if target != "sm_90":
        assert "tt.pointer_range = 32" in compiled.asm["ttgir"]
        assert "buffer_store" not in assembly(compiled)
        assert "trunci" not in compiled.asm["ttgir"]


@table("modifier, volatile, cuda, amd", [
    (".ca", False, r"ld\.global\.ca\.v4", r"global_load_dwordx4 [^\n]*off$|global_load_dwordx4 [^\n]*\]$"),
    (".cg", False, r"ld\.global\.cg\.v4", r"global_load_dwordx4 .* nt"),
    (".cv", False, r"ld\.volatile\.global\.v4", r"global_load_dwordx4 .* sc0 sc1"),
    (None, True, r"ld\.volatile\.global\.v4", r"global_load_dwordx4 .* sc0 sc1"),
])  # fmt: skip
def test_load_modifiers_reach_the_assembly(modifier, volatile, cuda, amd):
    kwargs = {"modifier": modifier, "volatile": volatile, "BLOCK": 1024}
    args = (torch.float32, torch.float32, torch.int64)
    assert re.search(cuda, assembly(compile_for(reload, args, kwargs, "sm_90")))
    assert re.search(amd, assembly(compile_for(reload, args, kwargs, "gfx942")), re.MULTILINE)


@table("modifier", [".wb", ".cg", ".cs", ".wt"])
def test_store_modifiers_reach_the_assembly(modifier):
    kwargs = {"modifier": modifier, "BLOCK": 1024}
    text = assembly(compile_for(refill, (torch.float32, torch.int64), kwargs, "sm_90"))
    assert re.search(rf"st\.global\{modifier}\.v4", text)
