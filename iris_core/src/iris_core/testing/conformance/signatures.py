"""Comparing what an object offers with what a protocol or a table asks for."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def member_problems(obj: Any, protocol: type) -> list[str]:
    """Say how an object departs from a protocol: members that are missing, or called in another way.

    Args:
        obj: the implementation.
        protocol: a class whose functions and properties, own and inherited, are the contract.

    Returns:
        One sentence per problem; further parameters of a method are none if they have defaults.
    """
    problems = []
    for name, member in inspect.getmembers_static(protocol):
        if name.startswith("_") or not (isinstance(member, property) or inspect.isfunction(member)):
            continue
        missing = object()
        static = inspect.getattr_static(obj, name, missing)
        if static is missing:
            problems.append(f"{name} is missing")
        elif isinstance(member, property):
            if inspect.isroutine(static):
                problems.append(f"{name} is a method; it must be a property")
        elif not callable(getattr(obj, name)):
            problems.append(f"{name} is no method")
        else:
            names = list(inspect.signature(member).parameters)[1:]  # without self
            problems += parameter_problems(name, getattr(obj, name), names)
    return problems


def parameter_problems(
    name: str, function: Callable[..., Any], expected: Sequence[str], optional: Sequence[str] = ()
) -> list[str]:
    """Say how a function's parameters depart from a list of names.

    Args:
        name: what to call it.
        function: a Python function, a bound method, or an object that wraps one in `fn` as Triton's jit does.
        expected: names in order.
        optional: names that follow and have defaults; so must what follows them.

    Returns:
        At most one sentence.
    """
    parameters = list(inspect.signature(plain_function(function)).parameters.values())
    given = [each.name for each in parameters if each.kind in _POSITIONAL]
    wanted = [*expected, *optional]
    if given[: len(wanted)] != wanted:
        return [f"{name}({', '.join(given)}) should begin with ({', '.join(wanted)})"]
    demanded = [
        each.name
        for each in parameters[len(expected) :]
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if demanded:
        return [f"{name} demands {', '.join(demanded)} beside ({', '.join(expected)}); give defaults"]
    return []


def plain_function(obj: Any) -> Any:
    """Return the Python function inside the wrappers of jit decorators, which keep it in `fn`."""
    while not inspect.isroutine(obj) and hasattr(obj, "fn"):
        obj = obj.fn
    return obj
