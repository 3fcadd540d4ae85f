"""Calls of `ctx.ccl` and `ctx.ops` in compiled code: `torch.compile` keeps each as one operator, in one graph.

Arguments that are not tensors are constants of the trace; they stay here, under a name that the operator has.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._compile import _disable_dynamo

from iris_core.dispatch.config import CONFIGS
from iris_core.dispatch.products import NORM
from iris_core.dispatch.requests import OPS, UNRECORDED
from iris_core.errors import ArgumentError, HeapClosedError

is_compiling = torch.compiler.is_compiling
BINDERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The binder of each context by its `name`, which is a constant for the compiler."""

_LIBRARY: Any = torch.library.Library("iris", "FRAGMENT")  # type: ignore[no-untyped-call]
_calls: dict[str, tuple[Any, ...]] = {}


def trace(binder: Any, op: str, tensors: Any, how: Any, async_op: bool | None, workspace: Any = None) -> Any:
    """Put a call into the graph that is being traced: `_run(written..., read, name)`; return its workspace.

    Others break the graph, and say why if it must be whole (fullgraph=True): one that writes nothing could be dropped
    from a graph, and one that torch would have to record for gradients is refused where it is made.  Split sizes that
    all_to_all writes take the place of a residual.
    """
    out, *others = tensors
    group, config, *more = how
    recorded = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    if recorded or out is None or async_op is not False:
        why = UNRECORDED if recorded else "in a graph it needs an output, and no async_op"
        torch._dynamo.graph_break(msg=f"{op}: {why}")
        return _eagerly(binder, op, tensors, how, async_op, workspace)
    has_splits = op == "all_to_all" and len(others) > 1
    written, read = (others[-1], others[:-1]) if has_splits else (None, others)
    residual, *read, scales = others if op == NORM else (written, *read, None)
    if in_place := op != NORM and read[0] is out:
        read = [None, *read[1:]]  # torch 2.11 makes a tuple of it
    number = None if config is None else getattr(config, "_hash", -1)  # which is no hash
    name = _name(binder.name, op, in_place, number, group, *more)
    torch.ops.iris.call(out, residual, scales, read, name)
    return workspace  # that of the caller; the call's own is not known while it is traced


def _name(binder: str, op: str, in_place: bool, number: int | None, group: Any, *how: Any) -> str:
    if number is not None and number not in CONFIGS:  # the tracer has not made it yet
        raise ArgumentError(f"{op}: make the config outside of the code that torch.compile compiles")
    call = binder, op, in_place, group, None if number is None else CONFIGS[number], *how
    for name, known in _calls.items():
        if known == call:
            return name
    name = f"{op} {len(_calls)}"
    _calls[name] = call
    return name


_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator imports the compiler


def _run(
    out: torch.Tensor, residual: torch.Tensor | None, scales: torch.Tensor | None, read: list[torch.Tensor | None],
    name: str,
) -> None:  # fmt: skip
    known, op, in_place, *how = _calls[name]
    binder = BINDERS.get(known)
    if binder is None:
        raise HeapClosedError(f"compiled code calls {op} of a context that is gone")
    splits = () if residual is None else (residual,)
    given = (out, residual, *read, scales) if op == NORM else (out, *read, *splits)
    tensors = [None if each is None else each.detach() for each in given]
    if in_place:
        tensors[1] = tensors[0]
    _call(binder, op, tuple(tensors), tuple(how))


def _call(binder: Any, op: str, tensors: Any, how: Any, async_op: bool | None = False, workspace: Any = None) -> Any:
    context = binder.open()
    if op not in OPS:
        return context.ops._run(op, tensors, how, async_op, workspace)
    group, config, *more = how
    return context.ccl._run(op, *tensors[:2], group, async_op, config, *more, tensors[2:])


_eagerly: Any = _disable_dynamo(_call)  # the compiler leaves what it calls alone, too
_LIBRARY.define("call(Tensor(a!) out, Tensor(b!)? residual, Tensor(c!)? scales, Tensor?[] read, str call) -> ()")
_LIBRARY.impl("call", _run, "CompositeExplicitAutograd")
torch.library.register_fake("iris::call", lambda *_: None, lib=_LIBRARY)
