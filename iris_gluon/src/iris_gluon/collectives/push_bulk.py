"""`gluon_bulk`: all_gather and all_to_all by the copy unit of Hopper: one thread begins the copies of a program.

Chosen by name, or where a table says so.
Programs of one warp store as fast as programs of sixteen that load and store by themselves (benchmarks/gluon_bulk.py),
and leave registers and issue slots of the multiprocessors to what runs beside them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.types import Availability, DeviceType
from iris_gluon import _compat
from iris_gluon.bulk import put_bulk
from iris_gluon.collectives.base import GluonCollective
from iris_triton.collectives.parts.barrier import (
    last_epoch,
    meet,
    meet_and_leave,
    meeting_arguments,
    row_of,
    tell_all,
    told,
)
from iris_triton.collectives.parts.elements import as_words, item_nbytes
from iris_triton.collectives.parts.portable import PER_CALL, Plan
from iris_triton.collectives.parts.sizes import MOST_PROGRAMS, carrier_of, layout_of
from iris_triton.collectives.pull import received_nbytes
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

_RUNTIME = ("me", "rank", "count", "apart", "timeout_ns", "status")


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_bulk(
    out, inp, control, bases, me, rank, count, apart, timeout_ns, status,
    SIZE: gl.constexpr, UNIT: gl.constexpr, CHUNK_BYTES: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copy a part to every member; both tensors are dense, and peers can address the output.

    Args (beside those of `iris_gluon.collectives.push.push`):
        count: elements that go to a member.
        apart: elements between the parts for two members in the input; 0 where all get the same.
        UNIT: programs take whole multiples of so many elements: lines of 128 bytes.
        CHUNK_BYTES, STAGES: see `iris_gluon.bulk.put_bulk`.
    """
    inp = as_words(inp)
    out = as_words(out)
    ITEM: gl.constexpr = item_nbytes(inp.dtype)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    own = gl.load(bases + me)
    count = gl.cast(count, gl.int64)
    place = out.to(gl.int64) - own
    tell_all(row, bases, me, place, place, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    programs = gl.num_programs(0)
    each = (count + programs * UNIT - 1) // (programs * UNIT) * UNIT
    begin = gl.minimum(gl.program_id(0) * each, count)
    number = gl.minimum(count - begin, each)
    for i in range(SIZE):
        member = (me + 1 + i) % SIZE
        source = inp + (member * gl.cast(apart, gl.int64) + begin)
        to = own + told(row, member, SIZE) + (me * count + begin) * ITEM  # as if it lay in the own heap
        if (member != me) | (to != source.to(gl.int64)):  # not in place
            put_bulk(source, to.to(out.dtype), number, me, member, bases, CHUNK_BYTES, STAGES)
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


_LINE_NBYTES = 128
_CHUNK_NBYTES, _STAGES = 16 << 10, 4  # the best of benchmarks/results/gluon_bulk-2.json
_HOPPER = 90


class PushBulk(GluonCollective):
    """all_gather or all_to_all of large messages by Hopper's copy unit, which leaves multiprocessors to others."""

    uses = ("comm_sms", "num_warps", "threads_per_warp")
    measured_only = True
    """Chosen where a table says so, or by name."""

    drops_plans = False
    """The kernel's scratch memory comes with its first launch, and graphs know it."""

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call: dense tensors, the output on the heap, Hopper or newer."""
        if request.options.get("uneven"):
            return Availability.no("it sends parts of equal size")
        if request.options.get("layout", "torch") != "torch":
            return Availability.no(f"it does not serve layout={request.options['layout']!r}")
        if not request.direct_out or layout_of(request.shape, request.options["in_stride"]).num_dims:
            return Availability.no("it copies contiguous tensors, to outputs on the heap")
        target = request.target
        capability = target.arch.removeprefix("sm_").rstrip("af")
        hopper = target.type is DeviceType.CUDA and capability.isdigit() and int(capability) >= _HOPPER
        if target.type is not DeviceType.CPU and not hopper:
            return Availability.no(f"it needs the copy unit of NVIDIA's Hopper or newer, and this is {target.arch!r}")
        return super().supports(request)

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, and what goes over the links."""
        return self.model(request, meetings=2, moved=received_nbytes(request))

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel."""
        config = request.options["config"]
        carrier = carrier_of(request.dtype)
        count = math.prod(request.shape) * carrier.parts
        apart = 0
        if self.op == "all_to_all":
            count //= team.size
            apart = count
        on_cpu = request.target.type is DeviceType.CPU
        chunks = -(-count * carrier.dtype.itemsize // _CHUNK_NBYTES)
        most = config.get("comm_sms", 1 if on_cpu else MOST_PROGRAMS)
        arguments = meeting_arguments(team) | {
            "count": count,
            "apart": apart,
            "UNIT": _LINE_NBYTES // carrier.dtype.itemsize,
            "CHUNK_BYTES": _CHUNK_NBYTES,
            "STAGES": _STAGES,
        }
        options = {} if on_cpu else {"num_warps": config.get("num_warps", 1)}
        programs = max(1, min(most, team.max_programs, chunks))
        return Plan(WithScratch(push_bulk, programs, arguments, PER_CALL, team.device, options), carrier)


class WithScratch(BoundKernel):
    """A kernel that describes memory to the copy unit, in scratch memory of its own.

    Triton asks for that at every launch.  It gets the same each time, so nothing is allocated, and graphs may keep the
    address: launches of a team follow each other.
    """

    _scratch: torch.Tensor | None = None

    def __call__(self, stream: Any, *tensors: torch.Tensor) -> None:
        """Launch; see `BoundKernel`."""
        with _compat.scratch_from(self._allocate):
            super().__call__(stream, *tensors)

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < nbytes:
            # torch aligns to 512 bytes; descriptions need 128
            self._scratch = torch.empty(nbytes, dtype=torch.int8, device=f"cuda:{self._index}")
        return self._scratch
