"""`iris.bench` of AMD's Iris: its decorators and its command line, on top of `iris_core.bench`.

    import iris.bench as bench

    @bench.register
    @bench.axis("num_ranks", [2, 4, 8])
    @bench.axis("n", bench.power_of_two(10, 16))
    def all_gather(state, ctx):
        ...
        state.set_bytes(...)
        state.exec(lambda: ctx.ccl.all_gather(out, inp), preamble_fn=...)

    if __name__ == "__main__":
        bench.main()

Data is not verified by such benchmarks; `state.exec(..., check=...)` and `state.provider` do that.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pathlib
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from iris_core.bench import registry
from iris_core.bench.registry import RunOptions, linear_range, parse_axis
from iris_core.bench.state import State
from iris_core.bench.suites import finish, suite
from iris_core.errors import BenchmarkError, IrisError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from iris_core.bench.registry import Benchmark
    from iris_core.bench.results import Report

__all__ = ["State", "axis", "linear_range", "main", "power_of_two", "register"]

F = TypeVar("F", bound="Callable[..., Any]")

_RANKS, _WANTED = "num_ranks", "__iris_bench_num_ranks__"
_MOST_RANKS = 8
_CPU_RANKS = 2
_CONTEXT = "iris_triton.rocm_iris.ported_context:Iris"
_HEAP_NBYTES = 1 << 34
_DTYPES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16"}


# -- declaring --------------------------------------------------------------------------------------------------------
def power_of_two(first: int, last: int) -> list[int]:
    """Return the powers of two with the exponents from `first` to `last`, both included.

    `iris_core.bench.power_of_two` takes the powers themselves.

    Raises:
        BenchmarkError: an exponent is negative, or the first is larger.

    Example:
        >>> power_of_two(2, 5)
        [4, 8, 16, 32]
    """
    if not 0 <= first <= last:
        raise BenchmarkError(f"power_of_two({first}, {last}): needs exponents, the first not larger than the last")
    return registry.power_of_two(1 << first, 1 << last)


def axis(name: str, values: Iterable[Any]) -> Callable[[F], F]:
    """Give a benchmark a parameter, as `iris_core.bench.axis`; stands below `@register`.

    Args:
        name: of the parameter; "num_ranks" is with how many ranks the benchmark is run, one run for each number.
        values: its values.

    Raises:
        BenchmarkError: as there.
    """
    if name != _RANKS:
        return registry.axis(name, values)
    numbers = tuple(values)
    if not numbers or not all(isinstance(each, int) and each > 0 for each in numbers):
        raise BenchmarkError(f"axis {name!r}: needs numbers of ranks, not {list(numbers)}")

    def decorate(function: F) -> F:
        setattr(function, _WANTED, numbers)
        return function

    return decorate


def register(function: F) -> F:
    """Register a benchmark, a function of (state, ctx); the outermost decorator.

    `state["num_ranks"]` is the number of ranks.

    Raises:
        BenchmarkError: another function has this name.
    """
    setattr(
        function, registry.AXES, {_RANKS: lambda options: [options.num_ranks], **getattr(function, registry.AXES, {})}
    )
    source = function.__code__.co_filename
    suite(pathlib.Path(source).stem, None, source=source, backend="triton", context=_CONTEXT)  # for `iris bench run`
    registry.register(function)
    return function


# -- running ----------------------------------------------------------------------------------------------------------
def main(argv: Sequence[str] | None = None) -> int:
    """Be a program: run the benchmarks of the file that was started, print the results, write them.

    Each number of ranks is a run of its own, on new processes; under torchrun the ranks that there are take part, and
    other numbers are left out with a warning.

    Args:
        argv: the arguments; sys.argv's by default.

    Returns:
        The exit status: 0 if all is well, 1 if data was wrong, 2 if the run could not be made.
    """
    try:
        args = _parsed(argv)
        report = _run(args)
    except IrisError as error:
        print(error, file=sys.stderr)
        return 2
    if _world_size() is not None and os.environ["RANK"] != "0":
        return 0
    return finish(report, out=args.benchmark_out, style=args.benchmark_format)


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
    add("--heap_size", type=int, default=_HEAP_NBYTES, metavar="BYTES", help="heap of each rank")
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
        getattr(args, option.removeprefix("--"))[name] = [_value(each) for each in found]
    return args


def _value(given: Any) -> Any:
    return getattr(importlib.import_module("torch"), _DTYPES[given]) if given in _DTYPES else given


def _run(args: argparse.Namespace) -> Report:
    from iris_core.bench.session import merged

    chosen = registry.registered(pattern=args.benchmark_filter)
    numbers, without = args.axis.pop(_RANKS, None), args.skip.pop(_RANKS, [])
    registry.check_axes(chosen, {**args.axis, **args.skip})
    reports = [
        _one_run(benchmark, _options(benchmark, args, ranks))
        for benchmark in chosen
        for ranks in _numbers_of_ranks(benchmark, numbers, without)
    ]
    if not reports:
        raise BenchmarkError("nothing is left to run")
    return merged(reports)


def _numbers_of_ranks(benchmark: Benchmark, numbers: Sequence[int] | None, without: Sequence[int]) -> list[int]:
    from iris_triton.rocm_iris.hip import count_devices

    usual = min(count_devices(), _MOST_RANKS) or _CPU_RANKS
    wanted = numbers or getattr(benchmark.function, _WANTED, None) or [usual]
    wanted = [each for each in wanted if each not in without]
    world = _world_size()
    if world is None:
        return wanted
    for ranks in wanted:
        if ranks != world:
            warnings.warn(f"{benchmark.name}: num_ranks={ranks} is left out: this world has {world}", stacklevel=4)
    return [world]


def _world_size() -> int | None:
    """Return the number of ranks that torchrun has started; None if this process is none of them."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def _options(benchmark: Benchmark, args: argparse.Namespace, ranks: int) -> RunOptions:
    options = RunOptions(
        num_ranks=ranks,
        backend="gluon" if args.use_gluon else "triton",
        heap_size=args.heap_size,
        rounds=args.rounds,
        warmup=args.n_warmup,
        repeat=args.n_repeat,
        context=_CONTEXT,
        axes=args.axis,
    )
    axes = benchmark.values(options)
    for name in axes.keys() & args.skip.keys():
        axes[name] = [value for value in axes[name] if value not in args.skip[name]]
        if not axes[name]:
            raise BenchmarkError(f"{benchmark.name}: no value of axis {name!r} is left")
    return dataclasses.replace(options, axes=axes)


def _one_run(benchmark: Benchmark, options: RunOptions) -> Report:
    from iris_core.bench import machine, session
    from iris_core.bench.results import Report

    world = _world_size()
    if world is None:
        return session.run([benchmark], options, name="benchmarks")
    start = time.perf_counter()
    results, facts = session.run_on_this_rank([benchmark.name], [benchmark.source], options)
    about = {"num_ranks": world, "seconds": round(time.perf_counter() - start, 1), **facts}
    return Report("benchmarks", machine.describe(), about, tuple(results[benchmark.name]))
