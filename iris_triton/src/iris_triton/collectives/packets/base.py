"""Base of the algorithms of packets: which calls they serve, and the arguments of their kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import triton.language as tl

from iris_core.types import DeviceType
from iris_triton.collectives.packets.fabric import lines_problem
from iris_triton.collectives.packets.mailbox import MAX_MEMBERS, PACKET, Mailbox, packets_for
from iris_triton.collectives.packets.packet import alignment
from iris_triton.collectives.parts.collective import KernelCollective
from iris_triton.collectives.parts.sizes import item_of, layout_arguments, layouts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

_FLOATS = ("float32", "float16", "bfloat16")


class PacketCollective(KernelCollective):
    """One operation in one form and encoding.

    Attributes:
        measured_only: those that CPU ranks emulate, too: the model knows GPUs.

    Args:
        op: the operation.
        form: what it does with packets, as the end of its name says.
        encoding: "ll", "ll128" or "sentinel"; see `iris_triton.collectives.packets.packet`.
        emulate: serve ranks on the CPU, too, however slowly: for tests of the protocol.
    """

    uses = ("comm_sms", "num_warps")

    def __init__(self, op: str, form: str, encoding: str, *, emulate: bool = False) -> None:
        super().__init__(op, f"{encoding}_{form}")
        self._form = form
        self._hops = 2 if form == "two_shot" else 1
        self._encoding = encoding
        self._emulate = emulate
        self._reduces = op in ("all_reduce", "reduce_scatter")
        self._sharded = op in ("reduce_scatter", "all_to_all")
        self.measured_only = emulate

    def _problem(self, request: CollectiveRequest) -> str:
        if problem := super()._problem(request):
            return problem
        if not 1 <= request.group_size <= MAX_MEMBERS:
            return f"it serves groups of up to {MAX_MEMBERS} ranks, and this one has {request.group_size}"
        if self._encoding == "sentinel" and request.dtype not in _FLOATS:
            return f"words of {request.dtype} may have any value, so none can say that nothing is there yet"
        if request.target.type is DeviceType.CPU:
            return "" if self._emulate else "it is for NVIDIA GPUs, and the CPU only emulates it for tests"
        if request.target.type is not DeviceType.CUDA:
            return "its packets are assembly for NVIDIA GPUs"
        return lines_problem(request.target.index) if self._encoding == "ll128" else ""

    def _through(self, mailbox: Mailbox, request: CollectiveRequest, team: Team) -> dict[str, Any]:
        """Arguments of all kernels."""
        inner, outer = layouts_of(request)
        part, unit = self._part_nbytes(request), alignment(self._encoding)
        whole = request.options.get("aligned", False) and part % unit == 0 and request.nbytes % unit == 0
        op, element = "", None
        if self._reduces:
            op, carrier = self.reduction(request)
            element = tl.uint8 if carrier is not None else getattr(tl, request.dtype)
        return layout_arguments(inner, outer) | {
            "peers": tuple(team.base_ptrs[(team.rank + 1 + i) % team.size] for i in range(team.size)),
            "part": part,
            "me": team.rank,
            "rank": team.world_rank,
            "kind": request.options.get("kind", 0),
            "counters": mailbox.counters,
            "cap": mailbox.cap,
            "box": mailbox.offset_bytes,
            "half": mailbox.half_nbytes,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "N": team.size,
            "ITEM": item_of(request),
            "IN_WHOLE": whole and not inner.num_dims,
            "OUT_WHOLE": whole and not outer.num_dims,
            "DT": element,
            "OP": op,
        }

    def _packets(self, request: CollectiveRequest) -> int:
        """Packets that go to one member, in one hop."""
        return packets_for(self._part_nbytes(request), self._encoding)

    def _part_nbytes(self, request: CollectiveRequest) -> int:
        """Bytes that go to one member, in one hop."""
        if self.op == "all_reduce" and self._form != "one_shot":  # parts begin at multiples of 16 bytes
            return max(1, -(-request.nbytes // (request.group_size * PACKET))) * PACKET
        return math.prod(request.shape) // (request.group_size if self._sharded else 1) * item_of(request)


def tunings_of(
    request: CollectiveRequest,
    shape_of: Callable[[CollectiveRequest], Any],
    tried: Sequence[dict[str, int]],
) -> list[dict[str, int]]:
    """Return configs whose launches differ, at most six: the own choice ({}), and some of those that are `tried`.

    Args:
        request: the call.
        shape_of: the launch of a call, comparable.
        tried: configs.
    """
    if request.target.type is DeviceType.CPU:
        return [{}]
    own = request.options["config"]
    found: dict[Any, dict[str, int]] = {}
    for config in ({}, *tried):
        if all(own.get(name, value) == value for name, value in config.items()):
            options = {**request.options, "config": {**own, **config}}
            found.setdefault(shape_of(replace(request, options=options)), config)
    return list(found.values())[:6]
