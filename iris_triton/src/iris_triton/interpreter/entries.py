"""CPU implementations of what Triton cannot express: vendor assembly and functions written around it; languages.

Imports neither torch nor triton, so any kernel module can register its entries.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from iris_core.errors import UnsupportedError
from iris_triton.interpreter.state import ProgramInfo, current

Entry = TypeVar("Entry", bound=Callable[..., Any])

PREPARED, ENTRY, AROUND = "_iris_cpu", "_iris_entry", "_iris_around"
"""Attributes of jitted functions: what runs them; the entry; what the checker calls in place of what runs them."""
FACTORIES = {"triton": "iris_triton.interpreter.frontend.calls:triton_dialect"}
"""What makes the `frontend.calls.Dialect` of a language, as "module:function"; the same one every time.  A language on
top of Triton adds its own; it is imported when the first kernel in that language is launched."""


def cpu_entry(function: Any) -> Callable[[Entry], Entry]:
    """Register the CPU implementation of a jitted device function.

    The implementation gets a `ProgramInfo` and then the call's arguments: constexprs and None unchanged, scalars as
    numpy scalars, blocks as numpy arrays, pointers as uint64 addresses, bf16 and fp8 values as float32.  Its result
    becomes a tensor: the numpy dtype decides the type (bool int1, Python ints the smallest of int32 and int64
    that holds them, Python floats float32); None stays None and a tuple becomes a tuple.  The implementation may also
    be a jitted function, which the executor runs with the call's arguments.

    Returns:
        A decorator, which returns the implementation unchanged: several decorators can be stacked.

    Example:
        >>> @cpu_entry(read_clock)  # doctest: +SKIP
        ... def _(program):
        ...     return np.int64(time.monotonic_ns())
    """

    def register(implementation: Entry) -> Entry:
        vars(function)[ENTRY] = implementation
        vars(function).pop(PREPARED, None)
        return implementation

    return register


def cpu_entry_at(function: Any, place: str, *given: Any) -> None:
    """Register a CPU implementation, by "module:name", that is imported when it is first called, with `given` first."""
    found = functools.cache(lambda: pkgutil.resolve_name(place))
    cpu_entry(function)(lambda *args, **named: found()(*given, *args, **named))


def find_assembly(assembly: str) -> Callable[[ProgramInfo], int] | None:
    """Return the implementation of an inline assembly instruction, or None if it is not one of the built-in ones."""
    return next((entry for form, entry in _BUILT_IN.items() if re.fullmatch(form, assembly.strip())), None)


clock: Callable[[], int] = time.monotonic_ns  # for kernels; where schedules are explored, it goes by their steps


def read_clock(program: ProgramInfo) -> int:
    """Return nanoseconds (CPU entry); from now on the program may be waiting for a time."""
    current.program.scheduler.is_bounded = True
    return clock()


_BUILT_IN: dict[str, Callable[[ProgramInfo], int]] = {
    r"mov\.u\d+ \$0, %(globaltimer|clock\d*);": read_clock,
    r"mov\.u32 \$0, %smid;": lambda program: program.linear_id,  # as if every program had a multiprocessor of its own
    # One program runs at a time, and each of its accesses is complete before the next one.
    r"fence\.[\w.]+; mov\.u32 \$0, 0;": lambda program: 0,
}


def dialect_of(function: Any) -> Any:
    """Return the dialect that runs a jitted kernel; UnsupportedError if none is loaded for its language."""
    from iris_triton import _compat

    language = _compat.language_of(function)
    if language not in FACTORIES:
        raise UnsupportedError(
            f"kernel {function.__name__!r} is written in {language.capitalize()}, which nothing that is loaded runs on "
            f"the CPU: install iris-{language} and import iris_{language}.interpreter"
        )
    return _factory(FACTORIES[language])()


_factory = functools.cache(pkgutil.resolve_name)
