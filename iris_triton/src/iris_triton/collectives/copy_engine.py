"""`copy_engine`: all_gather, all_to_all and broadcast by copy engines, which leave the multiprocessors to others.

Chosen by name, or where a table says so.

In rounds: every rank copies a piece for each member into a half of its staging region, all meet, and each one copies
its pieces out of the others' staging regions into its output; the halves take turns, so one meeting per round is
enough, and one at the end.  The meetings are kernels of one warp, everything else are copies in one stream.

A copy needs its addresses when it is asked for, and only the host of a member knows where its tensors lie in this call:
so what others read is staged, at places that do not change.  A rank's own part goes from its input to its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.types import Availability, DeviceType
from iris_triton.collectives.parts.barrier import bind_meeting
from iris_triton.collectives.parts.portable import Portable
from iris_triton.collectives.parts.sizes import layout_of, pieces
from iris_triton.copies import copier, copies_obstacle

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest
    from iris_triton.launcher import BoundKernel

ENGINE_OPS = ("all_gather", "all_to_all", "broadcast")
"""Operations that the copy engines serve."""

_WIRE, _COPY_S = 3.23e11, 2e-6
_SPAN = tuple[int, int, int]  # target, source, bytes; one of the two is an address, the other a place in a tensor


@dataclass(frozen=True, slots=True)
class _Round:
    """Copies of one round.

    Attributes:
        give: from the input into the own staging region.
        take: from the others' staging regions into the output.
    """

    give: tuple[_SPAN, ...]
    take: tuple[_SPAN, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is asked for in a launch.

    Attributes:
        rounds: one after the other.
        own: where the own part lies in the output and in the input, and its size; None if there is none.
        meet: the kernel by which members meet.
        copy: see `iris_triton.copies.copier`.
        index: of the device; None on the CPU.
    """

    rounds: tuple[_Round, ...]
    own: _SPAN | None
    meet: BoundKernel
    copy: Callable[[int, int, int, int], None]
    index: int | None


class CopyEngine(Portable):
    """One operation of `ENGINE_OPS` by the copy engines."""

    uses = ()
    measured_only = True
    """Chosen where a table says so, or by name."""

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        options = request.options
        if options.get("uneven"):
            return Availability.no("it sends parts of equal size")
        sides = [(request.shape, options.get("in_stride")), (options.get("out_shape"), options.get("out_stride"))]
        if any(
            stride is not None and shape is not None and layout_of(shape, stride).num_dims for shape, stride in sides
        ):
            return Availability.no("the copy engines move contiguous memory, and a tensor is strided")
        obstacle = copies_obstacle(request.target.type)
        return Availability.no(obstacle) if obstacle else answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: staging, two meetings, a copy from each peer, and what comes over the links."""
        size = request.group_size
        moved = request.nbytes * (size - 1) / (size if self.op == "all_to_all" else 1)
        if request.target.type is DeviceType.CPU:
            return self.model(request, meetings=2, moved=moved, copied=request.nbytes)
        return self.model(request, meetings=2, moved=0, copied=request.nbytes) + size * _COPY_S + moved / _WIRE

    def prepare(self, request: CollectiveRequest, context: Any) -> Any:
        """Make a plan.  Collective: every member calls it."""
        return self._plan(request, context.ccl.team(request.members))

    def _plan(self, request: CollectiveRequest, team: Team) -> _Plan:
        size, rank, root = team.size, team.rank, request.options.get("root")
        sharded = self.op == "all_to_all"
        nbytes = math.prod(request.shape) * int(getattr(torch, request.dtype).itemsize)
        part = nbytes // size if sharded else nbytes
        shares = size if sharded else 1  # what a rank stages at a time
        region, capacity = pieces(team, part, 1, shares, name="copy engine")
        half = shares * capacity
        stage = region.tensor.data_ptr()
        sources = [(rank + 1 + i) % size for i in range(size - 1)] if root is None else [root] * (rank != root)
        gives = [i for i in range(size) if i != rank] if sharded else [0] * (root in (None, rank))
        rounds = []
        for number, done in enumerate(range(0, part, capacity)):
            piece = min(part - done, capacity)
            begin = number % 2 * half
            give = tuple((stage + begin + i * capacity, i * part + done, piece) for i in gives)
            behind = begin + (rank * capacity if sharded else 0) + region.offset_bytes
            take = tuple(
                ((0 if root is not None else member * part) + done, team.base_ptrs[member] + behind, piece)
                for member in sources
            )
            rounds.append(_Round(give, take))
        own = None if root is not None else (rank * part, rank * part if sharded else 0, part)
        index = None if request.target.type is DeviceType.CPU else torch.device(team.device).index
        return _Plan(tuple(rounds), own, bind_meeting(team), copier(request.target.type), index)

    def launch(self, plan: Any, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Ask for all copies and meetings on a stream."""
        target = 0 if out is None else out.data_ptr()
        source = target if inp is None else inp.data_ptr()
        copy = plan.copy
        raw = 0
        if plan.index is not None:
            raw = torch._C._cuda_getCurrentRawStream(plan.index) if stream is None else stream.cuda_stream
        for each in plan.rounds:
            for there, begin, nbytes in each.give:
                copy(there, source + begin, nbytes, raw)
            plan.meet(stream)
            for begin, there, nbytes in each.take:
                copy(target + begin, there, nbytes, raw)
        if plan.own is not None:
            to, origin, nbytes = plan.own
            if target + to != source + origin:
                copy(target + to, source + origin, nbytes, raw)
        plan.meet(stream)
