"""Device functions for Gluon kernels: remote loads, stores, copies and atomics, and the synchronisation between ranks.

A *symmetric pointer* is an address in one rank's heap.  The functions take it together with two ranks: the first is
the rank in whose address space the pointer is (normally the caller), the second is the rank to be accessed.

    heap_bases      int64[world_size] tensor: address of every rank's heap in this process (`ctx.get_heap_bases()`).
    mask, other     as in gl.load and gl.store: of the pointers' layout.
    cache_modifier  loads: None, ".ca", ".cg", ".cv"; stores: None, ".wb", ".cg", ".cs", ".wt".
    hint            tuple with one int per dimension, or int for the last one: the translated pointer is a multiple of
                    so many bytes, and so many elements are contiguous.  Powers of two; whether they are true is
                    checked by the CPU executor only, for blocks.
    sem, scope      as in Gluon's atomics, but scope None means "sys": peers are outside the device's own scope.
                    sem None means "acq_rel".

Results have the layout of the pointers; a scalar operand goes with pointers of any layout.  Offsets are 64 bits wide.
Loads and stores are weak accesses: they order nothing.  To hand over data, store it and `signal`; the receiver calls
`wait`, `wait_any`, `test` or `load_acquire`, and then loads; before loads by TMA comes
`iris_gluon.bulk.fence_async_global`.

The same functions with the ranks filled in are methods of `iris_gluon.IrisDeviceCtx`.  Those for loads, stores and
copies are the ones of `iris_triton.language`.
"""

# mypy: ignore-errors

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
    "load_acquire",
    "put",
    "put_signal",
    "signal",
    "store",
    "test",
    "wait",
    "wait_any",
]
