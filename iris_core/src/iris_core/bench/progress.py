"""Where a run is: a bar on a terminal, a line for each benchmark elsewhere; on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iris_core.bench.options import RunOptions
    from iris_core.bench.registry import Benchmark


class Progress:
    """Shows how many points of a benchmark are done.

    Args:
        shown: false on all ranks but one.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def points(self, benchmark: Benchmark, options: RunOptions) -> Iterator[dict[str, Any]]:
        """Yield the points of a benchmark, and show that they are being measured."""
        points = list(benchmark.points(options))
        if self._bar is None:
            if self._shown:
                print(f"measuring {benchmark.name}: {benchmark.about}", file=sys.stderr, flush=True)
            yield from points
            return
        task = self._bar.add_task(benchmark.name, total=len(points))
        for point in points:
            yield point
            self._bar.advance(task)
