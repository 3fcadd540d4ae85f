"""Entry points of this distribution.  Imports neither torch nor an allocator until one is created."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from iris_allocators.info import HOST_INFO, TORCH_INFO, VMEM_INFO
from iris_core.hooks import hookimpl
from iris_core.types import Availability, DeviceType, PluginInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_allocators.host import HostAllocator
    from iris_allocators.torch_ipc import TorchAllocator
    from iris_allocators.vmem.allocator import VmemAllocator
    from iris_core.diagnosis import Finding
    from iris_core.settings import PluginSettings
    from iris_core.types import CreateRequest, DeviceTarget


class HostPlugin:
    """Provides the "host" allocator."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the allocator."""
        return HOST_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `HostSettings`."""
        from iris_allocators.settings import HostSettings

        return HostSettings

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether this machine has memory files and `target` is the CPU."""
        if target.type is not DeviceType.CPU:
            return Availability.no(f"its memory is the host's; kernels on {target.type} cannot reach it")
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            return Availability.no(f"it needs memfd_create, which Linux has and {sys.platform} has not")
        return Availability.yes()

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> HostAllocator:
        """Create one rank's allocator."""
        from iris_allocators.host import HostAllocator

        return HostAllocator(request)


class TorchPlugin:
    """Provides the "torch" allocator."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the allocator."""
        return TORCH_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `TorchSettings`."""
        from iris_allocators.settings import TorchSettings

        return TorchSettings

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether `target` is a GPU and its driver can be called."""
        return _has_bindings(target, "it shares memory of GPUs")

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> TorchAllocator:
        """Create one rank's allocator."""
        from iris_allocators.torch_ipc import TorchAllocator

        return TorchAllocator(request)

    @hookimpl
    def iris_plugin_diagnose(self, targets: Sequence[DeviceTarget]) -> list[Finding]:
        """Say for `iris doctor` whether memory of GPUs can be shared by IPC handle."""
        from iris_allocators.diagnosis import diagnose
        from iris_allocators.settings import TorchSettings

        return diagnose("IPC handles", "vmem", targets, self.iris_plugin_create, TorchSettings())


class VmemPlugin:
    """Provides the "vmem" allocator."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the allocator."""
        return VMEM_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `VmemSettings`."""
        from iris_allocators.settings import VmemSettings

        return VmemSettings

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether `target` is a GPU and its driver can be called."""
        return _has_bindings(target, "it maps memory of GPUs")

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> VmemAllocator:
        """Create one rank's allocator."""
        from iris_allocators.vmem.allocator import VmemAllocator

        return VmemAllocator(request)

    @hookimpl
    def iris_plugin_diagnose(self, targets: Sequence[DeviceTarget]) -> list[Finding]:
        """Say for `iris doctor` whether virtual memory of GPUs can be made and shared."""
        from iris_allocators.diagnosis import diagnose
        from iris_allocators.settings import VmemSettings

        return diagnose("virtual memory", "torch", targets, self.iris_plugin_create, VmemSettings())


def _has_bindings(target: DeviceTarget, what: str) -> Availability:
    """Whether the driver of a GPU can be called from Python."""
    if target.type is DeviceType.CUDA:
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
            return Availability.no("cuda-bindings is not installed; torch's CUDA wheels bring it")
        return Availability.yes()
    if target.type is DeviceType.HIP:
        if importlib.util.find_spec("hip") is None:
            return Availability.no("hip-python is not installed: pip install 'iris-allocators[rocm]'")
        return Availability.yes()
    return Availability.no(f"{what}, not of {target.type}")


host = HostPlugin()
torch_pool = TorchPlugin()
vmem = VmemPlugin()
