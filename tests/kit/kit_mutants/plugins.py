"""The plugin objects of the mutants: light, as plugins have to be, except where that is the mistake."""

from __future__ import annotations

import dataclasses

from iris_allocators.settings import VmemSettings
from iris_core.diagnosis import Finding, Verdict
from iris_core.hooks import hookimpl
from iris_core.settings import PluginSettings
from iris_core.types import Availability, Capability, DeviceType, PluginInfo, PluginKind
from iris_triton.settings import TritonSettings
from kit_mutants import mutants, mutated

_REMOTE = frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS})
RIGHT_ALLOCATOR = "iris_allocators.host:HostAllocator"
RIGHT_GROWING = "iris_allocators.vmem.allocator:VmemAllocator"
RIGHT_BACKEND = "iris_triton.backend:TritonBackend"


class Settings(PluginSettings):
    """Settings without a mistake."""

    verbose: bool = False
    """Changes nothing."""


class Plugin:
    """Creates `factory` ("module:class") with the edits of a mutant, imported only then, with its own description."""

    settings = Settings

    def __init__(self, kind, name, factory, edits=()):
        if kind is PluginKind.BACKEND:
            self.settings = TritonSettings
        devices = set(DeviceType) if kind is PluginKind.BACKEND else {DeviceType.CPU}
        relation = (
            {"provides": _REMOTE | {Capability.DECOMMIT}} if kind is PluginKind.ALLOCATOR else {"requires": _REMOTE}
        )
        self.info = PluginInfo(name=name, kind=kind, summary="wrong on purpose", devices=frozenset(devices), **relation)
        self.factory, self.edits = factory, edits

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
        # a class of its own, so that plugins of one class do not share what they say of themselves
        return type("Created", (mutated(self.factory, self.edits),), {"info": property(lambda _: self.info)})(request)


class RequiredSettings(PluginSettings):
    """One setting has no default."""

    where: str
    """Must be set."""


class UndescribedSettings(PluginSettings):
    """One setting has no description."""

    undescribed: int = 1


def hooked(name, hook):
    return type("Hooked", (Plugin,), {f"iris_plugin_{name}": hookimpl(hook)})


def _mutants(kind, factory, table, always=()):
    return {name: Plugin(kind, name, factory, (*always, *edits)) for name, (_, *edits) in table.items()}


ALLOCATORS = _mutants(PluginKind.ALLOCATOR, RIGHT_ALLOCATOR, {"right-allocator": ("",)} | mutants.ALLOCATORS)
_undeclared = ALLOCATORS["undeclared-capability"]
_undeclared.info = dataclasses.replace(_undeclared.info, provides=_REMOTE)

GROWING = {"right-growing": ("",)} | mutants.GROWING
GROWING = _mutants(PluginKind.ALLOCATOR, RIGHT_GROWING, GROWING, mutants.ON_FAKE)
for _plugin in GROWING.values():
    _plugin.settings = VmemSettings
    _more = {Capability.GROWTH, Capability.DECOMMIT, Capability.IMPORT_TENSOR}
    _plugin.info = dataclasses.replace(_plugin.info, provides=_REMOTE | _more)

BACKENDS = _mutants(PluginKind.BACKEND, RIGHT_BACKEND, {"right-backend": ("",)} | mutants.BACKENDS)
OPTIONAL = _mutants(PluginKind.BACKEND, RIGHT_BACKEND, mutants.OPTIONAL)
FAMILIES = _mutants(PluginKind.BACKEND, RIGHT_BACKEND, mutants.FAMILIES)

_CLASSES_OF_CALLS = "AllReduce AllGather ReduceScatter AllToAll Broadcast Reduce Gather Scatter Push"


def _collective(name, of, edits=()):
    return Plugin(PluginKind.COLLECTIVE, name, f"kit_mutants.reference:{of}", edits)


RIGHT_COLLECTIVES = {f"right-{each}": _collective(f"right-{each}", each) for each in _CLASSES_OF_CALLS.split()}
COLLECTIVES = RIGHT_COLLECTIVES | {
    name: _collective(name, mutants.CLASSES.get(name, "AllReduce"), tuple(edits))
    for name, (_, *edits) in mutants.COLLECTIVES.items()
}

_CLASSES = {
    "no-reason": hooked("probe", lambda self, target: Availability(ok=target.type is DeviceType.CPU)),
    "wrong-argument": hooked("probe", lambda self, device: Availability.yes()),
    "raising-diagnosis": hooked("diagnose", lambda self, targets: 1 / 0),
    "wordless-diagnosis": hooked("diagnose", lambda self: [Finding("the driver", Verdict.BROKEN, " ")]),
}
PLUGINS = {
    name: _CLASSES.get(name, Plugin)(PluginKind.ALLOCATOR, name, RIGHT_ALLOCATOR)
    for name in mutants.PLUGINS
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
