"""AMD's driver, through hip-python (the extra `rocm`).

Compiled, not run: no AMD GPU was at hand.  The calls are tested against a stand-in for the module `hip`, and their
arguments compared with the real one where that is installed (it can be imported without a GPU).
"""

from __future__ import annotations

import ctypes
from typing import Any

from hip import hip  # type: ignore[import-not-found]

from iris_core.errors import DriverError, UnsupportedError

_FD = hip.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor
# hip-python has no name for the union in hipMemAllocationProp that follows `type`, an enum of four bytes.
_HANDLE_TYPE_OFFSET = 4


def _call(function: Any, *args: Any) -> Any:
    """Call a runtime function and return what it returns behind its result code."""
    code, *values = function(*args)
    if code != hip.hipError_t.hipSuccess:
        raise DriverError(function.__name__, int(code), code.name)
    return values[0] if len(values) == 1 else tuple(values)


class HipDriver:
    """Implements `IpcDriver`; works on the current device (any torch call on it makes it so)."""

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the allocation that `ptr` lies in."""
        base, nbytes = _call(hip.hipMemGetAddressRange, ptr)
        return int(base), int(nbytes)

    def ipc_export(self, ptr: int) -> bytes:
        """Return the handle of the whole allocation that `ptr` lies in."""
        base, _ = self.address_range(ptr)  # HIP takes the address of its beginning only
        handle = _call(hip.hipIpcGetMemHandle, base)
        return ctypes.string_at(int(handle), hip.HIP_IPC_HANDLE_SIZE)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; returns the address of its beginning."""
        wrapped = hip.hipIpcMemHandle_st()
        ctypes.memmove(int(wrapped), handle, hip.HIP_IPC_HANDLE_SIZE)
        return int(_call(hip.hipIpcOpenMemHandle, wrapped, hip.hipIpcMemLazyEnablePeerAccess))

    def ipc_close(self, base_ptr: int) -> None:
        """Undo `ipc_open`."""
        _call(hip.hipIpcCloseMemHandle, base_ptr)


class HipVmm:
    """Implements `VmmDriver`.

    Args:
        index: the device's index, as torch and HIP_VISIBLE_DEVICES number it.

    Raises:
        UnsupportedError: the device or its driver lacks virtual memory management.
        DriverError: the runtime does not start.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        supported = hip.hipDeviceAttribute_t.hipDeviceAttributeVirtualMemoryManagementSupported
        if not _call(hip.hipDeviceGetAttribute, supported, index):
            raise UnsupportedError(f"GPU {index} or its driver does not support virtual memory management")
        device = hip.hipMemLocationType.hipMemLocationTypeDevice
        self._properties = hip.hipMemAllocationProp()
        self._properties.type = hip.hipMemAllocationType.hipMemAllocationTypePinned
        self._properties.location.type = device
        self._properties.location.id = index
        field = ctypes.c_uint32.from_address(int(self._properties) + _HANDLE_TYPE_OFFSET)
        field.value = int(_FD)
        self._access = hip.hipMemAccessDesc()
        self._access.location.type = device
        self._access.location.id = index
        self._access.flags = hip.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
        self._reserved: dict[int, int] = {}  # sizes by address; see `set_access`
        self._mapped: dict[int, int] = {}

    def granularity(self) -> int:
        """Return the smallest piece of physical memory in bytes."""
        option = hip.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum
        return int(_call(hip.hipMemGetAllocationGranularity, self._properties, option))

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve addresses."""
        ptr = int(_call(hip.hipMemAddressReserve, nbytes, alignment, None, 0))
        self._reserved[ptr] = nbytes
        return ptr

    def unreserve(self, ptr: int, nbytes: int) -> None:
        """Undo `reserve`."""
        _call(hip.hipMemAddressFree, ptr, nbytes)
        self._reserved.pop(ptr, None)

    def create(self, nbytes: int) -> int:
        """Create physical memory on this device; returns its handle."""
        with _Current(self._index):
            return int(_call(hip.hipMemCreate, nbytes, self._properties, 0))

    def release(self, handle: int) -> None:
        """Let go of a handle."""
        _call(hip.hipMemRelease, handle)

    def map(self, ptr: int, nbytes: int, handle: int) -> None:
        """Map physical memory at reserved addresses."""
        _call(hip.hipMemMap, ptr, nbytes, 0, handle, 0)
        self._mapped[ptr] = nbytes

    def unmap(self, ptr: int, nbytes: int) -> None:
        """Undo `map`."""
        _call(hip.hipMemUnmap, ptr, nbytes)
        self._mapped.pop(ptr, None)

    def set_access(self, ptr: int, nbytes: int) -> None:
        """Let this device read and write a mapped range.

        ROCm 7.0 to 7.2 take a size only if it is the sum of the first so many mappings of the reservation, in an order
        of their own and wherever `ptr` points (ROCm/rocm-systems issue 2667; mended by pull request 2451, in ROCm
        7.14).  The check comes before any effect, so what is refused is tried again cumulatively, from the beginning
        of the mappings that lead up to the range without a gap, to the range's end and to theirs: if these are all
        that there are, the sum is right in every order.  Mappings of one size, as the heap's own, are always right.
        """
        refused: DriverError | None = None
        for start, size in self._wider(ptr, nbytes):
            try:
                _call(hip.hipMemSetAccess, start, size, self._access, 1)
            except DriverError as e:
                if e.name != hip.hipError_t.hipErrorInvalidValue.name:
                    raise
                refused = refused or e
            else:
                return
        if refused is not None:
            raise refused

    def _wider(self, ptr: int, nbytes: int) -> list[tuple[int, int]]:
        """A range, and the larger ones without a gap that hold it: from their beginning, then to their end, too."""
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
        """Return a new file descriptor for physical memory."""
        fd = ctypes.c_int(-1)
        _call(hip.hipMemExportToShareableHandle, ctypes.addressof(fd), handle, _FD, 0)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """Return a handle of another process's physical memory."""
        with _Current(self._index):
            return int(_call(hip.hipMemImportFromShareableHandle, fd, _FD))

    def retain(self, ptr: int) -> int:
        """Return one more reference to the handle that is mapped at `ptr`."""
        return int(_call(hip.hipMemRetainAllocationHandle, ptr))

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the mapping that `ptr` lies in."""
        base, nbytes = _call(hip.hipMemGetAddressRange, ptr)
        return int(base), int(nbytes)

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        with _Current(self._index):
            free, total = _call(hip.hipMemGetInfo)
        return int(free), int(total)

    def synchronize(self) -> None:
        """Wait until the device has finished everything."""
        with _Current(self._index):
            _call(hip.hipDeviceSynchronize)


class _Current:
    """Makes a device the current one of this thread inside the block."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._before = index

    def __enter__(self) -> None:
        self._before = int(_call(hip.hipGetDevice))
        _call(hip.hipSetDevice, self._index)

    def __exit__(self, *exc: object) -> None:
        _call(hip.hipSetDevice, self._before)
