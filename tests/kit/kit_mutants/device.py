"""Device functions with one mistake each."""

import triton
import triton.language as tl

from iris_triton import language
from iris_triton.context import DeviceContext


@triton.jit
def _but_last(mask):
    """The mask without its last true lane."""
    lanes = tl.arange(0, mask.shape[0])
    return mask & (lanes < tl.max(tl.where(mask, lanes, 0), axis=0))


@triton.jit
def short_put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None):
    language.put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=_but_last(mask))


@triton.jit
def short_store(pointer, value, from_rank, to_rank, heap_bases, mask=None):
    if mask is None:
        language.store(pointer, value, from_rank, to_rank, heap_bases)
    else:
        language.store(pointer, value, from_rank, to_rank, heap_bases, mask=_but_last(mask))


@triton.jit
def local_store(pointer, value, from_rank, to_rank, heap_bases, mask=None):
    tl.store(pointer, value, mask=mask)


@triton.jit
def local_add(pointer, val, from_rank, to_rank, heap_bases):
    tl.atomic_add(pointer, val)


@triton.jit
def no_barrier(flags, rank, world_size: tl.constexpr, heap_bases, timeout_ns=0):
    pass


@triton.jit
def no_wait(pointer, value, timeout_ns=0):
    pass


@triton.jit
def no_signal(pointer, value, from_rank, to_rank, heap_bases):
    pass


@triton.jit
def load_swapped(
    pointer, from_rank, to_rank, heap_bases, mask=None, other=None, cache_modifier=None, volatile=False, hint=None
):
    return language.load(pointer, to_rank, from_rank, heap_bases, mask, other, cache_modifier, volatile, hint)


@triton.jit
def wait_demanding(pointer, value, cmp: tl.constexpr, timeout_ns):
    return language.wait(pointer, value, cmp, timeout_ns=timeout_ns)


@triton.jit
def store_swapped(self, value, pointer, to_rank, mask=None, cache_modifier=None, hint=None):
    self.store(pointer, value, to_rank, mask, cache_modifier, hint)


class OtherContext:
    """DeviceContext with value and pointer of store exchanged."""

    store = store_swapped


for _name in set(language.__all__) - {"store"}:
    setattr(OtherContext, _name, getattr(DeviceContext, _name))
