"""Device functions: remote loads, stores, copies and atomics, and the synchronisation built from them.

A *symmetric pointer* is an address in one rank's heap.  The functions take it together with two ranks: the first is
the rank in whose address space the pointer is (normally the caller), the second is the rank to be accessed.  The access
goes to `pointer - heap_bases[first] + heap_bases[second]`.

Arguments that they share:
    heap_bases: int64[world_size] tensor: address of every rank's heap in this process (`ctx.get_heap_bases()`), or of
        other memory that every rank has, as docs/porting.md says.  Bases differ by multiples of 4096 bytes, which the
        host checks of heaps: a translated pointer is as aligned and as contiguous as the original, and Triton's
        analysis can prove it, so accesses of 16 bytes survive without hints.
    mask, other: as in tl.load and tl.store.
    cache_modifier: loads: None, ".ca", ".cg", ".cv"; stores: None, ".wb", ".cg", ".cs", ".wt".
    hint: tuple with one int per dimension, or int for the last one: alignment of the translated pointer in bytes, and
        number of contiguous elements (tl.multiple_of, tl.max_contiguous).  Powers of two; only the CPU executor checks
        them, for blocks.  Does not apply to the caller's own pointer in get and put.
    sem, scope: as in Triton's atomics, but scope None means "sys": peers are outside the device's own scope.  sem None
        means "acq_rel".

Offsets are 64 bits wide throughout.  Loads and stores are weak accesses: they order nothing.  To hand over data, store
it and `signal`; the receiver calls `wait`, `wait_any`, `test` or `load_acquire`, and then loads.

The same functions with the ranks filled in are methods of `iris_triton.DeviceContext`.
"""

from iris_triton.language.atomics import (
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
from iris_triton.language.memory import copy, get, load, put, store
from iris_triton.language.sync import barrier, load_acquire, put_signal, signal, test, wait, wait_any

__all__ = [
    "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or", "atomic_sub", "atomic_xchg",
    "atomic_xor", "barrier", "copy", "get", "load", "load_acquire", "put", "put_signal", "signal", "store", "test",
    "wait", "wait_any",
]  # fmt: skip
