"""What the algorithms of packets have in common: whom they serve, plans, launching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from iris_core.types import REDUCIBLE, Availability, DeviceType, ReduceOp
from iris_triton.collectives.packets.exchange import exchange, two_shot
from iris_triton.collectives.packets.fabric import Fact, known_facts
from iris_triton.collectives.packets.mailbox import MAX_MEMBERS, PER_CALL
from iris_triton.collectives.packets.mailbox_sizes import (
    DATA_RATIO,
    Mailbox,
    looks_of,
    mailbox_for,
    packets_for,
    shape_for,
    tunings_of,
)
from iris_triton.collectives.packets.packet import alignment
from iris_triton.collectives.parts.sizes import Carrier, Layout, carrier_of, layout_of
from iris_triton.info import TRITON_INFO
from iris_triton.launcher import BoundKernel, early_launch

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest, PluginInfo

ENCODINGS = ("ll", "ll128", "sentinel")

_USED_CONFIG = ("comm_sms", "num_warps")

_HOP_S, _LAUNCH_S, _WIRE = 0.8e-6, 1.0e-6, 3.4e11  # of the model: seconds, seconds, bytes per second

_EARLY_NBYTES = 1 << 20  # of data for one member: a launch that comes up early saves time, nothing above

_FLOATS = ("float32", "float16", "bfloat16")

_BITWISE = ("band", "bor", "bxor")

_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max", "band": "min", "bor": "max", "bxor": "bxor"}


@dataclass(slots=True)
class Plan:
    """What has been prepared.

    Attributes:
        kernels: each takes the output and the input; launched in this order.
        carrier: as what they take the elements.
        is_ready: all kernels need nothing but addresses.
    """

    kernels: tuple[BoundKernel, ...]
    carrier: Carrier
    is_ready: bool = False


class PacketCollective:
    """One operation in one form and encoding; satisfies `iris_core.protocols.Collective`.

    Attributes:
        measured_only: of those that CPU ranks emulate: the model knows GPUs.
        drops_plans: a plan has regions of the team only, which stay, and which one made again finds.

    Args:
        op: the operation.
        form: "one_shot", "two_shot" or "mailbox".
        encoding: one of ENCODINGS.
        emulate: serve ranks on the CPU, too, however slowly: for tests of the protocol.
    """

    drops_plans = True
    _measured_only = False

    def __init__(self, op: str, form: str, encoding: str, *, emulate: bool = False) -> None:
        self.op = op
        self.name = f"{encoding}_{form}"
        self._form = form
        self._encoding = encoding
        self._emulate = emulate
        self.measured_only = emulate or self._measured_only

    @property
    def info(self) -> PluginInfo:
        """The backend's description."""
        return TRITON_INFO

    @property
    def _reduces(self) -> bool:
        return self.op in ("all_reduce", "reduce_scatter")

    @property
    def _sharded(self) -> bool:
        return self.op in ("reduce_scatter", "all_to_all")

    @property
    def _hops(self) -> int:
        return 2 if self._form == "two_shot" else 1

    # -- what it serves -----------------------------------------------------------------------------------------------
    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        problem = self._problem(request)
        return Availability.no(problem) if problem else Availability.yes()

    def _problem(self, request: CollectiveRequest) -> str:
        if request.op != self.op:
            return f"it serves {self.op}"
        if not 1 <= request.group_size <= MAX_MEMBERS:
            return f"it serves groups of up to {MAX_MEMBERS} ranks, and this one has {request.group_size}"
        options = request.options
        if options.get("layout", "torch") != "torch":
            return f"it does not serve layout={options['layout']!r}"
        if options.get("uneven"):
            return "it sends parts of equal size"
        unused = [name for name in options.get("config", {}) if name not in _USED_CONFIG]
        if unused:
            return f"it has no use for {', '.join(unused)} of the config"
        warps = options.get("config", {}).get("num_warps", 1)
        if warps & (warps - 1) or warps > 32:
            return f"num_warps is {warps}, which is no power of two up to 32"
        return self._type_problem(request) or self._device_problem(request)

    def _type_problem(self, request: CollectiveRequest) -> str:
        dtype = getattr(torch, request.dtype, None) if request.dtype else None
        if not isinstance(dtype, torch.dtype):
            return f"{request.dtype!r} is no element type"
        if self._encoding == "sentinel" and request.dtype not in _FLOATS:
            return f"words of {request.dtype} may have any value, so none can say that nothing is there yet"
        if not self._reduces:
            return ""
        reduction = request.options.get("reduction", "sum")
        if request.dtype not in REDUCIBLE:
            return f"it does not reduce {request.dtype}"
        if reduction.upper() not in ReduceOp.__members__:
            return f"it does not know the reduction {reduction!r}"
        if reduction in _BITWISE and dtype.is_floating_point:
            return f"{reduction} works on integers"
        return "avg does not work on bool" if (reduction, request.dtype) == ("avg", "bool") else ""

    def _device_problem(self, request: CollectiveRequest) -> str:
        if request.target.type is DeviceType.CPU:
            return "" if self._emulate else "it is for NVIDIA GPUs, and the CPU only emulates it for tests"
        if request.target.type is not DeviceType.CUDA:
            return "its packets are assembly for NVIDIA GPUs"
        return missing_facts(request.target.index, self._needs(request))

    def _needs(self, request: CollectiveRequest) -> tuple[Fact, ...]:
        """Facts about memory on which a call leans."""
        return (Fact.WHOLE_LINES,) if self._encoding == "ll128" else ()

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: a launch, the hops, and what goes over the links."""
        others, size = request.group_size - 1, request.group_size
        part = request.nbytes / size if self._sharded or self._form == "two_shot" else request.nbytes
        sent = self._hops * others * part * DATA_RATIO[self._encoding]
        return _LAUNCH_S + self._hops * _HOP_S + sent / _WIRE

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs that are worth measuring for a call that this algorithm serves."""

        def shape_of(each: CollectiveRequest) -> Any:
            shape = shape_for(each, self._packets(each), self._encoding, self._form)
            return shape.programs, shape.block

        return tunings_of(request, shape_of)

    # -- running ------------------------------------------------------------------------------------------------------
    def prepare(self, request: CollectiveRequest, context: Any) -> Plan:
        """Make a plan.  Collective: every member calls it."""
        team: Team = context.ccl.team(request.members or tuple(range(request.group_size)))
        options = request.options
        carrier = carrier_of(request.dtype)
        part, packets = self._part_nbytes(request), self._packets(request)
        shape = shape_for(request, packets, self._encoding, self._form)
        mailbox = mailbox_for(team, self._encoding, packets, self._hops * team.size, shape.block)
        inner = layout_of(request.shape, options["in_stride"])
        outer = layout_of(options["out_shape"], options["out_stride"])
        arguments = self._common(request, team, mailbox, part, inner, outer) | {
            "ONCE": mailbox.pieces == 1 and shape.programs * shape.block >= mailbox.cap,
            "BLOCK": shape.block,
            "STEP": shape.step,
            "NAP_NS": shape.nap_ns,
            "LOOKS": looks_of(shape.programs, shape.options.get("num_warps", 1)),
        }
        if self._form == "two_shot":
            kernel: Any = two_shot
            arguments |= {"nbytes": request.nbytes, "EVEN": part * team.size == request.nbytes}
        else:
            kernel = exchange
            arguments |= {"SHARDED": self._sharded, "REDUCES": self._reduces}
        early = early_launch(team.device) if packets <= packets_for(_EARLY_NBYTES, self._encoding) else {}
        arguments["EARLY"] = bool(early)
        launches = mailbox.pieces if self._encoding == "sentinel" else 1
        kernels = [
            BoundKernel(
                kernel,
                shape.programs,
                arguments | {"first": i * mailbox.cap, "pieces": mailbox.pieces // launches},
                PER_CALL,
                team.device,
                {**shape.options, **early},
            )
            for i in range(launches)
        ]
        return Plan(tuple(kernels), carrier)

    def _common(
        self, request: CollectiveRequest, team: Team, mailbox: Mailbox, part: int, inner: Layout, outer: Layout
    ) -> dict[str, Any]:
        """Arguments of all kernels."""
        unit = alignment(self._encoding)
        whole = request.options.get("aligned", False) and part % unit == 0 and request.nbytes % unit == 0
        return {
            "counters": mailbox.counters,
            "peers": tuple(team.base_ptrs[(team.rank + 1 + i) % team.size] for i in range(team.size)),
            "part": part,
            "me": team.rank,
            "rank": team.world_rank,
            "kind": request.options.get("kind", 0),
            "cap": mailbox.cap,
            "box": mailbox.offset_bytes,
            "half": mailbox.half_nbytes,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "out_sizes": outer.sizes,
            "out_strides": outer.strides,
            "N": team.size,
            "ENC": self._encoding,
            "ITEM": getattr(torch, request.dtype).itemsize,
            "IN_DIMS": inner.num_dims,
            "OUT_DIMS": outer.num_dims,
            "IN_WHOLE": whole and not inner.num_dims,
            "OUT_WHOLE": whole and not outer.num_dims,
            **self._reduction(request),
        }

    def _packets(self, request: CollectiveRequest) -> int:
        """Packets that go to one member, in one hop."""
        return packets_for(self._part_nbytes(request), self._encoding)

    def _part_nbytes(self, request: CollectiveRequest) -> int:
        """Bytes that go to one member, in one hop."""
        size, item = request.group_size, getattr(torch, request.dtype).itemsize
        if self._form == "two_shot":  # parts begin at multiples of 16 bytes
            return max(1, -(-request.nbytes // (size * 16))) * 16
        count = math.prod(request.shape)
        return int(count // size * item if self._sharded else count * item)

    def _reduction(self, request: CollectiveRequest) -> dict[str, Any]:
        if not self._reduces:
            return {"DT": None, "OP": ""}
        op = request.options["reduction"]
        if request.dtype == "bool":
            return {"DT": tl.uint8, "OP": _BOOL[op]}
        return {"DT": getattr(tl, request.dtype), "OP": op}

    def launch(self, plan: Plan, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Launch a plan on a stream."""
        assert out is not None
        assert inp is not None
        if not plan.is_ready:  # ready kernels look at the addresses only
            plan.is_ready = all(kernel.is_ready for kernel in plan.kernels)
            if not plan.is_ready:
                out, inp = plan.carrier.view(out), plan.carrier.view(inp)
        for kernel in plan.kernels:
            kernel(stream, out, inp)


def missing_facts(device_index: int | None, needed: tuple[Fact, ...]) -> str:
    """Say which facts were not found on this device; empty if all were."""
    if not needed:
        return ""
    if not torch.cuda.is_available():
        return "no GPU is here"
    device = torch.cuda.get_device_name(device_index)
    missing = [fact for fact in needed if fact not in known_facts(device)]
    if not missing:
        return ""
    return (
        f"it needs {', '.join(missing)} of memory between GPUs, which was not probed on {device!r}: run "
        "`python -m iris_triton.collectives.packets.probe`"
    )
