"""Stand-ins for cuda.bindings.driver and for hip-python's module, on the pretended drivers.

They take and return what the real bindings do: result codes first, handles as objects, descriptions as structures.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
import types
from typing import TYPE_CHECKING, Any

from iris_core.errors import DriverError

from .fake_driver import INVALID

if TYPE_CHECKING:
    from .fake_driver import FakeVmm
    from .fake_ipc import FakeIpc

DEVICE = 3
CONTEXT = "primary context"


class Handle:
    """A handle as the bindings return it: an object that is not equal to another one of the same number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __int__(self) -> int:
        return self.number


class _Structure(types.SimpleNamespace):
    """A structure whose nested ones exist from the beginning."""

    def __init__(self) -> None:
        super().__init__(location=types.SimpleNamespace())


class _CudaIpcHandle:
    """Takes 64 bytes and no fewer."""

    def __init__(self) -> None:
        self._reserved = bytes(64)

    @property
    def reserved(self) -> bytes:
        return self._reserved

    @reserved.setter
    def reserved(self, value: bytes) -> None:
        if len(value) != 64:
            raise ValueError("reserved length must be 64")
        self._reserved = bytes(value)


class _HipIpcHandle:
    """Has an address, where the driver writes."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * 64)()

    def __int__(self) -> int:
        return ctypes.addressof(self.memory)


class _HipProperties(_Structure):
    """Has an address, where the kind of handle is written behind the first four bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = (ctypes.c_uint32 * 8)()

    def __int__(self) -> int:
        return ctypes.addressof(self.memory)


def _enum(name: str, **members: int) -> type[enum.IntEnum]:
    return enum.IntEnum(name, members)


def _results(codes: type[enum.IntEnum]) -> Any:
    """Turns a function that raises DriverError into one that returns (code, value ...)."""

    def wrap(name: str, function: Any) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            try:
                value = function(*args)
            except DriverError as e:
                return codes(e.code), None
            return (codes(0), *(value if isinstance(value, tuple) else () if value is None else (value,)))

        call.__name__ = name
        return call

    return wrap


def cuda_driver(vmm: FakeVmm, attributes: dict[str, int], ipc: FakeIpc | None = None) -> types.ModuleType:
    """cuda.bindings.driver on a pretended driver, for device 3; addresses are those of `ipc`, where that is given."""
    m = types.ModuleType("cuda.bindings.driver")
    codes = _enum("CUresult", CUDA_SUCCESS=0, CUDA_ERROR_INVALID_VALUE=1, CUDA_ERROR_OUT_OF_MEMORY=2, UNSUPPORTED=801)
    current: list[Any] = []
    m.CUresult = codes
    m.CUmemAllocationHandleType = _enum("CUmemAllocationHandleType", CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    m.CUmemLocationType = _enum("CUmemLocationType", CU_MEM_LOCATION_TYPE_DEVICE=1)
    m.CUmemAllocationType = _enum("CUmemAllocationType", CU_MEM_ALLOCATION_TYPE_PINNED=1)
    m.CUmemAccess_flags = _enum("CUmemAccess_flags", CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    m.CUmemAllocationGranularity_flags = _enum("Granularity", CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    m.CUdevice_attribute = _enum(
        "CUdevice_attribute",
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    )
    m.CUmemLocation, m.CUmemAllocationProp, m.CUmemAccessDesc = types.SimpleNamespace, _Structure, _Structure

    def check_location(location: Any) -> None:
        assert (location.type, location.id) == (1, DEVICE)

    def check_properties(properties: Any) -> None:
        assert (properties.type, properties.requestedHandleTypes) == (1, 1)
        check_location(properties.location)

    def create(nbytes: int, properties: Any, flags: int) -> Handle:
        check_properties(properties)
        return Handle(vmm.create(nbytes))

    def granularity(properties: Any, option: Any) -> int:
        check_properties(properties)
        assert option == 0
        return vmm.granularity()

    def set_access(ptr: int, nbytes: int, descriptions: list[Any], count: int) -> None:
        (description,) = descriptions
        assert (count, description.flags) == (1, 3)
        check_location(description.location)
        vmm.set_access(ptr, nbytes)

    def in_context(function: Any) -> Any:
        def call(*args: Any) -> Any:
            assert current == [CONTEXT], "a context is needed, and no more than one pushed"
            return function(*args)

        return call

    functions = {
        "cuInit": lambda flags: None,
        "cuDeviceGet": lambda index: index,
        "cuDeviceGetAttribute": lambda attribute, device: attributes.get(attribute.name, 1),
        "cuDevicePrimaryCtxRetain": lambda device: CONTEXT if device == DEVICE else None,
        "cuCtxPushCurrent": lambda context: current.append(context),
        "cuCtxPopCurrent": lambda: current.pop(),
        "cuCtxSynchronize": in_context(vmm.synchronize),
        "cuMemGetAllocationGranularity": granularity,
        "cuMemAddressReserve": lambda nbytes, alignment, addr, flags: Handle(vmm.reserve(nbytes, alignment)),
        "cuMemAddressFree": vmm.unreserve,
        "cuMemCreate": create,
        "cuMemRelease": vmm.release,
        "cuMemMap": lambda ptr, nbytes, offset, handle, flags: vmm.map(ptr, nbytes, handle),
        "cuMemUnmap": vmm.unmap,
        "cuMemSetAccess": set_access,
        "cuMemExportToShareableHandle": lambda handle, kind, flags: vmm.export_fd(handle),
        "cuMemImportFromShareableHandle": lambda fd, kind: Handle(vmm.import_fd(fd)),
        "cuMemRetainAllocationHandle": lambda ptr: Handle(vmm.retain(ptr)),
        "cuMemGetAddressRange": in_context(vmm.address_range),
        "cuMemGetInfo": in_context(vmm.memory_info),
    }
    if ipc is not None:

        def get_handle(ptr: int) -> _CudaIpcHandle:
            handle = _CudaIpcHandle()
            handle.reserved = ipc.ipc_export(ptr)
            return handle

        def open_handle(handle: _CudaIpcHandle, flags: int) -> Handle:
            assert flags == 1
            return Handle(ipc.ipc_open(handle.reserved))

        m.CUipcMemHandle = _CudaIpcHandle
        m.CUipcMem_flags = _enum("CUipcMem_flags", CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
        functions |= {
            "cuMemGetAddressRange": lambda ptr: tuple(map(Handle, ipc.address_range(ptr))),
            "cuIpcGetMemHandle": get_handle,
            "cuIpcOpenMemHandle": open_handle,
            "cuIpcCloseMemHandle": ipc.ipc_close,
        }
    wrap = _results(codes)
    for name, function in functions.items():
        setattr(m, name, wrap(name, function))
    return m


def hip_module(vmm: FakeVmm, attributes: dict[str, int], ipc: FakeIpc | None = None) -> types.ModuleType:
    """hip-python's `hip.hip` on a pretended driver, for device 3; addresses are those of `ipc`, where that is given."""
    m = types.ModuleType("hip.hip")
    codes = _enum("hipError_t", hipSuccess=0, hipErrorInvalidValue=1, hipErrorOutOfMemory=2, hipErrorNotSupported=801)
    current = [0]
    m.hipError_t = codes
    m.hipMemAllocationHandleType = _enum("HandleType", hipMemHandleTypePosixFileDescriptor=1)
    m.hipMemLocationType = _enum("LocationType", hipMemLocationTypeDevice=1)
    m.hipMemAllocationType = _enum("AllocationType", hipMemAllocationTypePinned=1)
    m.hipMemAccessFlags = _enum("AccessFlags", hipMemAccessFlagsProtReadWrite=3)
    m.hipMemAllocationGranularity_flags = _enum("Granularity", hipMemAllocationGranularityMinimum=0)
    m.hipDeviceAttribute_t = _enum("Attribute", hipDeviceAttributeVirtualMemoryManagementSupported=89)
    m.hipMemAllocationProp, m.hipMemAccessDesc = _HipProperties, _Structure

    def check_properties(properties: Any) -> None:
        assert properties.type == 1
        assert list(properties.memory)[1] == 1
        assert (properties.location.type, properties.location.id) == (1, DEVICE)

    def create(nbytes: int, properties: Any, flags: int) -> Handle:
        check_properties(properties)
        return Handle(vmm.create(nbytes))

    def granularity(properties: Any, option: Any) -> int:
        check_properties(properties)
        return vmm.granularity()

    def set_access(ptr: int, nbytes: int, description: Any, count: int) -> None:
        assert (count, description.flags) == (1, 3)
        assert (description.location.type, description.location.id) == (1, DEVICE)
        if not vmm.takes_any_size:
            sums = itertools.accumulate(vmm.sizes_in_reservation(ptr))
            if nbytes not in sums:
                vmm.calls.append("refused")
                raise DriverError("set_access", *INVALID)
        vmm.set_access(ptr, nbytes)

    def export(out: int, handle: int, kind: Any, flags: int) -> None:
        ctypes.c_int.from_address(out).value = vmm.export_fd(handle)

    def on_device(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            assert current == [DEVICE]
            return function(*args)

        return call

    def range_of(ptr: int) -> tuple[Handle, int]:
        base, nbytes = vmm.address_range(ptr)
        return Handle(base), nbytes

    functions = {
        "hipDeviceGetAttribute": lambda attribute, index: attributes.get(attribute.name, 1),
        "hipGetDevice": lambda: current[0],
        "hipSetDevice": lambda index: current.__setitem__(0, index),
        "hipDeviceSynchronize": on_device(vmm.synchronize),
        "hipMemGetAllocationGranularity": granularity,
        "hipMemAddressReserve": lambda nbytes, alignment, addr, flags: Handle(vmm.reserve(nbytes, alignment)),
        "hipMemAddressFree": vmm.unreserve,
        "hipMemCreate": on_device(create),
        "hipMemRelease": vmm.release,
        "hipMemMap": lambda ptr, nbytes, offset, handle, flags: vmm.map(ptr, nbytes, handle),
        "hipMemUnmap": vmm.unmap,
        "hipMemSetAccess": set_access,
        "hipMemExportToShareableHandle": export,
        "hipMemImportFromShareableHandle": on_device(lambda fd, kind: Handle(vmm.import_fd(fd))),
        "hipMemRetainAllocationHandle": lambda ptr: Handle(vmm.retain(ptr)),
        "hipMemGetAddressRange": range_of,
        "hipMemGetInfo": on_device(vmm.memory_info),
    }
    if ipc is not None:

        def get_handle(ptr: int) -> _HipIpcHandle:
            assert ptr == ipc.address_range(ptr)[0], "HIP takes the beginning of an allocation only"
            handle = _HipIpcHandle()
            handle.memory.raw = ipc.ipc_export(ptr)
            return handle

        def open_handle(handle: _HipIpcHandle, flags: int) -> Handle:
            assert flags == 1
            return Handle(ipc.ipc_open(handle.memory.raw))

        m.hipIpcMemHandle_st = _HipIpcHandle
        m.HIP_IPC_HANDLE_SIZE, m.hipIpcMemLazyEnablePeerAccess = 64, 1
        functions |= {
            "hipMemGetAddressRange": lambda ptr: tuple(map(Handle, ipc.address_range(ptr))),
            "hipIpcGetMemHandle": get_handle,
            "hipIpcOpenMemHandle": open_handle,
            "hipIpcCloseMemHandle": ipc.ipc_close,
        }
    wrap = _results(codes)
    for name, function in functions.items():
        setattr(m, name, wrap(name, function))
    return m
