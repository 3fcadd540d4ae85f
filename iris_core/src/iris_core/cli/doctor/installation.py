"""The installation: distributions, settings, and plugins as `iris plugins` sees them.  Imports no torch."""

from __future__ import annotations

import re
import warnings

from iris_core.diagnosis import Finding, Verdict
from iris_core.errors import IrisError, error_text
from iris_core.registry.discovery import folder_of, identity, installed

DAMAGED = "(METADATA is damaged: reinstall it)"

_OF_INTEREST = re.compile(
    r"iris[-_.]|(pytorch[-_])?triton|torch|cuda[-_](bindings|python)|hip[-_]python|nvidia[-_]ml[-_]py|amdsmi|pluggy|pydantic"
)


def versions() -> dict[str, str]:
    """Return the versions of the installed distributions that matter here, by name."""
    found = {}
    for distribution in installed():
        try:
            name, version = identity(distribution)
        except Exception as error:  # noqa: BLE001 - a file may be damaged in any way
            name, version = folder_of(distribution).name, f"{DAMAGED}: {error_text(error)}"
        if _OF_INTEREST.match(name):
            found[name] = version
    return dict(sorted(found.items()))


def examine_packages() -> Finding:
    """Say which distributions there are; broken, if one of them is damaged."""
    found = versions()
    verdict = Verdict.BROKEN if any(DAMAGED in version for version in found.values()) else Verdict.OK
    return Finding("packages", verdict, ", ".join(map(" ".join, found.items())), found)


def examine_settings() -> list[Finding]:
    """Say which settings are wrong or misspelt."""
    from iris_core.cli.config import settings_classes
    from iris_core.registry import default_registry
    from iris_core.settings import IrisSettingsWarning, load_plugin_settings, load_settings, warn_unknown_variables

    findings = []
    registry = default_registry()
    try:
        registry.block(load_settings().block)
    except IrisError as error:
        findings.append(Finding("settings", Verdict.BROKEN, str(error)))
    for name, cls in settings_classes(registry).items():
        try:
            load_plugin_settings(name, cls)
        except IrisError as error:
            findings.append(Finding("settings", Verdict.BROKEN, str(error)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IrisSettingsWarning)
        findings += [Finding("settings", Verdict.NOTE, text) for text in warn_unknown_variables(registry.names())]
    return findings or [Finding("settings", Verdict.OK, "all valid; `iris config` lists them")]


def examine_plugins() -> list[Finding]:
    """Say what became of each installed plugin."""
    from iris_core.registry import default_registry
    from iris_core.types import PluginState

    bad = {
        PluginState.BROKEN: Verdict.BROKEN,
        PluginState.INCOMPATIBLE: Verdict.BROKEN,
        PluginState.CONFLICTING: Verdict.NOTE,
    }
    findings = []
    for record in default_registry().load_all():
        quiet = Verdict.NOTE if record.state in (PluginState.UNAVAILABLE, PluginState.BLOCKED) else Verdict.OK
        text = f"{record.state}: {record.reason}" if record.reason else str(record.state)
        origin = f"{record.distribution} {record.version}"
        findings.append(Finding(f"{record.kind} {record.name}", bad.get(record.state, quiet), f"{origin}: {text}"))
    return findings or [Finding("plugins", Verdict.BROKEN, "none: pip install ./iris_allocators ./iris_triton")]
