"""Tables and JSON for the subcommands."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def print_json(document: Any) -> None:
    """Print a document as JSON; what JSON does not know is printed as text."""
    print(json.dumps(document, indent=2, default=str))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, aligned columns in a pipe, where nothing is cut off."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*headings, box=None, header_style="bold", padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*map(Text, row))  # not markup: "[...]" in a reason is meant literally
        Console().print(table)
        return
    lines = [list(headings), *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
