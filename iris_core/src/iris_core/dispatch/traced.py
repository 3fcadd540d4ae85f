"""Calls of `ctx.ccl` and `ctx.ops` by torch's programs: compiled ones, and those that do not know where tensors lie.

`torch.compile` keeps each call as one operator, in one graph.  Arguments that are not tensors are constants of the
trace; they stay here, under a name that the operator has.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling

from iris_core.dispatch.config import CONFIGS
from iris_core.dispatch.products import NORM
from iris_core.dispatch.requests import ALIGNMENT_NBYTES, ALL_IN_PLACE, OPS, UNRECORDED, is_empty, shared_facts
from iris_core.errors import ArgumentError, HeapClosedError, UnsupportedError
from iris_core.heap.streams import eagerly

BINDERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The binder of each context by its `name`, which is a constant for the compiler."""

# By operation, the tensors that peers reach, and what a request calls those that lie where they can.
_REACHED: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    **dict.fromkeys((*ALL_IN_PLACE, "all_to_all"), ((0, 1), ("direct_out", "direct_in"))),
    **dict.fromkeys(("matmul_all_reduce", "matmul_all_gather"), ((0,), ("reach_out",))),
    "all_gather_matmul": ((1,), ("reach_a",)),
    NORM: ((2,), ("direct_in",)),
}

_LIBRARY: Any = torch.library.Library("iris", "FRAGMENT")  # type: ignore[no-untyped-call]
_calls: dict[str, tuple[Any, ...]] = {}


class Anywhere:
    """Binds calls of members whose tensors lie differently.

    At the first call of a kind, members agree whether the tensors of all are on the heap.  If so, later calls use those
    that are, and a member with others passes copies, for which the heap has room.  If not, calls use none there.
    """

    def __init__(self, binder: Any) -> None:
        self._binder = binder
        self._memory: dict[Any, torch.Tensor | None] = binder.copies  # by members; by kind, None if not all have theirs

    def bind(self, call: Any, key: Any, holder: Any) -> Any:
        """Return the bound launch of a call; see `Binder.bind`.  Collective."""
        binder = self._binder
        request: Any = None
        which: tuple[int, ...] = ()
        members, here = binder.members_of(call.group), replace(binder.here, anywhere=True)
        elsewhere = replace(here, heap=(0, 0))
        with contextlib.suppress(Exception):  # `binder.bind` raises it again, on all members
            request = call.describe(here, members)
            call.check(request, here)
            which, reached = _REACHED[call.op]
        if not which or is_empty(request) or request.options.get("uneven"):
            return binder.bind(call, key, holder, elsewhere)
        tensors = [call.tensors[place] for place in which]
        is_here = all(getattr(request, name) for name in reached) and all(each.is_contiguous() for each in tensors)
        facts = shared_facts(call.describe(elsewhere, members))
        kind = members, *facts.values()
        with binder._binding:  # threads that come at the same time agree on a kind once
            if kind not in self._memory:
                is_agreed = all(binder.members.gather(members, facts, is_here))
                self._memory[kind] = self._reserve(members, tensors) if is_agreed else None
            memory = self._memory[kind]
        if memory is None or is_here:
            return binder.bind(call, key, holder, elsewhere if memory is None else here)
        bound = self._copying(call, which, request.options.get("in_place"), memory, holder)
        if key is not None:
            holder().keep(key, bound)
        return bound

    def _reserve(self, members: tuple[int, ...], tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Return memory for copies of a call's tensors; None if the heap has no room.  Collective."""
        nbytes = sum(each.nbytes + ALIGNMENT_NBYTES for each in tensors)
        if (known := self._memory.get(members)) is not None and known.nbytes >= nbytes:
            return known
        binder, nbytes = self._binder, 1 << nbytes.bit_length()
        place = binder.members.world.subworld(members), members, nbytes
        with contextlib.suppress(UnsupportedError):  # on all
            self._memory[members] = binder.heap.take_region(*place, "copies of tensors", None).tensor
            return self._memory[members]
        return None

    def _copying(self, call: Any, which: tuple[int, ...], in_place: Any, memory: torch.Tensor, holder: Any) -> Any:
        """Bind a call on copies of some of its tensors, in place if it is; what is written is copied back."""
        copies, begin = dict[int, torch.Tensor](), 0
        first = min(call.tensors[place].data_ptr() for place in which)
        for place in which:
            each = call.tensors[place]
            at = each.data_ptr() - first if in_place else begin
            copies[place] = memory[at:][: each.nbytes].view(each.dtype).view(each.shape)
            begin += -(-each.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES

        def passed(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(copies.get(place, each) for place, each in enumerate(tensors))

        inner = self.bind(call._replace(tensors=passed(call.tensors)), None, holder)

        def launch(plan: Any, *tensors: Any) -> None:
            with torch.inference_mode():  # whatever the caller's mode is, and was when there was no memory yet
                for place in which:
                    copies[place].copy_(tensors[place])
                inner.launch(*passed(tensors))
                if 0 in which:
                    tensors[0].copy_(copies[0])

        bound = copy.copy(inner)
        bound._set_launch(launch)
        return bound


def trace(face: Any, op: str, tensors: Any, how: Any, async_op: bool | None, workspace: Any = None) -> Any:
    """Put a call into the graph that is being traced: `_run(written..., read, name)`; return its workspace.

    Others break the graph, and say why if it must be whole (fullgraph=True): one that torch would have to record for
    gradients is refused where it is made.  Split sizes that all_to_all writes take the place of a residual.
    """
    out, *others = tensors
    group, config, *more = how
    recorded = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    if recorded or async_op is not False:
        why = UNRECORDED if recorded else "async_op is not for compiled code"
        torch._dynamo.graph_break(msg=f"{op}: {why}")
        return eagerly(_call, face, op, tensors, how, async_op, workspace)
    has_splits = op == "all_to_all" and len(others) > 1
    written, read = (others[-1], others[:-1]) if has_splits else (None, others)
    residual, *read, scales = others if op == NORM else (written, *read, None)
    in_place = op != NORM and read[0] is out
    if in_place:
        read = [None, *read[1:]]  # torch 2.11 makes a tuple of it
    number = None if config is None else getattr(config, "_hash", -1)  # which is no hash
    name = _name(face._binder.name, face._is_anywhere, op, in_place, number, group, *more)
    torch.ops.iris.call(out, residual, scales, read, name)
    return workspace  # that of the caller; the call's own is not known while it is traced


def is_traced(tensors: tuple[Any, ...]) -> bool:
    """Return whether a call is traced while something is compiled: other threads and operators may call meanwhile."""
    return is_dynamo_compiling() or any(isinstance(each, FakeTensor) for each in tensors)


def _name(binder: str, anywhere: bool, op: str, in_place: bool, number: int | None, group: Any, *how: Any) -> str:
    if number is not None and number not in CONFIGS:  # the tracer has not made it yet
        raise ArgumentError(f"{op}: make the config outside of the code that torch.compile compiles")
    call = binder, anywhere, op, in_place, group, None if number is None else CONFIGS[number], *how
    name = next((name for name, known in _calls.items() if known == call), f"{op} {len(_calls)}")
    _calls[name] = call
    return name


_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator imports the compiler


def _run(
    out: torch.Tensor | None, residual: torch.Tensor | None, scales: torch.Tensor | None, read: list[Any], name: str
) -> None:
    known, anywhere, op, in_place, *how = _calls[name]
    binder = BINDERS.get(known)
    if binder is None:
        raise HeapClosedError(f"compiled code calls {op} of a context that is gone")
    splits = () if residual is None else (residual,)
    given = (out, residual, *read, scales) if op == NORM else (out, *read, *splits)
    tensors = [None if each is None else each.detach() for each in given]
    if in_place:
        tensors[1] = tensors[0]
    context = binder.open()
    face = context.ccl if op in OPS else context.ops
    _call(face._anywhere if anywhere else face, op, tuple(tensors), tuple(how))


def _call(face: Any, op: str, tensors: Any, how: Any, async_op: bool | None = False, workspace: Any = None) -> Any:
    if op not in OPS:
        return face._run(op, tensors, how, async_op, workspace)
    group, config, *more = how
    return face._run(op, *tensors[:2], group, async_op, config, *more, tensors[2:])


_LIBRARY.define("call(Tensor(a!)? out, Tensor(b!)? residual, Tensor(c!)? scales, Tensor?[] read, str call) -> ()")
_LIBRARY.impl("call", _run, "CompositeExplicitAutograd")
torch.library.register_fake("iris::call", lambda *_: None, lib=_LIBRARY)
torch.fx.node.has_side_effect(torch.ops.iris.call.default)  # peers wait for it, also where its result is not used
