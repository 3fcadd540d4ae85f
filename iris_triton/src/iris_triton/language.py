"""Device functions: remote loads, stores, copies and atomics, and the synchronisation built from them.

A *symmetric pointer* is an address in one rank's heap.  The functions take it together with two ranks: the first is
the rank in whose address space the pointer is (normally the caller), the second is the rank to be accessed.  The access
goes to `pointer - heap_bases[first] + heap_bases[second]`.

    heap_bases      int64[world_size] tensor: address of every rank's heap in this process (`ctx.get_heap_bases()`).
                    Bases are multiples of 4096 bytes, which the host checks.  Therefore a translated pointer
                    is as aligned and as contiguous as the original, and Triton's analysis can prove it: accesses of 16
                    bytes survive without hints.
    mask, other     as in tl.load and tl.store.
    cache_modifier  loads: None, ".ca", ".cg", ".cv"; stores: None, ".wb", ".cg", ".cs", ".wt".
    hint            tuple with one int per dimension, or int for the last one: the translated pointer is a multiple of so
                    many bytes, and so many elements are contiguous (tl.multiple_of, tl.max_contiguous).  Unchecked.
                    Says nothing of the caller's own pointer in get and put.
    sem, scope      as in Triton's atomics, but scope None means "sys": peers are outside the device's own scope.
                    sem None means "acq_rel".

Offsets are 64 bits wide throughout.  Loads and stores are weak accesses: they order nothing.  To hand over data, store
it and `signal`; the receiver calls `wait` and then loads.

The same functions with the ranks filled in are methods of `iris_triton.DeviceContext`.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from iris_triton.atomics import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_sub,
    atomic_xchg,
    atomic_xor,
)
from iris_triton.sync import barrier, put_signal, signal, wait
from iris_triton.translation import translate

__all__ = [
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "barrier",
    "copy",
    "get",
    "load",
    "put",
    "put_signal",
    "signal",
    "store",
    "wait",
]


@triton.constexpr_function
def _load_modifier(cache_modifier, volatile, on_amd):
    """Some versions of Triton drop `volatile` for AMD; what ".cv" asks for is the same there."""
    return ".cv" if on_amd and volatile and cache_modifier is None else cache_modifier


@triton.jit
def load(
    pointer,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Return what lies at `pointer` in the heap of from_rank.

    Args:
        pointer: address in the heap of to_rank, the caller.
        to_rank: rank that gets the data (the caller).
        from_rank: rank whose memory is read.
        heap_bases, mask, other, cache_modifier, hint: see the top of this module.
        volatile: never served from a cached or earlier value.
    """
    source = translate(pointer, to_rank, from_rank, heap_bases, hint)
    modifier: tl.constexpr = _load_modifier(cache_modifier, volatile, is_hip())
    return tl.load(source, mask=mask, other=other, cache_modifier=modifier, volatile=volatile)


@triton.jit
def store(
    pointer,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    hint: tl.constexpr = None,
    cache_modifier: tl.constexpr = None,
):
    """Store `value` at `pointer` in the heap of to_rank.

    Args:
        pointer: address in the heap of from_rank, the caller.
        value: scalar or block; converted to the pointer's element type.
        from_rank: the caller.
        to_rank: rank whose memory is written.
        heap_bases, mask, hint, cache_modifier: see the top of this module.
    """
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    tl.store(target, value, mask=mask, cache_modifier=cache_modifier)


@triton.jit
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from from_rank's memory at `src_ptr` to to_rank's memory at `dst_ptr`.

    Args:
        src_ptr, dst_ptr: addresses in the heap of cur_rank.
        from_rank: rank whose memory is read.
        to_rank: rank whose memory is written.
        cur_rank: the caller; need be neither of the two.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint: see the top of this module.
    """
    source = translate(src_ptr, cur_rank, from_rank, heap_bases, hint)
    target = translate(dst_ptr, cur_rank, to_rank, heap_bases, hint)
    data = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(target, data, mask=mask, cache_modifier=store_cache_modifier)


@triton.jit
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from to_rank's memory at `from_ptr` to the caller's own memory at `to_ptr`.

    Args:
        from_ptr: address in the heap of from_rank, the caller.
        to_ptr: any address that the caller may write.
        from_rank: the caller.
        to_rank: rank whose memory is read.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint: see the top of this module.
    """
    source = translate(from_ptr, from_rank, to_rank, heap_bases, hint)
    data = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(to_ptr, data, mask=mask, cache_modifier=store_cache_modifier)


@triton.jit
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from the caller's own memory at `from_ptr` to to_rank's memory at `to_ptr`.

    Args:
        from_ptr: any address that the caller may read.
        to_ptr: address in the heap of from_rank, the caller.
        from_rank: the caller.
        to_rank: rank whose memory is written.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint: see the top of this module.
    """
    target = translate(to_ptr, from_rank, to_rank, heap_bases, hint)
    data = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(target, data, mask=mask, cache_modifier=store_cache_modifier)
