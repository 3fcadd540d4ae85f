"""From an address in one rank's heap to the same place in another's."""
# mypy: ignore-errors

import triton
import triton.language as tl

HEAP_ALIGNMENT = 4096
"""Bytes of which every heap base is a multiple; the host checks it, `translate` builds on it."""

_ALIGNMENT_LOG2 = tl.constexpr(HEAP_ALIGNMENT.bit_length() - 1)


@triton.constexpr_function
def _elements_per_alignment(element_type):
    """Elements in HEAP_ALIGNMENT bytes; bool is stored as a byte, a pointer as eight."""
    bits = 64 if element_type.is_ptr() else element_type.primitive_bitwidth
    return HEAP_ALIGNMENT // max(1, bits // 8)


@triton.jit
def promise(pointer, hint: tl.constexpr):
    """Return `pointer` with the caller's promise about its alignment and contiguity; unchanged if hint is None."""
    if hint is not None:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, hint), hint)
    return pointer


@triton.jit
def translate(pointer, from_rank, to_rank, heap_bases, hint: tl.constexpr = None):
    """Return where `pointer`, an address (or block of addresses) in from_rank's heap, lies in to_rank's heap.

    Args:
        pointer: pointer or block of pointers into the heap of from_rank.
        from_rank: rank in whose address space the pointer is.
        to_rank: rank whose heap is meant; may be a block of ranks of the pointer's shape.
        heap_bases: int64[world_size].
        hint: alignment and contiguity in bytes and elements, see the module.
    """
    distance = tl.load(heap_bases + to_rank).to(tl.int64) - tl.load(heap_bases + from_rank).to(tl.int64)
    # Whole alignment units times a constant: in this form the compiler sees that the distance keeps the alignment.
    units: tl.constexpr = _elements_per_alignment(pointer.dtype.element_ty)
    moved = pointer + (distance >> _ALIGNMENT_LOG2) * units
    return promise(moved, hint)
