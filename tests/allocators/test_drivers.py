"""The calls into NVIDIA's and AMD's drivers, which mocks of their Python bindings note, and the probes."""

import ctypes
import enum
import functools
import sys
import types
from unittest.mock import MagicMock

import pytest
from tables import raises, table

from iris_allocators import driver as drivers
from iris_allocators._plugin import torch_pool, vmem
from iris_allocators.info import TORCH_INFO, VMEM_INFO
from iris_core.errors import DriverError, UnsupportedError
from iris_core.testing.conformance.plugin import member_problems
from iris_core.types import DeviceTarget, DeviceType

from .cluster import CPU
from .fake_driver import FakeIpc, FakeVmm

CUDA, HIP = DeviceType.CUDA, DeviceType.HIP
DEVICE, CONTEXT, HANDLE, SIZE = 3, "primary context", bytes(range(64)), 1 << 20
each_kind = pytest.mark.parametrize("kind", [CUDA, HIP])


class Handle:
    """A number as the bindings return it: an object that is not equal to another one of the same number."""

    def __init__(self, number):
        self.number = number

    def __int__(self):
        return self.number


RETURNED = {
    "MemGetAllocationGranularity": (SIZE,), "MemAddressReserve": (Handle(8192),), "MemCreate": (Handle(5),),
    "MemImportFromShareableHandle": (Handle(6),), "MemRetainAllocationHandle": (Handle(7),),
    "MemGetAddressRange": (Handle(4096), 2 * SIZE), "MemGetInfo": (100, 200), "IpcOpenMemHandle": (Handle(4096),),
    "MulticastGetGranularity": (SIZE,), "MulticastCreate": (Handle(8),), "DeviceGet": ("device",), "GetDevice": (0,),
    "DevicePrimaryCtxRetain": (CONTEXT,), "CtxPopCurrent": (CONTEXT,), "DeviceGetAttribute": (True,),
    **dict.fromkeys((
        "Init", "CtxPushCurrent", "CtxSynchronize", "SetDevice", "DeviceSynchronize", "MemAddressFree", "MemRelease",
        "MemMap", "MemUnmap", "MemSetAccess", "IpcCloseMemHandle", "MulticastAddDevice", "MulticastBindMem",
        "MulticastUnbind",
    ), ()),
}  # fmt: skip
"""What functions of both vendors return behind the result code, by their names without the prefix."""


def in_memory(content=bytes(64)):
    """A structure of HIP's, which has an address."""
    made = MagicMock(memory=ctypes.create_string_buffer(content, 64))
    made.__int__.return_value = ctypes.addressof(made.memory)
    return made


def binding(kind):
    """A vendor's module: constants and structures are mocks, and the functions fail where `code` says so."""
    m = MagicMock(called=[], code=lambda name, *args: 0, HIP_IPC_HANDLE_SIZE=64)
    prefix, holder, names = {
        CUDA: ("cu", "CUresult", ("CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED")),
        HIP: ("hip", "hipError_t", ("hipSuccess", "hipErrorInvalidValue", "hipErrorNotSupported")),
    }[kind]
    codes = enum.IntEnum(holder, dict(zip(names, (0, 1, 801), strict=True)))
    setattr(m, holder, codes)
    m.hipMemAllocationProp.return_value = in_memory()
    m.hipIpcMemHandle_st.return_value = in_memory()

    def call(name, returned, *args):
        m.called.append((name, *args))
        return (codes(m.code(name, *args)), *returned)

    def export_by_address(out, *args):
        ctypes.c_int.from_address(out).value = 9
        return call("MemExportToShareableHandle", (), *args)

    for name, returned in RETURNED.items():
        setattr(m, prefix + name, functools.partial(call, name, returned))
    m.hipMemExportToShareableHandle = export_by_address
    m.cuMemExportToShareableHandle = functools.partial(call, "MemExportToShareableHandle", (9,))
    got = MagicMock(reserved=HANDLE) if kind is CUDA else in_memory(HANDLE)
    setattr(m, f"{prefix}IpcGetMemHandle", functools.partial(call, "IpcGetMemHandle", (got,)))
    return m


@pytest.fixture
def load(monkeypatch):
    """Loads the driver of a kind of device on a mock of its bindings; returns both."""

    def load(kind):
        names = ("cuda", "cuda.bindings", "cuda.bindings.driver") if kind is CUDA else ("hip", "hip.hip")
        modules = {**{name: types.ModuleType(name) for name in names[:-1]}, names[-1]: binding(kind)}
        setattr(modules[names[-2]], names[-1].rpartition(".")[2], modules[names[-1]])
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        loaded.append(f"iris_allocators.driver.{kind.value}")
        sys.modules.pop(loaded[-1], None)
        return drivers.vendor(kind), modules[names[-1]]

    loaded = []
    yield load
    for name in loaded:  # it has the mock inside
        sys.modules.pop(name, None)


def makes(m, driver, rows):
    """Whether methods return, and call, what rows say: (method, arguments, result, the call that it makes).

    Methods named with a star make the device the current one for that.
    """
    enter, leave = [("CtxPushCurrent", CONTEXT)], [("CtxPopCurrent",)]
    if m.hipError_t.__class__ is enum.EnumType:
        enter, leave = [("GetDevice",), ("SetDevice", DEVICE)], [("SetDevice", 0)]
    for method, given, result, *calls in rows:
        m.called.clear()
        assert getattr(driver, method.strip("*"))(*given) == result
        assert m.called == [*enter, *calls, *leave] if "*" in method else m.called == calls, method


def constants(kind, m):
    """What calls of both vendors are given: properties, kind of handle, granularity, address, access, wait."""
    if kind is CUDA:
        kinds, location = m.CUmemAllocationHandleType, m.CUmemLocation.return_value
        fd, given = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, m.CUmemAllocationProp.return_value
        access, smallest = m.CUmemAccessDesc.return_value, m.CUmemAllocationGranularity_flags
        assert (given.type, given.location) == (m.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, location)
        assert (given.requestedHandleTypes, access.location) == (fd, location)
        assert (location.type, location.id) == (m.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, DEVICE)
        assert access.flags is m.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return given, fd, smallest.CU_MEM_ALLOC_GRANULARITY_MINIMUM, 0, [access], "CtxSynchronize"
    fd, given = m.hipMemAllocationHandleType.hipMemHandleTypePosixFileDescriptor, m.hipMemAllocationProp.return_value
    access, smallest = m.hipMemAccessDesc.return_value, m.hipMemAllocationGranularity_flags
    assert given.type is m.hipMemAllocationType.hipMemAllocationTypePinned
    assert (ctypes.c_uint32 * 2).from_buffer(given.memory)[1] == int(fd) == 1
    for location in (given.location, access.location):
        assert (location.type, location.id) == (m.hipMemLocationType.hipMemLocationTypeDevice, DEVICE)
    assert access.flags is m.hipMemAccessFlags.hipMemAccessFlagsProtReadWrite
    return given, fd, smallest.hipMemAllocationGranularityMinimum, None, access, "DeviceSynchronize"


@each_kind
def test_each_method_makes_one_call(load, kind):
    vendor, m = load(kind)
    driver = vendor.Vmm(DEVICE)
    assert member_problems(driver, drivers.VmmDriver) == member_problems(FakeVmm(), drivers.VmmDriver) == []
    properties, fd, smallest, anywhere, access, synchronize = constants(kind, m)
    makes(m, driver, [
        ("granularity", (), SIZE, ("MemGetAllocationGranularity", properties, smallest)),
        ("reserve", (SIZE, 4096), 8192, ("MemAddressReserve", SIZE, 4096, anywhere, 0)),
        ("*create", (SIZE,), 5, ("MemCreate", SIZE, properties, 0)),
        ("map", (8192, SIZE, 5), None, ("MemMap", 8192, SIZE, 0, 5, 0)),
        ("set_access", (8192, SIZE), None, ("MemSetAccess", 8192, SIZE, access, 1)),
        ("export_fd", (5,), 9, ("MemExportToShareableHandle", 5, fd, 0)),
        ("*import_fd", (9,), 6, ("MemImportFromShareableHandle", 9, fd)),
        ("retain", (8192,), 7, ("MemRetainAllocationHandle", 8192)),
        ("*address_range", (8192,), (4096, 2 * SIZE), ("MemGetAddressRange", 8192)),
        ("*memory_info", (), (100, 200), ("MemGetInfo",)), ("*synchronize", (), None, (synchronize,)),
        ("unmap", (8192, SIZE), None, ("MemUnmap", 8192, SIZE)), ("release", (5,), None, ("MemRelease", 5)),
        ("unreserve", (8192, SIZE), None, ("MemAddressFree", 8192, SIZE)),
    ])  # fmt: skip
    assert not [name for name in dir(m) + dir(m.CUdevice_attribute) if "multi" in name.lower() and name[:2] == "CU"]
    m.code = lambda name, *args: name == "MemCreate"
    with pytest.raises(DriverError) as caught:
        driver.create(SIZE)
    own = ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE") if kind is CUDA else ("hipMemCreate", "hipErrorInvalidValue")
    assert (caught.value.call, caught.value.name, caught.value.code) == (*own, 1), "the driver's own names"
    assert m.called[-1] == (("CtxPopCurrent",) if kind is CUDA else ("SetDevice", 0))


def test_multicast_is_nvidias(load):
    vendor, m = load(CUDA)
    driver, given = vendor.Vmm(DEVICE), m.CUmulticastObjectProp.return_value
    asked = "DeviceGetAttribute", m.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, "device"
    smallest = m.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
    makes(m, driver, [
        ("multicast_granularity", (2, SIZE), SIZE, asked, ("MulticastGetGranularity", given, smallest)),
        ("create_multicast", (2, SIZE), 8, asked, ("MulticastCreate", given)),
        ("add_device", (8,), None, ("MulticastAddDevice", 8, "device")),
        ("bind", (8, 4096, SIZE, 5), None, ("MulticastBindMem", 8, 4096, 5, 0, SIZE, 0)),
        ("unbind", (8, 4096, SIZE), None, ("MulticastUnbind", 8, "device", 4096, SIZE)),
    ])  # fmt: skip
    assert (given.numDevices, given.size, given.handleTypes) == (2, SIZE, 1)
    m.cuDeviceGetAttribute = lambda *args: (0, False)
    with raises(UnsupportedError, "names", "allocators.no support", name=f"cuda:{DEVICE}"):
        driver.create_multicast(2, SIZE)
    with raises(UnsupportedError, name="NVIDIA"):
        load(HIP)[0].Vmm(DEVICE).multicast_granularity(2, SIZE)


def test_access_on_rocm_is_set_cumulatively_where_the_range_alone_is_refused(load):
    """ROCm 7.0 to 7.2 compare the size with that of a reservation's first mappings, whichever the address."""
    vendor, m = load(HIP)
    driver, tried = vendor.Vmm(DEVICE), []
    for base in (0, 16):  # one behind the other
        m.hipMemAddressReserve = lambda *_, base=base: (0, base)
        driver.reserve(16, 1)
    for start, end in ((0, 3), (3, 4), (4, 6), (9, 14), (14, 16), (16, 17)):
        driver.map(start, end - start, 5)

    def set_access(start, end, *taken, code=1):
        """Ranges that are tried where the driver takes no others than those."""
        m.code = lambda name, ptr, size, *_: code * (tried.append((ptr, ptr + size)) or tried[-1] not in taken)
        tried.clear()
        try:
            driver.set_access(start, end - start)
        except DriverError as error:
            tried.append(error.name)
        return tried

    assert set_access(3, 4, (3, 4)) == [(3, 4)]
    assert set_access(3, 4, (0, 4), (0, 6)) == [(3, 4), (0, 4)], "from the beginning on"
    assert set_access(3, 4, (0, 6)) == [(3, 4), (0, 4), (0, 6)], "to the end of what follows"
    assert set_access(3, 4) == [(3, 4), (0, 4), (0, 6), "hipErrorInvalidValue"]
    assert set_access(14, 16) == [(14, 16), (9, 16), "hipErrorInvalidValue"], "neither over a gap nor beyond"
    assert set_access(3, 4, code=801) == [(3, 4), "hipErrorNotSupported"], "another failure"
    m.code = lambda *_: 0
    driver.unmap(0, 3)
    assert set_access(3, 4, (3, 6)) == [(3, 4), (3, 6)]


@each_kind
def test_a_pool_is_shared_by_ipc(load, kind):
    vendor, m = load(kind)
    driver = vendor.Ipc()
    assert member_problems(driver, drivers.IpcDriver) == member_problems(FakeIpc(), drivers.IpcDriver) == []
    wrapped, flags = m.CUipcMemHandle.return_value, m.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    exported = [("IpcGetMemHandle", 5000)]
    if kind is HIP:  # which takes the beginning of an allocation only
        wrapped, flags = m.hipIpcMemHandle_st.return_value, m.hipIpcMemLazyEnablePeerAccess
        exported = [("MemGetAddressRange", 5000), ("IpcGetMemHandle", 4096)]
    makes(m, driver, [
        ("address_range", (5000,), (4096, 2 * SIZE), ("MemGetAddressRange", 5000)),
        ("ipc_open", (HANDLE,), 4096, ("IpcOpenMemHandle", wrapped, flags)),
        ("ipc_close", (4096,), None, ("IpcCloseMemHandle", 4096)),
    ])  # fmt: skip
    assert (wrapped.reserved if kind is CUDA else wrapped.memory.raw) == HANDLE
    m.called.clear()
    assert driver.ipc_export(5000) == HANDLE
    assert [(name, int(ptr)) for name, ptr in m.called] == exported


@table("kind, attribute", [
    (CUDA, "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
    (CUDA, "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
    (HIP, "hipDeviceAttributeVirtualMemoryManagementSupported"),
])  # fmt: skip
def test_devices_without_it_are_refused(load, kind, attribute):
    vendor, m = load(kind)
    lacking = getattr(m.CUdevice_attribute if kind is CUDA else m.hipDeviceAttribute_t, attribute)
    m.cuDeviceGetAttribute = m.hipDeviceGetAttribute = lambda asked, index: (0, asked is not lacking)
    with raises(UnsupportedError, "allocators.no support"):
        vendor.Vmm(DEVICE)


def test_the_cpu_has_no_driver():
    with raises(UnsupportedError, name="'cpu'"):
        drivers.vendor(DeviceType.CPU)


@table("plugin", [torch_pool, vmem])
def test_the_probe_says_what_is_missing(monkeypatch, plugin):
    probe = plugin.iris_plugin_probe
    assert "not of cpu" in probe(CPU).reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "cuda-bindings" in probe(DeviceTarget(CUDA)).reason
    assert "iris-allocators[rocm]" in probe(DeviceTarget(HIP)).reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert probe(DeviceTarget(CUDA))
    assert probe(DeviceTarget(HIP))
    assert VMEM_INFO.priority < TORCH_INFO.priority, "torch stays the default"
