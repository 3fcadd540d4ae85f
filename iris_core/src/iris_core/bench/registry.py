"""Which benchmarks there are, and the points that their axes span."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import pathlib
import re
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from iris_core.errors import FAILURES, BenchmarkError, IrisError, error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from iris_core.bench.options import RunOptions

F = TypeVar("F", bound="Callable[..., Any]")

_AXES, _REGISTERED = "__iris_bench_axes__", "__iris_bench_registered__"
_RESERVED = {"num_ranks": "the number of ranks belongs to the run: RunOptions(num_ranks=...)"}
_registry: dict[str, Benchmark] = {}


@dataclass(frozen=True)
class Axis:
    """One parameter of a benchmark.

    Attributes:
        name: of the parameter.
        values: its values, or a function that makes them from the options of the run.
    """

    name: str
    values: Sequence[Any] | Callable[[RunOptions], Iterable[Any]]

    def resolve(self, options: RunOptions) -> list[Any]:
        """Return the values for a run; those of the options go first."""
        values: Iterable[Any]
        if self.name in options.axes:
            values = options.axes[self.name]
        else:
            values = self.values(options) if callable(self.values) else self.values
        return list(values)


@dataclass(frozen=True)
class Benchmark:
    """A registered benchmark.

    Attributes:
        name: file and function, "rma.pair".
        function: called with (state, ctx) for every point.
        axes: in the order of the decorators; the first one changes slowest.
        ranks: whether it needs ranks; then ctx is an open context, else None.
        matrix: two axes whose points are shown as a matrix of bandwidths; empty for a list.
        by_default: whether it runs where none was chosen by name.
        source: the file that it is in.
        line: its line there.
    """

    name: str
    function: Callable[..., Any]
    axes: tuple[Axis, ...]
    ranks: bool
    matrix: tuple[str, ...]
    by_default: bool
    source: str
    line: int

    @property
    def about(self) -> str:
        """First line of the function's docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    def points(self, options: RunOptions) -> Iterator[dict[str, Any]]:
        """Yield the values of the axes, one mapping for each point."""
        names = [axis.name for axis in self.axes]
        for values in itertools.product(*(axis.resolve(options) for axis in self.axes)):
            yield dict(zip(names, values, strict=True))


def axis(name: str, values: Iterable[Any] | Callable[[RunOptions], Iterable[Any]]) -> Callable[[F], F]:
    """Give a benchmark a parameter; stands below `@register`.

    Args:
        name: of the parameter; the benchmark reads it as state[name].
        values: its values, or a function of the `RunOptions` that returns them.

    Raises:
        BenchmarkError: the name is not one, reserved or used twice, there are no values, or `@register` is below.
    """
    if not name.isidentifier():
        raise BenchmarkError(f"axis {name!r}: the name must be usable as a name in Python")
    if name in _RESERVED:
        raise BenchmarkError(f"axis {name!r} is reserved: {_RESERVED[name]}")
    if not callable(values):
        values = tuple(values)
        if not values:
            raise BenchmarkError(f"axis {name!r} has no values")
    added = Axis(name, values)

    def decorate(function: F) -> F:
        if getattr(function, _REGISTERED, False):
            raise BenchmarkError(f"axis {name!r}: put @register above every @axis, so that it sees all of them")
        axes: tuple[Axis, ...] = getattr(function, _AXES, ())
        if name in [each.name for each in axes]:
            raise BenchmarkError(f"{function.__name__} has two axes {name!r}")
        setattr(function, _AXES, (added, *axes))  # decorators apply from below
        return function

    return decorate


@overload
def register(function: F) -> F:
    """Use it as a decorator without arguments."""


@overload
def register(
    *, name: str = ..., ranks: bool = ..., matrix: tuple[str, str] | tuple[()] = ..., by_default: bool = ...
) -> Callable[[F], F]:
    """Use it as a decorator with arguments."""


def register(
    function: F | None = None,
    *,
    name: str = "",
    ranks: bool = True,
    matrix: tuple[str, str] | tuple[()] = (),
    by_default: bool = True,
) -> F | Callable[[F], F]:
    """Register a benchmark, a function of (state, ctx); the outermost decorator.

    Args:
        function: the benchmark, where the decorator is used without arguments.
        name: its name; "<file>.<function>" by default.
        ranks: run it on ranks, with an open `Iris` as ctx; otherwise once in this process, with None as ctx.
        matrix: two axes; the console shows the bandwidth over them as a matrix.
        by_default: whether it runs where none was chosen by name.

    Returns:
        The function itself.

    Raises:
        BenchmarkError: another function has this name, or matrix names no axis.
    """
    if function is None:
        return lambda f: _register(f, name, ranks, tuple(matrix), by_default)
    return _register(function, name, ranks, tuple(matrix), by_default)


def _register(function: F, name: str, ranks: bool, matrix: tuple[str, ...], by_default: bool) -> F:
    code = function.__code__
    name = name or f"{pathlib.Path(code.co_filename).stem}.{function.__name__}"
    axes: tuple[Axis, ...] = getattr(function, _AXES, ())
    unknown = [each for each in matrix if each not in [axis.name for axis in axes]]
    if unknown:
        raise BenchmarkError(f"benchmark {name!r}: matrix names {', '.join(unknown)}, which is no axis of it")
    new = Benchmark(name, function, axes, ranks, matrix, by_default, code.co_filename, code.co_firstlineno)
    known = _registry.get(name)
    if known and (known.source, known.function.__qualname__) != (new.source, function.__qualname__):
        raise BenchmarkError(
            f"two benchmarks are called {name!r}: {known.source}:{known.line} and {new.source}:{new.line}; "
            "give one of them another name, register(name=...)"
        )
    _registry[name] = new  # the same function once more: its module was loaded again
    setattr(function, _REGISTERED, True)
    return function


def registered(*, source: str | None = None, pattern: str = "") -> list[Benchmark]:
    """Return benchmarks in the order of their registration.

    Args:
        source: only those of this file.
        pattern: regular expression that is searched in the names; without one, those that run by default.

    Raises:
        BenchmarkError: the pattern is not a regular expression, or none matches it.
    """
    home = None if source is None else pathlib.Path(source).resolve()
    here = [each for each in _registry.values() if home is None or pathlib.Path(each.source).resolve() == home]
    if not pattern:
        return [each for each in here if each.by_default]
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise BenchmarkError(f"{pattern!r} is not a regular expression: {error}") from error
    found = [each for each in here if wanted.search(each.name)]
    if not found:
        names = ", ".join(each.name for each in here) or "none at all"
        raise BenchmarkError(f"no benchmark matches {pattern!r}; there are: {names}")
    return found


def find(name: str) -> Benchmark:
    """Return the benchmark of a name.

    Raises:
        BenchmarkError: there is none.
    """
    if name not in _registry:
        raise BenchmarkError(f"no benchmark is called {name!r}; there are: {', '.join(_registry) or 'none at all'}")
    return _registry[name]


def matrices() -> dict[str, tuple[str, ...]]:
    """Return the two axes of every benchmark that is shown as a matrix, by name."""
    return {each.name: each.matrix for each in _registry.values() if each.matrix}


def load(path: str) -> None:
    """Import a file of benchmarks, unless this process has done so already.

    Args:
        path: the file; its folder becomes importable, as for a script.

    Raises:
        BenchmarkError: there is no such file, or importing it raised.
    """
    file = pathlib.Path(path).resolve()
    if any(pathlib.Path(each.source).resolve() == file for each in _registry.values()):
        return
    spec = importlib.util.spec_from_file_location(
        f"iris_bench_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}", file
    )
    if not file.is_file() or spec is None or spec.loader is None:
        raise BenchmarkError(f"{path} is not a Python file; benchmarks that run on ranks must be in one")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[spec.name]
        if isinstance(error, IrisError) or not isinstance(error, FAILURES):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f", at line {each.lineno}" for each in reversed(frames) if each.filename == str(file)), "")
        raise BenchmarkError(f"{path} cannot be imported: {error_text(error)}{line}") from error


def check_axes(benchmarks: Iterable[Benchmark], axes: Mapping[str, Sequence[Any]]) -> None:
    """Refuse values for axes that no chosen benchmark has.

    Raises:
        BenchmarkError: an axis is unknown or has no values; lists those that there are.
    """
    known = sorted({axis.name for each in benchmarks for axis in each.axes})
    for name, values in axes.items():
        if name not in known:
            raise BenchmarkError(f"no chosen benchmark has an axis {name!r}; there are: {', '.join(known) or 'none'}")
        if not list(values):
            raise BenchmarkError(f"axis {name!r} has no values")


def power_of_two(first: int, last: int) -> list[int]:
    """Return the powers of two from `first` to `last`, both included.

    Raises:
        BenchmarkError: one of them is not a power of two, or the first is larger.

    Example:
        >>> power_of_two(4, 32)
        [4, 8, 16, 32]
    """
    for each in (first, last):
        if each < 1 or each & (each - 1):
            raise BenchmarkError(f"power_of_two({first}, {last}): {each} is not a power of two")
    if first > last:
        raise BenchmarkError(f"power_of_two({first}, {last}): the first must not be larger than the last")
    return [1 << shift for shift in range(first.bit_length() - 1, last.bit_length())]


def linear_range(first: int, last: int, step: int) -> list[int]:
    """Return the numbers from `first` to at most `last`, `step` apart.

    Raises:
        BenchmarkError: the step is not positive, or the first is larger than the last.

    Example:
        >>> linear_range(1, 10, 4)
        [1, 5, 9]
    """
    if step < 1 or first > last:
        raise BenchmarkError(f"linear_range({first}, {last}, {step}): needs first <= last and a step of at least 1")
    return list(range(first, last + 1, step))
