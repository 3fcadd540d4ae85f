"""`iris config`: every setting, or one, with its value and where the value came from."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from typing import Any

from iris_core import settings
from iris_core.cli._arguments import registry_as_set
from iris_core.cli._output import print_json, print_table
from iris_core.errors import ArgumentError, PluginError, SettingsError
from iris_core.logs import logger
from iris_core.registry import Registry
from iris_core.types import PluginKind, PluginState


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "config",
        help="list every setting, or one, with type, value and source",
        description="List the IRIS_* variables of the core and of the installed plugins; with a name, say all of one.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="this variable only, such as heap_size")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List the settings; 1 if one of them has a wrong value."""
    registry = registry_as_set()
    rows, problems = survey(registry)
    if args.name is not None:
        known = {row.variable: row for row in rows}
        variable = settings.PREFIX + args.name.upper().removeprefix(settings.PREFIX)
        if variable not in known:
            near = settings.nearest(variable, known, settings.PREFIX)
            raise SettingsError(problems[0]) if problems else ArgumentError(f"there is no setting {args.name!r}{near}")
        rows = [known[variable]]
    if args.json:
        unknown = settings.unknown_variables(registry.names())
        print_json({"settings": [asdict(row) for row in rows], "warnings": unknown})
    elif args.name is not None:
        fields = {"type": rows[0].type, "value": _shown(rows[0].value), "source": rows[0].source}
        print("\n".join([rows[0].variable, *(f"  {name:6}  {text}" for name, text in fields.items()), rows[0].help]))
    else:
        sentences = (re.split(r"[;.](?:\s|$)", row.help, maxsplit=1)[0] for row in rows)  # the first of each
        found = [(row.variable, _shown(row.value), row.source, text) for row, text in zip(rows, sentences, strict=True)]
        print_table(("VARIABLE", "VALUE", "SOURCE", "FOR"), found)
    for problem in problems:
        print(f"iris: {problem}", file=sys.stderr)
    return int(bool(problems))


def survey(registry: Registry) -> tuple[list[settings.SettingRow], list[str]]:
    """Return the settings of the core and of all plugins that can be loaded, and what is wrong."""
    rows, problems = list[settings.SettingRow](), list[str]()
    classes: dict[str, type[settings.PluginSettings] | None] = {"": None}  # the core's
    for record in registry.records():
        if record.kind is PluginKind.OBSERVER or record.state in (PluginState.BLOCKED, PluginState.CONFLICTING):
            continue
        try:
            classes[record.name] = registry.settings_class(record)
        except PluginError as error:
            logger.warning("the settings of a plugin are not listed: %s", error)
    for name, cls in sorted(classes.items()):
        try:
            rows += settings.describe(name, cls)
        except SettingsError as error:  # the others are listed
            problems.append(str(error))
    return rows, problems


def _shown(value: Any) -> str:
    from pydantic import ByteSize

    if value is None or value == ():
        return "-"
    if isinstance(value, ByteSize):
        return value.human_readable(separator=" ")
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
