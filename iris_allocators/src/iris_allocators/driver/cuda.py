"""NVIDIA's driver, through cuda-bindings (which torch's CUDA wheels bring)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver

from iris_allocators.driver import IpcDriver, Library, VmmDriver
from iris_core.errors import UnsupportedError

_library = Library(driver, "cu", driver.CUresult.CUDA_SUCCESS)
_ATTRIBUTE = driver.CUdevice_attribute
_NEEDED = {
    "virtual memory management": _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    "sharing memory by file descriptor": _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
}


class Ipc(IpcDriver):
    """Needs a current context (any torch call on the device makes one)."""

    _call = _library

    def ipc_export(self, ptr: int) -> bytes:
        return bytes(_library("IpcGetMemHandle", ptr).reserved)

    def ipc_open(self, handle: bytes) -> int:
        wrapped = driver.CUipcMemHandle()
        wrapped.reserved = handle
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(_library("IpcOpenMemHandle", wrapped, flags))


class Vmm(VmmDriver):
    """Virtual memory management of a GPU, by its index as torch and CUDA_VISIBLE_DEVICES number it."""

    _call = _library
    _fd = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    _smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    _anywhere = 0
    _synchronize = "CtxSynchronize"

    def __init__(self, index: int) -> None:
        _library("Init", 0)
        device = _library("DeviceGet", index)
        for what, attribute in _NEEDED.items():
            if not _library("DeviceGetAttribute", attribute, device):
                raise UnsupportedError(f"cuda:{index} or its driver does not support {what}; use allocator='torch'")
        self._index, self._device = index, device
        self._context = _library("DevicePrimaryCtxRetain", device)  # to the end of the process, as torch does
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = self._fd
        self._properties.location = location
        access = driver.CUmemAccessDesc()
        access.location = location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = [access]

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        _library("CtxPushCurrent", self._context)
        try:
            yield
        finally:
            _library("CtxPopCurrent")

    def _multicast(self, num_devices: int, nbytes: int) -> Any:
        if not _library("DeviceGetAttribute", _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, self._device):
            raise UnsupportedError(
                f"cuda:{self._index} or its driver does not support multicast: unset IRIS_VMEM__MULTICAST"
            )
        properties = driver.CUmulticastObjectProp()
        properties.numDevices, properties.size = num_devices, nbytes
        properties.handleTypes = int(self._fd)
        return properties

    def multicast_granularity(self, num_devices: int, nbytes: int) -> int:
        smallest = driver.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        return int(_library("MulticastGetGranularity", self._multicast(num_devices, nbytes), smallest))

    def create_multicast(self, num_devices: int, nbytes: int) -> int:
        return int(_library("MulticastCreate", self._multicast(num_devices, nbytes)))
