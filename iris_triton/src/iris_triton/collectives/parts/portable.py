"""What the portable algorithms have in common: who they serve, how they are launched, and what they cost by a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.requests import REDUCING
from iris_core.types import REDUCIBLE, Availability, DeviceType, ReduceOp
from iris_triton.collectives.parts.barrier import meeting_arguments
from iris_triton.collectives.parts.sizes import MOVABLE, USED_CONFIG, Carrier, block_problem
from iris_triton.info import TRITON_INFO
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest, PluginInfo
    from iris_triton.collectives.parts.sizes import Blocks

RUNTIME = (
    "me", "rank", "kind", "capacity", "timeout_ns", "status", "in_sizes", "in_strides", "out_sizes", "out_strides",
    "count", "shard",
)  # fmt: skip
"""Arguments for whose values kernels are not compiled anew."""

PER_CALL = ("out", "inp")
"""Arguments that may lie anywhere."""

_TUNED_NBYTES = 1 << 20
_TRIED: tuple[dict[str, int], ...] = ({"comm_sms": 132}, {"comm_sms": 132, "num_warps": 16}, {"comm_sms": 32})

OF_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max", "band": "min", "bor": "max", "bxor": "bxor"}
"""Reductions of bool, as those of bytes that are 0 or 1."""

_REDUCTIONS = tuple(op.name.lower() for op in ReduceOp)


@dataclass(slots=True)
class Plan:
    """What a portable algorithm has prepared.

    Attributes:
        kernel: takes the output and the input.
        carrier: as what it takes their elements; None as what they are.
        memory: what the kernel reads beside the team's memory and the tensors.
    """

    kernel: BoundKernel
    carrier: Carrier | None = None
    memory: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Model:
    """Seconds per meeting, and bytes per second over links and within a device; rough, where nothing was measured."""

    meeting_s: float
    link: float
    memory: float


_GPU = _Model(meeting_s=3e-6, link=3e11, memory=1e12)
_CPU = _Model(meeting_s=1e-3, link=2e9, memory=2e9)


class Portable:
    """One portable algorithm; satisfies `iris_core.protocols.Collective`.

    Args:
        op: the operation.
        name: the algorithm.
        layouts: that it serves, if it is not torch's alone.
    """

    uses: tuple[str, ...] = USED_CONFIG
    """Fields of the config that it fulfils."""

    drops_plans = True
    """A plan has no memory of its own but `Plan.memory`, so it can be dropped and made again."""

    def __init__(self, op: str, name: str, layouts: tuple[str, ...] = ("torch",)) -> None:
        self.op = op
        self.name = name
        self.layouts = layouts

    @property
    def info(self) -> PluginInfo:
        """The backend's description."""
        return TRITON_INFO

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        options = request.options
        if request.op != self.op:
            return Availability.no(f"it does {self.op}, not {request.op!r}")
        reduction, layout = options.get("reduction", ""), options.get("layout", "torch")
        if (self.op in REDUCING) != bool(reduction) or reduction not in ("", *_REDUCTIONS):
            return Availability.no(f"it does not serve {self.op} with reduction {reduction!r}")
        known = REDUCIBLE if reduction else MOVABLE
        if request.dtype not in known:
            return Availability.no(f"it does not know elements of {request.dtype!r}; it does {', '.join(known)}")
        if layout not in self.layouts:
            return Availability.no(f"it serves layout {' and '.join(self.layouts)}, not {layout!r}")
        config = options.get("config", {})
        unused = [name for name in config if name not in self.uses]
        if unused:
            return Availability.no(f"it has no use for {', '.join(unused)} of the config")
        problem = block_problem(config)
        return Availability.no(problem) if problem else Availability.yes()

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds."""
        raise NotImplementedError

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs that are worth measuring for a call that this algorithm serves, its own choice first.

        A small message has as many programs as blocks, whatever is asked for.
        """
        if request.target.type is DeviceType.CPU or request.nbytes < _TUNED_NBYTES:
            return [{}]
        return [{}, *(config for config in _TRIED if all(name in self.uses for name in config))]

    @staticmethod
    def arguments(request: CollectiveRequest, team: Team) -> dict[str, Any]:
        """Arguments that all kernels take that compare the kinds of calls."""
        return meeting_arguments(team) | {"kind": request.options.get("kind", 0)}

    @staticmethod
    def bind(
        kernel: Any,
        team: Team,
        blocks: Blocks,
        arguments: dict[str, Any],
        carrier: Carrier | None,
        memory: torch.Tensor | None = None,
    ) -> Plan:
        """Make a plan of a kernel that takes all arguments but the tensors."""
        arguments["BLOCK"] = blocks.block
        bound = BoundKernel(kernel, blocks.programs, arguments, PER_CALL, team.device, blocks.options)
        return Plan(bound, carrier, memory)

    @staticmethod
    def model(
        request: CollectiveRequest, *, meetings: int, moved: float, copied: float = 0, link_share: float = 1
    ) -> float:
        """Seconds for so many meetings, bytes over the links of one rank, and bytes within its memory.

        `link_share` is how much faster, on a GPU, an algorithm uses the links than the usual one.
        """
        on_cpu = request.target.type is DeviceType.CPU
        model = _CPU if on_cpu else _GPU
        link = model.link * (1 if on_cpu else link_share)
        return meetings * model.meeting_s + moved / link + copied / model.memory

    def prepare(self, request: CollectiveRequest, context: Any) -> Plan:
        """Make a plan.  Collective: every member calls it."""
        return self.plan(request, context.ccl.team(request.members))

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Make a plan for a team."""
        raise NotImplementedError

    def launch(self, plan: Plan, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Launch a plan on a stream."""
        target = inp if out is None else out
        source = out if inp is None else inp
        assert target is not None
        assert source is not None
        kernel, carrier = plan.kernel, plan.carrier
        if carrier is not None and not kernel.is_ready:  # a ready one looks at the addresses only
            target, source = carrier.view(target), carrier.view(source)
        kernel(stream, target, source)


class Reduction(Portable):
    """What all reductions have in common."""

    @staticmethod
    def reduction(request: CollectiveRequest) -> tuple[str, Carrier | None]:
        """Return the reduction's name for the kernel, and as what it takes the elements."""
        op = request.options["reduction"]
        if request.dtype == "bool":
            return OF_BOOL[op], Carrier(torch.uint8)
        return op, None
