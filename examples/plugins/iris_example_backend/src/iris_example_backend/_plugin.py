"""What the entry points name: one object per plugin.  Imports neither torch nor numpy until something is created."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from iris_core.hooks import hookimpl
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    from iris_core.settings import PluginSettings
    from iris_core.types import CreateRequest, DeviceTarget
    from iris_example_backend.allocator import ExampleAllocator
    from iris_example_backend.backend import ExampleBackend
    from iris_example_backend.collective import TwoShotAllReduce

# Below the plugins that come with Iris: nobody gets an example who has not asked for one.
_PRIORITY = -100

ALLOCATOR_INFO = PluginInfo(
    name="example",
    kind=PluginKind.ALLOCATOR,
    summary="an example: files in a folder of the host's memory, for CPU ranks",
    devices=frozenset({DeviceType.CPU}),
    provides=frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS}),
    priority=_PRIORITY,
)
"""What the allocator says about itself."""

BACKEND_INFO = PluginInfo(
    name="example",
    kind=PluginKind.BACKEND,
    summary="an example: kernels are Python functions on numpy arrays",
    devices=frozenset({DeviceType.CPU}),
    requires=frozenset({Capability.REMOTE_LOAD_STORE}),  # its atomics take a lock
    priority=_PRIORITY,
    demos=frozenset({"ring-gemm"}),
)
"""What the backend says about itself."""

TWO_SHOT_INFO = PluginInfo(
    name="example-two-shot",
    kind=PluginKind.COLLECTIVE,
    summary="an example: all_reduce on the host, each rank reduces a slice and hands it to all",
    devices=frozenset({DeviceType.CPU}),
    requires=frozenset({Capability.REMOTE_LOAD_STORE}),
    priority=_PRIORITY,
)
"""What the collective says about itself."""


class AllocatorPlugin:
    """Provides the allocator "example"."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the allocator."""
        return ALLOCATOR_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `ExampleSettings`."""
        from iris_example_backend.settings import ExampleSettings

        return ExampleSettings

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether `target` is the CPU of a Linux machine."""
        return _cpu_of_linux(target)

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> ExampleAllocator:
        """Create one rank's allocator."""
        from iris_example_backend.allocator import ExampleAllocator

        return ExampleAllocator(request)


class BackendPlugin:
    """Provides the backend "example"."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the backend."""
        return BACKEND_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `ExampleSettings`: plugins of the same name share their settings."""
        from iris_example_backend.settings import ExampleSettings

        return ExampleSettings

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether `target` is the CPU of a Linux machine."""
        return _cpu_of_linux(target)

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> ExampleBackend:
        """Create one rank's backend."""
        from iris_example_backend.backend import ExampleBackend

        return ExampleBackend(request)


class TwoShotPlugin:
    """Provides the collective "example-two-shot"."""

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Describe the collective."""
        return TWO_SHOT_INFO

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return `TwoShotSettings`."""
        from iris_example_backend.settings import TwoShotSettings

        return TwoShotSettings

    @hookimpl
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:
        """Say whether `target` is the CPU of a Linux machine."""
        return _cpu_of_linux(target)

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> TwoShotAllReduce:
        """Create one rank's collective."""
        from iris_example_backend.collective import TwoShotAllReduce

        return TwoShotAllReduce(request)


def _cpu_of_linux(target: DeviceTarget) -> Availability:
    if target.type is not DeviceType.CPU:
        return Availability.no(f"it works in the host's memory and not on {target.type}")
    if not sys.platform.startswith("linux"):
        return Availability.no(f"it was written for Linux and not for {sys.platform}")
    return Availability.yes()


allocator = AllocatorPlugin()
backend = BackendPlugin()
two_shot = TwoShotPlugin()
