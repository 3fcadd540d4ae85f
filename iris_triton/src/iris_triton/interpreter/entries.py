"""CPU implementations of what Triton cannot express: vendor assembly and functions written around it.

Imports neither torch nor triton, so any kernel module can register its entries.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from iris_triton.interpreter.state import ProgramInfo, current

Entry = TypeVar("Entry", bound=Callable[..., Any])

PREPARED = "_iris_cpu"
"""Attribute in which the executor keeps what it made of a jitted function."""

# Keyed by identity: hashing a jitted function computes its cache key.  The function is kept, so its id stays taken.
_functions: dict[int, tuple[Any, Callable[..., Any]]] = {}
_assembly: list[tuple[str, Callable[..., Any]]] = []


def cpu_entry(function: Any) -> Callable[[Entry], Entry]:
    """Register what the CPU executor calls instead of a jitted device function.

    The implementation gets a `ProgramInfo` and then the call's arguments: constexprs and None as they are, scalars as
    numpy scalars, blocks as numpy arrays, pointers as uint64 addresses, bf16 and fp8 values as float32.  What it
    returns becomes a tensor: the numpy dtype decides the type (bool int1, Python ints the smallest of int32 and int64
    that holds them, Python floats float32); None stays None and a tuple becomes a tuple.

    Args:
        function: the jitted function.

    Returns:
        A decorator, which returns the implementation unchanged: several decorators can be stacked.

    Example:
        >>> @cpu_entry(read_clock)  # doctest: +SKIP
        ... def _(program):
        ...     return np.int64(time.monotonic_ns())
    """

    def register(implementation: Entry) -> Entry:
        _functions[id(function)] = (function, implementation)
        vars(function).pop(PREPARED, None)
        return implementation

    return register


def find_entry(function: Any) -> Callable[..., Any] | None:
    """Return the implementation registered for a jitted function, or None."""
    found = _functions.get(id(function))
    return found[1] if found else None


def cpu_assembly(text: str) -> Callable[[Entry], Entry]:
    """Register what the CPU executor does for inline assembly that contains `text`.

    The implementation gets a `ProgramInfo` and the operands, like a `cpu_entry`, and returns one value per result of
    the assembly (a tuple if there are several); values are cast to the result's type and broadcast to its shape.  What
    was registered last is asked first.

    Args:
        text: part of the assembly string.

    Returns:
        A decorator, which returns the implementation unchanged.
    """

    def register(implementation: Entry) -> Entry:
        _assembly.insert(0, (text, implementation))
        return implementation

    return register


def find_assembly(assembly: str) -> Callable[..., Any] | None:
    """Return the implementation for inline assembly, or None.

    Built-in entries apply only to assembly of nothing else: a loop around a fence is more than a fence.
    """
    entry = next((entry for text, entry in _assembly if text in assembly), None)
    instructions = [part.strip() for part in re.split(r"[;\n{}]", assembly) if part.strip()]
    if entry is None and all(map(_HARMLESS.match, instructions)):
        entry = next((entry for text, entry in _BUILT_IN.items() if text in assembly), None)
    return entry


_HARMLESS = re.compile(
    r"\.reg\b|mov\.|cvt\.|v_mov_b32\b|s_mov_b\d+\b|\$\d+$|//"  # registers; what stands behind AMD's comments
    r"|s_memrealtime\b|s_memtime\b|s_sendmsg_rtn|s_getreg_b32\b"
    r"|nanosleep\b|s_sleep\b|s_nop\b|fence\.|membar\.|s_waitcnt\b|buffer_(wbl2|inv|gl[01]_inv)\b"
)
"""Instructions that only move registers, or that one of the built-in entries stands for."""


def read_clock(program: ProgramInfo, *operands: Any) -> int:
    """Nanoseconds; CPU entry.  What a program waits for may be the time, from now on."""
    current.program.scheduler.is_bounded = True
    return time.monotonic_ns()


def _unit(program: ProgramInfo, *operands: Any) -> int:
    return program.linear_id  # as if every program had a multiprocessor of its own


def _nothing(program: ProgramInfo, *operands: Any) -> int:
    return 0  # one program runs at a time, and each of its accesses is complete before the next one


_BUILT_IN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["%globaltimer", "%clock", "s_memrealtime", "s_memtime", "MSG_RTN_GET_REALTIME"], read_clock),
    **dict.fromkeys(["%smid", "HW_REG_HW_ID"], _unit),
    **dict.fromkeys(["HW_REG_XCC_ID", "nanosleep", "s_sleep", "fence.", "membar.", "s_waitcnt vmcnt"], _nothing),
}
