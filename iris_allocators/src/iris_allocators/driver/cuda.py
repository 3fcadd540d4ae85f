"""NVIDIA's driver, through cuda-bindings (which torch's CUDA wheels bring)."""

from __future__ import annotations

import functools
from typing import Any

from cuda.bindings import driver

from iris_core.errors import DriverError, UnsupportedError


def _call(function: Any, *args: Any) -> Any:
    """Call a driver function and return what it returns behind its result code."""
    code, *values = function(*args)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(function.__name__, int(code), code.name)
    return values[0] if len(values) == 1 else tuple(values)


class CudaDriver:
    """Implements `IpcDriver`; needs a current context (any torch call on the device makes one)."""

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the allocation that `ptr` lies in."""
        base, nbytes = _call(driver.cuMemGetAddressRange, ptr)
        return int(base), int(nbytes)

    def ipc_export(self, ptr: int) -> bytes:
        """Return the handle of the whole allocation that `ptr` lies in."""
        handle = _call(driver.cuIpcGetMemHandle, ptr)
        return bytes(handle.reserved)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; returns the address of its beginning."""
        wrapped = driver.CUipcMemHandle()
        wrapped.reserved = handle
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(_call(driver.cuIpcOpenMemHandle, wrapped, flags))

    def ipc_close(self, base_ptr: int) -> None:
        """Undo `ipc_open`."""
        _call(driver.cuIpcCloseMemHandle, base_ptr)


_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ATTRIBUTE = driver.CUdevice_attribute
_NEEDED = {
    "virtual memory management": _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    "sharing memory by file descriptor": _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
}


@functools.cache
def _primary_context(device: int) -> Any:
    """The context that torch uses too; retained once, to the end of the process, as torch does."""
    return _call(driver.cuDevicePrimaryCtxRetain, device)


class CudaVmm:
    """Implements `VmmDriver`.

    Args:
        index: the device's index, as torch and CUDA_VISIBLE_DEVICES number it.

    Raises:
        UnsupportedError: the device or its driver lacks virtual memory management.
        DriverError: the driver does not start.
    """

    def __init__(self, index: int) -> None:
        _call(driver.cuInit, 0)
        self._device = _call(driver.cuDeviceGet, index)
        for what, attribute in _NEEDED.items():
            if not _call(driver.cuDeviceGetAttribute, attribute, self._device):
                raise UnsupportedError(f"cuda:{index} or its driver does not support {what}; use allocator='torch'")
        self._context = _primary_context(int(self._device))
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = _FD
        self._properties.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def granularity(self) -> int:
        """Return the smallest piece of physical memory in bytes."""
        option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(_call(driver.cuMemGetAllocationGranularity, self._properties, option))

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve addresses."""
        return int(_call(driver.cuMemAddressReserve, nbytes, alignment, 0, 0))

    def unreserve(self, ptr: int, nbytes: int) -> None:
        """Undo `reserve`."""
        _call(driver.cuMemAddressFree, ptr, nbytes)

    def create(self, nbytes: int) -> int:
        """Create physical memory on this device; returns its handle."""
        return int(_call(driver.cuMemCreate, nbytes, self._properties, 0))

    def release(self, handle: int) -> None:
        """Let go of a handle."""
        _call(driver.cuMemRelease, handle)

    def map(self, ptr: int, nbytes: int, handle: int) -> None:
        """Map physical memory at reserved addresses."""
        _call(driver.cuMemMap, ptr, nbytes, 0, handle, 0)

    def unmap(self, ptr: int, nbytes: int) -> None:
        """Undo `map`."""
        _call(driver.cuMemUnmap, ptr, nbytes)

    def set_access(self, ptr: int, nbytes: int) -> None:
        """Let this device read and write a mapped range."""
        _call(driver.cuMemSetAccess, ptr, nbytes, [self._access], 1)

    def export_fd(self, handle: int) -> int:
        """Return a new file descriptor for physical memory."""
        return int(_call(driver.cuMemExportToShareableHandle, handle, _FD, 0))

    def import_fd(self, fd: int) -> int:
        """Return a handle of another process's physical memory."""
        return int(_call(driver.cuMemImportFromShareableHandle, fd, _FD))

    def retain(self, ptr: int) -> int:
        """Return one more reference to the handle that is mapped at `ptr`."""
        return int(_call(driver.cuMemRetainAllocationHandle, ptr))

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the mapping that `ptr` lies in."""
        with _Current(self._context):
            base, nbytes = _call(driver.cuMemGetAddressRange, ptr)
        return int(base), int(nbytes)

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        with _Current(self._context):
            free, total = _call(driver.cuMemGetInfo)
        return int(free), int(total)

    def synchronize(self) -> None:
        """Wait until the device has finished everything."""
        with _Current(self._context):
            _call(driver.cuCtxSynchronize)


class _Current:
    """Makes a context the current one of this thread inside the block."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        _call(driver.cuCtxPushCurrent, self._context)

    def __exit__(self, *exc: object) -> None:
        _call(driver.cuCtxPopCurrent)
