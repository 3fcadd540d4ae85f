"""`iris plugins`: every installed plugin and where it stands."""

from __future__ import annotations

import argparse
from typing import Any

from iris_core.cli._arguments import registry_as_set
from iris_core.cli._output import print_json, print_table
from iris_core.types import PluginState


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "plugins",
        help="list the installed plugins and their states",
        description="Load every installed plugin and list it with its state. Exit status 1 if any is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List the plugins; 1 if any is broken."""
    found = [record.to_json() for record in registry_as_set().load_all()]
    if args.json:
        print_json(found)
    elif found:
        form = "{kind} {name}", "{distribution} {version}", "{api}", "{state}"
        rows = [(*(cell.format(**each) for cell in form), each["reason"] or each["summary"]) for each in found]
        print_table(("KIND NAME", "DISTRIBUTION VERSION", "API", "STATE", "ABOUT"), rows)
    else:
        print("no plugin is installed: pip install ./iris_allocators ./iris_triton")
    return int(any(each["state"] == PluginState.BROKEN for each in found))
