"""Base of all algorithms: supported requests, cost model, launches."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from iris_core.dispatch.requests import REDUCING
from iris_core.dispatch.team import Team
from iris_core.types import REDUCIBLE, Availability, CollectiveRequest, DeviceType, PluginInfo, ReduceOp
from iris_triton.collectives.parts.barrier import barrier_alone
from iris_triton.collectives.parts.sizes import MOVABLE, USED_CONFIG, Blocks, Carrier, block_problem, layout_arguments
from iris_triton.info import TRITON_INFO
from iris_triton.launcher import BoundKernel

RUNTIME = (  # arguments for whose values no kernel that has them is compiled anew
    "me", "rank", "kind", "capacity", "timeout_ns", "status", "in_sizes", "in_strides", "out_sizes", "out_strides",
    "count", "shard", "multicast", "in_step", "given", "out_step", "taken", "giver", "row_items", "in_rows", "out_rows",
    "wanted", "apart", "tiles", "root", "peers", "nbytes", "part", "first", "cap", "pieces", "box", "half", "slots",
    "peer", "element", "piece", "sizes", "strides", "rows", "bands", "sums", "most",
)  # fmt: skip
PER_CALL = ("out", "inp")  # arguments that may lie anywhere
# reductions of bool, as those of bytes that are 0 or 1
OF_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max", "band": "min", "bor": "max", "bxor": "bxor"}
_REDUCTIONS = tuple(op.name.lower() for op in ReduceOp)
_TUNED_NBYTES = 1 << 20
_TRIED: tuple[dict[str, int], ...] = ({"comm_sms": 132}, {"comm_sms": 132, "num_warps": 16}, {"comm_sms": 32})
_GPU = 3e-6, 3e11, 1e12  # of the model: seconds per barrier, bytes per second over links and within a device; rough
_CPU = 1e-3, 2e9, 2e9


@dataclass(slots=True)
class Plan:
    """A prepared call."""

    kernels: tuple[BoundKernel, ...]  # each takes the output and the input; launched in this order
    carrier: Carrier | None = None  # as what they take the elements; None as what they are
    memory: torch.Tensor | None = None  # what they read beside the team's memory and the tensors
    is_ready: bool = False  # all of them need nothing but addresses


def barrier_arguments(team: Team) -> dict[str, Any]:
    """Return the arguments of every kernel with barriers."""
    return {
        "control": team.control.tensor.view(torch.int64),
        "bases": team.bases,
        "me": team.rank,
        "rank": team.world_rank,
        "timeout_ns": team.timeout_ns,
        "status": team.status_ptr,
        "SIZE": team.size,
    }


def bind_alone(team: Team, kernel: Any = barrier_alone, tensors: tuple[str, ...] = (), **more: Any) -> BoundKernel:
    """Return a kernel of one program and warp, between copies on a stream; `more` are arguments beside a barrier's."""
    given = barrier_arguments(team) | more
    options, names = {} if team.device == "cpu" else {"num_warps": 1}, [n for n in kernel.arg_names if n not in tensors]
    return BoundKernel(kernel, 1, {name: given[name] for name in names}, tensors, team.device, options)


class KernelCollective:
    """One operation by one algorithm, in some layouts; satisfies `iris_core.protocols.Collective`."""

    info: PluginInfo = TRITON_INFO

    uses: tuple[str, ...] = USED_CONFIG  # fields of the config that it fulfils
    uneven = False  # whether it serves parts of different sizes
    device_splits = False  # whether it serves sizes that are on the devices alone
    drops_plans = True  # a plan has no memory of its own but `Plan.memory`, so it can be dropped and made again

    def __init__(self, op: str, name: str, layouts: tuple[str, ...] = ("torch",)) -> None:
        self.op = op
        self.name = name
        self.layouts = layouts

    def supports(self, request: CollectiveRequest) -> Availability:
        problem = self._problem(request)
        return Availability.no(problem) if problem else Availability.yes()

    def _problem(self, request: CollectiveRequest) -> str:
        """Return why the algorithm does not support a request; empty if it does."""
        options = request.options
        if request.op != self.op:
            return f"it does {self.op}, not {request.op!r}"
        reduction, layout = options.get("reduction", ""), options.get("layout", "torch")
        if (self.op in REDUCING) != bool(reduction) or reduction not in ("", *_REDUCTIONS):
            return f"it does not serve {self.op} with reduction {reduction!r}"
        known = REDUCIBLE if reduction else MOVABLE
        if request.dtype not in known:
            return f"it does not know elements of {request.dtype!r}; it does {', '.join(known)}"
        if layout not in self.layouts:
            return f"it serves layout {' and '.join(self.layouts)}, not {layout!r}"
        if options.get("uneven") and not self.uneven:
            return "it sends parts of equal size"
        if options.get("device_splits") and not self.device_splits:
            return "the host must know the split sizes"
        config = options.get("config", {})
        unused = [name for name in config if name not in self.uses]
        return f"it has no use for {', '.join(unused)} of the config" if unused else block_problem(config)

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return the configs to measure for a supported request, the default first.

        A small message has as many programs as blocks, whatever the config says.
        """
        if request.target.type is DeviceType.CPU or request.nbytes < _TUNED_NBYTES:
            return [{}]
        return [{}, *(config for config in _TRIED if all(name in self.uses for name in config))]

    def prepare(self, request: CollectiveRequest, context: Any) -> Plan:
        plan = self.plan(request, context.ccl.team(request.members))
        dtype = getattr(torch, request.dtype) if plan.carrier is None else plan.carrier.dtype
        plan.kernels[0].compile_ahead(
            out=dtype, inp=dtype, tensor=dtype, gives=torch.int64, takes=torch.int64
        )  # the others are the same kernel
        return plan

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        raise NotImplementedError

    def launch(self, plan: Plan, out: Any, inp: Any, stream: Any = None) -> None:
        target = inp if out is None else out
        source = out if inp is None else inp
        if plan.is_ready:
            for kernel in plan.kernels:
                kernel.again(stream, target, source)
            return
        plan.is_ready = all(kernel.again for kernel in plan.kernels)
        if plan.carrier is not None and not plan.is_ready:  # else only addresses count
            target, source = plan.carrier.view(target), plan.carrier.view(source)
        for kernel in plan.kernels:
            kernel(stream, target, source)

    # -- for subclasses -----------------------------------------------------------------------------------------------
    @staticmethod
    def model(
        request: CollectiveRequest, *, barriers: int, moved: float, copied: float = 0, link_share: float = 1
    ) -> float:
        """Estimate seconds for barriers, for bytes over a rank's links, and for bytes copied in its memory.

        `link_share` is the algorithm's link bandwidth on a GPU relative to the default one.
        """
        on_cpu = request.target.type is DeviceType.CPU
        barrier_s, link, memory = _CPU if on_cpu else _GPU
        return barriers * barrier_s + moved / (link if on_cpu else link * link_share) + copied / memory

    @staticmethod
    def arguments(request: CollectiveRequest, team: Team, carrier: Carrier | None = None) -> dict[str, Any]:
        """Return the arguments of kernels that compare the members' call signatures, and those for layouts."""
        given = barrier_arguments(team) | layout_arguments(request, carrier)
        return given | {"kind": request.options.get("kind", 0)}

    @staticmethod
    def reduction(request: CollectiveRequest) -> tuple[str, Carrier | None]:
        """Return the reduction's name for the kernel, and the carrier of the elements."""
        op = request.options["reduction"]
        return (OF_BOOL[op], Carrier(torch.uint8)) if request.dtype == "bool" else (op, None)

    @staticmethod
    def bind(
        kernel: Any, team: Team, blocks: Blocks, arguments: dict[str, Any], carrier: Carrier | None,
        memory: torch.Tensor | None = None, firsts: Iterable[int] = (), more: tuple[str, ...] = (),
    ) -> Plan:  # fmt: skip
        """Make a plan of a kernel that takes all arguments but the tensors; of a launch for each `first`, if any.

        `more` are names of tensors after the output and the input.
        """
        each = [arguments | {"BLOCK": blocks.block} | extra for extra in [{"first": n} for n in firsts] or [{}]]
        names = *PER_CALL, *more
        return Plan(
            tuple(BoundKernel(kernel, blocks.programs, one, names, team.device, blocks.options) for one in each),
            carrier,
            memory,
        )
