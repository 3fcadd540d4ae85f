"""Atomics on another rank's memory; `iris_triton.language` describes the common arguments."""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.language.address import translate
from iris_triton.language.blocks import spread


@triton.constexpr_function
def scope_or_sys(scope):
    """Peers are outside the scope that Triton takes by default."""
    return "sys" if scope is None else scope


@triton.jit
def atomic_add(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomically add `val` to to_rank's memory at `pointer` and return the old value.

    Args:
        pointer: address in the heap of from_rank.  Element type: 32- or 64-bit integer, f16, bf16, f32, f64.
        val: scalar or block; converted to the element type.
        from_rank: the caller.
        to_rank: rank whose memory is changed.
        heap_bases, mask, sem, scope, hint: see `iris_triton.language`.
    """
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_add(target, spread(val, target), mask=mask, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_sub(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomically subtract `val` from to_rank's memory at `pointer` and return the old value.  As atomic_add."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    # Negated in the element type: an unsigned value that is widened afterwards would not wrap as it must.
    negated = 0 - tl.cast(val, pointer.dtype.element_ty)
    return tl.atomic_add(target, spread(negated, target), mask=mask, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_cas(
    pointer,
    cmp,
    val,
    from_rank,
    to_rank,
    heap_bases,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
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
    element: tl.constexpr = pointer.dtype.element_ty
    expected = spread(tl.cast(cmp, element), target)
    desired = spread(tl.cast(val, element), target)
    return tl.atomic_cas(target, expected, desired, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_xchg(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomically store `val` to to_rank's memory at `pointer` and return the old value.  32- or 64-bit elements."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_xchg(target, spread(val, target), mask=mask, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_xor(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomic bitwise xor on to_rank's memory at `pointer`; returns the old value.  32- or 64-bit integers."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_xor(target, spread(val, target), mask=mask, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_and(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomic bitwise and on to_rank's memory at `pointer`; returns the old value.  32- or 64-bit integers."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_and(target, spread(val, target), mask=mask, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_or(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomic bitwise or on to_rank's memory at `pointer`; returns the old value.  32- or 64-bit integers."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_or(target, spread(val, target), mask=mask, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_min(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomic minimum on to_rank's memory at `pointer`; returns the old value.  32/64-bit integers, f32, f64."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_min(target, spread(val, target), mask=mask, sem=sem, scope=scope_or_sys(scope))


@triton.jit
def atomic_max(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Atomic maximum on to_rank's memory at `pointer`; returns the old value.  32/64-bit integers, f32, f64."""
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_max(target, spread(val, target), mask=mask, sem=sem, scope=scope_or_sys(scope))
