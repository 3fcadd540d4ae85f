"""Discover and import: entry points become records, and a record's entry point becomes an object."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import importlib_metadata

from iris_core.errors import FAILURES, error_text
from iris_core.logs import logger
from iris_core.registry.records import PluginRecord, canonical
from iris_core.types import PluginKind

_KINDS = {kind.group: kind for kind in PluginKind}
_GROUP_HEADER = re.compile(r"^\s*\[\s*(iris\.[\w.]+)\s*\]", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", re.ASCII)


def discover(search_path: Sequence[str] | None = None) -> list[PluginRecord]:
    """Read the entry points of all distributions on a path, by default the interpreter's.  Imports no plugin."""
    records: list[PluginRecord] = []
    seen = set()
    for found in installed(search_path):
        folder = folder_of(found)
        name, version, part = pathlib.Path(str(folder)).stem.partition("-")[0], "", "METADATA"
        if canonical(name) in seen:
            continue  # found twice (editable and installed): the first on the path counts, as for imports
        seen.add(canonical(name))
        try:
            groups = dict.fromkeys(each for each in _GROUP_HEADER.findall(_entry_points_text(found)) if each in _KINDS)
        except (OSError, ValueError) as error:  # it may have plugins, and nothing else shows it
            problem = f"entry_points.txt cannot be read: {error_text(error)}. Reinstall it, or delete it"
            logger.warning("%s is not searched for plugins: %s", folder, problem)
            continue
        if not groups:
            continue
        try:
            name, version = identity(found)
            part = "entry_points.txt"
            points = {(each.group, each.name): each.value for each in found.entry_points if each.group in _KINDS}
        except Exception as error:  # noqa: BLE001 - a file may be damaged in any way
            for group in groups:
                record = PluginRecord(_KINDS[group], name, name, version, part)
                record.fail(record.load_error(f": {folder}/{part} is damaged: {error_text(error)}"))
                records.append(record)
            continue
        records += [PluginRecord(_KINDS[group], point, name, version, each) for (group, point), each in points.items()]
    return records


def installed(search_path: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield the distributions on a path, by default the interpreter's, damaged ones among them."""
    path = sys.path if search_path is None else search_path
    # without what imports ignore: searching it would raise
    yield from importlib_metadata.distributions(path=[p for p in path if isinstance(p, str) and "\0" not in p])


def identity(distribution: Any) -> tuple[str, str]:
    """Return a distribution's name and version."""
    name, version = (distribution.metadata[field] for field in ("Name", "Version"))
    if not name or not _NAME.fullmatch(name):
        raise ValueError(f"METADATA has no valid Name: {name!r}")
    if not version:
        raise ValueError("METADATA has no Version")
    return name, " ".join(version.split())


def folder_of(distribution: Any) -> Any:
    """Where a distribution's metadata lies, for messages."""
    return getattr(distribution, "_path", None) or distribution.locate_file("")


def _entry_points_text(distribution: Any) -> str:
    """Return the text of entry_points.txt; empty if there is none.

    `read_text` says of a file that one may not read, or of a folder in its place, that there is none.
    """
    folder = folder_of(distribution)
    if not isinstance(folder, pathlib.Path):  # in a zip file
        return distribution.read_text("entry_points.txt") or ""
    try:
        return (folder / "entry_points.txt").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def import_plugin(record: PluginRecord) -> Any:
    """Import what a record's entry point names."""
    point = importlib_metadata.EntryPoint(record.name, record.entry_point, record.kind.group)
    try:
        return point.load()
    except FAILURES as error:
        raise record.load_error(f" could not be loaded from {record.entry_point!r}: {error_text(error)}") from error
