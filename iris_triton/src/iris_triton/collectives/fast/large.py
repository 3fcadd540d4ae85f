"""Algorithms for large messages: `split` for reductions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris_core.types import Availability, DeviceType
from iris_triton.collectives.fast.algorithms import PacketCollective, Plan
from iris_triton.collectives.fast.geometry import PACKET, mailbox_for, packets_for
from iris_triton.collectives.fast.mailbox import MAX_PROGRAMS, PER_CALL
from iris_triton.collectives.fast.split import split
from iris_triton.collectives.geometry import carrier_of, layout_of
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.ccl.team import Team
    from iris_core.types import CollectiveRequest

_CPU_BLOCK, _CPU_PAIRS = 256, 3
_GPU_WARPS, _GPU_PAIRS = 8, 132
_ITERATIONS = 4  # blocks of a chunk
_NAP_NS, _FIRST_NAP_NS = 100, 500
_START_S, _MEETING_S = 4e-6, 2.5e-6  # measured on 8 x H200
_WIRE = 3.4e11


class Split(PacketCollective):
    """all_reduce or reduce_scatter by pairs of programs; see `iris_triton.collectives.fast.split`.

    Args:
        op: the operation.
        encoding: of its packets.
        emulate: as for `PacketCollective`.
    """

    def __init__(self, op: str, encoding: str, *, emulate: bool = False) -> None:
        super().__init__(op, "split", encoding, emulate=emulate)

    @property
    def _gathers(self) -> bool:
        return self.op == "all_reduce"

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if answer and request.group_size < 2:
            return Availability.no("it needs two ranks at least")
        if answer and self._gathers and not request.direct_out:
            return Availability.no(
                "it stores results into the outputs of all, and this one is not on the heap, or strided"
            )
        return answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: packets to all, and results of an all_reduce as they are."""
        part = request.nbytes * (request.group_size - 1) / request.group_size
        sent = part * (packets_for(1 << 20, self._encoding) * PACKET / (1 << 20) + self._gathers)
        return _START_S + _MEETING_S * self._gathers + sent / _WIRE

    def prepare(self, request: CollectiveRequest, context: Any) -> Plan:
        """Make a plan.  Collective: every member calls it."""
        team: Team = context.ccl.team(request.members or tuple(range(request.group_size)))
        config, options = request.options["config"], request.options
        on_cpu = request.target.type is DeviceType.CPU
        item = getattr(torch, request.dtype).itemsize
        part = self._part_nbytes(request, item)
        packets = packets_for(part, self._encoding)
        warps = config.get("num_warps", _GPU_WARPS)
        block = _CPU_BLOCK if on_cpu and "num_warps" not in config else 32 * warps
        mailbox = mailbox_for(team, self._encoding, packets, team.size - 1, block)
        most = min(config.get("comm_sms", 2 * (_CPU_PAIRS if on_cpu else _GPU_PAIRS)) // 2, team.max_programs)
        pairs = max(1, min(most, MAX_PROGRAMS // 2, -(-mailbox.cap // block)))
        local = team.region("split", 4 * MAX_PROGRAMS)
        inner = layout_of(request.shape, options["in_stride"])
        outer = layout_of(options["out_shape"], options["out_stride"])
        arguments = self._common(request, team, mailbox, inner, outer) | {
            "control": team.control.tensor.view(torch.int64),
            "local": local.tensor.view(torch.int32),
            "bases": team.bases,
            "nbytes": request.nbytes,
            "part": part,
            "slots": mailbox.cap,
            "GATHERS": self._gathers,
            "BLOCK": block,
            "ITER": _ITERATIONS,
            "NAP_NS": _NAP_NS,
            "FIRST_NAP_NS": _FIRST_NAP_NS,
        }
        launch_options = {} if on_cpu else {"num_warps": warps}
        kernels = [
            BoundKernel(split, 2 * pairs, arguments | {"first": i * mailbox.cap}, PER_CALL, team.device, launch_options)
            for i in range(mailbox.pieces)
        ]
        return Plan(tuple(kernels), carrier_of(request.dtype))

    def _part_nbytes(self, request: CollectiveRequest, item: int) -> int:
        if self._gathers:
            return max(1, -(-request.nbytes // (request.group_size * PACKET))) * PACKET
        return math.prod(request.shape) // request.group_size * item
