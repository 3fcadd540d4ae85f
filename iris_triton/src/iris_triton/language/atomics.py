"""Atomics on another rank's memory; `iris_triton.language` describes the common arguments."""
# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language import constexpr

from iris_triton.language.address import translate
from iris_triton.language.blocks import spread


@triton.constexpr_function
def scope_or_sys(scope):
    """Peers are outside the scope that Triton takes by default."""
    return "sys" if scope is None else scope


@triton.jit
def _rmw(
    op: constexpr, pointer, val, from_rank, to_rank, heap_bases, mask, sem: constexpr, scope: constexpr, hint: constexpr
):
    """Do the operation `op` on to_rank's memory; return the old value."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    where: constexpr = scope_or_sys(scope)
    if op == "sub":  # negated in the element type: an unsigned value that is widened afterwards would not wrap
        val = 0 - tl.cast(val, pointer.dtype.element_ty)
    val = spread(val, target)
    if op == "add" or op == "sub":
        return tl.atomic_add(target, val, mask=mask, sem=sem, scope=where)
    elif op == "xchg":
        return tl.atomic_xchg(target, val, mask=mask, sem=sem, scope=where)
    elif op == "xor":
        return tl.atomic_xor(target, val, mask=mask, sem=sem, scope=where)
    elif op == "and":
        return tl.atomic_and(target, val, mask=mask, sem=sem, scope=where)
    elif op == "or":
        return tl.atomic_or(target, val, mask=mask, sem=sem, scope=where)
    elif op == "min":
        return tl.atomic_min(target, val, mask=mask, sem=sem, scope=where)
    else:
        tl.static_assert(op == "max", "there is no such atomic operation")
        return tl.atomic_max(target, val, mask=mask, sem=sem, scope=where)


@triton.jit
def atomic_add(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomically add `val` to to_rank's memory at `pointer` and return the old value.

    Args:
        pointer: address in the heap of from_rank.  Element type: 32- or 64-bit integer, f16, bf16, f32, f64.
        val: scalar or block; converted to the element type.
        from_rank: the caller.
        to_rank: rank whose memory is changed.
        heap_bases, mask, sem, scope, hint: see `iris_triton.language`.
    """
    return _rmw("add", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_sub(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomically subtract `val` from to_rank's memory at `pointer` and return the old value.  As atomic_add."""
    return _rmw("sub", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_cas(
    pointer, cmp, val, from_rank, to_rank, heap_bases, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomically replace to_rank's memory at `pointer` by `val` where it equals `cmp`; return the old value.

    Args:
        pointer: address in the heap of from_rank.  Element type of 16, 32 or 64 bits.
        cmp, val: scalars or blocks; converted to the element type.
        from_rank: the caller.
        to_rank: rank whose memory is changed.
        heap_bases, sem, scope, hint: see `iris_triton.language`.

    On AMD, Triton 3.6 gives a compare-and-swap device scope, whatever `scope` says; use 3.7 or newer to lock across
    ranks there.
    """
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    element: constexpr = pointer.dtype.element_ty
    expected = spread(tl.cast(cmp, element), target)
    desired = spread(tl.cast(val, element), target)
    return tl.atomic_cas(target, expected, desired, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_xchg(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomically store `val` to to_rank's memory at `pointer` and return the old value.  32- or 64-bit elements."""
    return _rmw("xchg", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_xor(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomic bitwise xor on to_rank's memory at `pointer`; returns the old value.  32- or 64-bit integers."""
    return _rmw("xor", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_and(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomic bitwise and on to_rank's memory at `pointer`; returns the old value.  32- or 64-bit integers."""
    return _rmw("and", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_or(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomic bitwise or on to_rank's memory at `pointer`; returns the old value.  32- or 64-bit integers."""
    return _rmw("or", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_min(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomic minimum on to_rank's memory at `pointer`; returns the old value.  32/64-bit integers, f32, f64."""
    return _rmw("min", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_max(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: constexpr = None, scope: constexpr = None,
    hint: constexpr = None
):  # fmt: skip
    """Atomic maximum on to_rank's memory at `pointer`; returns the old value.  32/64-bit integers, f32, f64."""
    return _rmw("max", pointer, val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)
