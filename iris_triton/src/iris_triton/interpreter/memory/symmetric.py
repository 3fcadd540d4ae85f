"""Checks of kernels' use of other ranks' heaps: context tensors, and pointers that are translated."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from iris_core.errors import ArgumentError
from iris_triton.interpreter.memory.regions import OFF_HEAP, Array, registered_heaps
from iris_triton.interpreter.state import current

if TYPE_CHECKING:
    from iris_triton.interpreter.state import ProgramInfo

_word = ctypes.c_int64
_NO_HEAP = 0, None
_ALIGNMENT = 4096  # HEAP_ALIGNMENT of iris_triton.language.address


def check_context(program: ProgramInfo, context_tensor: Any, rank: Any, world_size: Any) -> None:
    """Check what a kernel makes its context of; CPU entry.

    Raises:
        ArgumentError: the rank is not in the world, or the words are not those of an open context of this world.
    """
    if not current.launch.refuse:
        return
    rank, world_size = int(rank), int(world_size)
    if not 0 <= rank < world_size:
        raise ArgumentError(f"DeviceContext: rank {rank} is not in a world of {world_size}")
    said_rank, said_size, *bases = _words(int(context_tensor), 2 + world_size).tolist()
    if all(heap.heap_bases != tuple(bases) for heap in registered_heaps()) or said_size != world_size:
        raise ArgumentError(
            f"DeviceContext: the context tensor says rank {said_rank} of {said_size}, and its {world_size} heap bases "
            "are those of no open context: pass what ctx.get_device_context() returns, with ctx.get_num_ranks()"
        )
    if said_rank != rank:
        raise ArgumentError(f"DeviceContext: rank {rank} was given, but the context tensor is that of rank {said_rank}")


def stray(program: ProgramInfo, pointer: Any, from_rank: Any, to_rank: Any, heap_bases: Any) -> int | Array:
    """What is added to a pointer that is translated; CPU entry.

    0, or OFF_HEAP where it does not lie in the memory of from_rank: an error where an access is not masked off.

    Raises:
        ArgumentError: no memory that kernels may touch is where the words say, or it is placed in such a way that
            kernels could not reach it.
    """
    if not current.launch.refuse:
        return 0
    heaps = current.launch.checker.heaps
    ranks = [int(from_rank), *(np.asarray(to_rank).reshape(-1).tolist() if np.ndim(to_rank) else (int(to_rank),))]
    address = int(heap_bases)
    bases = [_word.from_address(address + 8 * rank).value for rank in ranks]  # the kernel has just loaded them
    end, number = heaps.get(bases[0], _NO_HEAP)
    if number is None:
        end = _end_of_memory(bases)
    if not end or any(heaps.get(base, _NO_HEAP)[1] != number for base in bases):
        said = ", ".join(f"{base:#x} for rank {rank}" for rank, base in zip(ranks, bases, strict=True))
        raise ArgumentError(
            f"the heap bases say {said}, where no open heap is: pass what ctx.get_heap_bases() or "
            "ctx.get_device_context() returns, and ranks of its world; or the addresses of other memory, which differ "
            f"by multiples of {_ALIGNMENT} bytes, and which iris_triton.interpreter.allow_region makes accessible"
        )
    if pointer.min() >= bases[0] and pointer.max() < end:
        return 0
    return np.where((pointer >= bases[0]) & (pointer < end), np.int64(0), np.int64(OFF_HEAP))


def _end_of_memory(bases: list[int]) -> int:
    """Where the memory at the first one of some addresses ends; 0 unless all are of memory that kernels can reach."""
    found = [current.launch.checker.find(base, base + 1) for base in bases]
    reachable = None not in found and not any((base - bases[0]) % _ALIGNMENT for base in bases)
    return found[0].end if reachable else 0  # type: ignore[union-attr]


def _words(address: int, count: int) -> Array:
    """Words of 64 bits at an address, checked like a kernel's load."""
    launch, nbytes = current.launch, 8 * count
    if launch.checker.find(address, address + nbytes) is None:
        addresses = np.arange(address, address + nbytes, 8).astype(np.uint64)
        raise launch.checker.error(launch.kernel, current.program.pid, "load", addresses, np.arange(count), 8)
    return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), np.int64)
