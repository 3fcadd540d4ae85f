"""Entry points of this distribution.  Imports neither torch nor an allocator until one is created."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from typing import Any

from iris_allocators.info import HOST_INFO, NCCL_INFO, TORCH_INFO, VMEM_INFO
from iris_core.hooks import ProviderPlugin, hookimpl
from iris_core.types import Availability, CreateRequest, DeviceTarget, DeviceType

_BINDINGS = {
    DeviceType.CUDA: ("cuda.bindings", "cuda-bindings is not installed; torch's CUDA wheels bring it"),
    DeviceType.HIP: ("hip", "hip-python is not installed: pip install 'iris-allocators[rocm]'"),
}


class HostPlugin(ProviderPlugin):
    """Provides the "host" allocator."""

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether this machine has memory files and `target` is the CPU."""
        if target.type is not DeviceType.CPU:
            return Availability.no(f"its memory is the host's; kernels on {target.type} cannot reach it")
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            return Availability.no(f"it needs memfd_create, which Linux has and {sys.platform} has not")
        return Availability.yes()


class GpuPlugin(ProviderPlugin):
    """Provides an allocator of GPU memory."""

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether `target` is a GPU and its driver can be called from Python."""
        if target.type not in _BINDINGS:
            return Availability.no(f"it shares memory of GPUs, not of {target.type}")
        module, problem = _BINDINGS[target.type]
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # of the package that it is in
            found = None
        return Availability.no(problem) if found is None else Availability.yes()


class NcclPlugin(HostPlugin):
    """Provides the "nccl" allocator: a heap that kernels reach on other nodes, too; on CPU ranks it is emulated."""

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether nccl4py and NCCL's device functions are installed; ranks on the CPU need neither."""
        if target.type is DeviceType.CPU:
            return super().iris_plugin_probe(target)
        if target.type is not DeviceType.CUDA:
            return Availability.no(f"NCCL is for NVIDIA's GPUs, not for {target.type}")
        needed = "nccl4py", "nvidia-nccl-cu13"
        lacking = [name for name in needed if not any(importlib.metadata.distributions(name=name))]
        if lacking:
            return Availability.no(f"{' and '.join(lacking)} not installed: pip install 'iris-allocators[nccl]'")
        return Availability.yes()

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> Any:
        """Make the allocator for a device."""
        if request.target.type is DeviceType.CPU:
            from iris_allocators.nccl.emulated import EmulatedAllocator

            return EmulatedAllocator(request)
        return super().iris_plugin_create(request)


host = HostPlugin(HOST_INFO, "iris_allocators.host:HostAllocator", "iris_allocators.settings:HostSettings")
torch_pool = GpuPlugin(TORCH_INFO, "iris_allocators.torch_ipc:TorchAllocator", "iris_allocators.settings:TorchSettings")
vmem = GpuPlugin(VMEM_INFO, "iris_allocators.vmem.allocator:VmemAllocator", "iris_allocators.settings:VmemSettings")
nccl = NcclPlugin(NCCL_INFO, "iris_allocators.nccl.window:NcclAllocator", "iris_allocators.settings:NcclSettings")
