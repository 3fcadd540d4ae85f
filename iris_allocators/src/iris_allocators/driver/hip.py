"""AMD's driver, through hip-python (the extra `rocm`).

Compiled, not run: no AMD GPU was at hand.  The calls are tested against a stand-in for the module `hip`, and their
arguments compared with the real one where that is installed (it can be imported without a GPU).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from hip import hip  # type: ignore[import-not-found]

from iris_allocators.driver import IpcDriver, Library, VmmDriver
from iris_core.errors import DriverError, UnsupportedError

_library = Library(hip, "hip", hip.hipError_t.hipSuccess)
# hip-python has no name for the union in hipMemAllocationProp that follows `type`, an enum of four bytes.
_HANDLE_TYPE_OFFSET = 4


class Ipc(IpcDriver):
    """Works on the current device (any torch call on it makes it so)."""

    _call = _library

    def ipc_export(self, ptr: int) -> bytes:
        base, _ = self.address_range(ptr)  # HIP takes the address of its beginning only
        handle = _library("IpcGetMemHandle", base)  # owns the memory that is read
        return ctypes.string_at(int(handle), hip.HIP_IPC_HANDLE_SIZE)

    def ipc_open(self, handle: bytes) -> int:
        wrapped = hip.hipIpcMemHandle_st()
        ctypes.memmove(int(wrapped), handle, hip.HIP_IPC_HANDLE_SIZE)
        return int(_library("IpcOpenMemHandle", wrapped, hip.hipIpcMemLazyEnablePeerAccess))


class Vmm(VmmDriver):
    """Virtual memory management of a GPU, by its index as torch and HIP_VISIBLE_DEVICES number it."""

    _call = _library
    _fd = hip.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor
    _smallest = hip.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum
    _anywhere = None
    _synchronize = "DeviceSynchronize"

    def __init__(self, index: int) -> None:
        self._index = index
        supported = hip.hipDeviceAttribute_t.hipDeviceAttributeVirtualMemoryManagementSupported
        if not _library("DeviceGetAttribute", supported, index):
            raise UnsupportedError(f"GPU {index} or its driver does not support virtual memory management")
        device = hip.hipMemLocationType.hipMemLocationTypeDevice
        self._properties = hip.hipMemAllocationProp()
        self._properties.type = hip.hipMemAllocationType.hipMemAllocationTypePinned
        self._properties.location.type = device
        self._properties.location.id = index
        field = ctypes.c_uint32.from_address(int(self._properties) + _HANDLE_TYPE_OFFSET)
        field.value = int(self._fd)
        self._access = hip.hipMemAccessDesc()
        self._access.location.type = device
        self._access.location.id = index
        self._access.flags = hip.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
        self._reserved: dict[int, int] = {}  # sizes by address; see `set_access`
        self._mapped: dict[int, int] = {}

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        before = int(_library("GetDevice"))
        _library("SetDevice", self._index)
        try:
            yield
        finally:
            _library("SetDevice", before)

    def reserve(self, nbytes: int, alignment: int) -> int:
        ptr = super().reserve(nbytes, alignment)
        self._reserved[ptr] = nbytes
        return ptr

    def unreserve(self, ptr: int, nbytes: int) -> None:
        super().unreserve(ptr, nbytes)
        self._reserved.pop(ptr, None)

    def map(self, ptr: int, nbytes: int, handle: int) -> None:
        super().map(ptr, nbytes, handle)
        self._mapped[ptr] = nbytes

    def unmap(self, ptr: int, nbytes: int) -> None:
        super().unmap(ptr, nbytes)
        self._mapped.pop(ptr, None)

    def set_access(self, ptr: int, nbytes: int) -> None:
        """Let this device read and write a mapped range.

        ROCm 7.0 to 7.2 accept a size only if it is the sum of the first n mappings of the reservation, for some n, in
        ROCm's own order and wherever `ptr` points (ROCm/rocm-systems issue 2667; fixed by pull request 2451, in ROCm
        7.14).  The check precedes any effect, so a refused range is retried with larger ones: from the beginning of
        the mappings that adjoin it without a gap, to its end and then to theirs.  If these are all mappings of the
        reservation, the sum is right in every order.  Mappings of equal size, as the heap's own, always work.
        """
        refused: DriverError | None = None
        for start, size in self._wider(ptr, nbytes):
            try:
                super().set_access(start, size)
            except DriverError as e:
                if e.name != hip.hipError_t.hipErrorInvalidValue.name:
                    raise
                refused = refused or e
            else:
                return
        if refused is not None:
            raise refused

    def _wider(self, ptr: int, nbytes: int) -> list[tuple[int, int]]:
        """Return a range, then the larger ones without a gap that hold it: from their beginning, then to their end."""
        start, end = ptr, ptr + nbytes
        within = [
            (at, at + size)
            for at, size in sorted(self._mapped.items())
            for base, reserved in self._reserved.items()
            if base <= at < base + reserved and base <= ptr < base + reserved
        ]
        first, last = start, end
        for at, stop in reversed(within):
            first = at if stop == first else first
        for at, stop in within:
            last = stop if at == last else last
        ranges = [(start, end), (first, end), (first, last)]
        return [(a, b - a) for a, b in dict.fromkeys(ranges)]

    def export_fd(self, handle: int) -> int:
        fd = ctypes.c_int(-1)
        _library("MemExportToShareableHandle", ctypes.addressof(fd), handle, self._fd, 0)
        return fd.value
