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


def counted(number: int, what: str) -> str:
    """Return a number of things, such as "1 rank" or "2 ranks"."""
    return f"{number} {what}{'s' * (number != 1)}"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", most: int = 9999) -> None:
    """Print a table: as wide as the terminal, or, in a pipe, as its content and `most`; numbers are flush right.

    Lines break at spaces only: where words are too long for that width, they are longer.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table, width = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False), 0
    for heading, *cells in zip(headings, *rows, strict=True):
        numbers = bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)
        longest = max(map(len, " ".join((heading, *cells)).split()))
        table.add_column(Text(heading), justify="right" if numbers else "left", min_width=longest)
        width += max(map(len, (heading, *cells))) + 2
    for row in rows:
        cells = [Text(" ".join(cell.split())) for cell in row]  # not markup: "[...]" in a reason is meant literally
        for cell in cells:
            cell.stylize(_STYLES.get(cell.plain, ""))
            cell.highlight_words(("WRONG", "MISSED"), _BAD)
        table.add_row(*cells)
    if title:
        print(title)
    console = Console(width=None if sys.stdout.isatty() else min(width, most))
    with console.capture() as captured:
        console.print(table, crop=False)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
