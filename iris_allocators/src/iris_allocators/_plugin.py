"""Entry points of this distribution.  Imports neither torch nor an allocator until one is created."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    from iris_allocators.host import HostAllocator
    from iris_core.settings import PluginSettings
    from iris_core.types import CreateRequest, DeviceTarget

HOST_INFO = PluginInfo(
    name="host",
    kind=PluginKind.ALLOCATOR,
    summary="shared memory of the host (memfd), for ranks that compute on the CPU",
    devices=frozenset({DeviceType.CPU}),
    provides=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS, Capability.DECOMMIT}),
)
"""What the "host" allocator says about itself."""


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


host = HostPlugin()
