"""Settings that a caller gives for plugins, checked against what is installed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from iris_core.errors import PluginError, SettingsError
from iris_core.logs import logger
from iris_core.settings import IrisSettingsWarning, load_plugin_settings, nearest
from iris_core.types import PluginKind, PluginState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iris_core.registry import PluginRecord, Registry


def check_options(
    registry: Registry, options: Mapping[str, Mapping[str, Any]], used: Iterable[PluginRecord], stacklevel: int = 2
) -> None:
    """Check the settings that a caller gave for plugins, also of plugins that are not used.

    A plugin that was not chosen has no use for its settings; what was given is checked, and a warning says that it has
    no effect.

    Args:
        registry: the plugins.
        options: settings by plugin name.
        used: the allocator and the backend that were chosen.
        stacklevel: of the warnings.

    Raises:
        SettingsError: no such plugin is installed or has settings, or a value is wrong, or a name unknown.
    """
    used = list(used)
    for name, given in options.items():
        records = [record for record in registry.records() if record.name == name]
        if not records:
            known = registry.names()
            raise SettingsError(f"options has settings for {name!r}, which is not installed" + nearest(name, known))
        if not isinstance(given, Mapping):
            raise SettingsError(f"options[{name!r}] must map names of settings to values, not be {given!r}")
        records = [record for record in records if record.kind is not PluginKind.OBSERVER]
        if not records:
            raise SettingsError(f"options has settings for {name!r}, which is an observer: these have none")
        if any(record is each for record in records for each in used):
            continue  # checked when it is created
        unused = _unused(registry, records, given)
        if unused and given:
            message = f"options has settings for {name!r}, which have no effect: {unused}"
            warnings.warn(message, IrisSettingsWarning, stacklevel=stacklevel + 1)
            logger.warning(message)


def _unused(registry: Registry, records: Iterable[PluginRecord], given: Mapping[str, Any]) -> str:
    """Check settings of a plugin that was not chosen; return why they have no effect, or nothing if they may have."""
    reasons, wrong, fits = [], [], False
    for record in records:
        if record.state is PluginState.BLOCKED:
            reasons.append(f"{record.label} is blocked")
            continue
        try:
            load_plugin_settings(record.name, registry.settings_class(record), given)
        except PluginError as error:
            reasons.append(str(error))
        except SettingsError as error:
            wrong.append(error)
        else:
            fits = True
            if record.kind not in (PluginKind.ALLOCATOR, PluginKind.BACKEND):
                return ""  # made when it is first needed
            reasons.append(f"another {record.kind} was chosen")
    if wrong and not fits:
        raise wrong[0]
    return "; ".join(dict.fromkeys(reasons))
