"""Virtual memory management without a GPU: addresses are real, physical memory is a memfd, and everything is counted.

It does what the driver promises and refuses what the driver refuses, so the allocator's protocol can be tested on any
machine, also between processes: descriptors are real, and memory that is not accessible yet cannot be read.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import DriverError

if TYPE_CHECKING:
    from iris_allocators.ranges import Range

GRANULE = 64 << 10
_NONE, _READ_WRITE = 0, 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value

INVALID, OUT_OF_MEMORY, NOT_SUPPORTED = (
    (1, "CUDA_ERROR_INVALID_VALUE"),
    (2, "CUDA_ERROR_OUT_OF_MEMORY"),
    (801, "CUDA_ERROR_NOT_SUPPORTED"),
)


class _Memory:
    """Physical memory: gone when its last handle and its last mapping are."""

    def __init__(self, fd: int, nbytes: int, charged: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.charged = charged  # what it takes of this device
        self.references = 0


class FakeVmm:
    """Implements `VmmDriver` on host memory.

    Args:
        total: bytes of the pretended device.

    Attributes:
        calls: names of the calls so far.
        fail_at: the number of the call that fails, counted from 1; None for none.
        fail_next: by name, how many calls from now on the failing one comes; 1 is the next.
        fail_with: how it fails.
        exportable: whether memory can be exported.
        takes_any_size: whether HIP's call for access takes any whole mappings, or as ROCm 7.2 does: a size that is the
            sum of the reservation's first so many mappings, in their order here.
    """

    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.used = 0
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.fail_next: dict[str, int] = {}
        self.fail_with = NOT_SUPPORTED
        self.exportable = True
        self.takes_any_size = True
        self.busy = False
        self._numbers = itertools.count(1000)
        self._handles: dict[int, list[Any]] = {}  # handle -> [memory, references to the handle]
        self._mappings: dict[int, tuple[int, int]] = {}  # address -> (size, handle)
        self._memory_of: dict[int, _Memory] = {}  # address -> what is mapped there
        self._reserved: dict[int, tuple[int, int, int]] = {}  # address -> (size, what was mapped, its size)

    def counts(self) -> tuple[int, int, int, int]:
        """Handles, mappings, reservations, and bytes of the device that are in use."""
        return sum(n for _, n in self._handles.values()), len(self._mappings), len(self._reserved), self.used

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail_next:
            self.fail_next[name] -= 1
        if len(self.calls) == self.fail_at or self.fail_next.get(name) == 0:
            self.fail_next.pop(name, None)
            raise DriverError(name, *self.fail_with)

    def _check(self, name: str, holds: bool, why: tuple[int, str] = INVALID) -> None:
        if not holds:
            raise DriverError(name, *why)

    # -- addresses ----------------------------------------------------------------------------------------------------
    def granularity(self) -> int:
        self._enter("granularity")
        return GRANULE

    def reserve(self, nbytes: int, alignment: int) -> int:
        self._enter("reserve")
        self._check("reserve", nbytes % GRANULE == 0 and nbytes < 1 << 46, OUT_OF_MEMORY)
        size = nbytes + alignment
        ptr = _libc.mmap(None, size, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
        self._check("reserve", ptr != _FAILED, OUT_OF_MEMORY)
        base = -(-ptr // alignment) * alignment
        self._reserved[base] = nbytes, ptr, size
        return base

    def unreserve(self, ptr: int, nbytes: int) -> None:
        self._enter("unreserve")
        self._check("unreserve", self._reserved.get(ptr, (0,))[0] == nbytes)
        self._check("unreserve", not any(ptr <= at < ptr + nbytes for at in self._mappings))
        _, mapped, size = self._reserved.pop(ptr)
        assert _libc.munmap(mapped, size) == 0

    # -- physical memory ----------------------------------------------------------------------------------------------
    def create(self, nbytes: int) -> int:
        self._enter("create")
        self._check("create", nbytes > 0 and nbytes % GRANULE == 0)
        self._check("create", self.used + nbytes <= self.total, OUT_OF_MEMORY)
        fd = os.memfd_create("fake-vmm")
        os.ftruncate(fd, nbytes)
        self.used += nbytes
        return self._handle(_Memory(fd, nbytes, nbytes))

    def release(self, handle: int) -> None:
        self._enter("release")
        self._check("release", handle in self._handles)
        entry = self._handles[handle]
        entry[1] -= 1
        self._let_go(entry[0])
        if entry[1] == 0:
            del self._handles[handle]

    def retain(self, ptr: int) -> int:
        self._enter("retain")
        handle = self._mapping(ptr)[2]
        memory = self._memory_of[self._mapping(ptr)[0]]
        entry = self._handles.setdefault(handle, [memory, 0])  # the mapping keeps the number when it was released
        entry[1] += 1
        memory.references += 1
        return handle

    def export_fd(self, handle: int) -> int:
        self._enter("export_fd")
        self._check("export_fd", handle in self._handles)
        self._check("export_fd", self.exportable, NOT_SUPPORTED)
        return os.dup(self._handles[handle][0].fd)

    def import_fd(self, fd: int) -> int:
        self._enter("import_fd")
        return self._handle(_Memory(os.dup(fd), os.fstat(fd).st_size, 0))

    # -- mappings -----------------------------------------------------------------------------------------------------
    def map(self, ptr: int, nbytes: int, handle: int) -> None:
        self._enter("map")
        self._check("map", handle in self._handles)
        memory = self._handles[handle][0]
        self._check("map", ptr % GRANULE == 0 and nbytes % GRANULE == 0 and 0 < nbytes <= memory.nbytes)
        inside = any(base <= ptr and ptr + nbytes <= base + size for base, (size, _, _) in self._reserved.items())
        free = all(at + size <= ptr or ptr + nbytes <= at for at, (size, _) in self._mappings.items())
        self._check("map", inside and free)
        assert _libc.mmap(ptr, nbytes, _NONE, _SHARED | _FIXED, memory.fd, 0) == ptr
        self._mappings[ptr] = nbytes, handle
        memory.references += 1
        self._memory_of[ptr] = memory

    def unmap(self, ptr: int, nbytes: int) -> None:
        self._enter("unmap")
        self._check("unmap", self._mappings.get(ptr, (0,))[0] == nbytes)
        flags = _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED
        assert _libc.mmap(ptr, nbytes, _NONE, flags, -1, 0) == ptr
        del self._mappings[ptr]
        self._let_go(self._memory_of.pop(ptr))

    def set_access(self, ptr: int, nbytes: int) -> None:
        self._enter("set_access")
        reached = ptr
        while reached < ptr + nbytes:
            self._check("set_access", reached in self._mappings)
            reached += self._mappings[reached][0]
        self._check("set_access", reached == ptr + nbytes)
        assert _libc.mprotect(ptr, nbytes, _READ_WRITE) == 0

    def sizes_in_reservation(self, ptr: int) -> list[int]:
        """Sizes of what is mapped in the reservation that an address lies in, the oldest first."""
        ((base, nbytes),) = ((b, n) for b, (n, _, _) in self._reserved.items() if b <= ptr < b + n)
        return [size for at, (size, _) in self._mappings.items() if base <= at < base + nbytes]

    def address_range(self, ptr: int) -> tuple[int, int]:
        self._enter("address_range")
        base, nbytes, _ = self._mapping(ptr)
        return base, nbytes

    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self.total - self.used, self.total

    def synchronize(self) -> None:
        self._enter("synchronize")
        while self.busy:
            time.sleep(0.01)

    def _mapping(self, ptr: int) -> tuple[int, int, int]:
        for base, (nbytes, handle) in self._mappings.items():
            if base <= ptr < base + nbytes:
                return base, nbytes, handle
        raise DriverError("retain", *INVALID)

    def _handle(self, memory: _Memory) -> int:
        memory.references += 1
        handle = next(self._numbers)
        self._handles[handle] = [memory, 1]
        return handle

    def _let_go(self, memory: _Memory) -> None:
        memory.references -= 1
        if memory.references == 0:
            os.close(memory.fd)
            self.used -= memory.charged


def as_bytes(part: Range) -> torch.Tensor:
    """A tensor on host memory that keeps its range alive, as torch does with GPU memory."""
    buffer = (ctypes.c_uint8 * part.nbytes).from_address(part.ptr)
    buffer.part = part
    return torch.frombuffer(buffer, dtype=torch.uint8)


class _Mark:
    """Lives as long as a tensor's storage."""


class Expandable:
    """Memory as torch's expandable segments have it: pieces of physical memory, one behind the other.

    Args:
        driver: where it is made.
        sizes: bytes of each piece.

    Attributes:
        last: what the last tensor's storage keeps alive.
    """

    def __init__(self, driver: FakeVmm, *sizes: int) -> None:
        self.driver = driver
        self.nbytes = sum(sizes)
        self.last: Any = None
        self.base = driver.reserve(self.nbytes, GRANULE)
        self.pieces = []
        ptr = self.base
        for size in sizes:
            handle = driver.create(size)
            driver.map(ptr, size, handle)
            self.pieces.append((ptr, size, handle))
            ptr += size
        driver.set_access(self.base, self.nbytes)

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor that begins `start` bytes behind the beginning."""
        elements = 1
        for size in shape:
            elements *= size
        self.last = buffer = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(self.base + start)
        buffer.mark = _Mark()
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def close(self) -> None:
        """Give everything back, as torch does under memory pressure."""
        for ptr, size, handle in self.pieces:
            self.driver.unmap(ptr, size)
            self.driver.release(handle)
        self.driver.unreserve(self.base, self.nbytes)
