"""Global memory accesses of kernels: every access is checked here and recorded for the scheduler.

Triton's native load and store go through memory element by element.  Where all active lanes lie in one accessible
range, a numpy array over it does it several times faster.  Elements that are not aligned to their size, and ranges that
are unknown because checks are off, take the native way.

Atomics are machine instructions, exact between processes; addition of 16-bit floats is built here from
compare-and-swap.  Masked lanes do nothing and return 0.  All are of system scope, whatever a kernel says: what it says
counts for the checker only.
"""

import ctypes
from typing import Any

import numpy as np
import triton.language as tl

from iris_core.errors import ArgumentError, UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.frontend import numerics
from iris_triton.interpreter.memory.regions import FAR, OFF_HEAP, RANK_BIT, Array, Region, registered_heaps
from iris_triton.interpreter.state import ProgramInfo, current

watcher: Any = None  # the checker while it is on, for launches; at accesses it replaces functions below
_word = ctypes.c_int64
_NO_HEAP = 0, None
_FEW = 16  # addresses that are looked up faster one after the other
_ALIGNMENT = 4096  # HEAP_ALIGNMENT of iris_triton.language.address
_OPS, _RELAXED = _compat.ir.ATOMIC_OP, _compat.ir.MEM_SEMANTIC.RELAXED


def untag(addresses: Array, mask: Array | None, nbytes: int, access: str) -> Array:
    """Return addresses as they are; the checker takes off them what it knows their tensors by."""
    return addresses


def plain(data: Array) -> Array:
    """Return data as they leave the kernel; the checker takes off pointers what it knows their tensors by."""
    return data


def check(addresses: Array, mask: Array | None, nbytes: int, access: str) -> Region | None:
    """Return the accessible range that holds every active element; None if they lie in several.

    Raises OutOfBoundsError where an active element lies in none and checks are on.
    """
    launch = current.launch
    checker = launch.checker
    if addresses.size == 1:
        if mask is not None and not mask.reshape(-1)[0]:
            return None
        low = high = int(addresses.reshape(-1)[0])
    else:
        low, high = int(np.minimum.reduce(addresses, axis=None)), int(np.maximum.reduce(addresses, axis=None))
    region = checker.find(low, high + nbytes)
    if region is not None:
        return region
    flat = addresses.reshape(-1)
    lanes = np.arange(flat.size)
    if mask is not None:
        lanes = np.flatnonzero(mask)
        flat = flat[lanes]
        if not flat.size:
            return None
        region = checker.find(int(flat.min()), int(flat.max()) + nbytes)
    if region is not None or not launch.refuse:
        return region
    if flat.size <= _FEW and all(checker.find(each, each + nbytes) for each in flat.tolist()):
        return None  # words of several ranks, as flags are
    if checker.outside(flat, nbytes).any():
        raise checker.error(launch.kernel, current.program.pid, access, flat, lanes, nbytes)
    return region


def _locate(
    addresses: Array, mask: Array | None, dtype: np.dtype[Any], access: str
) -> tuple[Array | None, Array | None, Any, Region | None]:
    """Return mask (None: true), the accessible range as an array (None: the native way), indices into it, the range."""
    mask = None if mask is None or mask.all() else np.broadcast_to(mask, addresses.shape)
    region = check(addresses, mask, dtype.itemsize, access)
    indices = None if region is None else region.indices(addresses if mask is None else addresses[mask], dtype.itemsize)
    return mask, None if region is None or indices is None else region.view(dtype), indices, region


def load(
    addresses: Array, mask: Array | None, fill: Array | None, dtype: np.dtype[Any], access: str = "load",
    poll: bool = False,
) -> Array:  # fmt: skip
    """Read the active elements; the others get `fill`, or 0 without one."""
    shape = addresses.shape
    mask, view, indices, _ = _locate(addresses, mask, dtype, access)
    data: Array
    if view is not None and mask is None:
        data = view.take(indices)
    else:
        data = np.zeros(shape, dtype) if fill is None else np.broadcast_to(fill, shape).astype(dtype)
        if view is not None:
            data[mask] = view.take(indices)
        else:
            data = _compat.native.load(addresses, np.ones(shape, np.bool_) if mask is None else mask, data, dtype)
    (current.program.observe if poll else current.program.loaded)(addresses, data)
    return data


def store(addresses: Array, mask: Array | None, data: Array) -> None:
    """Write the active elements."""
    shape = addresses.shape
    if data.shape != shape:
        data = np.broadcast_to(data, shape)
    mask, view, indices, _ = _locate(addresses, mask, data.dtype, "store")
    if view is not None:
        view[indices] = data if mask is None else data[mask]
    else:
        _compat.native.store(addresses, data, np.ones(shape, np.bool_) if mask is None else mask)
    current.program.progress()


def rmw(op: Any, addresses: Array, values: Array, mask: Array, sem: Any, element: Any, scope: Any = None) -> Array:
    """Read, modify and write the active elements, and return the old values.

    `op`, `sem` and `scope` are the IR's operation, memory order and scope, `element` is Triton's type of the elements.
    """
    values, mask = _spread(values, addresses.shape), _spread(mask, addresses.shape)
    check(addresses, mask, values.itemsize, f"atomic_{op.name.lower()}")
    old = native_rmw(op, addresses, values, element, mask, sem)
    if mask.any():
        current.program.observe(addresses, old)
    return old


def cas(addresses: Array, expected: Array, desired: Array, sem: Any, scope: Any = None) -> Array:
    """Replace every element that equals `expected` by `desired`, and return the old values."""
    kept = expected.dtype
    bits = np.dtype(f"i{kept.itemsize}")  # floats are compared by their bits, as on GPUs
    expected, desired = (_spread(each, addresses.shape).view(bits) for each in (expected, desired))
    check(addresses, None, kept.itemsize, "atomic_cas")
    old: Array = _compat.native.atomic_cas(addresses, expected, desired, _compat.NATIVE_SEMS[sem]).view(kept)
    current.program.observe(addresses, old)
    return old


def native_rmw(
    op: Any, addresses: Array, values: Array, element: Any, mask: Array | None = None, sem: Any = _RELAXED
) -> Array:
    """As `rmw`, of memory that has been checked; what it finds is no poll."""
    kept = values.dtype
    if mask is None:
        mask = np.ones(addresses.shape, np.bool_)
    if op == _OPS.FADD and kept.itemsize == 2:
        return _add_16_bit(addresses, values, mask, _compat.NATIVE_SEMS[sem], element)
    native_op = _compat.NATIVE_OPS.get(op)
    if native_op is None:
        raise UnsupportedError(f"atomic operation {op} has no CPU implementation")
    if op == _OPS.XCHG and kept.kind == "f":
        values = values.view(f"i{kept.itemsize}")
    elif op in (_OPS.UMIN, _OPS.UMAX):
        values = values.view(f"u{kept.itemsize}")
    old: Array = _compat.native.atomic_rmw(native_op, addresses, values, mask, _compat.NATIVE_SEMS[sem]).view(kept)
    if not mask.all():
        old[~mask] = 0
    return old


def _spread(data: Array, shape: tuple[int, ...]) -> Array:
    """Return the array in a shape, contiguous."""
    return np.ascontiguousarray(data if data.shape == shape else np.broadcast_to(data, shape))


def _add_16_bit(addresses: Array, values: Array, mask: Array, sem: Any, element: Any) -> Array:
    def add(left: Array, right: Array) -> Array:
        if element == tl.bfloat16:
            return numerics.to_bf16(numerics.bf16_to_f32(left) + numerics.bf16_to_f32(right))
        return (left.view(np.float16) + right.view(np.float16)).view(np.uint16)

    flat, operands = addresses.reshape(-1), values.reshape(-1).view(np.uint16)
    old = np.zeros(flat.shape, np.uint16)
    for lane in np.flatnonzero(mask):
        address = flat[lane : lane + 1].copy()
        seen = _compat.native.load(address, np.ones(1, bool), np.zeros(1, np.uint16), np.dtype(np.uint16))
        while (swapped := _compat.native.atomic_cas(address, seen, add(seen, operands[lane : lane + 1]), sem)) != seen:
            seen = swapped
        old[lane] = seen[0]
    return old.view(values.dtype).reshape(addresses.shape)


def check_context(program: ProgramInfo, context_tensor: Any, rank: Any, world_size: Any) -> None:
    """Check the rank and the words that a kernel makes its context of; CPU entry."""
    if not current.launch.refuse:
        return
    rank, world_size = int(rank), int(world_size)
    if not 0 <= rank < world_size:
        raise ArgumentError(f"DeviceContext: rank {rank} is not in a world of {world_size}")
    addresses = int(context_tensor) + np.arange(0, 8 * (2 + world_size), 8).astype(np.uint64)
    said_rank, said_size, *bases = load(addresses, None, None, np.dtype(np.int64)).tolist()
    if all(heap.heap_bases != tuple(bases) for heap in registered_heaps()) or said_size != world_size:
        raise ArgumentError(
            f"DeviceContext: the context tensor says rank {said_rank} of {said_size}, and its {world_size} heap bases "
            "are those of no open context: pass what ctx.get_device_context() returns, with ctx.get_num_ranks()"
        )
    if said_rank != rank:
        raise ArgumentError(f"DeviceContext: rank {rank} was given, but the context tensor is that of rank {said_rank}")


def stray(program: ProgramInfo, pointer: Any, from_rank: Any, to_rank: Any, heap_bases: Any) -> int | Array:
    """Return what is added to a pointer that is translated; CPU entry.

    0, or OFF_HEAP where it does not lie in the memory of from_rank, or FAR where to_rank is on another node: errors
    where an access is not masked off.
    """
    if not current.launch.refuse:
        return 0
    heaps = current.launch.checker.heaps
    ranks = [int(from_rank), *(np.asarray(to_rank).reshape(-1).tolist() if np.ndim(to_rank) else (int(to_rank),))]
    address = int(heap_bases)
    bases = [_word.from_address(address + 8 * rank).value for rank in ranks]  # the kernel has just loaded them
    end, number = heaps.get(bases[0], _NO_HEAP)
    if number is None:  # other memory, which ends with the region at its beginning, if kernels can reach all of it
        first, *others = (current.launch.checker.find(base, base + 1) for base in bases)
        is_apart = any((base - bases[0]) % _ALIGNMENT for base in bases)
        end = 0 if first is None or None in others or is_apart else first.end
    if not end or any(heaps.get(base, _NO_HEAP)[1] != number for base in bases):
        said = ", ".join(f"{base:#x} for rank {rank}" for rank, base in zip(ranks, bases, strict=True))
        raise ArgumentError(
            f"the heap bases say {said}, where no open heap is: pass what ctx.get_heap_bases() returns, and ranks of "
            f"its world; or the addresses of other memory, which differ by multiples of {_ALIGNMENT} bytes, and which "
            "iris_triton.interpreter.allow_region makes accessible"
        )
    far = current.launch.checker.far
    added: int | Array = 0
    if not far.keys().isdisjoint(bases[1:]):
        peers = zip(ranks[1:], bases[1:], strict=True)
        added = np.array([FAR | rank << RANK_BIT if base in far else 0 for rank, base in peers], np.int64)
        added = added.reshape(np.shape(to_rank))
    if pointer.min() >= bases[0] and pointer.max() < end:
        return added
    return np.where((pointer >= bases[0]) & (pointer < end), added, np.int64(OFF_HEAP))
