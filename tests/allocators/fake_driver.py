"""GPU drivers without a GPU: addresses are real, physical memory is a memfd, and everything is counted.

They do what drivers promise and refuse what drivers refuse, so that protocols can be tested anywhere, also between
processes: descriptors are real, and memory that is not accessible yet cannot be read.
"""

import ctypes
import functools
import itertools
import math
import os
import threading
import time
import types
from dataclasses import dataclass

import torch

from iris_allocators import ranges
from iris_core.errors import DriverError, UnsupportedError

GRANULE = 64 << 10
INVALID = 1, "CUDA_ERROR_INVALID_VALUE"
OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY"
NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED"
ORIGIN = 4096
"""Where the one allocation that `FakeIpc` pretends begins."""

_NONE, _READ_WRITE = 0, 3
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_adding = threading.Lock()


class Faulty:
    """Counts the calls of its public methods but those that are no driver's, and fails where a test wants it.

    Attributes:
        fail_at: the number of the call that fails, counted from 1; None for none.
        fail_next: by name, how many calls from now on the failing one comes; 1 is the next.
    """

    def __init_subclass__(cls):
        def counted(method):
            @functools.wraps(method)
            def call(self, *args):
                self._enter(method.__name__)
                return method(self, *args)

            return call

        for name, method in list(vars(cls).items()):
            if not name.startswith("_") and name != "counts":
                setattr(cls, name, counted(method))

    def __init__(self):
        self.calls = []
        self.fail_at, self.fail_next = None, {}

    def _enter(self, name):
        self.calls.append(name)
        if name in self.fail_next:
            self.fail_next[name] -= 1
        if len(self.calls) == self.fail_at or self.fail_next.get(name) == 0:
            self.fail_next.pop(name, None)
            raise DriverError(name, *NOT_SUPPORTED)

    def _check(self, holds, why=INVALID):
        if not holds:
            raise DriverError(self.calls[-1], *why)


class FakeIpc(Faulty):
    """Implements `IpcDriver`: a handle opens at the address that it stands for, because ranks are in one process."""

    def __init__(self):
        super().__init__()
        self.opened = 0

    def address_range(self, ptr):
        return ORIGIN, 1 << 48

    def ipc_export(self, ptr):
        return ORIGIN.to_bytes(64)

    def ipc_open(self, handle):
        self._check(handle == ORIGIN.to_bytes(64))
        self.opened += 1
        return ORIGIN

    def ipc_close(self, base_ptr):
        self._check(base_ptr == ORIGIN and self.opened > 0)
        self.opened -= 1

    def counts(self):
        return (self.opened,)


@dataclass
class _Memory:
    """Physical memory: gone when its last handle and its last mapping are."""

    fd: int
    nbytes: int
    charged: int  # what it takes of this device
    handles: int = 1
    mappings: int = 0


class FakeVmm(Faulty):
    """Implements `VmmDriver` on host memory.

    Attributes:
        bound: what is bound to multicast objects: (size, memory) by object and offset.
    """

    def __init__(self, total=1 << 40):
        super().__init__()
        self.total, self.used, self.busy = total, 0, False
        self.exportable = self.has_multicast = True
        self.multicast_granule = GRANULE
        self.bound = {}
        self._numbers = itertools.count(1000)
        self._memory = {}  # by handle
        self._mappings = {}  # address -> (size, handle)
        self._reserved = {}  # address -> (size, what was mapped, its size)

    def counts(self):
        """Handles, mappings, reservations, and bytes of the device that are in use."""
        return sum(each.handles for each in self._memory.values()), len(self._mappings), len(self._reserved), self.used

    def granularity(self):
        return GRANULE

    def reserve(self, nbytes, alignment):
        self._check(nbytes % GRANULE == 0 and nbytes < 1 << 46, OUT_OF_MEMORY)
        size = nbytes + alignment
        ptr = _libc.mmap(None, size, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
        self._check(ptr != _FAILED, OUT_OF_MEMORY)
        base = -(-ptr // alignment) * alignment
        self._reserved[base] = nbytes, ptr, size
        return base

    def unreserve(self, ptr, nbytes):
        self._check(self._reserved.get(ptr, (0,))[0] == nbytes)
        self._check(not any(ptr <= at < ptr + nbytes for at in self._mappings))
        _, mapped, size = self._reserved.pop(ptr)
        assert _libc.munmap(mapped, size) == 0

    def create(self, nbytes):
        self._check(nbytes > 0 and nbytes % GRANULE == 0)
        self._check(self.used + nbytes <= self.total, OUT_OF_MEMORY)
        fd = os.memfd_create("fake-vmm")
        os.ftruncate(fd, nbytes)
        self.used += nbytes
        return self._handle(_Memory(fd, nbytes, nbytes))

    def release(self, handle):
        self._check(not any(each == handle for each, _ in self.bound))
        self._held(handle).handles -= 1
        self._let_go(handle)

    def retain(self, ptr):
        handle = self._mapping(ptr)[2]
        self._memory[handle].handles += 1
        return handle

    def export_fd(self, handle):
        self._check(self.exportable, NOT_SUPPORTED)
        return os.dup(self._held(handle).fd)

    def import_fd(self, fd):
        return self._handle(_Memory(os.dup(fd), os.fstat(fd).st_size, 0))

    # An object's file counts the devices, for all processes.
    def multicast_granularity(self, num_devices, nbytes):
        if not self.has_multicast:
            raise UnsupportedError("this device does not support multicast")
        return self.multicast_granule

    def create_multicast(self, num_devices, nbytes):
        self._check(nbytes % self.multicast_granule == 0)
        fd = os.memfd_create("fake-vmm-multicast")
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, bytes([num_devices, 0]), 0)
        return self._handle(_Memory(fd, nbytes, 0))

    def add_device(self, multicast):
        fd = self._held(multicast).fd
        with _adding:
            wanted, added = os.pread(fd, 2, 0)
            self._check(added < wanted)
            os.pwrite(fd, bytes([wanted, added + 1]), 0)

    def bind(self, multicast, offset, nbytes, handle):
        self._check_complete(multicast)
        self._check(offset % self.multicast_granule == nbytes % self.multicast_granule == 0)
        self._check(nbytes <= self._held(handle).nbytes)
        self._check(offset + nbytes <= self._held(multicast).nbytes)
        ends = [(at, at + size) for (object_, at), (size, _) in self.bound.items() if object_ == multicast]
        self._check(all(end <= offset or offset + nbytes <= at for at, end in ends))
        self.bound[multicast, offset] = nbytes, handle
        self._memory[handle].mappings += 1

    def unbind(self, multicast, offset, nbytes):
        self._held(multicast)
        self._check(self.bound.get((multicast, offset), (0,))[0] == nbytes)
        _, handle = self.bound.pop((multicast, offset))
        self._memory[handle].mappings -= 1
        self._let_go(handle)

    def _check_complete(self, multicast):
        """A real driver waits here; nothing may ever come to that."""
        wanted, added = os.pread(self._held(multicast).fd, 2, 0)
        self._check(wanted == added > 0)

    def memory_info(self):
        return self.total - self.used, self.total

    def map(self, ptr, nbytes, handle):
        memory = self._held(handle)
        self._check(ptr % GRANULE == 0 and nbytes % GRANULE == 0 and 0 < nbytes <= memory.nbytes)
        if "multicast" in os.readlink(f"/proc/self/fd/{memory.fd}"):
            self._check_complete(handle)
        self._check(any(base <= ptr and ptr + nbytes <= base + size for base, (size, _, _) in self._reserved.items()))
        self._check(all(at + size <= ptr or ptr + nbytes <= at for at, (size, _) in self._mappings.items()))
        assert _libc.mmap(ptr, nbytes, _NONE, _SHARED | _FIXED, memory.fd, 0) == ptr
        self._mappings[ptr] = nbytes, handle
        memory.mappings += 1

    def unmap(self, ptr, nbytes):
        self._check(self._mappings.get(ptr, (0,))[0] == nbytes)
        assert _libc.mmap(ptr, nbytes, _NONE, _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED, -1, 0) == ptr
        _, handle = self._mappings.pop(ptr)
        self._memory[handle].mappings -= 1
        self._let_go(handle)

    def set_access(self, ptr, nbytes):
        reached = ptr
        while reached < ptr + nbytes:
            self._check(reached in self._mappings)
            reached += self._mappings[reached][0]
        self._check(reached == ptr + nbytes)
        assert _libc.mprotect(ptr, nbytes, _READ_WRITE) == 0

    def address_range(self, ptr):
        return self._mapping(ptr)[:2]

    def synchronize(self):
        while self.busy:
            time.sleep(0.01)

    def _mapping(self, ptr):
        for base, (nbytes, handle) in self._mappings.items():
            if base <= ptr < base + nbytes:
                return base, nbytes, handle
        raise DriverError(self.calls[-1], *INVALID)

    def _held(self, handle):
        self._check(handle in self._memory and self._memory[handle].handles > 0)
        return self._memory[handle]

    def _handle(self, memory):
        handle = next(self._numbers)
        self._memory[handle] = memory
        return handle

    def _let_go(self, handle):
        memory = self._memory[handle]
        if memory.handles == memory.mappings == 0:
            os.close(memory.fd)
            self.used -= memory.charged
            del self._memory[handle]


def as_tensor(part, device):
    """A tensor that keeps its range alive, which is memory of the host where the device is the CPU."""
    if device != "cpu":
        return torch.as_tensor(part, device=device)
    buffer = (ctypes.c_uint8 * part.nbytes).from_address(part.ptr)
    buffer.part = part
    return torch.frombuffer(buffer, dtype=torch.uint8)


ranges.torch = types.SimpleNamespace(as_tensor=as_tensor)


class _Mark:
    """Lives as long as a tensor's storage."""


class Expandable:
    """Memory as torch's expandable segments have it: pieces of physical memory, one behind the other.

    Attributes:
        last: what the last tensor's storage keeps alive.
    """

    def __init__(self, driver, *sizes):
        self.driver, self.nbytes = driver, sum(sizes)
        self.last = None
        self.base = driver.reserve(self.nbytes, GRANULE)
        starts = itertools.accumulate(sizes, initial=self.base)
        self.pieces = [(ptr, size, driver.create(size)) for ptr, size in zip(starts, sizes, strict=False)]
        for piece in self.pieces:
            driver.map(*piece)
        driver.set_access(self.base, self.nbytes)

    def tensor(self, start, shape, dtype=torch.float32):
        """A tensor that begins `start` bytes behind the beginning."""
        self.last = buffer = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(self.base + start)
        buffer.mark = _Mark()
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def close(self):
        """Give everything back, as torch does under memory pressure."""
        for ptr, size, handle in self.pieces:
            self.driver.unmap(ptr, size)
            self.driver.release(handle)
        self.driver.unreserve(self.base, self.nbytes)


def make_importable(allocator, nbytes):
    """Bytes over the border of two pieces, for the kit; they stay for good."""
    return Expandable(allocator._driver, GRANULE, GRANULE).tensor(GRANULE - 4096, (nbytes,), torch.uint8)
