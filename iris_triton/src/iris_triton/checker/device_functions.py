"""Signals and waits as operations: what a flag is set by, what a wait compares with.

On the CPU these device functions are atomics in a loop.  While the checker is on, each says to its strand what it is
before it runs, so that a wait is known by its comparison and its expected value.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from iris_triton.checker.watcher import Watcher
from iris_triton.interpreter.entries import run_around
from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.language import flags, sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _during(operation: Callable[..., Any], function: Any) -> Callable[..., Any]:
    def around(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        strand = Watcher.strand()
        if strand is None or (strand.operation is not None and strand.operation[0] != "load"):
            return run(*args, **kwargs)
        given = function.signature.bind(*args, **kwargs)
        given.apply_defaults()
        before, strand.operation = strand.operation, operation(given.arguments)
        try:
            return run(*args, **kwargs)
        finally:
            strand.operation = before

    return around


def _numbers(value: Any) -> Any:
    value = unwrap(value)
    return np.asarray(value.handle.data if hasattr(value, "handle") else value).reshape(-1)


def _spin(given: dict[str, Any]) -> Any:
    return "any" if unwrap(given["ANY"]) else "wait", unwrap(given["cmp"]), _numbers(given["expected"])


def _test(given: dict[str, Any]) -> Any:
    return "wait", unwrap(given["cmp"]), _numbers(given["value"])


_OPERATIONS: tuple[tuple[Any, Callable[[dict[str, Any]], Any]], ...] = (
    (flags.set_flag, lambda given: ("set",)),
    (flags.set_flags, lambda given: ("set",)),
    (flags.poll, lambda given: ("load",)),
    (flags.spin, _spin),
    (sync.test, _test),
)


@contextlib.contextmanager
def as_operations() -> Iterator[None]:
    """Let these functions say what they are, within a `with` block."""
    for function, operation in _OPERATIONS:
        run_around(function, functools.partial(_during(operation, function)))
    try:
        yield
    finally:
        for function, _ in _OPERATIONS:
            run_around(function, None)
