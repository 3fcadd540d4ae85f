"""The extension surface of Iris, on one page.

A plugin is a small object (usually a module-level instance) whose methods are marked with `hookimpl`; an entry point
names it.  Provider plugins (groups iris.allocators, iris.backends, iris.collectives) implement the four provider hooks
and, if they like, the optional one.  Observers (group iris.plugins) implement any of the observer hooks.
Implementations may leave out arguments they do not need.  The module that holds the object must import neither torch
nor triton: listing plugins has to stay cheap.  docs/write_an_allocator.md shows a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from iris_core.diagnosis import Finding
    from iris_core.settings import PluginSettings
    from iris_core.types import Availability, CreateRequest, DeviceTarget, PluginInfo


PROJECT_NAME = "iris"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Marks the methods of a plugin that implement hooks: `@hookimpl`.  What is not marked is not called."""


class ProviderHooks:
    """Hooks of a plugin that provides an allocator, a backend or a collective; called on a single plugin."""

    @hookspec
    def iris_plugin_info(self) -> PluginInfo:  # type: ignore[empty-body]
        """Describe the plugin.  Must be cheap and touch no device."""

    @hookspec
    def iris_plugin_settings(self) -> type[PluginSettings]:  # type: ignore[empty-body]
        """Return the class of the plugin's settings (IRIS_<NAME>__... and `options={name: {...}}`)."""

    @hookspec
    def iris_plugin_probe(self, target: DeviceTarget) -> Availability:  # type: ignore[empty-body]
        """Say whether the plugin can be used on a device.  Must be cheap and open no device context.

        Args:
            target: one device of this machine.

        Returns:
            `Availability.yes()`, or `Availability.no(reason)`: what is missing, and the way out where there is one.
        """

    @hookspec
    def iris_plugin_create(self, request: CreateRequest) -> Any:
        """Create the Allocator, DeviceBackend or Collective for one rank.

        Called on every rank.  An error it raises for an allocator or a backend is raised on all ranks.

        Args:
            request: rank, world size, sizes in bytes, device, and the plugin's settings.

        Returns:
            An `Allocator`, a `DeviceBackend` or a `Collective`, by the plugin's kind.
        """

    @hookspec
    def iris_plugin_diagnose(self, targets: Sequence[DeviceTarget]) -> Sequence[Finding]:  # type: ignore[empty-body]
        """Say for `iris doctor`, which is optional, whether what the plugin needs is there.

        Called in a process of its own, with those devices of this machine that the plugin works on (perhaps none).  It
        may import anything and open devices.  What is missing, or a call that fails, is a finding, not an exception.
        """


class ProviderPlugin:
    """Base of provider plugins: all hooks but `iris_plugin_probe`, which a subclass adds, and the optional one.

    `provider` and `settings` name classes, such as "package.module:Class"; they are imported when they are needed.
    """

    def __init__(self, info: PluginInfo, provider: str, settings: str) -> None:
        self._info, self._provider, self._settings = info, provider, settings

    @hookimpl
    def iris_plugin_info(self) -> PluginInfo:
        """Return `info`."""
        return self._info

    @hookimpl
    def iris_plugin_settings(self) -> type[PluginSettings]:
        """Return the class that `settings` names."""
        return resolve_name(self._settings)  # type: ignore[no-any-return]

    @hookimpl
    def iris_plugin_create(self, request: CreateRequest) -> Any:
        """Make one of the class that `provider` names, from the request."""
        return resolve_name(self._provider)(request)


class ObserverHooks:
    """Hooks of an observer; all observers are called, and one that raises is reported, not fatal."""

    @hookspec
    def iris_opened(self, context: Any) -> None:
        """Observe that a context (`iris_core.Iris`) was opened on this rank."""

    @hookspec
    def iris_closing(self, context: Any) -> None:
        """Observe that a context is about to be closed; its heap can still be used."""

    @hookspec
    def iris_allocated(self, context: Any, offset_bytes: int, nbytes: int) -> None:
        """Observe that a block was allocated on the symmetric heap.

        Args:
            context: the `iris_core.Iris`.
            offset_bytes: where it begins in each rank's heap.
            nbytes: its size after rounding.
        """

    @hookspec
    def iris_collective(self, context: Any, op: str, algorithm: str, nbytes: int) -> None:
        """Observe that a collective was launched.

        Args:
            context: the `iris_core.Iris`.
            op: "all_reduce", "all_gather", ...
            algorithm: the name of what serves it.
            nbytes: as in the `CollectiveRequest`.
        """


PROVIDER_HOOKS = ("iris_plugin_info", "iris_plugin_settings", "iris_plugin_probe", "iris_plugin_create")
OPTIONAL_PROVIDER_HOOKS = ("iris_plugin_diagnose",)
OBSERVER_HOOKS = ("iris_opened", "iris_closing", "iris_allocated", "iris_collective")
