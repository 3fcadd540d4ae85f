"""What the allocators tell `iris doctor`, on a stand-in for the driver."""

import pytest

from iris_allocators._plugin import host, torch_pool, vmem
from iris_allocators.settings import TorchSettings, VmemSettings
from iris_allocators.vmem.allocator import VmemAllocator
from iris_core.diagnosis import Verdict
from iris_core.errors import DriverError
from iris_core.types import DeviceTarget, DeviceType

from .fake_driver import GRANULE, FakeVmm, as_bytes
from .vmem_cluster import CPU

GPUS = [DeviceTarget(DeviceType.CUDA, index) for index in range(2)]
PLUGINS = [(torch_pool, "IPC handles", "vmem", TorchSettings), (vmem, "virtual memory", "torch", VmemSettings)]


@pytest.fixture
def create(monkeypatch):
    """Lets plugins make allocators on a pretended driver, one step of which may fail; nothing must be left there."""
    drivers = []

    def install(plugin, settings, fail=None):
        def make(self, request):
            assert (request.target, type(request.settings), request.world_size) == (GPUS[0], settings, 2)
            driver = FakeVmm(total=64 * GRANULE)
            drivers.append(driver)
            if fail:
                setattr(driver, fail, refuse)
            cpu = type(request)(CPU, 0, 2, request.heap_nbytes, VmemSettings(granule=GRANULE))
            return VmemAllocator(cpu, driver, as_bytes)

        monkeypatch.setattr(type(plugin), "iris_plugin_create", make)

    yield install
    assert drivers
    assert {driver.counts() for driver in drivers} == {(0, 0, 0, 0)}


def refuse(*args):
    raise DriverError("cuMemExportToShareableHandle", 801, "CUDA_ERROR_NOT_SUPPORTED")


@pytest.mark.parametrize(("plugin", "subject", "other", "settings"), PLUGINS)
@pytest.mark.parametrize("fail", [None, "create", "export_fd"])
def test_a_heap_is_tried(create, plugin, subject, other, settings, fail):
    create(plugin, settings, fail)
    (finding,) = plugin.iris_plugin_diagnose(targets=GPUS)
    assert (finding.subject, finding.verdict) == (subject, Verdict.NOTE if fail else Verdict.OK)
    assert "cuda:0" in finding.text
    assert ("CUDA_ERROR_NOT_SUPPORTED" in finding.text) == (f"take allocator={other!r}" in finding.text) == bool(fail)


def test_without_gpus_there_is_nothing_to_say():
    assert torch_pool.iris_plugin_diagnose(targets=[]) == []
    assert vmem.iris_plugin_diagnose(targets=[]) == []
    assert not hasattr(host, "iris_plugin_diagnose")
