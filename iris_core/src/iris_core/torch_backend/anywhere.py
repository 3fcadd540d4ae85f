"""`ctx.ccl` for members whose tensors lie differently: torch.distributed does not ask where they do."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from iris_core.ccl.api import Collectives
from iris_core.dispatch.bind import Bound
from iris_core.dispatch.requests import ALIGNMENT_NBYTES, ALL_HAVE_INPUT, ALL_HAVE_OUTPUT, CollectiveCall, shared_facts
from iris_core.errors import HeapExhaustedError

if TYPE_CHECKING:
    from iris_core.dispatch.bind import Binder


class _Call(CollectiveCall):
    """A call whose tensors are on the heap on all members, or else are taken for ordinary ones."""

    on_heap = False

    def describe(self, here: Any, members: tuple[int, ...]) -> Any:
        request = super().describe(here if self.on_heap else replace(here, heap=(0, 0)), members)
        return replace(request, options={**request.options, "anywhere": True})


class Anywhere(Collectives):
    """The collectives of a process group.

    At the first call of a kind, members agree whether the tensors of all are on the heap.  If so, later calls use those
    that are, and a member with others passes copies, for which the heap has room.  If not, calls use none there.
    """

    _launches = "anywhere"

    def __init__(self, binder: Binder) -> None:
        super().__init__(binder)
        self._stage = torch.empty(0, dtype=torch.uint8)
        self._stages: dict[Any, torch.Tensor | None] = {}  # for copies, by kind; None if not all were on the heap

    def _bind(self, call: CollectiveCall, key: Any) -> Any:
        binder, request, ours = self._binder, None, _Call(*call)
        members = binder.members_of(call.group)
        with contextlib.suppress(Exception):  # `bind` raises it again, on all members
            found = call.describe(binder.here, members)
            call.check(found, binder.here)
            request = found if call.op in ALL_HAVE_INPUT and call.op in ALL_HAVE_OUTPUT else None
        if request is not None and request.nbytes and not request.options["uneven"]:
            facts, is_here = shared_facts(ours.describe(binder.here, members)), request.direct_in and request.direct_out
            kind = tuple(facts.values())
            if kind not in self._stages:
                self._stages[kind] = self._reserve(call) if all(binder.compare(facts, is_here)) else None
            ours.on_heap = self._stages[kind] is not None
            if ours.on_heap and not is_here:
                return self._copying(call, self._stages[kind])
        return binder.bind(ours, key, lambda: self._bound)

    def _reserve(self, call: CollectiveCall) -> torch.Tensor | None:
        """Return memory for copies of a call's tensors; None if the heap has no room.  Collective."""
        nbytes = sum(each.nbytes + ALIGNMENT_NBYTES for each in {*call.tensors})
        if self._stage.nbytes < nbytes:
            nbytes = 1 << nbytes.bit_length()
            try:
                self._stage = self._binder.memory.heap.allocate_unscoped(nbytes, ("copies", nbytes))
            except HeapExhaustedError:  # on all
                return None
        return self._stage

    def _copying(self, call: CollectiveCall, stage: Any) -> Bound:
        """Bind a call on copies."""
        apart = 0 if call.tensors[0] is call.tensors[1] else -(-call.tensors[0].nbytes // ALIGNMENT_NBYTES)
        begins = zip((0, apart * ALIGNMENT_NBYTES), call.tensors, strict=True)
        copies = [stage[begin:][: each.nbytes].view(each.dtype).view(each.shape) for begin, each in begins]
        inner = self._find(call.op, tuple(copies), *call[2:])

        def launch(plan: Any, out: torch.Tensor, inp: torch.Tensor) -> None:
            copies[1].copy_(inp)
            inner.launch(*copies)
            out.copy_(copies[0])

        algorithm = SimpleNamespace(name=inner.algorithm, launch=launch)
        return Bound(algorithm, None, self._binder.order(), inner._team, inner._context, inner.request)
