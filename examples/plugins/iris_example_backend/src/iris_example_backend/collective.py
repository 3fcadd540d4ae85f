"""The collective: all_reduce in two steps ("two-shot"), driven by the host through the symmetric heap.

Every rank puts its input into the workspace; every rank reduces one slice of all inputs, in the order of the ranks, and
stores the result into everybody's workspace.  Each element is reduced by one rank, so all get the same bits, and each
rank moves about twice its input, however many ranks there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iris_core.errors import ArgumentError, HeapClosedError, UnsupportedError
from iris_core.types import Availability, DeviceType
from iris_example_backend._plugin import TWO_SHOT_INFO

if TYPE_CHECKING:
    from iris_core.api import Iris
    from iris_core.types import CollectiveRequest, CreateRequest, PluginInfo

_REDUCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16")

_BYTES_PER_S, _BARRIER_S = 2e9, 2e-4  # roughly what one core copies, and what a barrier of the host costs


class TwoShotAllReduce:
    """The algorithm; satisfies `iris_core.protocols.Collective`."""

    op = "all_reduce"
    name = "example-two-shot"

    def __init__(self, request: CreateRequest) -> None:
        """Keep the settings (`TwoShotSettings`); nothing is allocated before `prepare`."""
        self._max_nbytes: int = request.settings.max_nbytes  # type: ignore[attr-defined]

    @property
    def info(self) -> PluginInfo:
        """The plugin's description."""
        return TWO_SHOT_INFO

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm can serve the request; the reason is shown to the user who asked for it."""
        reduction = request.options.get("reduction", "sum")
        if request.op != self.op:
            return Availability.no(f"it does {self.op} and not {request.op}")
        if request.target.type is not DeviceType.CPU:
            return Availability.no(f"it works in the host's memory and not on {request.target.type}")
        if request.dtype not in _DTYPES:
            return Availability.no(f"it reduces {', '.join(_DTYPES)} and not {request.dtype}")
        if reduction not in _REDUCTIONS:
            return Availability.no(f"it knows {', '.join(_REDUCTIONS)} and not {reduction!r}")
        if request.nbytes > self._max_nbytes:
            return Availability.no(f"{request.nbytes} bytes are more than max_nbytes of its settings allows")
        return Availability.yes()

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: in and out of the workspace, one slice of everybody, one to everybody; two barriers."""
        return 4 * request.nbytes / _BYTES_PER_S + 2 * _BARRIER_S

    def prepare(self, request: CollectiveRequest, context: Iris) -> TwoShotPlan:
        """Make a plan with its workspace on the heap.  Collective: every rank of the context calls it.

        Raises:
            UnsupportedError: `supports` says no, or the group is not the whole world of the context.
        """
        answer = self.supports(request)
        if not answer:
            raise UnsupportedError(f"{self.name}: {answer.reason}")
        if request.group_size != context.num_ranks:
            raise UnsupportedError(f"{self.name}: it works on all {context.num_ranks} ranks, not {request.group_size}")
        return TwoShotPlan(request, context)


class TwoShotPlan:
    """What `prepare` makes: a workspace for inputs of one size, used again by every launch."""

    def __init__(self, request: CollectiveRequest, context: Iris) -> None:
        self._context: Iris | None = context
        self._request = request
        dtype = getattr(torch, request.dtype)
        # half-precision numbers are summed in single precision and rounded once
        self._sum_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        self._combine: Any = _REDUCTIONS[request.options.get("reduction", "sum")]
        numel = int(np.prod(request.shape, dtype=np.int64))
        self._inputs = context.empty(numel, dtype=dtype)
        self._results = context.empty(numel, dtype=dtype)
        ranks = range(context.num_ranks)
        self._peer_inputs = [_of_rank(context, self._inputs, rank) for rank in ranks]
        self._peer_results = [_of_rank(context, self._results, rank) for rank in ranks]

    def launch(self, out: torch.Tensor, input: torch.Tensor, stream: Any = None) -> Done:
        """Reduce `input` of all ranks into `out`.  Collective: every rank calls it.

        Args:
            out: tensor of the planned shape and dtype; may be `input`.
            input: the same; need not be on the heap.
            stream: accepted as by every algorithm; on the CPU there is nothing to order.

        Returns:
            A finished `iris_core.protocols.Work`.

        Raises:
            ArgumentError: a tensor is not what was planned for.
            HeapClosedError: the plan is closed.
        """
        context = self._opened()
        for tensor in (out, input):
            if tuple(tensor.shape) != self._request.shape or tensor.dtype != self._inputs.dtype:
                planned, given = self._request.shape, tuple(tensor.shape)
                raise ArgumentError(f"planned for {self._inputs.dtype} {planned}, not {tensor.dtype} {given}")
        self._inputs.copy_(input.reshape(-1))
        context.barrier()  # all inputs are there; all have taken the results of the launch before
        mine = self._slice(context)
        total = self._peer_inputs[0][mine].to(self._sum_dtype)
        for peer in self._peer_inputs[1:]:
            total = self._combine(total, peer[mine])
        for result in self._peer_results:
            result[mine] = total.to(result.dtype)
        context.barrier()  # all slices are there
        out.copy_(self._results.reshape(out.shape))
        return Done()

    def close(self) -> None:
        """Free the workspace.  Collective: every rank calls it at the same place.  Idempotent."""
        if self._context is not None:
            context, self._context = self._context, None
            self._peer_inputs.clear()
            self._peer_results.clear()
            context.free(self._inputs)
            context.free(self._results)

    def _opened(self) -> Iris:
        if self._context is None:
            raise HeapClosedError("this plan is closed: prepare a new one")
        return self._context

    def _slice(self, context: Iris) -> slice:
        per_rank = -(-self._inputs.numel() // context.num_ranks)
        return slice(context.cur_rank * per_rank, (context.cur_rank + 1) * per_rank)


class Done:
    """A `iris_core.protocols.Work` that is finished: the host has done everything."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


def _of_rank(context: Iris, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what `tensor`, which is symmetric, is on another rank; valid while the context is open."""
    address = context.heap.translate(tensor.data_ptr(), context.cur_rank, rank)
    return torch.from_numpy(np.asarray(_Bytes(address, tensor.nbytes))).view(tensor.dtype)


class _Bytes:
    """Memory at an address, in the form that numpy makes arrays of."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
