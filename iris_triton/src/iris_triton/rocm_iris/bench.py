"""`iris.bench` of AMD's Iris: its decorators and its command line, on top of `iris_core.bench`.

    @bench.register
    @bench.axis("num_ranks", [2, 4, 8])
    @bench.axis("n", bench.power_of_two(10, 16))
    def all_gather(state, ctx):
        ...
        state.exec(lambda: ctx.ccl.all_gather(out, inp), preamble_fn=...)

    if __name__ == "__main__":
        bench.main()

Data is not verified by such benchmarks; `state.exec(..., check=...)` and `state.provider` do that.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from iris_core.bench import registry, runner
from iris_core.bench.machine import describe
from iris_core.bench.registry import RunOptions, linear_range, parse_axis
from iris_core.bench.results import Report
from iris_core.bench.state import State
from iris_core.bench.suites import finish, merged
from iris_core.errors import BenchmarkError, IrisError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from iris_core.bench.registry import Benchmark

__all__ = ["State", "axis", "linear_range", "main", "power_of_two", "register"]

F = TypeVar("F", bound="Callable[..., Any]")

_RANKS = "num_ranks"
_MOST_RANKS, _CPU_RANKS = 8, 2
_CONTEXT = "iris_triton.rocm_iris.ported_context:Iris"
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


def axis(name: str, values: Iterable[Any]) -> Callable[[F], F]:
    """Give a benchmark a parameter, as `iris_core.bench.axis`; stands below `@register`.

    "num_ranks" is with how many ranks the benchmark is run, one run for each number.
    """
    if name != _RANKS:
        return registry.axis(name, values)
    numbers = tuple(values)
    if not numbers or not all(isinstance(each, int) and each > 0 for each in numbers):
        raise BenchmarkError(f"axis {name!r}: needs numbers of ranks, not {list(numbers)}")

    def decorate(function: F) -> F:
        setattr(function, registry.AXES, getattr(function, registry.AXES, {}) | {_RANKS: numbers})
        return function

    return decorate


def register(function: F) -> F:
    """Register a benchmark, a function of (state, ctx); `state["num_ranks"]` is the number of ranks."""
    setattr(function, registry.AXES, {_RANKS: (), **getattr(function, registry.AXES, {})})
    registry.register(function)
    return function


def main(argv: Sequence[str] | None = None) -> int:
    """Be a program: run the benchmarks of the file that was started, print the results, write them.

    Each number of ranks is a run of its own, on new processes; under torchrun the ranks that there are take part, and
    other numbers are left out with a warning.

    Args:
        argv: the arguments; sys.argv's by default.

    Returns:
        The exit status: 0 if all is well, 1 if data was wrong, 2 if the run could not be made.
    """
    world = int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None
    try:
        args = _parsed(argv)
        chosen = registry.registered(pattern=args.benchmark_filter)
        registry.check_axes(chosen, {**args.axis, **args.skip})
        numbers = {each: _numbers_of_ranks(each, args, world) for each in chosen}
        reports = [_report(each, args, ranks, world) for each in chosen for ranks in numbers[each]]
        if not reports:
            raise BenchmarkError("nothing is left to run")
    except IrisError as error:
        print(error, file=sys.stderr)
        return 2
    if world is not None and os.environ["RANK"] != "0":
        return 0
    return finish(merged(reports), out=args.benchmark_out, style=args.benchmark_format)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; `axis` and `skip` are values by the name of an axis."""
    parser = argparse.ArgumentParser(
        epilog="--axis_NAME=VALUES: other values of an axis; --skip_NAME=VALUES: values that are left out. VALUES is a "
        "list 1,2,fp16, pow2:FIRST:LAST with exponents, or lin:FIRST:LAST:STEP."
    )
    add = parser.add_argument
    add("--benchmark_filter", default="", metavar="REGEX", help="benchmarks whose names match")
    add("--benchmark_format", choices=("console", "json", "csv"), default="console")
    add("--benchmark_out", default="", metavar="FILE", help="JSON, or CSV if it ends in .csv")
    add("--heap_size", type=int, default=1 << 34, metavar="BYTES", help="heap of each rank")
    add("--use_gluon", action="store_true", help="open contexts with the Gluon backend")
    add("--n_warmup", type=int, default=25, help="calls before the timed ones (default 25)")
    add("--n_repeat", type=int, default=100, help="timed calls (default 100)")
    add("--rounds", type=int, default=1, help="how often all of that is done (default 1)")
    args, rest = parser.parse_known_args(argv)
    args.axis, args.skip = {}, {}
    for text in rest:
        option, _, values = text.partition("_")
        if option not in ("--axis", "--skip"):
            parser.error(f"unrecognized argument: {text}")
        name, found = parse_axis(values, power_of_two)
        getattr(args, option.removeprefix("--"))[name] = [_DTYPES.get(each, each) for each in found]
    return args


def _numbers_of_ranks(benchmark: Benchmark, args: argparse.Namespace, world: int | None) -> list[int]:
    usual = min(torch.cuda.device_count(), _MOST_RANKS) or _CPU_RANKS
    wanted: Any = args.axis.get(_RANKS) or benchmark.axes[_RANKS] or [usual]
    wanted = [each for each in wanted if each not in args.skip.get(_RANKS, ())]
    if world is None:
        return wanted  # type: ignore[no-any-return]
    for ranks in set(wanted) - {world}:
        warnings.warn(f"{benchmark.name}: num_ranks={ranks} is left out: this world has {world}", stacklevel=3)
    return [world]


def _report(benchmark: Benchmark, args: argparse.Namespace, ranks: int, world: int | None) -> Report:
    """Run on new ranks; in a world that torchrun has started, as one of its ranks."""
    options = RunOptions(
        num_ranks=ranks, backend="gluon" if args.use_gluon else "triton", heap_size=args.heap_size, rounds=args.rounds,
        warmup=args.n_warmup, repeat=args.n_repeat, context=_CONTEXT, axes=args.axis | {_RANKS: [ranks]},
    )  # fmt: skip
    skip = args.skip | {_RANKS: ()}
    axes = {
        name: [v for v in values if v not in skip.get(name, ())] for name, values in benchmark.values(options).items()
    }
    if empty := [name for name, values in axes.items() if not values]:
        raise BenchmarkError(f"{benchmark.name}: no value of axis {empty[0]!r} is left")
    options = dataclasses.replace(options, axes=axes)
    if world is None:
        return runner.run([benchmark], options)
    results, facts = runner.run_on_this_rank([benchmark.name], [str(benchmark.source)], options)
    about = {"num_ranks": world, "seconds": 0.0, **facts}
    return Report("benchmarks", describe(), about, tuple(results[benchmark.name]))
