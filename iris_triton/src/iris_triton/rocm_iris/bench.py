"""`iris.bench` of AMD's Iris: its decorators and command line; `state.exec(..., check=...)` can verify data here."""

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris_core.bench import registry, runner
from iris_core.bench.registry import RANKS, RunOptions, axis, parse_axis
from iris_core.bench.suites import finish
from iris_core.errors import BenchmarkError, IrisError

_DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}


def power_of_two(first: int, last: int) -> list[int]:
    """Return the powers of two with the exponents from `first` to `last`, both included; `BenchmarkError` if none.

    Example:
        >>> power_of_two(2, 5)  # iris_core.bench.power_of_two takes the powers themselves
        [4, 8, 16, 32]
    """
    if not 0 <= first <= last:
        raise BenchmarkError(f"power_of_two({first}, {last}): needs exponents, the first not larger than the last")
    return registry.power_of_two(1 << first, 1 << last)


def register(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a benchmark, a function of (state, ctx); `state["num_ranks"]` is the number of ranks."""
    if RANKS not in getattr(function, registry.AXES, {}):
        axis(RANKS, lambda options: [options.num_ranks])(function)
    registry.register(function)
    return function


def main(argv: Sequence[str] | None = None) -> int:
    """Be a program: run the benchmarks of the file that was started, print the results, write them.

    Return the exit status: 0 if all is well, 1 if data was wrong, 2 if the run could not be made.  Each number of ranks
    is a run of its own, on new processes; by default all GPUs, at most 8, or 2 CPU ranks.  Under torchrun the ranks
    that there are take part, and other numbers are left out with a warning.  `argv` is sys.argv's by default.
    """
    is_rank = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    try:
        given = vars(_parsed(argv))
        chosen = registry.registered(pattern=given.pop("benchmark_filter"))
        how = {"out": given.pop("benchmark_out"), "style": given.pop("benchmark_format")}
        options = RunOptions(num_ranks=min(torch.cuda.device_count(), 8) or 2, **given)
        if is_rank:
            world = int(os.environ["WORLD_SIZE"])
            for ranks in {each for one in chosen for each in one.values(options)[RANKS]} - {world}:
                warnings.warn(f"num_ranks={ranks} is left out: this world has {world}", stacklevel=2)
            options = dataclasses.replace(options, axes={**options.axes, RANKS: [world]})
        report = runner.run(chosen, options, is_rank=is_rank)
    except IrisError as error:
        print(error, file=sys.stderr)
        return 2
    if is_rank and os.environ["RANK"] != "0":
        return 0
    return finish(report, **how)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments: those about choice and output, and fields of `RunOptions` by their names."""
    parser = argparse.ArgumentParser(
        epilog="--axis_NAME=VALUES: other values of an axis; --skip_NAME=VALUES: values that are left out. VALUES is a "
        "list 1,2,fp16, pow2:FIRST:LAST with exponents, or lin:FIRST:LAST:STEP."
    )
    add = parser.add_argument
    add("--benchmark_filter", default="", metavar="REGEX", help="benchmarks whose names match")
    add("--benchmark_format", choices=("console", "json", "csv"), default="console")
    add("--benchmark_out", default="", metavar="FILE", help="JSON, or CSV if it ends in .csv")
    add("--heap_size", type=int, default=1 << 34, metavar="BYTES", help="heap of each rank")
    gluon = "open contexts with the Gluon backend"
    add("--use_gluon", dest="backend", action="store_const", const="gluon", default="triton", help=gluon)
    add("--n_warmup", dest="warmup", type=int, default=25, help="calls before the timed ones (default 25)")
    add("--n_repeat", dest="repeat", type=int, default=100, help="timed calls (default 100)")
    add("--rounds", type=int, default=1, help="how often all of that is done (default 1)")
    args, rest = parser.parse_known_args(argv)
    args.axes, args.skip, args.context = {}, {}, "iris_triton.rocm_iris.ported_context:Iris"
    for text in rest:
        option, _, values = text.partition("_")
        if option not in ("--axis", "--skip"):
            parser.error(f"unrecognized argument: {text}")
        name, found = parse_axis(values, power_of_two)
        (args.axes if option == "--axis" else args.skip)[name] = [_DTYPES.get(each, each) for each in found]
    return args
