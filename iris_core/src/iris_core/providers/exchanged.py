"""Reductions between nodes as an exchange of parts, which their owners reduce in the group's order.

That is Rabenseifner's algorithm (Thakur, Rabenseifner and Gropp, 2005) with direct messages.  It serves any elements
and reductions, floats of less than 32 bits as float32, and promises the bits of `deterministic` contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from iris_core.device.launch_order import Begun
from iris_core.dispatch.team import Host
from iris_core.providers.model import between_nodes_s, everywhere
from iris_core.providers.parts import Composed, Side, dense, part_of, scratch_of
from iris_core.types import REDUCIBLE, CollectiveRequest

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
_OF_BOOL = {"sum": "bor", "product": "band", "min": "band", "max": "bor"}


@dataclass(slots=True)
class _Plan:
    exchange: Any
    gather: Any  # None where each keeps its part
    combine: Callable[..., Any]
    is_average: bool
    given: torch.Tensor  # a part for each member; afterwards the results of all
    received: torch.Tensor
    total: torch.Tensor
    result: torch.Tensor
    pending: Begun | None = None


class Exchanged(Composed):
    """One reduction as an all_to_all, a local reduction and, where all or the root get it, an all_gather or gather."""

    name = "exchanged"
    info = everywhere("exchanged", "an exchange of parts, which are reduced in the group's order")
    deterministic = True

    def _problem(self, request: CollectiveRequest) -> str:
        return "" if request.dtype in REDUCIBLE else f"elements of {request.dtype} cannot be reduced"

    def cost(self, request: CollectiveRequest) -> float:
        return 2 * between_nodes_s(request, flat=True)

    def prepare(self, request: CollectiveRequest, host: Host) -> _Plan:
        """Find memory for the parts, and bind the collectives."""
        options, dtype, size = request.options, request.dtype, request.group_size
        reduction = (_OF_BOOL if dtype == "bool" else {}).get(options["reduction"], options["reduction"])
        kind, part = getattr(torch, dtype), -(-math.prod(request.shape) // size)
        wide = "float32" if kind.is_floating_point and kind.itemsize < 4 else dtype
        whole: Side = (size, part), dense((size, part)), False
        own: Side = (part,), (1,), False
        gather = None
        exchange = host.collective(part_of(request, "all_to_all", whole, whole))
        if self.op == "all_reduce":
            gather = host.collective(part_of(request, "all_gather", own, whole))
        elif self.op == "reduce":
            root = options["root"]
            taken = whole if request.rank == root else None
            gather = host.collective(part_of(request, "gather", own, taken, root=root))
        given, received = (
            scratch_of(host, f"exchanged {name}", size * part, dtype).view(size, part) for name in ("from", "to")
        )
        total, result = scratch_of(host, "exchanged total", part, wide), scratch_of(host, "exchanged", part, dtype)
        is_average = reduction == "avg"
        return _Plan(exchange, gather, _COMBINE[reduction], is_average, given, received, total, result)

    def begin(self, plan: _Plan, out: Any, inp: Any) -> Begun:
        """Send the parts, and return a handle: they are reduced and gathered when it is waited for."""
        if plan.pending is not None:  # two calls cannot use the memory at the same time
            plan.pending.wait()
        with torch.no_grad():
            plan.given.view(-1)[: inp.numel()].view(inp.shape).copy_(inp)
            work = plan.exchange.begin(plan.received, plan.given)
        plan.pending = Begun(partial(self._end, plan, work, out))
        return plan.pending

    def _end(self, plan: _Plan, work: Any, out: Any) -> None:
        with torch.no_grad():
            work.wait()
            plan.total.copy_(plan.received[0])
            for part in plan.received[1:]:
                plan.combine(plan.total, part, out=plan.total)
            if plan.is_average:
                mode = None if plan.total.is_floating_point() else "trunc"
                torch.div(plan.total, len(plan.received), rounding_mode=mode, out=plan.total)
            plan.result.copy_(plan.total)
            if plan.gather is None:
                out.copy_(plan.result.view(out.shape))
                return
            plan.gather.launch(plan.given if out is not None else None, plan.result)
            if out is not None:
                out.copy_(plan.given.view(-1)[: out.numel()].view(out.shape))
