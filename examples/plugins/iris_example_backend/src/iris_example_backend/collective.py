"""The collective: all_reduce in two steps ("two-shot"), driven by the host through the symmetric heap.

Every rank puts its input into the workspace; every rank reduces one slice of all inputs, in the order of the ranks, and
stores the result into everybody's workspace.  Each element is reduced by one rank, so all get the same bits, and each
rank moves about twice its input, however many ranks there are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.types import Availability, DeviceType
from iris_example_backend._plugin import TWO_SHOT_INFO

if TYPE_CHECKING:
    from iris_core.api import Iris
    from iris_core.types import CollectiveRequest, CreateRequest, PluginInfo

_REDUCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16")

_BYTES_PER_S, _BARRIER_S = 2e9, 5e-4  # roughly what a core copies, and what waiting for the other ranks costs


class TwoShotAllReduce:
    """The algorithm; satisfies `iris_core.protocols.Collective`."""

    deterministic = True

    def __init__(self, request: CreateRequest) -> None:
        """Keep size of the world and settings; nothing is allocated before `prepare`.

        Args:
            request: the world, and `TwoShotSettings`.
        """
        self._world_size = request.world_size
        self._max_nbytes: int = request.settings.max_nbytes  # type: ignore[attr-defined]  # of TwoShotSettings

    @property
    def info(self) -> PluginInfo:
        """The plugin's description."""
        return TWO_SHOT_INFO

    @property
    def op(self) -> str:
        """The operation."""
        return "all_reduce"

    @property
    def name(self) -> str:
        """The algorithm's name, by which users ask for it."""
        return "example-two-shot"

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm can serve the request; the reason is what a user gets who asked for it by name.

        It looks only at what is equal on all ranks, so all come to the same answer.
        """
        reduction = request.options.get("reduction", "sum")
        unused = sorted(set(request.options.get("config", ())) - {"algorithm"})
        if request.op != self.op:
            return Availability.no(f"it does {self.op} and not {request.op}")
        if request.target.type is not DeviceType.CPU:
            return Availability.no(f"it works in the host's memory and not on {request.target.type}")
        # It meets at ctx.device_barrier(), and its workspace is an ordinary tensor: all ranks have to be there.
        if request.group_size < self._world_size or request.members not in ((), tuple(range(request.group_size))):
            return Availability.no("it works on the whole world and not on a group of ranks")
        if request.dtype not in _DTYPES:
            return Availability.no(f"it reduces {', '.join(_DTYPES)} and not {request.dtype}")
        if reduction not in _REDUCTIONS:
            return Availability.no(f"it knows {', '.join(_REDUCTIONS)} and not {reduction!r}")
        if request.options.get("layout", "torch") != "torch":
            return Availability.no(f"its results lie as in torch and not as {request.options['layout']!r}")
        if unused:
            return Availability.no(f"it has no use for {', '.join(unused)} of the config")
        if request.nbytes > self._max_nbytes:
            return Availability.no(f"{request.nbytes} bytes are more than its setting max_nbytes allows")
        return Availability.yes()

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: into the workspace, a slice from everybody, one to everybody, and out; two barriers."""
        return 4 * request.nbytes / _BYTES_PER_S + 2 * _BARRIER_S

    def prepare(self, request: CollectiveRequest, context: Iris) -> TwoShotPlan:
        """Make a plan with its workspace on the heap.  Collective: every rank calls it.

        Raises:
            UnsupportedError: `supports` says no.
            HeapExhaustedError: the heap has no room for the workspace.
        """
        answer = self.supports(request)
        if not answer:
            raise UnsupportedError(f"{self.name}: {answer.reason}")
        return TwoShotPlan(request, context)

    def launch(self, plan: TwoShotPlan, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Reduce `inp` of all ranks into `out`.  Collective: every rank calls it.

        Args:
            plan: what `prepare` returned.
            out: tensor with as many elements as was planned for, of the dtype; may be `inp`.
            inp: the same.  Neither need be on the heap, or contiguous.
            stream: on the CPU there is nothing to order: all is done when the call returns.

        Raises:
            ArgumentError: a tensor is not what was planned for.
        """
        for tensor in (out, inp):
            if tensor is None or (tensor.numel(), tensor.dtype) != (plan.numel, plan.dtype):
                given = "none" if tensor is None else f"{tensor.numel()} of {tensor.dtype}"
                raise ArgumentError(f"planned for {plan.numel} elements of {plan.dtype}, given {given}")
        assert out is not None
        assert inp is not None
        plan.run(out, inp)


class TwoShotPlan:
    """What `prepare` makes: a workspace for inputs of one size, used again by every launch."""

    def __init__(self, request: CollectiveRequest, context: Iris) -> None:
        self.numel = math.prod(request.shape)
        self.dtype = getattr(torch, request.dtype)
        self._context = context
        # half-precision numbers are summed in single precision and rounded once
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        self._sum_dtype = torch.float32 if is_half else self.dtype
        self._combine: Any = _REDUCTIONS[request.options.get("reduction", "sum")]
        room = max(self.numel, 1)  # a tensor without elements has no address
        self._input, self._result = (context.empty(room, dtype=self.dtype) for _ in range(2))
        ranks = range(context.num_ranks)
        self._inputs = [_of_rank(context, self._input, rank) for rank in ranks]
        self._results = [_of_rank(context, self._result, rank) for rank in ranks]
        per_rank = -(-self.numel // context.num_ranks)
        self._mine = slice(context.cur_rank * per_rank, (context.cur_rank + 1) * per_rank)
        context.device_barrier()  # the first one sets up its flags: not in `run`

    def run(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Do it once.  None passes the first barrier before all have left the last launch."""
        self._input[: self.numel].copy_(inp.reshape(-1))
        self._context.device_barrier()  # all inputs are there, all earlier results are taken
        total = self._inputs[0][self._mine].to(self._sum_dtype)
        for other in self._inputs[1:]:
            total = self._combine(total, other[self._mine])
        for result in self._results:
            result[self._mine] = total.to(result.dtype)
        self._context.device_barrier()  # all slices are there, no input is read any more
        out.copy_(self._result[: self.numel].reshape(out.shape))


def _of_rank(context: Iris, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what `tensor`, which is symmetric, is on another rank; valid while the context is open."""
    address = context.heap.translate(tensor.data_ptr(), context.cur_rank, rank)
    return torch.from_numpy(np.asarray(_Bytes(address, tensor.nbytes))).view(tensor.dtype)


class _Bytes:
    """Memory at an address, in the form that numpy makes arrays of."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
