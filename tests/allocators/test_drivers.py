"""The calls into NVIDIA's and AMD's drivers, against stand-ins for their Python bindings."""

import ctypes
import sys
import types

import pytest
from tables import table

from iris_allocators import driver as drivers
from iris_allocators._plugin import torch_pool, vmem
from iris_allocators.info import TORCH_INFO, VMEM_INFO
from iris_core.errors import DriverError, HeapExhaustedError, PeerAccessError, UnsupportedError
from iris_core.testing.conformance import oracle
from iris_core.testing.conformance.plugin import member_problems
from iris_core.testing.conformance.plugin_jobs import received
from iris_core.types import DeviceTarget, DeviceType

from .cluster import CPU, make, make_torch, nothing
from .fake_bindings import DEVICE, cuda_driver, hip_module
from .fake_driver import GRANULE, Expandable, FakeIpc, FakeVmm

CUDA, HIP = DeviceType.CUDA, DeviceType.HIP
each_kind = pytest.mark.parametrize("kind", [CUDA, HIP])


@pytest.fixture
def load(monkeypatch):
    """Loads the driver of a kind of device on stand-ins for its bindings; returns it and what is behind."""

    def load(kind, ipc=None, lacking=()):
        vmm = FakeVmm(total=16 * GRANULE)
        names = ("cuda", "cuda.bindings", "cuda.bindings.driver") if kind is CUDA else ("hip", "hip.hip")
        modules = {name: types.ModuleType(name) for name in names[:-1]}
        modules[names[-1]] = (cuda_driver if kind is CUDA else hip_module)(vmm, lacking, ipc)
        setattr(modules[names[-2]], names[-1].rpartition(".")[2], modules[names[-1]])
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, f"iris_allocators.driver.{kind.value}", raising=False)
        loaded.append(f"iris_allocators.driver.{kind.value}")
        if ipc is not None:
            return drivers.vendor(kind).Ipc(), ipc
        return drivers.vendor(kind).Vmm(DEVICE), vmm

    loaded = []
    yield load
    for name in loaded:  # it has the stand-ins inside
        sys.modules.pop(name, None)


@each_kind
def test_an_allocator_lives_on_it(load, kind):
    driver, behind = load(kind)
    assert member_problems(driver, drivers.VmmDriver) == member_problems(behind, drivers.VmmDriver) == []
    one, two = (make(8 * GRANULE, rank, 2, driver) for rank in range(2))
    one.commit(0, 2 * GRANULE)
    mapping = two.import_peer(0, received(one.export()))
    one.exchanged()
    one.tensor(0, 2 * GRANULE, nothing).fill_(7)
    assert oracle.read_bytes(mapping.base_ptr + 2 * GRANULE - 1, 1) == b"\7"
    pieces = Expandable(behind, GRANULE, GRANULE)
    source = pieces.tensor(GRANULE - 8, (4,)).fill_(2)
    assert one.import_extent(source)[:2] == (2 * GRANULE, GRANULE - 8)
    shared = one.import_tensor(4 * GRANULE, source, nothing)
    source.fill_(3)
    assert shared.tolist() == [3.0] * 4
    assert one.import_extent(source)[2] == 5 * GRANULE - 8
    del shared
    one.decommit(4 * GRANULE, 2 * GRANULE)
    behind.total, total = behind.used, behind.total
    with pytest.raises(HeapExhaustedError, match=f"0 of its {behind.used} bytes are free"):
        one.commit(4 * GRANULE, 1)
    behind.total = total
    one.close()
    two.close()
    pieces.close()
    assert behind.counts() == (0, 0, 0, 0)
    with pytest.raises(DriverError) as caught:
        driver.create(GRANULE + 1)
    own = ("cuMemCreate", "CUDA_ERROR_INVALID_VALUE") if kind is CUDA else ("hipMemCreate", "hipErrorInvalidValue")
    assert (caught.value.call, caught.value.name, caught.value.code) == (*own, 1), "the driver's own names"


def test_multicast_lives_on_it_and_nothing_of_it_is_looked_up_unless_it_is_asked_for(load):
    driver, behind = load(CUDA)
    module = sys.modules["cuda.bindings.driver"]

    def open_both(**settings):
        both = [make(4 * GRANULE, rank, 2, driver, **settings) for rank in (0, 1)]
        for each in both:
            each.commit(0, 2 * GRANULE)
        return both

    for each in open_both():
        each.decommit(0, 2 * GRANULE)
        each.close()
    constants = {name for holder in (module, module.CUdevice_attribute) for name in dir(holder)}
    looked_up = {name for name in constants if not name.startswith("cu")}.union(module.called)
    assert {"MemUnmap", "CUmemAccessDesc"} < looked_up
    assert not [name for name in looked_up if "multicast" in name.lower()]
    one, two = open_both(multicast=True)
    offered = [*one.multicast.offer(), *two.multicast.offer()]
    other = received(offered)
    one.multicast.join(offered)
    two.multicast.join(other)
    assert one.multicast.map() != two.multicast.map()
    two.commit(2 * GRANULE, GRANULE)
    one.decommit(GRANULE, GRANULE)
    assert sorted(offset // GRANULE for _, offset in behind.bound) == [0, 0, 1, 2]
    one.close()
    two.close()
    assert behind.counts() == (0, 0, 0, 0)
    driver, _ = load(CUDA, lacking=["CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED"])
    with pytest.raises(UnsupportedError, match=f"cuda:{DEVICE} or its driver does not support multicast"):
        open_both(multicast=True)
    driver, _ = load(HIP)
    with pytest.raises(UnsupportedError, match="NVIDIA"):
        open_both(multicast=True)


def test_access_on_rocm_is_set_cumulatively_where_the_range_alone_is_refused(load):
    """ROCm 7.0 to 7.2 compare the size with that of a reservation's first mappings, whichever the address."""
    driver, behind = load(HIP)
    behind.takes_any_size = False
    base, elsewhere = driver.reserve(16 * GRANULE, GRANULE), driver.reserve(4 * GRANULE, GRANULE)

    def put(index, size, there=base):
        handle = driver.create(size * GRANULE)
        driver.map(there + index * GRANULE, size * GRANULE, handle)
        driver.release(handle)

    def set_access(index, size, there=base):
        """Sets it, uses the memory (a fault ends the process), and returns the calls that it took."""
        behind.calls.clear()
        driver.set_access(there + index * GRANULE, size * GRANULE)
        ctypes.memset(there + index * GRANULE, 1, size * GRANULE)
        return len(behind.calls)

    for index in (3, 0, 2):
        put(index, 1, elsewhere)
        assert set_access(index, 1, elsewhere) == 1, "mappings of one size need nothing else"
    for index, size, calls in ((0, 3, 1), (3, 1, 2), (4, 2, 2), (6, 1, 2)):
        put(index, size)
        assert set_access(index, size) == calls, "from the beginning on"
    driver.unmap(base, 3 * GRANULE)
    put(1, 2)
    assert set_access(1, 2) == 2, "to the end of what follows"
    put(9, 5)  # behind a gap, where no range has a size that would be right
    with pytest.raises(DriverError, match="hipMemSetAccess failed with hipErrorInvalidValue"):
        set_access(9, 5)
    behind.takes_any_size = True  # as it should be
    assert set_access(9, 5) == 1
    behind.fail_next["set_access"] = 1
    behind.calls.clear()
    with pytest.raises(DriverError, match="hipErrorNotSupported"):
        set_access(3, 1)
    assert behind.calls.count("set_access") == 1, "another failure is no reason to try again"


@each_kind
def test_a_pool_is_shared_by_ipc(load, kind):
    driver, behind = load(kind, FakeIpc())
    assert member_problems(driver, drivers.IpcDriver) == member_problems(behind, drivers.IpcDriver) == []
    one, two = (make_torch(1 << 16, rank, 2, driver) for rank in range(2))
    one.tensor(100, 8, nothing).fill_(7)
    (segment,) = one.export()
    assert len(segment.payload) == 8 + 64
    mapping = two.import_peer(0, [segment])
    assert oracle.read_bytes(mapping.base_ptr + 100, 8) == b"\7" * 8
    behind.fail_next["ipc_open"] = 1
    with pytest.raises(PeerAccessError, match=r"(cu|hip)IpcOpenMemHandle failed with") as caught:
        one.import_peer(1, two.export())
    assert isinstance(caught.value.__cause__, DriverError)
    assert behind.counts() == (1,)
    two.close()
    one.close()
    assert behind.counts() == (0,)


@table("kind, attribute", [
    (CUDA, "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
    (CUDA, "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
    (HIP, "hipDeviceAttributeVirtualMemoryManagementSupported"),
])  # fmt: skip
def test_devices_without_it_are_refused(load, kind, attribute):
    with pytest.raises(UnsupportedError, match="does not support"):
        load(kind, lacking=[attribute])


def test_the_cpu_has_no_driver():
    with pytest.raises(UnsupportedError, match="'cpu'"):
        drivers.vendor(DeviceType.CPU)
    assert drivers.topology_command(CUDA).startswith("nvidia-smi")
    assert drivers.topology_command(HIP).startswith("rocm-smi")


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
