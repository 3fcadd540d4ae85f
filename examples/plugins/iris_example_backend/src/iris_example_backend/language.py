"""The device functions, with the names and parameters that every backend of Iris has.

Common arguments:
    pointer: a `Pointer` into a symmetric tensor of the caller, one element or a block of them.
    from_rank, to_rank: ranks, as numbers; the caller is `from_rank` except in `load`, which reads from it.
    heap_bases: `ctx.get_heap_bases()`.
    mask, other: which elements are touched, and what a load returns for the others (0).
    sem, scope: accepted as every backend does; all atomics here have the strongest order there is.
    hint, cache_modifier, volatile: promises to a compiler and to caches.  Here is no compiler, every load reads memory,
        and so there is nothing that they could change.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from iris_core.errors import ArgumentError
from iris_example_backend.heaps import heap_at
from iris_example_backend.kernels import BoundsError, Kernel, Pointer, kernel, program_id

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BoundsError", "Kernel", "Pointer", "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min",
    "atomic_or", "atomic_sub", "atomic_xchg", "atomic_xor", "barrier", "copy", "get", "kernel", "load", "load_acquire",
    "program_id", "put", "put_signal", "remote", "signal", "store", "test", "wait", "wait_any",
]  # fmt: skip

_SEMS = (None, "relaxed", "acquire", "release", "acq_rel")
_SCOPES = (None, "cta", "gpu", "sys")
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
}  # fmt: skip


# -- from rank to rank ------------------------------------------------------------------------------------------------
def remote(pointer: Pointer, from_rank: int, to_rank: int, heap_bases: Pointer) -> Pointer:
    """Return the same place in to_rank's heap.

    A heap has the same layout on every rank, so the place is as far from to_rank's base as it
    is from from_rank's.

    Raises:
        ArgumentError: no such rank.
        NotOnHeapError: the tensor does not lie on the symmetric heap, or was freed.
    """
    bases = heap_bases.array
    for rank in (from_rank, to_rank):
        if not 0 <= rank < bases.size:
            raise ArgumentError(f"there is no rank {rank}: the world has {bases.size} ranks")
    if not pointer.array.size:
        return pointer  # of no elements: it has no address
    address = pointer.array.ctypes.data + int(bases[to_rank]) - int(bases[from_rank])
    heap_at(address).check(address, pointer.array.nbytes)
    return Pointer(np.asarray(_Memory(address, pointer.array)), pointer.index)


class _Memory:
    """Memory at an address, in the form that numpy makes arrays of."""

    def __init__(self, address: int, like: Any) -> None:
        self.__array_interface__ = {**like.__array_interface__, "data": (address, False)}


def load(
    pointer: Pointer,
    to_rank: int,
    from_rank: int,
    heap_bases: Pointer,
    mask: Any = None,
    other: Any = None,
    cache_modifier: str | None = None,
    volatile: bool = False,
    hint: Any = None,
) -> Any:
    """Return what lies at `pointer` in the heap of from_rank; to_rank is the caller."""
    return remote(pointer, to_rank, from_rank, heap_bases).load(mask, other)


def store(
    pointer: Pointer,
    value: Any,
    from_rank: int,
    to_rank: int,
    heap_bases: Pointer,
    mask: Any = None,
    hint: Any = None,
    cache_modifier: str | None = None,
) -> None:
    """Store `value` at `pointer` in the heap of to_rank."""
    remote(pointer, from_rank, to_rank, heap_bases).store(value, mask)


def copy(
    src_ptr: Pointer,
    dst_ptr: Pointer,
    from_rank: int,
    to_rank: int,
    cur_rank: int,
    heap_bases: Pointer,
    mask: Any = None,
    other: Any = None,
    load_cache_modifier: str | None = None,
    store_cache_modifier: str | None = None,
    hint: Any = None,
) -> None:
    """Copy from from_rank's heap to to_rank's; cur_rank, the caller, need be neither."""
    data = load(src_ptr, cur_rank, from_rank, heap_bases, mask, other)
    store(dst_ptr, data, cur_rank, to_rank, heap_bases, mask)


def get(
    from_ptr: Pointer,
    to_ptr: Pointer,
    from_rank: int,
    to_rank: int,
    heap_bases: Pointer,
    mask: Any = None,
    other: Any = None,
    load_cache_modifier: str | None = None,
    store_cache_modifier: str | None = None,
    hint: Any = None,
) -> None:
    """Copy from to_rank's heap to memory of the caller, which need not be on the heap."""
    to_ptr.store(load(from_ptr, from_rank, to_rank, heap_bases, mask, other), mask)


def put(
    from_ptr: Pointer,
    to_ptr: Pointer,
    from_rank: int,
    to_rank: int,
    heap_bases: Pointer,
    mask: Any = None,
    other: Any = None,
    load_cache_modifier: str | None = None,
    store_cache_modifier: str | None = None,
    hint: Any = None,
) -> None:
    """Copy from memory of the caller, which need not be on the heap, to to_rank's heap."""
    store(to_ptr, from_ptr.load(mask, other), from_rank, to_rank, heap_bases, mask)


# -- atomics ----------------------------------------------------------------------------------------------------------
def _atomic(change: Callable[[Any, Any], Any], what: str) -> Callable[..., Any]:
    def atomic(
        pointer: Pointer,
        val: Any,
        from_rank: int,
        to_rank: int,
        heap_bases: Pointer,
        mask: Any = None,
        sem: str | None = None,
        scope: str | None = None,
        hint: Any = None,
    ) -> Any:
        _check_order(sem, scope)
        target = remote(pointer, from_rank, to_rank, heap_bases)
        return _update(target, change, val, mask=mask)

    atomic.__doc__ = f"Atomically {what} to_rank's memory at `pointer`; return the old values."
    return atomic


def _update(target: Pointer, change: Callable[..., Any], *operands: Any, mask: Any = None) -> Any:
    """Replace element by element, for a block may name one twice; return the old values."""
    index, active = target.lanes(mask)
    array = target.array
    blocks = [np.broadcast_to(np.asarray(each).astype(array.dtype), index.shape) for each in operands]
    old = np.zeros(index.shape, array.dtype)
    if not active.any():
        return old[()]
    with heap_at(array.ctypes.data).locked(), np.errstate(over="ignore"):  # sums wrap around, as on a GPU
        for lane in zip(*np.nonzero(active), strict=True) if index.ndim else [()] * int(active):
            place = index[lane]
            old[lane] = array[place]
            array[place] = change(old[lane], *(each[lane] for each in blocks))
    return old[()]


def _check_order(sem: str | None, scope: str | None) -> None:
    if sem not in _SEMS or scope not in _SCOPES:
        raise ArgumentError(f"sem must be one of {_SEMS} and scope one of {_SCOPES}, not {sem!r} and {scope!r}")


atomic_add = _atomic(np.add, "add `val` to")
atomic_sub = _atomic(np.subtract, "subtract `val` from")
atomic_xchg = _atomic(lambda old, val: val, "store `val` to")
atomic_xor = _atomic(np.bitwise_xor, "xor `val` into")
atomic_and = _atomic(np.bitwise_and, "and `val` into")
atomic_or = _atomic(np.bitwise_or, "or `val` into")
atomic_min = _atomic(np.minimum, "store the smaller of `val` and")
atomic_max = _atomic(np.maximum, "store the larger of `val` and")


def atomic_cas(
    pointer: Pointer,
    cmp: Any,
    val: Any,
    from_rank: int,
    to_rank: int,
    heap_bases: Pointer,
    sem: str | None = None,
    scope: str | None = None,
    hint: Any = None,
) -> Any:
    """Atomically store `val` to to_rank's memory at `pointer` where it is `cmp`; return the old values."""
    _check_order(sem, scope)
    target = remote(pointer, from_rank, to_rank, heap_bases)
    return _update(target, lambda old, expected, new: new if old == expected else old, cmp, val)


# -- synchronisation --------------------------------------------------------------------------------------------------
def signal(pointer: Pointer, value: int, from_rank: int, to_rank: int, heap_bases: Pointer, op: str = "set") -> None:
    """Set a flag of to_rank to `value`, or add to it (op "add"), after everything that the caller has stored so far."""
    if op not in ("set", "add"):
        raise ArgumentError(f'op of signal must be "set" or "add", not {op!r}')
    (atomic_add if op == "add" else atomic_xchg)(pointer, value, from_rank, to_rank, heap_bases)


def put_signal(
    from_ptr: Pointer,
    to_ptr: Pointer,
    signal_ptr: Pointer,
    value: int,
    from_rank: int,
    to_rank: int,
    heap_bases: Pointer,
    op: str = "set",
    mask: Any = None,
) -> None:
    """Put, then signal: who has waited for the flag finds the data."""
    put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask)
    signal(signal_ptr, value, from_rank, to_rank, heap_bases, op)


def wait(pointer: Pointer, value: Any, cmp: str = "ge", timeout_ns: int | None = None) -> Any:
    """Wait until flags of the caller compare with `value` as they should; return them.

    Args:
        pointer: one flag or a block of them, in a symmetric tensor of the caller.
        value: what to compare with.
        cmp: "eq", "ne", "gt", "ge", "lt" or "le".
        timeout_ns: bound in nanoseconds, 0 for none; IRIS_DEVICE_TIMEOUT by default.

    Raises:
        DeviceTimeoutError: it took longer.
        PeerLostError: a peer's process has ended.
    """
    _await(pointer, value, cmp, timeout_ns, np.all)
    return pointer.load()


def wait_any(pointer: Pointer, value: Any, cmp: str = "ge", timeout_ns: int | None = None) -> int:
    """Wait until one of a block of flags compares with `value` as it should; return which.  See `wait`."""
    _await(pointer, value, cmp, timeout_ns, np.any)
    return int(np.argmax(_holds(pointer, value, cmp)))


def test(pointer: Pointer, value: Any, cmp: str = "ge") -> bool:  # noqa: PT028
    """Return whether flags of the caller compare with `value` now."""
    return bool(np.all(_holds(pointer, value, cmp)))


def load_acquire(pointer: Pointer) -> Any:
    """Return flags of the caller; the processors that this runs on reorder no loads."""
    return pointer.load()


def _holds(pointer: Pointer, value: Any, cmp: str) -> Any:
    if cmp not in _COMPARISONS:
        raise ArgumentError(f"cmp of wait must be one of {', '.join(_COMPARISONS)}, not {cmp!r}")
    return _COMPARISONS[cmp](pointer.load(), value)


def _await(pointer: Pointer, value: Any, cmp: str, timeout_ns: int | None, enough: Callable[[Any], Any]) -> None:
    _holds(pointer, value, cmp)  # refuses a comparison before it waits
    heap_at(pointer.array.ctypes.data).wait_until(
        lambda: bool(enough(_holds(pointer, value, cmp))),
        lambda: f"flags that are {pointer.load()} to be {cmp} {value}",
        timeout_ns,
    )


def barrier(
    flags: Pointer,
    rank: int,
    world_size: int,
    heap_bases: Pointer,
    rank_start: int = 0,
    rank_stride: int = 1,
    group_size: int | None = None,
    timeout_ns: int | None = None,
) -> None:
    """Wait for all ranks of a group: rank_start, rank_start + rank_stride, ..., group_size of them; all by default.

    Args:
        flags: int64 symmetric tensor of world_size + 1 zeros, for this group alone.  Word r is raised by rank r, the
            last one counts the barriers of the caller.
        rank: the caller.
        world_size: number of ranks in heap_bases.
        heap_bases: `ctx.get_heap_bases()`.
        rank_start, rank_stride, group_size: the group.
        timeout_ns: as in `wait`.
    """
    members = rank_start + rank_stride * np.arange(world_size if group_size is None else group_size)
    epoch = (flags + world_size).load() + 1
    for member in members:
        signal(flags + rank, epoch, rank, int(member), heap_bases)
    wait(flags + members, epoch, "ge", timeout_ns)
    (flags + world_size).store(epoch)
