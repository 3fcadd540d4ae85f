"""An all_to_all between nodes: what is for other nodes goes straight there, kernels exchange what stays in the node.

Both are under way at the same time, and nothing is copied in between: a rank exchanges with as many peers over the
network as in a flat all_to_all, with the same bytes, and torch.distributed has nothing to do within a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from iris_core.dispatch.requests import nodes_of
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


@dataclass(slots=True)
class _Plan:
    far: Any  # of torch.distributed
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
        return _Plan(self._flat.prepare(replace(request, options={**options, **far}), host), bound, sides[0], sides[1])

    # -- launching ----------------------------------------------------------------------------------------------------
    def begin(self, plan: _Plan, out: Any, inp: Any) -> Begun:
        """Begin with the other nodes, exchange within the node, and return a handle for the end."""
        if plan.pending is not None:  # two calls cannot use the buffers at the same time
            plan.pending.wait()
        with torch.no_grad():
            given, taken = plan.inp.whole.fill(inp), plan.out.whole.flat(out)
            work = self._flat.begin(plan.far, taken, given)
            self._near(plan, taken[plan.out.run], given[plan.inp.run])
        begun = Begun(partial(self._end, plan, work, out))
        if plan.inp.whole.buffer is not None or plan.out.whole.buffer is not None:
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
