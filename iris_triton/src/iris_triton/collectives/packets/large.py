"""Algorithms for large messages: `split` and `ring`, both for reductions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris_core.types import Availability, DeviceType
from iris_triton.collectives.packets.algorithms import PacketCollective, Plan
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, PER_CALL
from iris_triton.collectives.packets.mailbox_sizes import PACKET, looks_of, mailbox_for, packets_for, tunings_of
from iris_triton.collectives.packets.packet_ring import WORDS, packet_ring
from iris_triton.collectives.packets.split import split
from iris_triton.collectives.parts.sizes import carrier_of, layout_of
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

_CPU_BLOCK, _CPU_PAIRS = 256, 3
_GPU_WARPS, _GPU_PAIRS = 8, 132
_TRIED = ({"comm_sms": 128}, {"num_warps": 16}, {"comm_sms": 132, "num_warps": 16})
_ITERATIONS = 4  # packets of a thread in a chunk
_FEW_NBYTES, _MANY_NBYTES = 1 << 20, 4 << 20  # of a part
_NAP_NS, _FIRST_NAP_NS = 100, 500
_START_S, _MEETING_S = 4e-6, 2.5e-6  # of the model, like those below
_WIRE = 3.4e11
_HOP_S, _RING_WIRE = 0.8e-6, 3.51e11


class Split(PacketCollective):
    """all_reduce or reduce_scatter by pairs of programs; see `iris_triton.collectives.packets.split`.

    Args:
        op: the operation.
        encoding: of its packets.
        emulate: as for `PacketCollective`.
    """

    _measured_only = True
    """Chosen where a table says so, or by name: nearly as fast as the other forms, seldom faster."""

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
        options = request.options
        part = self._part_nbytes(request)
        warps, sub, several, iterations = self._stretch(request)
        mailbox = mailbox_for(team, self._encoding, self._packets(request), team.size - 1, sub)
        pairs = self._pairs(request, mailbox.cap, sub * several, team.max_programs)
        local = team.region("split", 4 * MAX_PROGRAMS)
        inner = layout_of(request.shape, options["in_stride"])
        outer = layout_of(options["out_shape"], options["out_stride"])
        arguments = self._common(request, team, mailbox, part, inner, outer) | {
            "control": team.control.tensor.view(torch.int64),
            "local": local.tensor.view(torch.int32),
            "bases": team.bases,
            "nbytes": request.nbytes,
            "EVEN": part * team.size == request.nbytes,
            "slots": mailbox.cap,
            "GATHERS": self._gathers,
            "BLOCK": sub * several,
            "SUB": sub,
            "ITER": iterations,
            "NAP_NS": _NAP_NS,
            "FIRST_NAP_NS": _FIRST_NAP_NS,
            "LOOKS": looks_of(2 * pairs, warps or 1),
        }
        launch_options = {} if request.target.type is DeviceType.CPU else {"num_warps": warps}
        kernels = [
            BoundKernel(split, 2 * pairs, arguments | {"first": i * mailbox.cap}, PER_CALL, team.device, launch_options)
            for i in range(mailbox.pieces)
        ]
        return Plan(tuple(kernels), carrier_of(request.dtype))

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs that are worth measuring for a call that this algorithm serves."""

        def shape_of(each: CollectiveRequest) -> Any:
            warps, sub, several, iterations = self._stretch(each)
            return warps, several, iterations, self._pairs(each, self._packets(each), sub * several, MAX_PROGRAMS)

        return tunings_of(request, shape_of, _TRIED)

    def _stretch(self, request: CollectiveRequest) -> tuple[int, int, int, int]:
        """Warps; packets that a program holds one to a thread; how many a pushing thread holds; blocks of a chunk.

        Several packets in a thread keep more stores under way; several short blocks hand results over as often, and
        fill the programs more evenly where there are few.
        """
        config = request.options["config"]
        if request.target.type is DeviceType.CPU:
            warps = int(config.get("num_warps", 0))
            return warps, 32 * warps if warps else _CPU_BLOCK, 1, _ITERATIONS
        warps = int(config.get("num_warps", _GPU_WARPS))
        nbytes = self._packets(request) * PACKET
        if self._gathers:
            several = 1 if _FEW_NBYTES < nbytes <= _MANY_NBYTES else 4
        else:
            several = 2
        return warps, 32 * warps, several, _ITERATIONS // several if self._gathers else 1

    def _pairs(self, request: CollectiveRequest, packets: int, block: int, most: int) -> int:
        """Pairs of programs."""
        usual = 2 * (_CPU_PAIRS if request.target.type is DeviceType.CPU else _GPU_PAIRS)
        wanted = int(request.options["config"].get("comm_sms", usual)) // 2
        return max(1, min(wanted, most, MAX_PROGRAMS // 2, -(-packets // block)))

    def _part_nbytes(self, request: CollectiveRequest) -> int:
        size = request.group_size
        if self._gathers:
            return max(1, -(-request.nbytes // (size * PACKET))) * PACKET
        return int(math.prod(request.shape) // size * getattr(torch, request.dtype).itemsize)


class Ring(PacketCollective):
    """all_reduce or reduce_scatter of floats round a ring; see `iris_triton.collectives.packets.packet_ring`.

    It serves 16-bit floats only where nothing is rounded on the way: their sums would be, at every hop.

    Args:
        op: the operation.
        emulate: as for `PacketCollective`.
    """

    _measured_only = True
    """Chosen where a table says so, or by name."""

    def __init__(self, op: str, *, emulate: bool = False) -> None:
        super().__init__(op, "ring", "sentinel", emulate=emulate)

    @property
    def _gathers(self) -> bool:
        return self.op == "all_reduce"

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.group_size < 2:
            return Availability.no("it needs two ranks at least")
        if "num_warps" in request.options.get("config", {}):
            return Availability.no("its mailbox is made for programs of one size, so it has no use for num_warps")
        if request.dtype != "float32" and request.options.get("reduction") not in ("min", "max"):
            return Availability.no(f"partial results of {request.dtype} would be rounded at every hop")
        return answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: once round the ring, or twice."""
        hops = (request.group_size - 1) * (1 + self._gathers)
        return _START_S + hops * (_HOP_S + request.nbytes / request.group_size / _RING_WIRE)

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs that are worth measuring for a call that this algorithm serves."""
        if request.target.type is DeviceType.CPU:
            return [{}]
        return [{}, {"comm_sms": 132}, {"comm_sms": 528}]

    def prepare(self, request: CollectiveRequest, context: Any) -> Plan:
        """Make a plan.  Collective: every member calls it."""
        team: Team = context.ccl.team(request.members or tuple(range(request.group_size)))
        options = request.options
        on_cpu = request.target.type is DeviceType.CPU
        item = int(getattr(torch, request.dtype).itemsize)
        part = self._part_nbytes(request)
        packets = packets_for(part, self._encoding)
        block = 32 * _GPU_WARPS
        area = 2 * 2 * (team.size - 1) * block * PACKET
        most = min(options["config"].get("comm_sms", _CPU_PAIRS if on_cpu else 2 * _GPU_PAIRS), MAX_PROGRAMS)
        programs = max(1, min(most, -(-packets // block)))
        mailbox = team.workspace("ring of packets", programs * area, area, fill=0xFF)  # every byte of packets' EMPTY
        words = team.region("words of the ring of packets", WORDS * 8 * MAX_PROGRAMS)
        inner = layout_of(request.shape, options["in_stride"])
        outer = layout_of(options["out_shape"], options["out_stride"])
        whole = options.get("aligned", False) and part % PACKET == 0 and request.nbytes % PACKET == 0
        arguments = {
            "words": words.tensor.view(torch.int64),
            "peers": tuple(team.base_ptrs[(team.rank + 1 + i) % team.size] for i in range(team.size)),
            "me": team.rank,
            "rank": team.world_rank,
            "nbytes": request.nbytes,
            "part": part,
            "packets": packets,
            "box": mailbox.offset_bytes,
            "area": area,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "out_sizes": outer.sizes,
            "out_strides": outer.strides,
            "N": team.size,
            "GATHERS": self._gathers,
            "ITEM": item,
            "IN_DIMS": inner.num_dims,
            "OUT_DIMS": outer.num_dims,
            "IN_WHOLE": whole and not inner.num_dims,
            "OUT_WHOLE": whole and not outer.num_dims,
            "EVEN": part * team.size == request.nbytes,
            "BLOCK": block,
            "NAP_NS": 0,
            **self._reduction(request),
        }
        launch_options = {} if on_cpu else {"num_warps": _GPU_WARPS}
        programs = min(programs, mailbox.nbytes // area)
        kernel = BoundKernel(packet_ring, programs, arguments, PER_CALL, team.device, launch_options)
        return Plan((kernel,), carrier_of(request.dtype))

    def _part_nbytes(self, request: CollectiveRequest) -> int:
        size = request.group_size
        if self._gathers:
            return max(1, -(-request.nbytes // (size * PACKET))) * PACKET
        return int(math.prod(request.shape) // size * getattr(torch, request.dtype).itemsize)
