"""Translation of an address in one rank's heap to the same offset in another rank's heap."""

import triton
import triton.language as tl

from iris_triton._compat import builtin, core
from iris_triton.interpreter.entries import cpu_entry_at

HEAP_ALIGNMENT = 4096  # bytes of which every heap base is a multiple; the host checks it, `translate` builds on it
_ALIGNMENT, _ALIGNMENT_LOG2 = tl.constexpr(HEAP_ALIGNMENT), tl.constexpr(HEAP_ALIGNMENT.bit_length() - 1)


@triton.constexpr_function
def _carrier(element_type):
    """Another element type of the same size, see `translate`."""
    bits = max(8, element_type.primitive_bitwidth)  # a bool is stored as a byte
    if element_type.is_int() and element_type.primitive_bitwidth == bits:
        return {8: tl.float8e5, 16: tl.float16, 32: tl.float32, 64: tl.float64}[bits]
    return {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64}[bits]


@builtin
def _promises(hint, pointer, _semantic=None):
    """Return a hint as a number for each dimension; an int is for the last one."""
    hint, rank = core._unwrap_if_constexpr(hint), len(pointer.shape)
    each = hint if isinstance(hint, (tuple, list, tl.tuple)) else [1] * (rank - 1) + [hint]
    numbers = [core._unwrap_if_constexpr(number) for number in each]
    if not all(isinstance(number, int) and number >= 1 and number & (number - 1) == 0 for number in numbers):
        raise ValueError("a hint must be a power of two, or a tuple with one for each dimension")
    if len(numbers) != max(rank, 1):
        raise ValueError(f"hint {tuple(numbers)} has {len(numbers)} dimensions, but the block of pointers has {rank}")
    return tuple(map(core.constexpr, numbers))


@triton.jit
def _stray(pointer, from_rank, to_rank, heap_bases):
    """Return 0; on the CPU, an offset outside every heap if the pointer is not in the heap of from_rank."""
    return 0


@triton.jit
def check_context(context_tensor, rank, world_size):
    """Check on the CPU that a context tensor is that of this rank and world; does nothing on GPUs."""


cpu_entry_at(_stray, "iris_triton.interpreter.memory.accesses:stray")
cpu_entry_at(check_context, "iris_triton.interpreter.memory.accesses:check_context")


@triton.jit
def translate(pointer, from_rank, to_rank, heap_bases, hint: tl.constexpr = None):
    """Return where `pointer`, an address (or block of addresses) in from_rank's heap, lies in to_rank's heap.

    Args:
        pointer: pointer or block of pointers into the heap of from_rank.
        from_rank: rank in whose address space the pointer is.
        to_rank: rank whose heap is meant; may be a block of ranks of the pointer's shape.
        heap_bases: int64[world_size].
        hint: alignment in bytes and contiguity in elements, see `iris_triton.language`.
    """
    distance = tl.load(heap_bases + to_rank).to(tl.int64) - tl.load(heap_bases + from_rank).to(tl.int64)
    distance += _stray(pointer, from_rank, to_rank, heap_bases)
    # The pointer is moved as a pointer to another type because of AMD: the compiler assumes that 32-bit offsets reach
    # all of a small tensor argument and would truncate the distance; after a cast it no longer knows the argument.
    # A cast to an integer, or to a type of another size, would lose alignment or contiguity as well.
    carrier: tl.constexpr = _carrier(pointer.dtype.element_ty)
    # Alignment units times a constant: in this form the compiler can prove that the distance keeps the alignment.
    units: tl.constexpr = _ALIGNMENT // (carrier.primitive_bitwidth // 8)
    moved = pointer.to(tl.pointer_type(carrier), bitcast=True) + (distance >> _ALIGNMENT_LOG2) * units
    moved = moved.to(pointer.dtype, bitcast=True)
    if hint is not None:  # here and not in a function of its own: inlining drops what is promised of an argument
        moved = tl.multiple_of(moved, _promises(hint, pointer))
        if len(pointer.shape) > 0:
            moved = tl.max_contiguous(moved, _promises(hint, pointer))
    return moved
