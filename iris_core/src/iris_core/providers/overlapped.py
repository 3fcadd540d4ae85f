"""Products between nodes, unfused in chunks of rows or columns: the network carries one while the next is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from iris_core.device.launch_order import Begun
from iris_core.dispatch.requests import nodes_of
from iris_core.dispatch.team import Host
from iris_core.providers.baseline import Unfused
from iris_core.providers.model import everywhere, fixed_s, moving_s, product_s
from iris_core.types import Availability, FusedRequest
from iris_core.world.scaling import CHUNKS

_LEAST_NBYTES, _LEAST_LINES = 4 << 20, 64
"""Of a chunk: bytes that take longer than it takes to begin with them, and a product that keeps a device busy."""


class Overlapped(Unfused):
    """`overlapped` of all products."""

    name = "overlapped"
    info = everywhere("overlapped", "torch.matmul and a collective between nodes, in chunks")
    scaled = ()

    def supports(self, request: FusedRequest) -> Availability:
        if len(nodes_of(request)) < 2:
            return Availability.no("it is offered between nodes only")
        if request.options["layout"] != "torch":
            return Availability.no("it does not divide tiles")
        if _pieces(request) < 2:
            return Availability.no(f"chunks of less than {_LEAST_NBYTES} bytes, or {_LEAST_LINES} rows, do not pay")
        return super().supports(request)

    def cost(self, request: FusedRequest) -> float:
        computed, moved, pieces = product_s(request), moving_s(request), _pieces(request)
        fixed = pieces * fixed_s(request, launches=2, barriers=2)
        return max(computed, moved) + min(computed, moved) / pieces + fixed

    def prepare(self, request: FusedRequest, host: Host) -> list[tuple[int, int, Any]]:
        """Prepare the chunks: where they begin and end, and their plans, two in turn and one for the last."""
        lines = _lines(request)
        length = -(-lines // _pieces(request))
        plans: dict[tuple[int, int], Any] = {}
        found = []
        for number, begin in enumerate(range(0, lines, length)):
            key = min(length, lines - begin), number % 2
            if key not in plans:
                plans[key] = self._prepare(_chunk_of(request, key[0]), host, f" of chunk {key[1]}")
                if (key[0], 0) in plans:  # of one plan of the collective, calls may overlap
                    plans[key].collective = plans[key[0], 0].collective
            found.append((begin, begin + key[0], plans[key]))
        return found

    @torch.no_grad()
    def launch(self, plan: Any, out: Any, a: Any, b: Any, bias: Any, *scales: Any) -> None:
        before, length = Begun(), plan[0][1] - plan[0][0]
        for begin, end, part in plan:
            if end - begin < length:  # another plan of the collective, with the same buffers
                before.wait()
            tensors = self._divided(begin, end, out, a, b, bias)
            work = Begun(self._begin(part, *tensors, part.collective.begin))
            before.wait()
            before = work
        before.wait()

    def _divided(self, begin: int, end: int, out: Any, a: Any, b: Any, bias: Any) -> tuple[Any, Any, Any, Any]:
        rows = a.shape[0]
        along = bias is not None and (bias.dim() == 2 and bias.shape[1] == 1 and out.shape[1] > 1)
        if self.op == "matmul_reduce_scatter" or (self.op == "matmul_all_gather" and out.shape[1] == b.shape[1]):
            own = bias if bias is None or along else bias[..., begin:end]
            return out[:, begin:end], a, b[:, begin:end], own
        if self.op == "all_gather_matmul" and out.shape[0] != rows:
            own = bias.unflatten(0, (-1, rows))[:, begin:end] if along else bias
            return out.unflatten(0, (-1, rows))[:, begin:end], a[begin:end], b, own
        return out[begin:end], a[begin:end], b, bias[begin:end] if along else bias


def _lines(request: FusedRequest) -> int:
    """Rows or columns that are divided into chunks."""
    if _is_by_columns(request):
        return request.n
    by_rows = request.op == "all_gather_matmul" and request.options["gather_dim"] == 0
    return request.m // request.group_size if by_rows else request.m


def _is_by_columns(request: FusedRequest) -> bool:
    """Whether chunks are columns: where rows are divided among the members."""
    is_below = request.op == "matmul_all_gather" and request.options["gather_dim"] == 0
    return request.op == "matmul_reduce_scatter" or is_below


def _pieces(request: FusedRequest) -> int:
    """How many chunks a call has."""
    return min(CHUNKS, request.nbytes // _LEAST_NBYTES, _lines(request) // _LEAST_LINES)


def _chunk_of(request: FusedRequest, lines: int) -> FusedRequest:
    """Return the request of a chunk of some rows or columns."""
    nbytes, (rows, columns) = request.nbytes // _lines(request) * lines, request.out_shape
    if _is_by_columns(request):
        return replace(request, n=lines, nbytes=nbytes, out_shape=(rows, lines))
    m = request.m // _lines(request) * lines
    return replace(request, m=m, nbytes=nbytes, out_shape=(m, columns))
