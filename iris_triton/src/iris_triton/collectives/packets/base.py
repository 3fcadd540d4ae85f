"""Base of the algorithms of packets: which calls they serve, and the arguments of their kernels."""

import math
from dataclasses import replace
from typing import Any

import triton.language as tl

from iris_core.dispatch.requests import COLUMNS, REDUCING
from iris_core.types import CollectiveRequest, DeviceType
from iris_triton.collectives.packets.fabric import lines_problem
from iris_triton.collectives.packets.mailbox import MAX_MEMBERS, PACKET, packets_for
from iris_triton.collectives.packets.packet import alignment
from iris_triton.collectives.parts.collective import KernelCollective
from iris_triton.collectives.parts.sizes import item_of, layout_arguments, layouts_of

ROOTS = {"broadcast": "from", "scatter": "from", "gather": "to", "reduce": "to"}  # only the root sends data, or stores
_FLOATS = ("float32", "float16", "bfloat16")


class PacketCollective(KernelCollective):
    """One operation in one form ("one_shot", ...) and encoding (see `iris_triton.collectives.packets.packet`)."""

    devices: tuple[DeviceType, ...] = (DeviceType.CUDA,)  # tests of the protocol emulate the assembly on others
    uses = ("comm_sms", "num_warps")

    tried: tuple[dict[str, int], ...]  # configs that may be worth measuring

    def __init__(self, op: str, form: str, encoding: str) -> None:
        super().__init__(op, f"{encoding}_{form}", ("torch", COLUMNS) if op == "all_to_all" else ("torch",))
        self._form = form
        self._hops = 2 if form == "two_shot" else 1
        self._encoding = encoding
        self._reduces = op in REDUCING
        self._sharded = op in ("reduce_scatter", "all_to_all", "scatter")

    def _problem(self, request: CollectiveRequest) -> str:
        if problem := super()._problem(request):
            return problem
        if not 1 <= request.group_size <= MAX_MEMBERS:
            return f"it serves groups of up to {MAX_MEMBERS} ranks, and this one has {request.group_size}"
        if self._encoding == "sentinel" and request.dtype not in _FLOATS:
            return f"words of {request.dtype} may have any value, so none can say that nothing is there yet"
        if request.target.type not in self.devices:
            return "its packets are assembly for NVIDIA GPUs"
        has_lines = self._encoding == "ll128" and request.target.type is DeviceType.CUDA
        return lines_problem(request.target.index) if has_lines else ""

    def _arguments(self, request: CollectiveRequest) -> dict[str, Any]:
        """Return the arguments that say what a call moves, and how; those of its mailbox are others."""
        inner, outer = layouts_of(request)
        part, unit = self._part_nbytes(request), alignment(self._encoding)
        item, whole = item_of(request), request.options.get("aligned", False)
        whole = whole and part % unit == 0 and request.nbytes % unit == 0
        op, element = "", None
        if self._reduces:
            op, carrier = self.reduction(request)
            element = tl.uint8 if carrier is not None else getattr(tl, request.dtype)
        return layout_arguments(request) | {
            "part": part,
            "kind": request.options.get("kind", 0),
            "ITEM": item,
            "IN_WHOLE": whole and inner.has_runs(unit // math.gcd(unit, item)),
            "OUT_WHOLE": whole and outer.has_runs(unit // math.gcd(unit, item)),
            "DT": element,
            "OP": op,
        }

    def _packets(self, request: CollectiveRequest) -> int:
        """Return the number of packets sent to one member in one hop."""
        return packets_for(self._part_nbytes(request), self._encoding)

    def _part_nbytes(self, request: CollectiveRequest) -> int:
        """Return the number of bytes sent to one member in one hop."""
        if self.op == "all_reduce" and self._form != "one_shot":  # parts begin at multiples of 16 bytes
            return max(1, -(-request.nbytes // (request.group_size * PACKET))) * PACKET
        return math.prod(request.shape) // self._parts_of(request) * item_of(request)

    def _parts_of(self, request: CollectiveRequest) -> int:
        """Return how many members' parts the tensor of a request has; in a scatter, other members' have one."""
        is_whole = self._sharded and (self.op != "scatter" or request.rank == request.options["root"])
        return request.group_size if is_whole else 1

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs whose launches differ, at most six: the own choice ({}), and some of `tried`."""
        if request.target.type is DeviceType.CPU:
            return [{}]
        own = request.options["config"]
        found: dict[Any, dict[str, int]] = {}
        for config in ({}, *self.tried):
            if all(own.get(name, value) == value for name, value in config.items()):
                options = {**request.options, "config": {**own, **config}}
                found.setdefault(self._launch_of(replace(request, options=options)), config)
        return list(found.values())[:6]

    def _launch_of(self, request: CollectiveRequest) -> tuple[int, ...]:
        """Return a comparable key of a call's launch."""
        raise NotImplementedError
