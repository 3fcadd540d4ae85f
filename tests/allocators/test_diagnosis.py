"""What the allocators tell `iris doctor`, on stand-ins for the drivers' bindings."""

import enum
import sys
import types

import pytest

from iris_allocators import diagnosis
from iris_allocators._plugin import host, torch_pool, vmem
from iris_allocators.driver import device_facts, peer_facts
from iris_allocators.driver.facts import DeviceFacts, PeerFacts
from iris_allocators.settings import TorchSettings, VmemSettings
from iris_allocators.vmem.allocator import VmemAllocator
from iris_core.diagnosis import Verdict
from iris_core.errors import DriverError, UnsupportedError
from iris_core.types import DeviceTarget, DeviceType

from .fake_bindings import cuda_driver, hip_module
from .fake_driver import GRANULE, FakeVmm, as_bytes
from .vmem_cluster import CPU

NOT_KNOWN = 1  # CUDA_ERROR_INVALID_VALUE, hipErrorInvalidValue
SUPPORTED = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 102,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 103,
    "HANDLE_TYPE_FABRIC_SUPPORTED": 128,
    "GPU_DIRECT_RDMA_SUPPORTED": 116,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 110,
    "DMA_BUF_SUPPORTED": 124,
    "MULTICAST_SUPPORTED": 132,
}
PEER = {"PERFORMANCE_RANK": 1, "ACCESS_SUPPORTED": 2, "NATIVE_ATOMIC_SUPPORTED": 3}
KINDS = [DeviceType.CUDA, DeviceType.HIP]


@pytest.fixture
def bindings(monkeypatch):
    """Installs stand-ins for the bindings of a kind of device.

    `answers` are those to attributes by name, or by name and devices: None is a refusal, 1 the answer to all others.
    """

    def install(kind, answers=None, known=None, start=0):
        given = {"PERFORMANCE_RANK": 0, "hipDevP2PAttrPerformanceRank": 0, **(answers or {})}

        def ask(attribute, *devices):
            name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_").removeprefix("CU_DEVICE_P2P_ATTRIBUTE_")
            answer = given.get((name, *devices), given.get(name, 1))
            return (codes(NOT_KNOWN), None) if answer is None else (codes(0), answer)

        if kind is DeviceType.CUDA:
            module = cuda_driver(FakeVmm(), {})
            codes = module.CUresult
            names = SUPPORTED if known is None else {name: SUPPORTED[name] for name in known}
            module.CUdevice_attribute = enum.IntEnum("A", {f"CU_DEVICE_ATTRIBUTE_{n}": v for n, v in names.items()})
            module.CUdevice_P2PAttribute = enum.IntEnum(
                "P", {f"CU_DEVICE_P2P_ATTRIBUTE_{n}": v for n, v in PEER.items()}
            )
            module.cuDeviceGetAttribute = module.cuDeviceGetP2PAttribute = ask
            if start:
                module.cuInit = lambda flags: (codes(start), None)
                module.cuInit.__name__ = "cuInit"
            package = types.ModuleType("cuda.bindings")
            package.driver = module
            modules = {"cuda": types.ModuleType("cuda"), "cuda.bindings": package, "cuda.bindings.driver": module}
        else:
            package = types.ModuleType("hip")
            package.hip = module = hip_module(FakeVmm(), {})
            codes = module.hipError_t
            names = ("PerformanceRank", "AccessSupported", "NativeAtomicSupported")
            module.hipDeviceP2PAttr = enum.IntEnum("P", {f"hipDevP2PAttr{name}": n for n, name in enumerate(names)})
            module.hipDeviceGetAttribute = module.hipDeviceGetP2PAttribute = ask
            modules = {"hip": package, "hip.hip": module}
        ask.__name__ = "ask"
        for name, each in modules.items():
            monkeypatch.setitem(sys.modules, name, each)
        forget(monkeypatch)

    yield install
    forget(monkeypatch)  # they have the stand-ins inside


def forget(monkeypatch):
    import iris_allocators.driver as package

    for name in ("cuda", "hip", "cuda_facts", "hip_facts"):
        monkeypatch.delitem(sys.modules, f"iris_allocators.driver.{name}", raising=False)
        monkeypatch.delattr(package, name, raising=False)


def gpus(count, kind=DeviceType.CUDA):
    return [DeviceTarget(kind, index) for index in range(count)]


def make(request, fail=None):
    """The allocator on a pretended driver, whatever the device is."""
    driver = FakeVmm(total=64 * GRANULE)
    if fail:
        setattr(driver, fail, refuse)
    cpu = type(request)(CPU, request.rank, request.world_size, request.heap_nbytes, VmemSettings(granule=GRANULE))
    allocator = VmemAllocator(cpu, driver, as_bytes)
    made.append((driver, allocator))
    return allocator


def refuse(*args):
    raise DriverError("cuMemExportToShareableHandle", 801, "CUDA_ERROR_NOT_SUPPORTED")


made = []


@pytest.fixture(autouse=True)
def nothing_left():
    made.clear()
    yield
    for driver, _ in made:
        assert driver.counts() == (0, 0, 0, 0)


# -- facts ------------------------------------------------------------------------------------------------------------
def test_facts_of_nvidias_driver(bindings):
    bindings(DeviceType.CUDA, {"HANDLE_TYPE_FABRIC_SUPPORTED": 0, ("NATIVE_ATOMIC_SUPPORTED", 0, 1): 0})
    assert device_facts(gpus(1)[0]) == DeviceFacts(True, True, False, True, True, True, True)
    one, other = gpus(2)
    assert peer_facts(one, other) == PeerFacts(access=True, native_atomics=False, performance_rank=0)
    assert peer_facts(other, one) == PeerFacts(access=True, native_atomics=True, performance_rank=0)


def test_what_bindings_or_driver_do_not_know_is_none(bindings):
    known = [name for name in SUPPORTED if "FABRIC" not in name]
    bindings(DeviceType.CUDA, {"DMA_BUF_SUPPORTED": None}, known)
    facts = device_facts(gpus(1)[0])
    assert (facts.dma_buf, facts.fabric_handles, facts.multicast) == (None, None, True)


def test_facts_of_amds_driver(bindings):
    bindings(DeviceType.HIP, {"hipDevP2PAttrNativeAtomicSupported": 0})
    one, other = gpus(2, DeviceType.HIP)
    assert device_facts(one) == DeviceFacts(virtual_memory=True)
    assert peer_facts(one, other) == PeerFacts(access=True, native_atomics=False, performance_rank=0)


def test_the_cpu_has_none():
    with pytest.raises(UnsupportedError, match="'cpu'"):
        device_facts(CPU)
    with pytest.raises(UnsupportedError, match="'cpu'"):
        peer_facts(CPU, CPU)


def test_a_driver_that_does_not_start(bindings):
    bindings(DeviceType.CUDA, start=2)
    with pytest.raises(DriverError, match="cuInit"):
        device_facts(gpus(1)[0])
    (finding,) = diagnosis.diagnose_vmem(gpus(2), make, VmemSettings())
    assert finding.verdict is Verdict.BROKEN
    assert "the driver cannot be asked: DriverError: cuInit" in finding.text


# -- findings ---------------------------------------------------------------------------------------------------------
def by_subject(findings):
    return {finding.subject: finding for finding in findings}


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_that_has_everything(bindings, kind):
    bindings(kind)
    found = by_subject(diagnosis.diagnose_vmem(gpus(8, kind), make, VmemSettings()))
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["virtual memory"].text.splitlines() == [
        "can be made and shared by file descriptor (tried on cuda:0)",
        "peer access between all 56 ordered pairs of GPUs",
        "native atomics between all 56 ordered pairs of GPUs",
    ]
    assert found["virtual memory"].data["devices"]["7"]["virtual_memory"] is True
    expected = {"from": 0, "to": 1, "access": True, "native_atomics": True, "performance_rank": 0}
    assert found["virtual memory"].data["pairs"][0] == expected
    fabric = "reported" if kind is DeviceType.CUDA else "not known"
    assert found["fabric handles"].text == f"{fabric}; Iris does not use them"
    (ipc,) = diagnosis.diagnose_torch(gpus(8, kind), make, TorchSettings())
    assert (ipc.subject, ipc.verdict) == ("IPC handles", Verdict.OK)
    assert ipc.text.startswith("can be made (tried on cuda:0)\npeer access between all 56")
    assert len(ipc.data["pairs"]) == 56


def test_one_gpu_has_no_peers(bindings):
    bindings(DeviceType.CUDA)
    (ipc,) = diagnosis.diagnose_torch(gpus(1), make, TorchSettings())
    assert ipc.text == "can be made (tried on cuda:0)"


def test_no_native_atomics_are_noted_with_the_pair(bindings):
    bindings(DeviceType.CUDA, {("NATIVE_ATOMIC_SUPPORTED", 1, 0): 0})
    (ipc,) = diagnosis.diagnose_torch(gpus(2), make, TorchSettings())
    assert ipc.verdict is Verdict.NOTE
    assert "no native atomics: 1->0; atomics on a peer may get lost" in ipc.text


def test_many_missing_pairs_are_not_all_listed(bindings):
    bindings(DeviceType.CUDA, {"ACCESS_SUPPORTED": 0, "NATIVE_ATOMIC_SUPPORTED": None})
    (ipc,) = diagnosis.diagnose_torch(gpus(8), make, TorchSettings())
    assert "and 48 more; heaps cannot be mapped there (`nvidia-smi topo -p2p r`)" in ipc.text
    assert "the driver does not say whether there is native atomics: 0->1" in ipc.text


@pytest.mark.parametrize("name", ["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"])
def test_a_gpu_without_virtual_memory_is_named(bindings, name):
    bindings(DeviceType.CUDA, {(name, 1): 0})
    found = by_subject(diagnosis.diagnose_vmem(gpus(3), make, VmemSettings()))
    assert found["virtual memory"].verdict is Verdict.NOTE
    assert found["virtual memory"].text.startswith("GPU 1 or the driver cannot manage it")
    assert "take allocator='torch'" in found["virtual memory"].text
    assert not made


def test_features_of_some_gpus_only(bindings):
    bindings(DeviceType.CUDA, {("MULTICAST_SUPPORTED", 0): 0, ("MULTICAST_SUPPORTED", 2): 0})
    found = by_subject(diagnosis.diagnose_vmem(gpus(4), make, VmemSettings()))
    assert found["multicast"].text.startswith("reported for GPU 1, 3 only")


@pytest.mark.parametrize("step", ["create", "export_fd"])
def test_reported_but_it_does_not_work(bindings, step):
    bindings(DeviceType.CUDA)
    found = by_subject(diagnosis.diagnose_vmem(gpus(2), lambda request: make(request, step), VmemSettings()))
    assert found["virtual memory"].verdict is Verdict.BROKEN
    assert "CUDA_ERROR_NOT_SUPPORTED" in found["virtual memory"].text
    (ipc,) = diagnosis.diagnose_torch(gpus(2), lambda request: make(request, step), TorchSettings())
    assert ipc.verdict is Verdict.NOTE
    assert "take allocator='vmem'" in ipc.text


def test_without_gpus_there_is_nothing_to_say():
    assert torch_pool.iris_plugin_diagnose(targets=[]) == []
    assert vmem.iris_plugin_diagnose(targets=[]) == []
    assert not hasattr(host, "iris_plugin_diagnose")


def test_the_plugins_try_their_own_allocators(bindings, monkeypatch):
    bindings(DeviceType.CUDA)
    tried = []
    for plugin in (torch_pool, vmem):
        monkeypatch.setattr(
            type(plugin), "iris_plugin_create", lambda self, request: tried.append(request) or make(request)
        )
        assert plugin.iris_plugin_diagnose(targets=gpus(1))[0].verdict is Verdict.OK
    assert [type(request.settings) for request in tried] == [TorchSettings, VmemSettings]
    assert {request.world_size for request in tried} == {2}
