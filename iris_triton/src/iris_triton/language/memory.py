"""Loads, stores and copies of other ranks' memory; `iris_triton.language` describes the common arguments."""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from iris_triton.language.address import translate


@triton.jit
def _read(pointer, mask, other, cache_modifier: tl.constexpr, volatile: tl.constexpr = False):
    # Fresh data, asked for by `volatile` or by ".cv", goes before any other cache modifier.  Some versions of Triton
    # drop the first for AMD and the second for NVIDIA, where no other modifier may stand beside `volatile`.
    fresh: tl.constexpr = volatile or cache_modifier == ".cv"
    of_fresh: tl.constexpr = ".cv" if is_hip() else None
    modifier: tl.constexpr = of_fresh if fresh else cache_modifier
    is_volatile: tl.constexpr = volatile or (fresh and not is_hip())
    if other is not None and pointer.dtype.element_ty.is_fp8():  # Triton makes no fp8 of an integer
        other = tl.core.to_tensor(other)
        if other.dtype.is_int():
            other = other.to(tl.float32)
    return tl.load(pointer, mask=mask, other=other, cache_modifier=modifier, volatile=is_volatile)


@triton.jit
def load(
    pointer, to_rank, from_rank, heap_bases, mask=None, other=None, cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False, hint: tl.constexpr = None
):  # fmt: skip
    """Return what lies at `pointer` in the heap of from_rank.

    Args:
        pointer: address in the heap of to_rank, the caller.
        to_rank, from_rank: rank that gets the data (the caller), and rank whose memory is read.
        heap_bases, mask, other, cache_modifier, hint: see `iris_triton.language`.
        volatile: never served from a cached or earlier value, whatever cache_modifier says.
    """
    source = translate(pointer, to_rank, from_rank, heap_bases, hint)
    return _read(source, mask, other, cache_modifier, volatile)


@triton.jit
def store(
    pointer, value, from_rank, to_rank, heap_bases, mask=None, hint: tl.constexpr = None,
    cache_modifier: tl.constexpr = None
):  # fmt: skip
    """Store `value` at `pointer` in the heap of to_rank.

    Args:
        pointer: address in the heap of from_rank, the caller.
        value: scalar or block; converted to the pointer's element type.
        to_rank: rank whose memory is written.
        heap_bases, mask, hint, cache_modifier: see `iris_triton.language`.
    """
    target = translate(pointer, from_rank, to_rank, heap_bases, hint)
    tl.store(target, value, mask=mask, cache_modifier=cache_modifier)


@triton.jit
def copy(
    src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None, other=None,
    load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None, hint: tl.constexpr = None
):  # fmt: skip
    """Copy from from_rank's memory at `src_ptr` to to_rank's memory at `dst_ptr`.

    Args:
        src_ptr, dst_ptr: addresses in the heap of cur_rank.
        from_rank, to_rank: rank whose memory is read, and rank whose memory is written.
        cur_rank: the caller; need be neither of the two.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint: see `iris_triton.language`.
    """
    data = load(src_ptr, cur_rank, from_rank, heap_bases, mask, other, load_cache_modifier, False, hint)
    store(dst_ptr, data, cur_rank, to_rank, heap_bases, mask, hint, store_cache_modifier)


@triton.jit
def get(
    from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
    load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None, hint: tl.constexpr = None
):  # fmt: skip
    """Copy from to_rank's memory at `from_ptr` to the caller's own memory at `to_ptr`.

    Args:
        from_ptr: address in the heap of from_rank, the caller.
        to_ptr: any address that the caller may write.
        to_rank: rank whose memory is read.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint: see `iris_triton.language`.
    """
    data = load(from_ptr, from_rank, to_rank, heap_bases, mask, other, load_cache_modifier, False, hint)
    tl.store(to_ptr, data, mask=mask, cache_modifier=store_cache_modifier)


@triton.jit
def put(
    from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None, other=None,
    load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None, hint: tl.constexpr = None
):  # fmt: skip
    """Copy from the caller's own memory at `from_ptr` to to_rank's memory at `to_ptr`.

    Args:
        from_ptr: any address that the caller may read.
        to_ptr: address in the heap of from_rank, the caller.
        to_rank: rank whose memory is written.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint: see `iris_triton.language`.
    """
    data = _read(from_ptr, mask, other, load_cache_modifier)
    store(to_ptr, data, from_rank, to_rank, heap_bases, mask, hint, store_cache_modifier)
