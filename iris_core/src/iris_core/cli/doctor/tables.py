"""The report as text: a table of findings, and matrices of pairs.  Fits into 120 columns with 8 GPUs."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from iris_core.cli.doctor.links import label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.cli.doctor.selftest import Outcome
    from iris_core.diagnosis import Finding

WIDTH = 120


def rows(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Return the table of findings: subject, verdict and text, the text wrapped so that a line fits into WIDTH."""
    subjects = max((len(finding.subject) for finding in findings), default=0)
    room = WIDTH - subjects - len("VERDICT") - 4  # two spaces between columns
    table = []
    for finding in findings:
        lines = [piece for line in finding.text.splitlines() for piece in _wrapped(line, room)] or [""]
        for number, line in enumerate(lines):
            table.append((finding.subject, str(finding.verdict), line) if number == 0 else ("", "", line))
    return table


def _wrapped(line: str, room: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def link_matrix(pairs: Sequence[dict[str, Any]]) -> str:
    """Return how GPUs are connected: the row reaches the column.  Empty without pairs."""
    if not pairs:
        return ""
    size = 1 + max(pair["from"] for pair in pairs)
    cells = {}
    for pair in pairs:
        name = label({"link": pair["link"], "link_count": pair["link_count"], "atomics": pair["atomics"]})
        cells[pair["from"], pair["to"]] = f"{name}!" if pair["access"] is False else name
    legend = "NVn: n NVLinks; PIX, PXB, PHB, NODE, SYS: ever longer paths over PCIe; ?: not known"
    if any(pair["access"] is False for pair in pairs):
        legend += "; !: no peer access"
    matrix = _matrix("GPU", size, lambda row, column: cells.get((row, column), "-"))
    return f"GPU to GPU ({legend})\n{matrix}"


def self_test_matrix(outcome: Outcome) -> str:
    """Return whether everything was right between each two ranks.  Empty where nothing was tested."""
    if not outcome.checks:
        return ""
    good = {(check.rank, check.peer) for check in outcome.checks}
    bad = {(check.rank, check.peer) for check in outcome.failures}

    def cell(row: int, column: int) -> str:
        if (row, column) in bad:
            return "FAILED"
        return "ok" if (row, column) in good else "-"

    ops = ", ".join(dict.fromkeys(check.op for check in outcome.checks))
    job = outcome.job
    heading = (
        f"Self-test, {job.backend} on {job.allocator}, {job.device} (the row's rank on the column's memory: {ops})"
    )
    return f"{heading}\n{_matrix('rank', job.ranks, cell)}"


def _matrix(corner: str, size: int, cell: Callable[[int, int], str]) -> str:
    lines = [[corner, *map(str, range(size))]]
    lines += [[str(row), *(cell(row, column) for column in range(size))] for row in range(size)]
    widths = [max(len(line[column]) for line in lines) for column in range(size + 1)]
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
