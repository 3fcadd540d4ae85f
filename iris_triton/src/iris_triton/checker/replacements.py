"""What stands for functions of the executor while the checker is on: accesses, fences, signals and waits.

Nothing of this is there while it is off: an access of the executor asks for no checker.

Signals and waits are atomics in a loop on the CPU.  Each of these device functions says to its strand what it is before
it runs, so that a wait is known by its comparison and its expected value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from iris_triton import _compat
from iris_triton.checker.watcher import Watcher
from iris_triton.interpreter import entries
from iris_triton.interpreter.entries import AROUND, PREPARED
from iris_triton.interpreter.frontend import builder
from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.state import current
from iris_triton.language import flags, sync


@contextlib.contextmanager
def replaced(functions: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let others stand for functions (module, name, what stands for it), within a `with` block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
    try:
        for owner, name, other in functions:
            setattr(owner, name, other)
        yield
    finally:
        for owner, name, kept in before:
            setattr(owner, name, kept)


class Accesses:
    """Accesses and fences that a checker learns of; where they go to memory, a subclass may do something else.

    Methods of the name of a function of `accesses`, or of `entries`, do the same as that.
    """

    def __init__(self, checker: Watcher | None) -> None:
        self._watcher = checker if checker is not None and checker.follows_accesses else None

    def replacements(self) -> tuple[tuple[Any, str, Any], ...]:
        names = "untag", "plain", "load", "store", "rmw", "cas"
        return (
            *((accesses, name, getattr(self, name)) for name in names),
            (builder, "find_assembly", self.find_assembly),
        )

    @staticmethod
    def untag(addresses: Any, mask: Any, nbytes: int, access: str) -> Any:
        views = current.launch.views  # which holds an access against the tensor that its pointer comes from
        return addresses if views is None else views.enter(addresses, mask, nbytes, access)

    @staticmethod
    def plain(data: Any) -> Any:
        return data if data.dtype != np.uint64 or current.launch.views is None else current.launch.views.untag(data)

    def load(
        self, addresses: Any, mask: Any, fill: Any, dtype: np.dtype[Any], access: str = "load", poll: bool = False
    ) -> Any:
        thread, watcher = self._begin(often=poll), self._watcher
        addresses = self.untag(addresses, mask, dtype.itemsize, access)
        mask, view, indices, region = accesses._locate(addresses, mask, dtype, access)
        if watcher is not None and not poll:
            watcher.load(access, region, indices, addresses, mask, dtype.itemsize)
        if watcher is not None and fill is None and mask is not None:
            fill = watcher.undefined(dtype)
        data = np.broadcast_to(np.zeros(1) if fill is None else fill, addresses.shape).astype(dtype)
        data = self._read(thread, addresses, mask, data, view, indices, poll)
        if watcher is not None and poll:
            watcher.poll(addresses, mask, data)
        (current.program.observe if poll else current.program.loaded)(addresses, data)
        return data

    def store(self, addresses: Any, mask: Any, data: Any) -> None:
        thread, watcher = self._begin(often=False), self._watcher
        data = np.broadcast_to(data, addresses.shape)
        addresses = self.untag(addresses, mask, data.itemsize, "store")
        if watcher is not None:
            watcher.using(data, mask, "store")
        data = self.plain(data)
        mask, view, indices, region = accesses._locate(addresses, mask, data.dtype, "store")
        stored = None if watcher is None else watcher.store(region, indices, addresses, mask, data.itemsize)
        self._write(thread, addresses, mask, data, view, indices, stored is not None)
        if stored is not None:
            stored()
        current.program.progress()

    def rmw(self, op: Any, addresses: Any, values: Any, mask: Any, sem: Any, element: Any, scope: Any = None) -> Any:
        thread, watcher = self._begin(often=True), self._watcher
        values, mask = (accesses._spread(each, addresses.shape) for each in (values, mask))
        name = f"atomic_{op.name.lower()}"
        addresses = self.untag(addresses, mask, values.itemsize, name)
        if watcher is not None:
            watcher.using(values, mask, name)
        accesses.check(addresses, mask, values.itemsize, name)
        strand = Watcher.strand()
        is_set = op.name == "XCHG" and strand is not None and strand.operation == ("set",)
        run = self._change(thread, op, addresses, values, mask, sem, element, scope, is_set)
        old = run() if watcher is None else watcher.rmw(run, op, addresses, values, mask, sem, scope)
        if is_set:
            current.program.progress()
        elif mask.any():
            current.program.observe(addresses, old)
        return old

    def cas(self, addresses: Any, expected: Any, desired: Any, sem: Any, scope: Any = None) -> Any:
        thread, watcher = self._begin(often=True), self._watcher
        kept = expected.dtype
        bits = np.dtype(f"i{kept.itemsize}")
        expected, desired = (accesses._spread(each, addresses.shape).view(bits) for each in (expected, desired))
        addresses = self.untag(addresses, None, kept.itemsize, "atomic_cas")
        accesses.check(addresses, None, kept.itemsize, "atomic_cas")
        run = self._swap(thread, addresses, expected, desired, sem, scope)
        found = run() if watcher is None else watcher.cas(run, addresses, expected, desired, sem, scope)
        old = found.view(kept)
        current.program.observe(addresses, old)
        return old

    def find_assembly(self, assembly: str) -> Any:
        entry = entries.find_assembly(assembly)
        if entry is None or not assembly.startswith("fence."):
            return entry

        def fence(program: Any) -> int:
            self.fence(assembly)
            return entry(program)

        return fence

    def fence(self, assembly: str) -> None:
        if self._watcher is not None:
            self._watcher.fence(assembly)

    # -- memory --------------------------------------------------------------------------------------------------------
    def _begin(self, *, often: bool) -> Any:
        """Prepare an access (`often`: an atomic or a poll), and return what the functions below get."""

    def _read(self, thread: Any, addresses: Any, mask: Any, data: Any, view: Any, indices: Any, poll: bool) -> Any:
        if view is None:
            active = np.ones(addresses.shape, np.bool_) if mask is None else mask
            return _compat.native.load(addresses, active, data, data.dtype)
        if mask is None:
            return view.take(indices)
        data[mask] = view.take(indices)
        return data

    def _write(self, thread: Any, addresses: Any, mask: Any, data: Any, view: Any, indices: Any, at_once: bool) -> None:
        """Write the active lanes; `at_once`: memory is looked at then."""
        if view is None:
            _compat.native.store(addresses, data, np.ones(addresses.shape, np.bool_) if mask is None else mask)
        else:
            view[indices] = data if mask is None else data[mask]

    def _change(
        self, thread: Any, op: Any, addresses: Any, values: Any, mask: Any, sem: Any, element: Any, scope: Any,
        is_set: bool
    ) -> Callable[[], Any]:  # fmt: skip
        return functools.partial(accesses.native_rmw, op, addresses, values, element, mask, sem)

    def _swap(
        self, thread: Any, addresses: Any, expected: Any, desired: Any, sem: Any, scope: Any
    ) -> Callable[[], Any]:
        return functools.partial(_compat.native.atomic_cas, addresses, expected, desired, _compat.NATIVE_SEMS[sem])


# -- signals and waits ------------------------------------------------------------------------------------------------
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


def _condition(what: str, cmp: Any, value: Any) -> tuple[str, str, Any]:
    value = unwrap(value)
    numbers = np.asarray(value.handle.data if hasattr(value, "handle") else value)
    return what, unwrap(cmp), numbers.reshape(-1)


_OPERATIONS: tuple[tuple[Any, Callable[[dict[str, Any]], Any]], ...] = (
    (flags.set_flag, lambda given: ("set",)),
    (flags.set_flags, lambda given: ("set",)),
    (flags.poll, lambda given: ("load",)),
    (flags.spin, lambda given: _condition("any" if unwrap(given["ANY"]) else "wait", given["cmp"], given["expected"])),
    (sync.test, lambda given: _condition("test", given["cmp"], given["value"])),
)


@contextlib.contextmanager
def as_operations() -> Iterator[None]:
    """Let these functions say what they are, within a `with` block."""
    for function, operation in _OPERATIONS:
        vars(function)[AROUND] = _during(operation, function)
        vars(function).pop(PREPARED, None)
    try:
        yield
    finally:
        for function, _ in _OPERATIONS:
            del vars(function)[AROUND]
            vars(function).pop(PREPARED, None)
