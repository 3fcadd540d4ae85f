"""An all_to_all between nodes: what is for other nodes goes straight there, kernels exchange what stays in the node.

Both are under way at the same time, and nothing is copied in between: a rank exchanges with as many peers over the
network as in a flat all_to_all, with the same bytes, and torch.distributed has nothing to do within a node.

Of two nodes with as many ranks each, those of the same place swap what is for all of the other node by an all_gather,
which NCCL carries by rings, faster than messages; kernels then distribute it within the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from iris_core.device.launch_order import Begun
from iris_core.dispatch.requests import nodes_of
from iris_core.dispatch.team import Host
from iris_core.providers.hierarchical import grid_of, strides_of
from iris_core.providers.model import between_nodes_s, everywhere
from iris_core.providers.parts import Composed, Side, Staged, dense, part_of, scratch_of, staged
from iris_core.providers.torch_distributed import TorchCollective
from iris_core.types import CollectiveRequest


class _Side(NamedTuple):
    """Input or output: as contiguous elements; which of them are the node's; and these as one run, in order of rank."""

    whole: Staged
    run: slice
    in_node: Staged


class _Swap(NamedTuple):
    """The exchange with the other one of two nodes."""

    rail: Any  # what is bound, along the rail
    near: Any  # and then in the node
    landed: torch.Tensor  # memory for the rail, (2, elements)
    other: int  # which row of it is the other node's
    run: slice  # the other node's elements of input and output

    def begin(self, out: torch.Tensor, inp: torch.Tensor) -> Begun:
        """Begin along the rail; the end distributes within the node what has landed."""
        work = self.rail.begin(self.landed, inp[self.run])

        def finish() -> None:
            work.wait()
            self.near.launch(out[self.run], self.landed[self.other])

        return Begun(finish)


@dataclass(slots=True)
class _Plan:
    far: Callable[[torch.Tensor, torch.Tensor], Begun]  # begins the exchange with other nodes
    near: Any  # what is bound
    inp: _Side
    out: _Side
    is_in_turn: bool  # whether calls use the same memory
    pending: Begun | None = None


class StraightAllToAll(Composed):
    """An all_to_all of a group of which two members at least share a node; `flat` is that of torch.distributed."""

    name = "hierarchical"
    info = everywhere("hierarchical", "an exchange within nodes, and beside it one with other nodes")
    always_measured = True

    def __init__(self, flat: TorchCollective) -> None:
        super().__init__("all_to_all")
        self._flat = flat

    def _problem(self, request: CollectiveRequest) -> str:
        if len(nodes_of(request)) == request.group_size:
            return "no two members of the group are on one node"
        return self._flat.supports(request).reason

    def cost(self, request: CollectiveRequest) -> float:
        return between_nodes_s(request, flat=False)

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: CollectiveRequest, host: Host) -> _Plan:
        """Prepare the exchange with other nodes, and that within the node."""
        options, size, dtype = request.options, request.group_size, request.dtype
        here = [each for each in range(size) if request.nodes[each] == request.nodes[request.rank]]
        here.sort(key=request.members.__getitem__)
        is_run, uneven = here == list(range(here[0], here[0] + len(here))), options["uneven"]
        far: dict[str, Any] = {"to_other_nodes": True}
        near: dict[str, Any] = {"uneven": uneven}
        sides: list[_Side] = []
        given: list[Side] = []
        for what, shape, is_direct in (
            ("in", request.shape, request.direct_in),
            ("out", options["out_shape"], request.direct_out),
        ):
            rows = options[f"{what}_splits"] if uneven else (shape[0] // size,) * size
            sizes = [n * math.prod(shape[1:]) for n in rows]
            own = tuple(sizes[each] for each in here)
            begin, count = sum(sizes[: here[0]]), sum(own)
            whole = staged(host, f"straight {what}", dtype, shape, options[f"{what}_stride"], None)
            in_node, run = Staged(), slice(begin, begin + count)
            if not is_run:
                in_node = Staged(scratch_of(host, f"straight {what} of the node", count, dtype), here, sizes)
                run = slice(None)
            sides.append(_Side(whole, run, in_node))
            # of parts that differ, those of the node begin elsewhere on each of its ranks
            given.append(((count,), (1,), is_direct and is_run and not uneven))
            far |= {f"{what}_stride": dense(shape), f"{what}_splits": rows}
            near |= {f"{what}_splits": own} if uneven else {}
        bound = host.collective(part_of(request, self.op, given[0], given[1], here, **near))
        has_memory = any(each.whole.buffer is not None for each in sides)
        grid = None if uneven else grid_of(request)
        if grid is not None and len(grid.rows) == 2 and strides_of(grid) == (len(here), 1):
            ((count,), stride, _), other = given[0], 1 - grid.node
            both: Side = (2, count), (count, 1), False
            rail = host.collective(part_of(request, "all_gather", ((count,), stride, False), both, grid.rail))
            then = host.collective(part_of(request, self.op, ((count,), stride, False), given[1], here))
            landed = scratch_of(host, "straight from the other node", 2 * count, dtype).view(2, count)
            swap = _Swap(rail, then, landed, other, slice(other * count, (other + 1) * count))
            return _Plan(swap.begin, bound, sides[0], sides[1], True)
        host.collective(None)  # torch connects the members: only if all have bound their node's part
        flat = self._flat.prepare(replace(request, options={**options, **far}), host)
        return _Plan(partial(self._flat.begin, flat), bound, sides[0], sides[1], has_memory)

    # -- launching ----------------------------------------------------------------------------------------------------
    def begin(self, plan: _Plan, out: Any, inp: Any) -> Begun:
        """Begin with the other nodes, exchange within the node, and return a handle for the end."""
        if plan.pending is not None:  # two calls cannot use the buffers at the same time
            plan.pending.wait()
        with torch.no_grad():
            given, taken = plan.inp.whole.fill(inp), plan.out.whole.flat(out)
            work = plan.far(taken, given)
            self._near(plan, taken[plan.out.run], given[plan.inp.run])
        begun = Begun(partial(self._end, plan, work, out))
        if plan.is_in_turn:
            plan.pending = begun
        return begun

    def _near(self, plan: _Plan, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Exchange within the node."""
        plan.near.launch(plan.out.in_node.flat(out), plan.inp.in_node.fill(inp))
        plan.out.in_node.drain(out)

    def _end(self, plan: _Plan, work: Begun, out: Any) -> None:
        with torch.no_grad():
            work.wait()
            plan.out.whole.drain(out)
