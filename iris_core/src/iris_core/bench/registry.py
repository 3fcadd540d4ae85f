"""Registered benchmarks, the points that their axes span, and the options of a run."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import pydantic

from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    Values = Sequence[Any] | Callable[["RunOptions"], Iterable[Any]]

F = TypeVar("F", bound="Callable[..., Any]")

AXES = "__iris_bench_axes__"
RANKS = "num_ranks"
BENCHMARKS: dict[str, Benchmark] = {}
_VALUES = pydantic.TypeAdapter(list[Annotated[int | float | str, pydantic.Field(union_mode="left_to_right")]])
_LEAST = {"num_ranks": 1, "rounds": 1, "warmup": 0, "repeat": 1, "batch_ms": 1e-6, "warm_ms": 0.0, "limit_s": 1e-6}


@dataclass(frozen=True)
class RunOptions:
    """How to run; the same on every rank.  A number out of range is a `BenchmarkError`."""

    #: ranks that are started for benchmarks with a context; several numbers are values of an axis, below
    num_ranks: int = 1
    device: str | None = None  #: as of `iris_core.Iris`
    allocator: str = "auto"  #: likewise
    backend: str = "auto"  #: likewise
    heap_size: int | str = "1GiB"  #: likewise
    quick: bool = False  #: fewer points, for a first look and for tests
    #: values that replace those which the benchmarks declare, by axis; all benchmarks have the axis "num_ranks"
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    skip: Mapping[str, Sequence[Any]] = field(default_factory=dict)  #: values that are left out
    rounds: int = 7  #: where a benchmark does not say, like the next two
    warmup: int = 1  #: calls before the timed ones of each round
    repeat: int | None = None  #: timed calls of each round; None for as many as `batch_ms` holds
    batch_ms: float = 5.0  #: how long the timed calls of one round should take together
    warm_ms: float = 10.0  #: how long a GPU computes before each point, so that its clocks are up
    #: no point begins after nine tenths of it; a rank that takes longer in all prints where it is and ends
    limit_s: float = 600.0
    #: class of the contexts that benchmarks get, "module:name"; it takes the arguments of `iris_core.Iris`
    context: str = "iris_core.api:Iris"
    #: variables that the ranks get, unless the environment has them
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | type(least)) and value >= least):
                kind = "a whole number" if isinstance(least, int) else "a number"
                raise BenchmarkError(f"{name} must be at least {least} and {kind}, not {value}")


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark."""

    name: str  #: file and function, "rma.pair"
    function: Callable[..., Any]  #: called with (state, ctx) for every point
    #: whether it runs on ranks, with an open `Iris` as ctx; else once in this process, with None as ctx
    ranks: bool = True
    by_default: bool = True  #: whether it runs where none was chosen by name

    @property
    def source(self) -> pathlib.Path:
        """The file that it is in."""
        return pathlib.Path(self.function.__code__.co_filename).resolve()

    @property
    def axes(self) -> Mapping[str, Values]:
        """Values by name, or functions of the `RunOptions` that return them; the first axis changes slowest."""
        return getattr(self.function, AXES, {})

    def values(self, options: RunOptions) -> dict[str, list[Any]]:
        """Return the values of each axis in a run: those of the options where it has some, without those to skip."""
        given = {name: options.axes.get(name, values) for name, values in self.axes.items()}
        found = {name: values(options) if callable(values) else values for name, values in given.items()}
        return {name: [v for v in values if v not in options.skip.get(name, ())] for name, values in found.items()}

    def points(self, options: RunOptions) -> list[dict[str, Any]]:
        """Return the values of the axes at each point."""
        values = self.values(options)
        return [dict(zip(values, point, strict=True)) for point in itertools.product(*values.values())]


def axis(name: str, values: Iterable[Any] | Callable[[RunOptions], Iterable[Any]]) -> Callable[[F], F]:
    """Give a benchmark a parameter, which it reads as state[name].

    Its values are a list, or a function of the `RunOptions` that returns them; of "num_ranks", numbers of ranks, each a
    run of its own.  A name that is none or used twice, and an axis without values, are a `BenchmarkError`.
    """
    added: Values = values if callable(values) else tuple(values)
    if not name.isidentifier():
        raise BenchmarkError(f"axis {name!r}: the name must be usable as a name in Python")
    if not added:
        raise BenchmarkError(f"axis {name!r} has no values")

    def decorate(function: F) -> F:
        below: dict[str, Values] = getattr(function, AXES, {})
        if name in below:
            raise BenchmarkError(f"{function.__name__} has two axes {name!r}")
        setattr(function, AXES, {name: added, **below})
        return function

    return decorate


def register(
    function: Callable[..., Any] | None = None, *, name: str = "", ranks: bool = True, by_default: bool = True
) -> Any:
    """Register a benchmark, a function of (state, ctx); a decorator with or without arguments, fields of `Benchmark`.

    The name is "<file>.<function>" by default.  A name that another function has is a `BenchmarkError`.
    """
    if function is None:
        return functools.partial(register, name=name, ranks=ranks, by_default=by_default)
    name = name or f"{pathlib.Path(function.__code__.co_filename).stem}.{function.__name__}"
    new = Benchmark(name, function, ranks, by_default)
    known = BENCHMARKS.get(name, new)
    if (known.source, known.function.__qualname__) != (new.source, function.__qualname__):
        places = " and ".join(f"{each.source}:{each.function.__code__.co_firstlineno}" for each in (known, new))
        raise BenchmarkError(f"two benchmarks are called {name!r}: {places}; name one of them, register(name=...)")
    BENCHMARKS[name] = new  # the same function once more: its module was loaded again
    return function


def registered(*, source: str | None = None, pattern: str = "") -> list[Benchmark]:
    """Return benchmarks in the order of their registration; only those of the file `source`, where it is given.

    They are those that run by default, or, with a pattern, all in whose names the regular expression is found; it is a
    `BenchmarkError` if there are none.
    """
    file = source and pathlib.Path(source).resolve()
    here = [each for each in BENCHMARKS.values() if file in (None, each.source)]
    try:
        found = [each for each in here if (re.search(pattern, each.name) if pattern else each.by_default)]
    except re.error as error:
        raise BenchmarkError(f"{pattern!r} is not a regular expression: {error}") from error
    if pattern and not found:
        names = ", ".join(each.name for each in here) or "none at all"
        raise BenchmarkError(f"no benchmark matches {pattern!r}; there are: {names}")
    return found


def load(path: str | pathlib.Path) -> None:
    """Import a file of benchmarks, unless this process has done so; its folder becomes importable, as for a script.

    A file that does not exist is a `BenchmarkError`; what it raises itself is raised.
    """
    file = pathlib.Path(path).resolve()
    if any(each.source == file for each in BENCHMARKS.values()):
        return
    spec = importlib.util.spec_from_file_location(f"iris_bench_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise BenchmarkError(f"{path} is not a Python file; benchmarks that run on ranks must be in one")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise


def check_axes(benchmarks: Sequence[Benchmark], options: RunOptions) -> None:
    """Refuse options for axes that no chosen benchmark has, or that leave no point, with a `BenchmarkError`."""
    known = sorted({name for each in benchmarks for name in each.axes})
    if strange := [name for name in (*options.axes, *options.skip) if name not in (RANKS, *known)]:
        raise BenchmarkError(f"no chosen benchmark has an axis {strange[0]!r}; there are: {', '.join(known) or 'none'}")
    if not any(each.points(options) for each in benchmarks):
        raise BenchmarkError("nothing is left to run: no benchmark is chosen, or each has an axis without values")


# -- values of axes ---------------------------------------------------------------------------------------------------
def power_of_two(first: int, last: int) -> list[int]:
    """Return the powers of two from `first` to `last`, 4, 8, 16 for 4 and 16; a `BenchmarkError` if they are none."""
    if first.bit_count() != 1 or last.bit_count() != 1 or not 0 < first <= last:
        raise BenchmarkError(f"power_of_two({first}, {last}): needs powers of two, the first not larger than the last")
    return [1 << shift for shift in range(first.bit_length() - 1, last.bit_length())]


def linear_range(first: int, last: int, step: int) -> list[int]:
    """Return the numbers from `first` to at most `last`, `step` apart; a `BenchmarkError` if there are none."""
    if step < 1 or first > last:
        raise BenchmarkError(f"linear_range({first}, {last}, {step}): needs first <= last and a step of at least 1")
    return list(range(first, last + 1, step))


def parse_axis(text: str, powers: Callable[[int, int], list[int]] = power_of_two) -> tuple[str, list[Any]]:
    """Return name and values of NAME=VALUES; a `BenchmarkError` if it is none.

    VALUES is a list 1,2.5,name (numbers where they are some), pow2:FIRST:LAST (see `powers`), or lin:FIRST:LAST:STEP.
    """
    name, _, values = text.partition("=")
    if not name.isidentifier() or not values:
        raise BenchmarkError(f"{text!r} is no axis: say NAME=VALUES, such as nbytes=1024,4096")
    if found := re.fullmatch(r"pow2:(\d+):(\d+)|lin:(-?\d+):(-?\d+):(\d+)", values):
        bounds = [int(each) for each in found.groups() if each is not None]
        return name, powers(*bounds) if len(bounds) == 2 else linear_range(*bounds)
    if values.startswith(("pow2:", "lin:")):
        raise BenchmarkError(f"{text!r}: say pow2:FIRST:LAST or lin:FIRST:LAST:STEP, in whole numbers")
    return name, _VALUES.validate_python(values.split(","))
