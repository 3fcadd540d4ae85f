"""Loads that add up what all ranks have, and stores to all of them, by NVLink SHARP.

For Hopper and newer, where IRIS_VMEM__MULTICAST is set.  An access is of 16 bytes, as four words of 32 bits, so that a
sum can be stored again as it is.  (PTX ISA, "multimem"; the order of a sum is the switch's.)  The CPU executor, which
has no such addresses, goes from rank to rank.

    pointer     block of pointers to float32, float16 or bfloat16 (of a store, any type), each to 16 aligned bytes of
                the heap of `rank`, the caller.
    heap_bases  int64[world_size], as in `iris_triton.language`.
    multicast   the host's `ctx.heap.multicast_base` (int64); on the CPU 0.
    mask        which accesses are made (block).

The accesses are relaxed ones of the system; between them and others of the same memory come a barrier and then
`multimem_fence`, for the addresses are aliases.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from iris_triton.interpreter.entries import cpu_entry
from iris_triton.language.address import translate

_NO_TARGET = tl.constexpr("multimem instructions are for NVIDIA GPUs and the CPU executor, not for this target")
_WORDS = tl.constexpr((tl.int32,) * 4)


@triton.constexpr_function
def _kind(element_type):
    """Return what is added up, and how precisely, as PTX says it."""
    return {"fp32": "v4.f32", "bf16": "acc::f32.v4.bf16x2", "fp16": "acc::f32.v4.f16x2"}[element_type.name]


@triton.jit
def multimem_load_reduce(pointer, rank, heap_bases, multicast, mask, world_size: tl.constexpr):
    """Return the four words of each sum of what all ranks have; 16-bit floats are added as float32.  0 where masked."""
    tl.static_assert(is_cuda(), _NO_TARGET)
    address = pointer.to(tl.int64) - tl.load(heap_bases + rank) + multicast
    kind: tl.constexpr = _kind(pointer.dtype.element_ty)
    text: tl.constexpr = (
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;\n@p "
        "multimem.ld_reduce.relaxed.sys.global.add." + kind + " {$0,$1,$2,$3}, [$4]; }"
    )
    operands = [address, mask.to(tl.int32)]
    return tl.inline_asm_elementwise(text, "=&r,=&r,=&r,=&r,l,r", operands, dtype=_WORDS, is_pure=False, pack=1)


@triton.jit
def multimem_store(pointer, words, rank, heap_bases, multicast, mask, world_size: tl.constexpr):
    """Store four words of each access to the memory of all ranks."""
    tl.static_assert(is_cuda(), _NO_TARGET)
    address = pointer.to(tl.int64) - tl.load(heap_bases + rank) + multicast
    text: tl.constexpr = (
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; mov.b32 $0, 0;\n"
        "@p multimem.st.relaxed.sys.global.v4.f32 [$1], {$2,$3,$4,$5}; }"
    )
    operands = [address, words[0], words[1], words[2], words[3], mask.to(tl.int32)]
    tl.inline_asm_elementwise(text, "=r,l,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def multimem_fence():
    """Order this thread's accesses by one alias of memory before those by another; all threads call it."""
    tl.inline_asm_elementwise("fence.proxy.alias; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


# -- on the CPU, rank after rank --------------------------------------------------------------------------------------
@triton.jit
def _load_reduce(pointer, rank, heap_bases, multicast, mask, world_size: tl.constexpr):
    kind: tl.constexpr = pointer.dtype.element_ty
    in_word: tl.constexpr = 32 // kind.primitive_bitwidth
    words = ()
    for k in tl.static_range(4):
        word = mask.to(tl.int32) * 0
        for j in tl.static_range(in_word):
            total = word.to(tl.float32) * 0
            for other in range(world_size):
                there = translate(pointer + (k * in_word + j), rank, other, heap_bases)
                total += tl.load(there, mask=mask, other=0).to(tl.float32)
            if in_word == 1:
                word = total.to(tl.int32, bitcast=True)
            else:
                word |= (total.to(kind).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << (16 * j)
        words = words + (word,)  # noqa: RUF005 - the compiler knows no star
    return words


@triton.jit
def _store(pointer, words, rank, heap_bases, multicast, mask, world_size: tl.constexpr):
    place = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    for other in range(world_size):
        for k in tl.static_range(4):
            tl.store(translate(place + k, rank, other, heap_bases), words[k], mask=mask)


cpu_entry(multimem_load_reduce)(_load_reduce)
cpu_entry(multimem_store)(_store)
