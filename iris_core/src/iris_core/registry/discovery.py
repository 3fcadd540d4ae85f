"""Discover and import: entry points become records, and a record's entry point becomes an object."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import importlib_metadata

from iris_core.errors import PluginLoadError
from iris_core.registry.records import PluginRecord, canonical, error_text
from iris_core.types import PluginKind

if TYPE_CHECKING:
    from collections.abc import Sequence

_KINDS = {kind.group: kind for kind in PluginKind}
_GROUP_HEADER = re.compile(r"^\s*\[\s*(iris\.[\w.]+)\s*\]", re.MULTILINE)


def discover(search_path: Sequence[str] | None = None) -> list[PluginRecord]:
    """Read the entry points of all distributions; a damaged one is listed as broken.  Imports no plugin.

    Args:
        search_path: directories with installed distributions; default is the interpreter's path.
    """
    where: dict[str, Any] = {} if search_path is None else {"path": list(search_path)}
    # One distribution may be found twice (editable and installed): the first on the path counts, as for imports.
    names: dict[str, str] = {}
    for found in importlib_metadata.distributions(**where):
        if _GROUP_HEADER.search(found.read_text("entry_points.txt") or ""):
            name = found.metadata["Name"] or ""
            names.setdefault(canonical(name), name)
    records: list[PluginRecord] = []
    for name in filter(None, names.values()):
        distribution = next(iter(importlib_metadata.distributions(name=name, **where)))
        try:
            points = {(each.group, each.name): each.value for each in distribution.entry_points if each.group in _KINDS}
        except Exception as error:  # noqa: BLE001 - a file may be damaged in any way
            for group in _GROUP_HEADER.findall(distribution.read_text("entry_points.txt") or ""):
                if group in _KINDS:
                    record = PluginRecord(_KINDS[group], name, name, distribution.version, "entry_points.txt")
                    record.fail(PluginLoadError(f"{record.label}: entry_points.txt is damaged: {error_text(error)}"))
                    records.append(record)
            continue
        for (group, point), value in points.items():
            records.append(PluginRecord(_KINDS[group], point, name, distribution.version, value))
    return records


def import_plugin(record: PluginRecord) -> Any:
    """Import what a record's entry point names.

    Raises:
        PluginLoadError: that failed; the cause is chained.
    """
    point = importlib_metadata.EntryPoint(record.name, record.entry_point, record.kind.group)
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{record.label} could not be loaded from {record.entry_point!r}: {error_text(error)}. "
            f"Reinstall {record.distribution}, or block the plugin with IRIS_BLOCK={record.name}"
        ) from error
