"""What the algorithms of packets have in common: whom they serve, plans, launching."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from iris_core.types import REDUCIBLE, Availability, DeviceType, ReduceOp
from iris_triton.collectives.packets.fabric import Fact, known_facts
from iris_triton.collectives.packets.mailbox import MAX_MEMBERS, PACKET, Mailbox, packets_for
from iris_triton.collectives.packets.packet import alignment
from iris_triton.collectives.parts.portable import OF_BOOL
from iris_triton.collectives.parts.sizes import Carrier, item_of, layout_arguments, layouts_of
from iris_triton.info import TRITON_INFO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest, PluginInfo
    from iris_triton.launcher import BoundKernel

ENCODINGS = ("ll", "ll128", "sentinel")
_USED_CONFIG = ("comm_sms", "num_warps")
_HOP_S, _LAUNCH_S, _WIRE = 0.8e-6, 1.0e-6, 3.4e11  # of the model: seconds, seconds, bytes per second
_EARLY_NBYTES = 1 << 20  # of data for one member: a launch that comes up early saves time, nothing above
_FLOATS = ("float32", "float16", "bfloat16")
_BITWISE = ("band", "bor", "bxor")


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
        form: what it does with them, as the end of its name says.
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
    def _gathers(self) -> bool:
        return self.op == "all_reduce"

    @property
    def _sharded(self) -> bool:
        return self.op in ("reduce_scatter", "all_to_all")

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
        """Estimate seconds."""
        raise NotImplementedError

    # -- running ------------------------------------------------------------------------------------------------------
    def prepare(self, request: CollectiveRequest, context: Any) -> Plan:
        """Make a plan.  Collective: every member calls it."""
        return self.plan(request, context.ccl.team(request.members or tuple(range(request.group_size))))

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Make a plan for a team."""
        raise NotImplementedError

    def _common(self, request: CollectiveRequest, team: Team) -> dict[str, Any]:
        """Arguments of all kernels."""
        inner, outer = layouts_of(request)
        part, unit = self._part_nbytes(request), alignment(self._encoding)
        whole = request.options.get("aligned", False) and part % unit == 0 and request.nbytes % unit == 0
        return layout_arguments(inner, outer) | {
            "peers": tuple(team.base_ptrs[(team.rank + 1 + i) % team.size] for i in range(team.size)),
            "part": part,
            "me": team.rank,
            "rank": team.world_rank,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "N": team.size,
            "ITEM": item_of(request),
            "IN_WHOLE": whole and not inner.num_dims,
            "OUT_WHOLE": whole and not outer.num_dims,
            **self._reduction(request),
        }

    def _through(self, mailbox: Mailbox, request: CollectiveRequest, team: Team) -> dict[str, Any]:
        """Arguments of the kernels that send through a mailbox."""
        return self._common(request, team) | {
            "counters": mailbox.counters,
            "kind": request.options.get("kind", 0),
            "cap": mailbox.cap,
            "box": mailbox.offset_bytes,
            "half": mailbox.half_nbytes,
            "ENC": self._encoding,
        }

    def _packets(self, request: CollectiveRequest) -> int:
        """Packets that go to one member, in one hop."""
        return packets_for(self._part_nbytes(request), self._encoding)

    def _part_nbytes(self, request: CollectiveRequest) -> int:
        """Bytes that go to one member, in one hop."""
        if self.op == "all_reduce" and self._form != "one_shot":  # parts begin at multiples of 16 bytes
            return max(1, -(-request.nbytes // (request.group_size * PACKET))) * PACKET
        return math.prod(request.shape) // (request.group_size if self._sharded else 1) * item_of(request)

    def _reduction(self, request: CollectiveRequest) -> dict[str, Any]:
        if not self._reduces:
            return {"DT": None, "OP": ""}
        op = request.options["reduction"]
        if request.dtype == "bool":
            return {"DT": tl.uint8, "OP": OF_BOOL[op]}
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


def tunings_of(
    request: CollectiveRequest,
    shape_of: Callable[[CollectiveRequest], Any],
    tried: Sequence[dict[str, int]],
) -> list[dict[str, int]]:
    """Return an algorithm's own choice ({}) and what to try beside it: configs whose launches differ, at most six.

    Args:
        request: the call.
        shape_of: the launch of a call, comparable.
        tried: configs, without the own choice.
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
