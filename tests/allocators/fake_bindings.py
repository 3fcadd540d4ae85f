"""Stand-ins for cuda.bindings.driver and for hip-python's module, on the pretended drivers.

They take and return what the real bindings do: result codes first, handles as objects, descriptions as structures.
"""

import ctypes
import enum
import functools
import itertools
import types

from iris_core.errors import DriverError

from .fake_driver import GRANULE, INVALID

DEVICE = 3
CONTEXT = "primary context"
IN_DEVICE = {"type": 1, "id": DEVICE}


class Handle:
    """A handle as the bindings return it: an object that is not equal to another one of the same number."""

    def __init__(self, number):
        self.number = number

    def __int__(self):
        return self.number


class _Structure(types.SimpleNamespace):
    """A structure whose nested ones exist from the beginning."""

    def __init__(self):
        super().__init__(location=types.SimpleNamespace())


class _InMemory(_Structure):
    """A structure of HIP's with an address: where an IPC handle is, and the kind of handle behind `type`."""

    def __init__(self):
        super().__init__()
        self.memory = (ctypes.c_char * 64)()

    def __int__(self):
        return ctypes.addressof(self.memory)


class _Recording(types.ModuleType):
    """A module that remembers which of its names were looked up, in `resolved`."""

    def __getattribute__(self, name):
        if name != "resolved":
            self.resolved.add(name)
        return super().__getattribute__(name)


def _returns_codes(codes, name, function):
    """Turn a function that raises DriverError into one that returns (code, value ...)."""

    def call(*args):
        try:
            value = function(*args)
        except DriverError as e:
            return codes(e.code), None
        return (codes(0), *(value if isinstance(value, tuple) else () if value is None else (value,)))

    call.__name__ = name
    return call


def _only(current, wanted, function):
    """A function at whose calls what is current must be what is wanted."""

    def call(*args):
        assert current == wanted, "a context is needed, and no more than one pushed"
        return function(*args)

    return call


def _common(vmm, check):
    """What both vendors call the same but for a prefix; `check` looks at the properties of memory."""

    def create(nbytes, properties, flags):
        check(properties)
        return Handle(vmm.create(nbytes))

    def granularity(properties, option):
        check(properties)
        assert option == 0
        return vmm.granularity()

    def range_of(ptr):
        base, nbytes = vmm.address_range(ptr)
        return Handle(base), nbytes

    return {
        "MemGetAllocationGranularity": granularity,
        "MemAddressReserve": lambda nbytes, alignment, addr, flags: Handle(vmm.reserve(nbytes, alignment)),
        "MemAddressFree": vmm.unreserve,
        "MemCreate": create,
        "MemRelease": vmm.release,
        "MemMap": lambda ptr, nbytes, offset, handle, flags: vmm.map(ptr, nbytes, handle),
        "MemUnmap": vmm.unmap,
        "MemImportFromShareableHandle": lambda fd, kind: Handle(vmm.import_fd(fd)),
        "MemRetainAllocationHandle": lambda ptr: Handle(vmm.retain(ptr)),
        "MemGetAddressRange": range_of,
        "MemGetInfo": vmm.memory_info,
    }


def _of_ipc(ipc, get, content):
    def open_handle(handle, flags):
        assert flags == 1
        return Handle(ipc.ipc_open(content(handle)))

    return {
        "MemGetAddressRange": lambda ptr: tuple(map(Handle, ipc.address_range(ptr))),
        "IpcGetMemHandle": get,
        "IpcOpenMemHandle": open_handle,
        "IpcCloseMemHandle": ipc.ipc_close,
    }


def _module(name, prefix, codes, functions, **enums):
    """A module of functions that return codes, called 0, 1, 2 and 801, and of enumerations."""
    m = types.ModuleType(name)
    result = enum.IntEnum(codes[0], dict(zip(codes[1:], (0, 1, 2, 801), strict=True)))
    setattr(m, codes[0], result)
    for kind, members in enums.items():
        setattr(m, kind, enum.IntEnum(kind, members))
    for each, function in functions.items():
        setattr(m, prefix + each, _returns_codes(result, prefix + each, function))
    return m


def cuda_driver(vmm, attributes, ipc=None):
    """cuda.bindings.driver on a pretended driver, for device 3; addresses are those of `ipc`, where that is given."""
    current = []
    in_context = functools.partial(_only, current, [CONTEXT])

    def check(properties):
        assert (properties.type, properties.requestedHandleTypes) == (1, 1)
        assert vars(properties.location) == IN_DEVICE

    def get_attribute(attribute, device):
        m.resolved.add(attribute.name)
        return attributes.get(attribute.name, 1)

    def multicast(properties, *option):
        assert (properties.handleTypes, properties.size % GRANULE, option in ((), (0,))) == (1, 0, True)
        function = vmm.multicast_granularity if option else vmm.create_multicast
        return function(properties.numDevices, properties.size)

    def bind(handle, offset, memory, start, nbytes, flags):
        assert start == flags == 0
        vmm.bind(int(handle), offset, nbytes, int(memory))

    def set_access(ptr, nbytes, descriptions, count):
        (description,) = descriptions
        assert (count, description.flags, vars(description.location)) == (1, 3, IN_DEVICE)
        vmm.set_access(ptr, nbytes)

    def get_handle(ptr):
        return types.SimpleNamespace(reserved=ipc.ipc_export(ptr))

    functions = _common(vmm, check) | {
        "Init": lambda flags: None,
        "DeviceGet": lambda index: index,
        "DeviceGetAttribute": get_attribute,
        "DevicePrimaryCtxRetain": lambda device: CONTEXT if device == DEVICE else None,
        "CtxPushCurrent": lambda context: current.append(context),
        "CtxPopCurrent": lambda: current.pop(),
        "CtxSynchronize": in_context(vmm.synchronize),
        "MemSetAccess": set_access,
        "MemExportToShareableHandle": lambda handle, kind, flags: vmm.export_fd(handle),
        "MulticastGetGranularity": multicast,
        "MulticastCreate": lambda properties: Handle(multicast(properties)),
        "MulticastAddDevice": lambda handle, device: vmm.add_device(handle) if device == DEVICE else None,
        "MulticastBindMem": bind,
        "MulticastUnbind": lambda handle, device, offset, nbytes: vmm.unbind(handle, offset, nbytes),
    }
    functions |= {name: in_context(functions[name]) for name in ("MemGetAddressRange", "MemGetInfo")}
    functions |= {} if ipc is None else _of_ipc(ipc, get_handle, lambda handle: handle.reserved)
    error = "CUDA_ERROR_"
    codes = "CUresult", "CUDA_SUCCESS", f"{error}INVALID_VALUE", f"{error}OUT_OF_MEMORY", f"{error}NOT_SUPPORTED"
    m = _module(
        "cuda.bindings.driver", "cu", codes, functions,
        CUmemAllocationHandleType={"CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": 1},
        CUmemLocationType={"CU_MEM_LOCATION_TYPE_DEVICE": 1},
        CUmemAllocationType={"CU_MEM_ALLOCATION_TYPE_PINNED": 1},
        CUmemAccess_flags={"CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3},
        CUmemAllocationGranularity_flags={"CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0},
        CUmulticastGranularity_flags={"CU_MULTICAST_GRANULARITY_MINIMUM": 0},
        CUipcMem_flags={"CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": 1},
        CUdevice_attribute={
            "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
            "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 103,
            "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED": 132,
        },
    )  # fmt: skip
    m.CUmemLocation, m.CUmemAllocationProp, m.CUmemAccessDesc = types.SimpleNamespace, _Structure, _Structure
    m.CUipcMemHandle, m.CUmulticastObjectProp = types.SimpleNamespace, types.SimpleNamespace
    m.resolved = set()
    m.__class__ = _Recording
    return m


def hip_module(vmm, attributes, ipc=None):
    """hip-python's `hip.hip` on a pretended driver, for device 3; addresses are those of `ipc`, where that is given."""
    current = [0]
    on_device = functools.partial(_only, current, [DEVICE])

    def check(properties):
        kind = (ctypes.c_uint32 * 2).from_buffer(properties.memory)[1]
        assert (properties.type, kind, vars(properties.location)) == (1, 1, IN_DEVICE)

    def set_access(ptr, nbytes, description, count):
        assert (count, description.flags, vars(description.location)) == (1, 3, IN_DEVICE)
        if not vmm.takes_any_size and nbytes not in itertools.accumulate(vmm.sizes_in_reservation(ptr)):
            vmm.calls.append("refused")
            raise DriverError("set_access", *INVALID)
        vmm.set_access(ptr, nbytes)

    def export(out, handle, kind, flags):
        ctypes.c_int.from_address(out).value = vmm.export_fd(handle)

    def get_handle(ptr):
        assert ptr == ipc.address_range(ptr)[0], "HIP takes the beginning of an allocation only"
        handle = _InMemory()
        handle.memory.raw = ipc.ipc_export(ptr)
        return handle

    functions = _common(vmm, check) | {
        "DeviceGetAttribute": lambda attribute, index: attributes.get(attribute.name, 1),
        "GetDevice": lambda: current[0],
        "SetDevice": lambda index: current.__setitem__(0, index),
        "DeviceSynchronize": on_device(vmm.synchronize),
        "MemSetAccess": set_access,
        "MemExportToShareableHandle": export,
    }
    needing = "MemCreate", "MemImportFromShareableHandle", "MemGetInfo"
    functions |= {name: on_device(functions[name]) for name in needing}
    functions |= {} if ipc is None else _of_ipc(ipc, get_handle, lambda handle: handle.memory.raw)
    codes = "hipError_t", "hipSuccess", "hipErrorInvalidValue", "hipErrorOutOfMemory", "hipErrorNotSupported"
    m = _module(
        "hip.hip", "hip", codes, functions,
        hipMemAllocationHandleType={"hipMemHandleTypePosixFileDescriptor": 1},
        hipMemLocationType={"hipMemLocationTypeDevice": 1},
        hipMemAllocationType={"hipMemAllocationTypePinned": 1},
        hipMemAccessFlags={"hipMemAccessFlagsProtReadWrite": 3},
        hipMemAllocationGranularity_flags={"hipMemAllocationGranularityMinimum": 0},
        hipDeviceAttribute_t={"hipDeviceAttributeVirtualMemoryManagementSupported": 89},
    )  # fmt: skip
    m.hipMemAllocationProp, m.hipMemAccessDesc, m.hipIpcMemHandle_st = _InMemory, _Structure, _InMemory
    m.HIP_IPC_HANDLE_SIZE, m.hipIpcMemLazyEnablePeerAccess = 64, 1
    return m
