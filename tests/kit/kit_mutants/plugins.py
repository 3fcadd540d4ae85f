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

_REMOTE = frozenset({Capability.REMOTE_LOAD_STORE, Capability.REMOTE_ATOMICS})


class Settings(PluginSettings):
    """Settings without a mistake."""

    verbose: bool = False
    """Changes nothing."""


class Plugin:
    """Creates `factory` ("module:class") and gives it its own description.

    Args:
        kind: what the class is.
        name: name of the plugin, equal to its entry point's.
        factory: where the class is; imported when it is created.
    """

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


class NoReason(Plugin):
    """Says no without a reason."""

    @hookimpl
    def iris_plugin_probe(self, target):
        return Availability(ok=target.type is DeviceType.CPU)


class WrongArgument(Plugin):
    """A hook with an argument that is not specified."""

    @hookimpl
    def iris_plugin_probe(self, device):
        return Availability.yes()


class RaisingDiagnosis(Plugin):
    """Fails where it should say what is missing."""

    @hookimpl
    def iris_plugin_diagnose(self, targets):
        raise RuntimeError("no such driver")


class WordlessDiagnosis(Plugin):
    """A finding that says nothing."""

    @hookimpl
    def iris_plugin_diagnose(self):
        return [Finding("the driver", Verdict.BROKEN, " ")]


RIGHT_ALLOCATOR = "iris_allocators.host:HostAllocator"
RIGHT_BACKEND = "iris_triton.backend:TritonBackend"


def _with(plugin, **attributes):
    for name, value in attributes.items():
        setattr(plugin, name, value)
    return plugin


def _class_of(name):
    """A plugin's name in the spelling of classes."""
    return "".join(part.capitalize() for part in name.split("-"))


def _mutants(kind, module, names):
    """Plugins for classes that are called as the plugins, in another spelling."""
    for name in names.split():
        yield name, Plugin(kind, name, f"kit_mutants.{module}:{_class_of(name)}")


ALLOCATORS = {
    "right-allocator": Plugin(PluginKind.ALLOCATOR, "right-allocator", RIGHT_ALLOCATOR),
    **dict(
        _mutants(
            PluginKind.ALLOCATOR,
            "allocators",
            "crooked-base short-heap odd-granularity restless-generation one-memory "
            "swapped-parameters untold-capability plain-error shifted-tensor shared-storage copied-tensor "
            "overlapping-tensors release-twice release-never release-early release-at-close release-by-place "
            "commit-clears decommit-too-much close-once usable-after-close close-takes-memory leaky-descriptor "
            "leaky-mapping short-export export-opens wrong-peer own-peer shifted-peer snapshot-peer import-again "
            "leaky-import kept-descriptors leaky-error",
        )
    ),
}
_untold = ALLOCATORS["untold-capability"]
_untold.info = dataclasses.replace(_untold.info, provides=_REMOTE)

GROWING = dict(
    _mutants(
        PluginKind.ALLOCATOR,
        "growing",
        "right-growing quiet-commit loud-exchange hasty-export moving-peer unsaid-rest endless-export copied-import "
        "shifted-import odd-extent lost-import remembered-import silent-import credulous-import unannounced-import",
    )
)
for _plugin in GROWING.values():
    _plugin.settings = VmemSettings
    _more = {Capability.GROWTH, Capability.DECOMMIT, Capability.IMPORT_TENSOR}
    _plugin.info = dataclasses.replace(_plugin.info, provides=_REMOTE | _more)

BACKENDS = {
    "right-backend": Plugin(PluginKind.BACKEND, "right-backend", RIGHT_BACKEND),
    **dict(
        _mutants(
            PluginKind.BACKEND,
            "backends",
            "swapped-words no-timeout credulous detach-once renamed-parameter no-cases vain-hope no-signal "
            "swapped-ranks swapped-method deaf-tracing own-words",
        )
    ),
}
OPTIONAL = dict(
    _mutants(
        PluginKind.BACKEND,
        "backends",
        "secret-waits open-barrier half-tested hypochondriac secretive",
    )
)
FAMILIES = dict(_mutants(PluginKind.BACKEND, "backends", "mute near blind returns torn mute-methods"))
_OPS = "all-reduce all-gather reduce-scatter all-to-all broadcast reduce gather scatter"
COLLECTIVES = {
    **{
        f"right-{name}": Plugin(PluginKind.COLLECTIVE, f"right-{name}", f"kit_mutants.reference:{_class_of(name)}")
        for name in [*_OPS.split(), "push"]
    },
    **dict(
        _mutants(
            PluginKind.COLLECTIVE,
            "collectives",
            "wrong-order swapped-chunks first-chunk root-zero dropped-last nothing-for-nothing half-precision "
            "last-first rounded-twice own-rounding one-too-far scratch-input never-done once no-entry no-exit "
            "own-first takes-memory borrows-memory plans-pile-up whole-world other-peers raises silent-no never "
            "yes-man free-of-charge cheaper-by-the-dozen other-names",
        )
    ),
}
PLUGINS = {
    "required-settings": _with(
        Plugin(PluginKind.ALLOCATOR, "required-settings", RIGHT_ALLOCATOR), settings=RequiredSettings
    ),
    "undescribed-settings": _with(
        Plugin(PluginKind.ALLOCATOR, "undescribed-settings", RIGHT_ALLOCATOR), settings=UndescribedSettings
    ),
    "no-reason": NoReason(PluginKind.ALLOCATOR, "no-reason", RIGHT_ALLOCATOR),
    "wrong-argument": WrongArgument(PluginKind.ALLOCATOR, "wrong-argument", RIGHT_ALLOCATOR),
    "raising-diagnosis": RaisingDiagnosis(PluginKind.ALLOCATOR, "raising-diagnosis", RIGHT_ALLOCATOR),
    "wordless-diagnosis": WordlessDiagnosis(PluginKind.ALLOCATOR, "wordless-diagnosis", RIGHT_ALLOCATOR),
    "other-name": Plugin(PluginKind.ALLOCATOR, "another-name", RIGHT_ALLOCATOR),
    "no-summary": Plugin(PluginKind.ALLOCATOR, "no-summary", RIGHT_ALLOCATOR),
}
_silent = PLUGINS["no-summary"]
_silent.info = dataclasses.replace(_silent.info, summary="")


def attribute(kind, name):
    """Name under which a plugin stands in this module, for its entry point."""
    return f"{kind}_{name.replace('-', '_')}"


_KINDS = {
    "allocator": ALLOCATORS | GROWING | PLUGINS,
    "backend": BACKENDS | OPTIONAL | FAMILIES,
    "collective": COLLECTIVES,
}
for _kind, _plugins in _KINDS.items():
    globals().update({attribute(_kind, name): plugin for name, plugin in _plugins.items()})
