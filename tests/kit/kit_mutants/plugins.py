"""The plugin objects of the mutants: light, as plugins have to be, except where that is the mistake."""

from __future__ import annotations

import functools

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

    def __init__(self, kind, name, factory=RIGHT_ALLOCATOR, edits=(), settings=None, **changes):
        self.settings = settings or (TritonSettings if kind is PluginKind.BACKEND else Settings)
        devices = set(DeviceType) if kind is PluginKind.BACKEND else {DeviceType.CPU}
        relation = (
            {"provides": _REMOTE | {Capability.DECOMMIT}} if kind is PluginKind.ALLOCATOR else {"requires": _REMOTE}
        )
        about = {"summary": "wrong on purpose", "devices": frozenset(devices), **relation, **changes}
        self.info = PluginInfo(name=name, kind=kind, **about)
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


def _mutants(kind, factory, table, always=(), **changes):
    return {name: Plugin(kind, name, factory, (*always, *edits), **changes) for name, (_, *edits) in table.items()}


def _hooked(name, hook, function):
    return type("Hooked", (Plugin,), {f"iris_plugin_{hook}": hookimpl(function)})(PluginKind.ALLOCATOR, name)


_ALLOCATOR = functools.partial(Plugin, PluginKind.ALLOCATOR)
ALLOCATORS = _mutants(PluginKind.ALLOCATOR, RIGHT_ALLOCATOR, {"right-allocator": ("",)} | mutants.ALLOCATORS)
ALLOCATORS["undeclared-capability"] = _ALLOCATOR("undeclared-capability", provides=_REMOTE)
GROWING = _mutants(
    PluginKind.ALLOCATOR, RIGHT_GROWING, {"right-growing": ("",)} | mutants.GROWING, mutants.ON_FAKE,
    settings=VmemSettings, provides=_REMOTE | {Capability.GROWTH, Capability.DECOMMIT, Capability.IMPORT_TENSOR},
)  # fmt: skip
BACKENDS = _mutants(PluginKind.BACKEND, RIGHT_BACKEND, {"right-backend": ("",)} | mutants.BACKENDS)
OPTIONAL = _mutants(PluginKind.BACKEND, RIGHT_BACKEND, mutants.OPTIONAL)
FAMILIES = _mutants(PluginKind.BACKEND, RIGHT_BACKEND, mutants.FAMILIES)

_CLASSES = ["AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "Reduce", "Gather", "Scatter", "Push"]
_OF = {f"right-{each}": each for each in _CLASSES} | dict.fromkeys(mutants.COLLECTIVES, "AllReduce") | mutants.CLASSES
COLLECTIVES = {
    name: Plugin(PluginKind.COLLECTIVE, name, f"kit_mutants.reference:{of}", mutants.COLLECTIVES.get(name, ("",))[1:])
    for name, of in _OF.items()
}
PLUGINS = {
    "required-settings": _ALLOCATOR("required-settings", settings=RequiredSettings),
    "undescribed-settings": _ALLOCATOR("undescribed-settings", settings=UndescribedSettings),
    "no-reason": _hooked("no-reason", "probe", lambda self, target: Availability(ok=target.type is DeviceType.CPU)),
    "wrong-argument": _hooked("wrong-argument", "probe", lambda self, device: Availability.yes()),
    "other-name": _ALLOCATOR("another-name"),
    "no-summary": _ALLOCATOR("no-summary", summary=""),
    "raising-diagnosis": _hooked("raising-diagnosis", "diagnose", lambda self, targets: 1 / 0),
    "wordless-diagnosis": _hooked(
        "wordless-diagnosis", "diagnose", lambda self: [Finding("the driver", Verdict.BROKEN, " ")]
    ),
}

ALL = ALLOCATORS | GROWING | PLUGINS | BACKENDS | OPTIONAL | FAMILIES | COLLECTIVES
globals().update({name.replace("-", "_"): plugin for name, plugin in ALL.items()})
