"""An all_to_all between nodes: what is for other nodes goes straight there, kernels exchange what stays in the node.

Both are under way at the same time, and nothing is copied in between: a rank exchanges with as many peers over the
network as in a flat all_to_all, with the same bytes, and torch.distributed has nothing to do within a node.

Of two nodes with as many ranks each, those of the same place swap what is for all of the other node by an all_gather,
which NCCL carries by rings, faster than messages; kernels then distribute it within the node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from iris_core.dispatch.requests import nodes_of
from iris_core.providers.hierarchical import grid_of
from iris_core.providers.model import between_nodes_s, everywhere
from iris_core.providers.parts import Begun, Composed, Staged, dense, part_of, scratch_of, staged

if TYPE_CHECKING:
    from iris_core.dispatch.team import Host
    from iris_core.providers.parts import Side
    from iris_core.providers.torch_distributed import TorchCollective
    from iris_core.types import CollectiveRequest

_HOST_S = 5e-5


class _Side(NamedTuple):
    """Input or output: as contiguous elements; which of them are the node's; and these as one run, in order of rank."""

    whole: Staged
    run: slice
    in_node: Staged


class _Swap(NamedTuple):
    """Between two nodes: what is bound along the rail and then in the node; what lands; what is the other node's."""

    rail: Any
    near: Any
    landed: torch.Tensor
    other: int
    run: slice


@dataclass(slots=True)
class _Plan:
    far: Any  # of torch.distributed; or a swap
    near: Any  # what is bound
    inp: _Side
    out: _Side
    pending: Begun | None = None


class StraightAllToAll(Composed):
    """An all_to_all of a group of which two members at least share a node.

    Args:
        flat: the all_to_all of torch.distributed.
    """

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

    def host_seconds(self, request: CollectiveRequest) -> float:
        """Estimate what a call costs the CPU: a launch, and a call of torch."""
        return _HOST_S

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
        grid = grid_of(request)
        rows = () if grid is None or uneven else grid.rows
        if len(rows) == 2 and all(row == tuple(range(row[0], row[0] + len(row))) for row in rows):
            assert grid is not None
            ((count,), stride, _), other = given[0], 1 - grid.node
            both: Side = (2, count), (count, 1), False
            rail = host.collective(part_of(request, "all_gather", ((count,), stride, False), both, grid.rail))
            then = host.collective(part_of(request, self.op, ((count,), stride, False), given[1], here, **near))
            landed = scratch_of(host, "straight from the other node", 2 * count, dtype).view(2, count)
            begin = 0 if here[0] else count
            swap = _Swap(rail, then, landed, other, slice(begin, begin + count))
            return _Plan(swap, bound, sides[0], sides[1])
        return _Plan(self._flat.prepare(replace(request, options={**options, **far}), host), bound, sides[0], sides[1])

    # -- launching ----------------------------------------------------------------------------------------------------
    def begin(self, plan: _Plan, out: Any, inp: Any) -> Begun:
        """Begin with the other nodes, exchange within the node, and return a handle for the end."""
        if plan.pending is not None:  # two calls cannot use the buffers at the same time
            plan.pending.wait()
        with torch.no_grad():
            given, taken = plan.inp.whole.fill(inp), plan.out.whole.flat(out)
            swap = plan.far if isinstance(plan.far, _Swap) else None
            if swap is None:
                work = self._flat.begin(plan.far, taken, given)
            else:
                work = swap.rail.begin(swap.landed, given[swap.run])
            self._near(plan, taken[plan.out.run], given[plan.inp.run])
        begun = Begun(partial(self._end, plan, work, out, taken))
        if swap is not None or plan.inp.whole.buffer is not None or plan.out.whole.buffer is not None:
            plan.pending = begun
        return begun

    def _near(self, plan: _Plan, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Exchange within the node."""
        plan.near.launch(plan.out.in_node.flat(out), plan.inp.in_node.fill(inp))
        plan.out.in_node.drain(out)

    def _end(self, plan: _Plan, work: Any, out: Any, taken: torch.Tensor) -> None:
        with torch.no_grad():
            work.wait()
            if isinstance(swap := plan.far, _Swap):
                swap.near.launch(taken[swap.run], swap.landed[swap.other])
            plan.out.whole.drain(out)
