"""Atomics on another rank's memory; `iris_triton.language` describes the common arguments."""

import triton
import triton.language as tl
from triton.language import constexpr

from iris_triton.language.address import translate
from iris_triton.language.blocks import spread


@triton.jit
def _rmw(
    op: constexpr, pointer, val, from_rank, to_rank, heap_bases, mask, sem: constexpr, scope: constexpr, hint: constexpr
):
    """Do the operation `op` on to_rank's memory; return the old value."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    where: constexpr = "sys" if scope is None else scope  # peers are outside the scope that Triton takes by default
    if op == "sub":  # negated in the element type: an unsigned value that is widened afterwards would not wrap
        val = 0 - tl.cast(val, pointer.dtype.element_ty)
    if mask is not None:
        mask = spread(mask, target)
    name: constexpr = "atomic_add" if op == "sub" else "atomic_" + op
    return getattr(tl, name)(target, spread(val, target), mask=mask, sem=sem, scope=where)


def _atomic(op, what, types):
    OP = constexpr(op)

    def atomic(
        pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
        hint: constexpr = None
    ):  # fmt: skip
        return _rmw(OP, pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)

    atomic.__name__ = atomic.__qualname__ = f"atomic_{op}"
    atomic.__doc__ = f"""Atomically {what} to_rank's memory at `pointer`; returns the old value.

    Args:
        pointer: address in the heap of from_rank, the caller.  Element type: {types}.
        val: scalar or block; converted to the element type.
        to_rank: rank whose memory is changed.
        heap_bases, mask, sem, scope, hint: see `iris_triton.language`.
    """
    return triton.jit(atomic)


_INTEGERS = "32- or 64-bit integer"
atomic_add = _atomic("add", "add `val` to", f"{_INTEGERS}, f16, bf16, f32, f64")
atomic_sub = _atomic("sub", "subtract `val` from", f"{_INTEGERS}, f16, bf16, f32, f64")
atomic_xchg = _atomic("xchg", "store `val` to", "any of 32 or 64 bits")
atomic_xor = _atomic("xor", "do a bitwise xor with `val` on", _INTEGERS)
atomic_and = _atomic("and", "do a bitwise and with `val` on", _INTEGERS)
atomic_or = _atomic("or", "do a bitwise or with `val` on", _INTEGERS)
atomic_min = _atomic("min", "do a minimum with `val` on", f"{_INTEGERS}, f32, f64")
atomic_max = _atomic("max", "do a maximum with `val` on", f"{_INTEGERS}, f32, f64")


@triton.jit
def atomic_cas(
    pointer, cmp, val, from_rank, to_rank, heap_bases, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomically replace to_rank's memory at `pointer` by `val` where it equals `cmp`; return the old value.

    Args:
        pointer: address in the heap of from_rank, the caller.  Element type of 16, 32 or 64 bits.
        cmp, val: scalars or blocks; converted to the element type.
        to_rank: rank whose memory is changed.
        heap_bases, sem, scope, hint: see `iris_triton.language`.

    On AMD, Triton 3.6 gives a compare-and-swap device scope, whatever `scope` says; use 3.7 or newer to lock across
    ranks there.
    """
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    element: constexpr = pointer.dtype.element_ty
    expected = spread(tl.cast(cmp, element), target)
    desired = spread(tl.cast(val, element), target)
    where: constexpr = "sys" if scope is None else scope
    return tl.atomic_cas(target, expected, desired, sem=sem, scope=where)
