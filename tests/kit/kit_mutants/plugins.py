"""The plugin objects of the mutants: light, as plugins have to be, except where that is the mistake."""

from __future__ import annotations

import dataclasses
import importlib

from iris_allocators.settings import VmemSettings
from iris_core.diagnosis import Finding, Verdict
from iris_core.hooks import hookimpl
from iris_core.settings import PluginSettings
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind
from iris_triton.settings import TritonSettings
from kit_mutants import killers

_REMOTE = frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS})
RIGHT_ALLOCATOR = "iris_allocators.host:HostAllocator"


class Settings(PluginSettings):
    """Settings without a mistake."""

    verbose: bool = False
    """Changes nothing."""


class Plugin:
    """Creates `factory` ("module:class"), which is imported only then, and gives it its own description."""

    settings = Settings

    def __init__(self, kind, name, factory):
        if kind is PluginKind.BACKEND:
            self.settings = TritonSettings
        devices = set(DeviceType) if kind is PluginKind.BACKEND else {DeviceType.CPU}
        relation = (
            {"provides": _REMOTE | {Capability.DECOMMIT}} if kind is PluginKind.ALLOCATOR else {"requires": _REMOTE}
        )
        self.info = PluginInfo(name=name, kind=kind, summary="wrong on purpose", devices=frozenset(devices), **relation)
        self.factory = factory

    @hookimpl
    def iris_plugin_info(self):
        return self.info

    @hookimpl
    def iris_plugin_settings(self):
        return self.settings

    @hookimpl
    def iris_plugin_probe(self, target):
        return Availability.yes() if target.type is DeviceType.CPU else Availability.no("CPU only")

    @hookimpl
    def iris_plugin_create(self, request):
        module, _, name = self.factory.partition(":")
        cls = getattr(importlib.import_module(module), name)
        # a class of its own, so that mutants of one class do not share what they say of themselves
        return type(name, (cls,), {"info": property(lambda _: self.info)})(request)


class RequiredSettings(PluginSettings):
    """One setting has no default."""

    where: str
    """Must be set."""


class UndescribedSettings(PluginSettings):
    """One setting has no description."""

    undescribed: int = 1


def hooked(name, hook):
    return type("Hooked", (Plugin,), {f"iris_plugin_{name}": hookimpl(hook)})


def _plugins(kind, module, names, prefix=""):
    """Plugins for classes that are called as the plugins, in another spelling."""
    classes = {name: name.replace("-", " ").title().replace(" ", "") for name in names}
    made = {prefix + name: f"kit_mutants.{module}:{each}" for name, each in classes.items()}
    return {name: Plugin(kind, name, factory) for name, factory in made.items()}


ALLOCATORS = {"right-allocator": Plugin(PluginKind.ALLOCATOR, "right-allocator", RIGHT_ALLOCATOR)}
ALLOCATORS |= _plugins(PluginKind.ALLOCATOR, "allocators", killers.ALLOCATORS)
_undeclared = ALLOCATORS["undeclared-capability"]
_undeclared.info = dataclasses.replace(_undeclared.info, provides=_REMOTE)

GROWING = _plugins(PluginKind.ALLOCATOR, "growing", ["right-growing", *killers.GROWING])
for _plugin in GROWING.values():
    _plugin.settings = VmemSettings
    _more = {Capability.GROWTH, Capability.DECOMMIT, Capability.IMPORT_TENSOR}
    _plugin.info = dataclasses.replace(_plugin.info, provides=_REMOTE | _more)

BACKENDS = {"right-backend": Plugin(PluginKind.BACKEND, "right-backend", "iris_triton.backend:TritonBackend")}
BACKENDS |= _plugins(PluginKind.BACKEND, "backends", killers.BACKENDS)
OPTIONAL = _plugins(PluginKind.BACKEND, "backends", killers.OPTIONAL)
FAMILIES = _plugins(PluginKind.BACKEND, "backends", killers.FAMILIES)

_OPS = "all-reduce all-gather reduce-scatter all-to-all broadcast reduce gather scatter push"
RIGHT_COLLECTIVES = _plugins(PluginKind.COLLECTIVE, "reference", _OPS.split(), "right-")
COLLECTIVES = RIGHT_COLLECTIVES | _plugins(PluginKind.COLLECTIVE, "collectives", killers.COLLECTIVES)

_CLASSES = {
    "no-reason": hooked("probe", lambda self, target: Availability(ok=target.type is DeviceType.CPU)),
    "wrong-argument": hooked("probe", lambda self, device: Availability.yes()),
    "raising-diagnosis": hooked("diagnose", lambda self, targets: 1 / 0),
    "wordless-diagnosis": hooked("diagnose", lambda self: [Finding("the driver", Verdict.BROKEN, " ")]),
}
PLUGINS = {
    name: _CLASSES.get(name, Plugin)(PluginKind.ALLOCATOR, name, RIGHT_ALLOCATOR)
    for name in killers.PLUGINS
    if name != "heavy"
}
PLUGINS["required-settings"].settings = RequiredSettings
PLUGINS["undescribed-settings"].settings = UndescribedSettings
PLUGINS["other-name"].info = dataclasses.replace(PLUGINS["other-name"].info, name="another-name")
PLUGINS["no-summary"].info = dataclasses.replace(PLUGINS["no-summary"].info, summary="")


def attribute(kind, name):
    """Name under which a plugin stands in this module, for its entry point."""
    return f"{kind}_{name.replace('-', '_')}"


KINDS = {
    PluginKind.ALLOCATOR: ALLOCATORS | GROWING | PLUGINS,
    PluginKind.BACKEND: BACKENDS | OPTIONAL | FAMILIES,
    PluginKind.COLLECTIVE: COLLECTIVES,
}
for _kind, _named in KINDS.items():
    globals().update({attribute(_kind, name): plugin for name, plugin in _named.items()})
