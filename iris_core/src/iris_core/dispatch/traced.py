"""Calls of `ctx.ccl` and `ctx.ops` in compiled code: `torch.compile` keeps each as one operator, in one graph.

Arguments that are not tensors are constants of the trace; they stay here, under a name that the operator has.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from iris_core.dispatch.config import CONFIGS
from iris_core.dispatch.products import NormCall
from iris_core.errors import ArgumentError, HeapClosedError

is_compiling = torch.compiler.is_compiling
BINDERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The binder of each context by its `name`, which is a constant for the compiler."""

_LIBRARY: Any = torch.library.Library("iris", "FRAGMENT")  # type: ignore[no-untyped-call]
_calls: dict[str, tuple[str, str, bool, tuple[Any, ...]]] = {}


def trace(
    binder: Any, op: str, out: Any, x: Any, b: Any, bias: Any, arguments: tuple[Any, ...], scales: tuple[Any, ...] = ()
) -> bool:
    """Put a call into the graph that is being traced: `_run(op, out, x, [b, bias,] *arguments, *scales)`.

    Return whether it was put there.  A call that writes nothing could be dropped from a graph, and one that torch would
    have to record for gradients is refused where it is made.
    """
    needed = any(each is not None and each.requires_grad for each in (out, x, b, bias, *scales))
    if out is None or any(each is None for each in scales) or (torch.is_grad_enabled() and needed):
        return False
    group, is_async, config, *more = arguments
    name = _name(binder.name, op, x is out, _number(config), group, is_async, *more)
    torch.ops.iris.call(out, None if x is out else x, b, bias, list(scales), name)
    return True


def trace_norm(binder: Any, call: Any) -> bool:
    """Put an `all_reduce_rms_norm` into the graph that is being traced; see `trace`."""
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in call.tensors):
        return False
    name = _name(binder.name, call.op, False, _number(call.config), call.group, False, call.eps)
    torch.ops.iris.norm_call(*call.tensors, name)
    return True


def _number(config: Any) -> int | None:
    return None if config is None else getattr(config, "_hash", -1)  # which is no hash


def _name(binder: str, op: str, in_place: bool, number: int | None, group: Any, is_async: bool, *more: Any) -> str:
    if number is not None and number not in CONFIGS:  # the tracer has not made it yet
        raise ArgumentError(f"{op}: make the config outside of the code that torch.compile compiles")
    arguments = group, is_async, None if number is None else CONFIGS[number], *more
    for name, known in _calls.items():
        if known == (binder, op, in_place, arguments):
            return name
    name = f"{op} {len(_calls)}"
    _calls[name] = binder, op, in_place, arguments
    return name


_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator imports the compiler


def _recall(name: str) -> tuple[Any, str, bool, tuple[Any, ...]]:
    """Return the context of a call that was traced, its operation, whether it is in place, and its arguments."""
    known, op, in_place, arguments = _calls[name]
    binder = BINDERS.get(known)
    if binder is None:
        raise HeapClosedError(f"compiled code calls {op} of a context that is gone")
    return binder.open(), op, in_place, arguments


def _run(
    out: torch.Tensor, x: torch.Tensor | None, b: torch.Tensor | None, bias: torch.Tensor | None,
    scales: list[torch.Tensor], name: str,
) -> None:  # fmt: skip
    context, op, in_place, arguments = _recall(name)
    first, product = out if in_place else x, () if b is None else (b, bias)
    face = context.ccl if b is None else context.ops
    face._run(op, out.detach(), first if first is None else first.detach(), *product, *arguments, *scales)


def _run_norm(
    out: torch.Tensor, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None,
    name: str,
) -> None:  # fmt: skip
    context, op, _, (group, _, config, eps) = _recall(name)
    tensors = (None if each is None else each.detach() for each in (out, residual, x, weight, scales))
    context.ops._run_norm(NormCall._make((op, *tensors, eps, group, config)), False)


_LIBRARY.define(
    "norm_call(Tensor(a!) out, Tensor(b!) residual, Tensor x, Tensor weight, Tensor(c!)? scales, str call) -> ()"
)
_LIBRARY.impl("norm_call", _run_norm, "CompositeExplicitAutograd")
torch.library.register_fake("iris::norm_call", lambda *_: None, lib=_LIBRARY)
_LIBRARY.define("call(Tensor(a!) out, Tensor? x, Tensor? b, Tensor? bias, Tensor[] scales, str call) -> ()")
_LIBRARY.impl("call", _run, "CompositeExplicitAutograd")
torch.library.register_fake("iris::call", lambda *_: None, lib=_LIBRARY)
