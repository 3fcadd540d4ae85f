"""A file of benchmarks as a program and for `iris bench run`: on what it runs by default, and its options."""

from __future__ import annotations

import argparse
import pathlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.bench import registry
from iris_core.bench.registry import RunOptions, parse_axis, registered
from iris_core.bench.session import merged, run
from iris_core.bench.table import show
from iris_core.errors import BenchmarkError, IrisError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from iris_core.bench.results import Report

_suites: dict[pathlib.Path, Suite] = {}


@dataclass(frozen=True)
class Suite:
    """Ranks, device and plugins of a file of benchmarks where the user does not say, and the file of its results.

    Attributes:
        name: of the report.
        about: the program's description.
        source: the file, `__file__`.
        device: "cuda": on all GPUs, and only if there are enough; "cpu": on CPU ranks; None: where `Iris` chooses.
        min_ranks: fewest ranks that make sense; on CPUs it is also how many there are.
        max_ranks: most ranks where the user does not say how many; None for no bound.
        allocator, backend: by name, where the user does not say; the allocator on `device` only.
        heap_size: heap of each rank.
        environ: variables that the ranks get, unless the environment has them.
        context: class of the contexts that benchmarks get; see `RunOptions`.
        cpu_heap_size, cpu_environ: the same on CPU ranks; None for no difference.
        results: file of the JSON, in which {ranks} and {allocator} stand for what was used; it is written after runs of
            everything on the suite's own device.  Empty for none.
        obstacle: says why this machine's GPUs cannot run it; empty if they can.
    """

    name: str
    about: str
    source: str
    device: str | None = None
    min_ranks: int = 1
    max_ranks: int | None = None
    allocator: str = "auto"
    backend: str = "auto"
    heap_size: str = "1GiB"
    environ: Mapping[str, str] = field(default_factory=dict)
    context: str = RunOptions.context
    cpu_heap_size: str | None = None
    cpu_environ: Mapping[str, str] | None = None
    results: str = ""
    obstacle: Callable[[], str] | None = None

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Parse the arguments (sys.argv's by default), run, print, write.

        Returns:
            The exit status: 0 if all is well; 1 if data was wrong, or with --enforce a target was missed; 2 if the run
            could not be made.
        """
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_options(parser)
        return self.run(parser.parse_args(argv))

    def run(self, args: argparse.Namespace) -> int:
        """Run with parsed arguments (see `add_options`); returns the exit status."""
        try:
            first, *others = self.options(args)
            chosen = registered(source=self.source, pattern=args.only)
            ranks = "-".join(str(each.num_ranks) for each in (first, *others))
            file = self.results.format(ranks=ranks, allocator=first.allocator)
            name = pathlib.PurePath(file).stem or self.name
            on_ranks = [each for each in chosen if each.ranks]  # the others are run once
            report = merged([run(chosen, first, name=name), *(run(on_ranks, o, name=name) for o in others if on_ranks)])
        except IrisError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 2
        if args.only or args.axis or args.quick or first.device != self.device:
            file = ""  # a part, or on something else than the file is kept for
        return finish(report, out=args.out or file, enforce=args.enforce, style=args.format)

    def options(self, args: argparse.Namespace) -> list[RunOptions]:
        """Return how to run, once for each number of ranks; a `BenchmarkError` if this machine has too few GPUs."""
        device = args.device or self.device
        on_cpu = device == "cpu"
        return [
            RunOptions(
                num_ranks=ranks,
                device=device,
                allocator=args.allocator or (self.allocator if device == self.device else "auto"),
                backend=args.backend or self.backend,
                heap_size=args.heap_size or (on_cpu and self.cpu_heap_size) or self.heap_size,
                quick=args.quick,
                axes=dict(parse_axis(text) for text in args.axis),
                rounds=args.rounds,
                limit_s=args.limit,
                context=self.context,
                environ=self.environ if not on_cpu or self.cpu_environ is None else self.cpu_environ,
            )
            for ranks in self._numbers_of_ranks(args.ranks, device)
        ]

    def _numbers_of_ranks(self, text: str, device: str | None) -> list[int]:
        try:
            given = [int(each) for each in text.split(",")] if text else []
        except ValueError:
            raise BenchmarkError(f"--ranks: {text!r} is no number of ranks") from None
        if device != "cuda":
            return given or [self.min_ranks]
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        numbers = given or [max(self.min_ranks, min(gpus, self.max_ranks or gpus))]
        for ranks in numbers:
            if not self.min_ranks <= ranks <= gpus:
                raise BenchmarkError(
                    f"{ranks} ranks need as many GPUs, and {self.min_ranks} at least; torch sees {gpus} here. "
                    "`--device cpu` runs the same code on CPU ranks; its times say nothing about GPUs"
                )
        if self.obstacle and (problem := self.obstacle()):
            raise BenchmarkError(problem)
        return numbers


def suite(name: str, about: str | None, *, source: str, **fields: Any) -> Suite:
    """Declare on what this file of benchmarks runs; `about` is its `__doc__`, the fields are others of `Suite`.

    Example:
        SUITE = bench.suite("copy", __doc__, source=__file__, device="cuda", min_ranks=2)

        if __name__ == "__main__":
            sys.exit(SUITE.main())
    """
    made = _suites[pathlib.Path(source).resolve()] = Suite(name, about or "", source, **fields)
    return made


def suite_of(path: str) -> Suite:
    """Return the suite of a loaded file of benchmarks, or one that leaves everything to `Iris`."""
    file = pathlib.Path(path).resolve()
    return _suites.get(file) or Suite(file.stem, "", str(file))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks share."""
    add = parser.add_argument
    add("--ranks", default="", metavar="N[,N...]", help="numbers of ranks; each is a run of its own")
    add("--device", choices=("cpu", "cuda"), default=None, help="default: what the file says")
    add("--allocator", default="", help="allocator by name")
    add("--backend", default="", help="device backend by name")
    add("--heap-size", default="", metavar="SIZE", help="heap of each rank, such as 1GiB")
    add("--only", default="", metavar="REGEX", help="benchmarks whose names match")
    values = "other values of an axis: 1,2,3 or pow2:1024:65536 or lin:0:100:20; repeatable"
    add("--axis", action="append", default=[], metavar="NAME=VALUES", help=values)
    add("--quick", action="store_true", help="fewer points")
    add("--rounds", type=int, default=7, help="rounds, where a benchmark does not say (default 7)")
    add("--limit", type=float, default=600, metavar="S", help="bound of each rank (default 600)")
    add("--format", choices=("console", "json", "csv"), default="console", help="what is printed (default console)")
    add("--out", default="", metavar="FILE", help="file of the results: JSON, or CSV if it ends in .csv")
    add("--enforce", action="store_true", help="a missed target gives exit status 1 too")


def finish(report: Report, *, out: str = "", enforce: bool = False, style: str = "console") -> int:
    """Print a report as "console", "json" or "csv", write it to the file `out` (as CSV if it ends in .csv).

    Returns:
        The exit status: 1 if data was wrong, or, with `enforce`, a target was missed or could not be measured; else 0.
    """
    if style == "console":
        show(report, {name: each.matrix for name, each in registry.BENCHMARKS.items()})
    else:
        print(report.to_json() if style == "json" else report.to_csv(), end="")
    if out:
        print(f"written to {report.write(out)}", file=sys.stdout if style == "console" else sys.stderr)
    unreached = enforce and any(each.reached is not True for result in report.results for each in result.targets)
    return int(bool(report.errors) or unreached)
