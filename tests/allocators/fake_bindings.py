"""Stand-ins for cuda.bindings.driver and for hip-python's module, on the pretended drivers.

They take and return what the real bindings do: result codes first, handles as objects, descriptions as structures.
Constants and structures are mocks, each of which is the same whenever it is looked up.
"""

import ctypes
import enum
import functools
import itertools
from unittest.mock import MagicMock

from iris_core.errors import DriverError

from .fake_driver import GRANULE, INVALID

DEVICE = 3
CONTEXT = "primary context"


class Handle:
    """A handle as the bindings return it: an object that is not equal to another one of the same number."""

    def __init__(self, number):
        self.number = number

    def __int__(self):
        return self.number


def _in_memory():
    """A structure of HIP's with an address: where an IPC handle is, and the kind of handle behind `type`."""
    made = MagicMock(memory=(ctypes.c_char * 64)())
    made.__int__.return_value = ctypes.addressof(made.memory)
    return made


def _only(current, wanted, function):
    """A function at whose calls what is current must be what is wanted."""

    def call(*args):
        assert current == wanted, "a context is needed, and no more than one pushed"
        return function(*args)

    return call


def _common(vmm, check, smallest):
    """What both vendors call the same but for a prefix; `check` looks at the properties of memory."""

    def create(nbytes, properties, flags):
        check(properties)
        return Handle(vmm.create(nbytes))

    def granularity(properties, option):
        check(properties)
        assert option is smallest()
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
    return {
        "MemGetAddressRange": lambda ptr: tuple(map(Handle, ipc.address_range(ptr))),
        "IpcGetMemHandle": get,
        "IpcOpenMemHandle": lambda handle, flags: Handle(ipc.ipc_open(content(handle, flags))),
        "IpcCloseMemHandle": ipc.ipc_close,
    }


def _add(m, prefix, names, functions):
    """Give a module functions that return one of four codes, 0, 1, 2 and 801, before what they return."""
    codes = enum.IntEnum(names[0], dict(zip(names[1:], (0, 1, 2, 801), strict=True)))
    setattr(m, names[0], codes)

    def call(name, function, *args):
        m.called.append(name)
        try:
            value = function(*args)
        except DriverError as e:
            return codes(e.code), None
        return (codes(0), *(value if isinstance(value, tuple) else () if value is None else (value,)))

    for name, function in functions.items():
        setattr(m, prefix + name, functools.partial(call, name, function))


def cuda_driver(vmm, lacking=(), ipc=None):
    """cuda.bindings.driver on a pretended driver, for device 3; addresses are those of `ipc`, where that is given."""
    m, current = MagicMock(called=[]), []
    in_context = functools.partial(_only, current, [CONTEXT])

    def check_location(location):
        assert (location.type, location.id) == (m.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, DEVICE)

    def check(properties):
        assert properties.type is m.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kinds = m.CUmemAllocationHandleType
        assert properties.requestedHandleTypes is kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        check_location(properties.location)

    def multicast(function, properties, *option):
        smallest = m.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        assert option == (smallest,) * (function == vmm.multicast_granularity)
        assert (properties.handleTypes, properties.size % GRANULE) == (1, 0)
        return function(properties.numDevices, properties.size)

    def bind(handle, offset, memory, start, nbytes, flags):
        assert start == flags == 0
        vmm.bind(int(handle), offset, nbytes, int(memory))

    def set_access(ptr, nbytes, descriptions, count):
        (description,) = descriptions
        assert (count, description.flags) == (1, m.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        check_location(description.location)
        vmm.set_access(ptr, nbytes)

    def content(handle, flags):
        assert flags is m.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return handle.reserved

    functions = _common(vmm, check, lambda: m.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM) | {
        "Init": lambda flags: None,
        "DeviceGet": lambda index: index,
        "DeviceGetAttribute":
            lambda attribute, device: all(attribute is not getattr(m.CUdevice_attribute, each) for each in lacking),
        "DevicePrimaryCtxRetain": lambda device: CONTEXT if device == DEVICE else None,
        "CtxPushCurrent": current.append,
        "CtxPopCurrent": current.pop,
        "CtxSynchronize": in_context(vmm.synchronize),
        "MemSetAccess": set_access,
        "MemExportToShareableHandle": lambda handle, kind, flags: vmm.export_fd(handle),
        "MulticastGetGranularity": functools.partial(multicast, vmm.multicast_granularity),
        "MulticastCreate": lambda properties: Handle(multicast(vmm.create_multicast, properties)),
        "MulticastAddDevice": lambda handle, device: vmm.add_device(handle) if device == DEVICE else None,
        "MulticastBindMem": bind,
        "MulticastUnbind": lambda handle, device, offset, nbytes: vmm.unbind(handle, offset, nbytes),
    }  # fmt: skip
    functions |= {name: in_context(functions[name]) for name in ("MemGetAddressRange", "MemGetInfo")}
    if ipc is not None:
        functions |= _of_ipc(ipc, lambda ptr: MagicMock(reserved=ipc.ipc_export(ptr)), content)
    names = "CUDA_SUCCESS", *(f"CUDA_ERROR_{each}" for each in ("INVALID_VALUE", "OUT_OF_MEMORY", "NOT_SUPPORTED"))
    _add(m, "cu", ("CUresult", *names), functions)
    return m


def hip_module(vmm, lacking=(), ipc=None):
    """hip-python's `hip.hip` on a pretended driver, for device 3; addresses are those of `ipc`, where that is given."""
    m, current = MagicMock(called=[], HIP_IPC_HANDLE_SIZE=64), [0]
    m.hipMemAllocationProp = m.hipIpcMemHandle_st = _in_memory
    on_device = functools.partial(_only, current, [DEVICE])

    def check_location(location):
        assert (location.type, location.id) == (m.hipMemLocationType.hipMemLocationTypeDevice, DEVICE)

    def check(properties):
        kind = (ctypes.c_uint32 * 2).from_buffer(properties.memory)[1]
        assert (properties.type, kind) == (m.hipMemAllocationType.hipMemAllocationTypePinned, 1)
        check_location(properties.location)

    def set_access(ptr, nbytes, description, count):
        assert (count, description.flags) == (1, m.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite)
        check_location(description.location)
        if not vmm.takes_any_size and nbytes not in itertools.accumulate(vmm.sizes_in_reservation(ptr)):
            vmm.calls.append("refused")
            raise DriverError("set_access", *INVALID)
        vmm.set_access(ptr, nbytes)

    def export(out, handle, kind, flags):
        ctypes.c_int.from_address(out).value = vmm.export_fd(handle)

    def get_handle(ptr):
        assert ptr == ipc.address_range(ptr)[0], "HIP takes the beginning of an allocation only"
        handle = _in_memory()
        handle.memory.raw = ipc.ipc_export(ptr)
        return handle

    def content(handle, flags):
        assert flags is m.hipIpcMemLazyEnablePeerAccess
        return handle.memory.raw

    functions = _common(vmm, check, lambda: m.hipMemAllocationGranularity_flags.hipMemAllocationGranularityMinimum) | {
        "DeviceGetAttribute":
            lambda attribute, index: all(attribute is not getattr(m.hipDeviceAttribute_t, each) for each in lacking),
        "GetDevice": _only(current, [0], lambda: 0),
        "SetDevice": lambda index: current.__setitem__(0, index),
        "DeviceSynchronize": on_device(vmm.synchronize),
        "MemSetAccess": set_access,
        "MemExportToShareableHandle": export,
    }  # fmt: skip
    needing = "MemCreate", "MemImportFromShareableHandle", "MemGetInfo"
    functions |= {name: on_device(functions[name]) for name in needing}
    functions |= {} if ipc is None else _of_ipc(ipc, get_handle, content)
    names = "hipSuccess", "hipErrorInvalidValue", "hipErrorOutOfMemory", "hipErrorNotSupported"
    _add(m, "hip", ("hipError_t", *names), functions)
    return m
