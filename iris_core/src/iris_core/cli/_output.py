"""Tables and JSON for the subcommands and for results of benchmarks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

_BAD, _ODD, _GOOD = "bold red", "yellow", "green"
_STYLES = {
    **dict.fromkeys(("WRONG", "broken", "slower", "wrong", "gone"), _BAD),
    **dict.fromkeys(("note", "blocked", "incompatible", "conflicting", "unavailable"), _ODD),
    **dict.fromkeys(("right", "ok", "loaded", "created", "faster"), _GOOD),
}
"""Colours of cells that are one of these words, on a terminal; rich leaves them out where NO_COLOR is set."""
_NUMBER = re.compile(r"[-\d.,]+(e[-+]\d+)?|WRONG|")


def print_json(document: Any) -> None:
    """Print a document as JSON; what JSON does not know is printed as text."""
    print(json.dumps(document, indent=2, default=str))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table: as wide as the terminal, or, in a pipe, as wide as its content; numbers are flush right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading, *cells in zip(headings, *rows, strict=True):
        numbers = bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)
        table.add_column(Text(heading), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        cells = [Text(" ".join(cell.split())) for cell in row]  # not markup: "[...]" in a reason is meant literally
        for cell in cells:
            cell.stylize(_STYLES.get(cell.plain, ""))
            cell.highlight_words(("WRONG", "MISSED"), _BAD)
        table.add_row(*cells)
    if title:
        print(title)
    if sys.stdout.isatty():
        Console().print(table)
        return
    console = Console(width=sum(max(map(len, column)) + 2 for column in zip(headings, *rows, strict=True)))
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
