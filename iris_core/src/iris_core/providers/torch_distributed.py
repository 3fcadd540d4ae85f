"""Algorithms of torch.distributed: NCCL (gloo on CPUs), alone and after torch.matmul, and asynchronous products.

They serve where the program has initialised torch.distributed, and are chosen where they were measured as the fastest,
or by name.  What they reduce is rounded as NCCL does it.
"""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from iris_core.dispatch.config import Config
from iris_core.dispatch.products import OPS
from iris_core.providers.baseline import Unfused, dense, info
from iris_core.types import Availability, DeviceType

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.host import Host
    from iris_core.types import CollectiveRequest, FusedRequest

_BYTES_PER_S, _CALL_S = {"nccl": 2e11, "gloo": 1e9}, {"nccl": 2e-5, "gloo": 1e-3}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_DTYPES = (*_FLOATS, "int8", "uint8", "int32", "int64")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_SYMMETRIC = {"all_gather_matmul": "fused_all_gather_matmul", "matmul_reduce_scatter": "fused_matmul_reduce_scatter"}

# torch 2.13 has new names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Groups:
    """Process groups of torch.distributed with the ranks of our groups, apart from the program's own.

    Attributes:
        backend: "nccl" or "gloo".
    """

    backend: str

    def problem(self, request: CollectiveRequest | FusedRequest) -> str:
        """Say why there can be no group for a request; empty if there can."""
        members = request.members
        if len(members) < 2:
            return "a rank alone has no peer"
        if not (dist.is_available() and dist.is_initialized()):
            return "torch.distributed is not initialised (torch.distributed.init_process_group)"
        if list(members) != sorted(members):
            return "torch.distributed orders the members by rank"
        if dist.get_rank() != members[request.rank] or dist.get_world_size() <= members[-1]:
            return "torch.distributed numbers the ranks otherwise"
        if self.backend == "gloo" and not dist.is_gloo_available():
            return "this torch has no gloo"
        if self.backend == "nccl" and not dist.is_nccl_available():
            return "this torch has no NCCL"
        return ""

    def group(self, members: tuple[int, ...]) -> Any:
        """Return the group of some ranks.  Collective, the first time: every member calls it."""
        world, number, known = _groups.get((self.backend, members), (None, 0, None))
        if world is not dist.group.WORLD:  # the program may have ended torch.distributed, and begun again
            known = _new_group(members, self.backend, f"iris_{number}_{'_'.join(map(str, members))}")
            _groups[self.backend, members] = dist.group.WORLD, number + 1, known
        return known


_groups: dict[tuple[str, tuple[int, ...]], tuple[Any, int, Any]] = {}
"""Of all contexts: torch keeps groups as long as the process lives."""


def _new_group(members: tuple[int, ...], backend: str, name: str) -> Any:
    """Make a group whose name is the same on all members; torch's own depends on how many groups a rank has made."""
    c10d = dist.distributed_c10d
    own = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: name
    try:
        return dist.new_group(list(members), backend=backend, use_local_synchronization=True)
    finally:
        c10d._hash_ranks_to_str = own


@dataclass
class TorchCollective:
    """A collective of torch.distributed.

    Attributes:
        op: one of all_reduce, all_gather, reduce_scatter, all_to_all and broadcast.
        name: the backend of its groups.
        groups: where it runs.
    """

    op: str
    name: str
    groups: Groups

    measured_only: ClassVar = True
    always_measured: ClassVar = True

    @property
    def info(self) -> Any:
        """The description."""
        return info(self.name, f"torch.distributed with {self.name}")

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether torch.distributed does this collective with such tensors."""
        options = request.options
        reduction = options.get("reduction", "sum")
        shapes = ((request.shape, options.get("in_stride")), (options.get("out_shape"), options.get("out_stride")))
        if problem := self.groups.problem(request):
            return Availability.no(problem)
        if options.get("config"):
            return Availability.no(f"it has no use for {', '.join(options['config'])} of the config")
        if options.get("layout", "torch") != "torch" or options.get("uneven"):
            return Availability.no("it divides tensors in equal parts, along the first dimension")
        if request.dtype not in _DTYPES:
            return Availability.no(f"it is offered for {', '.join(_DTYPES)}")
        if reduction not in ("sum", "product", "min", "max") and not (
            reduction == "avg" and self.name == "nccl" and request.dtype in _FLOATS
        ):
            return Availability.no(f"it does not reduce by {reduction}")
        if any(stride is not None and shape is not None and stride != dense(shape) for shape, stride in shapes):
            return Availability.no("its tensors are contiguous")
        return Availability.yes()

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds."""
        return _CALL_S[self.name] + request.nbytes * (request.group_size - 1) / _BYTES_PER_S[self.name]

    def host_seconds(self, request: CollectiveRequest) -> float:
        """Estimate what a call costs the CPU."""
        return _CALL_S["nccl"]

    def prepare(self, request: CollectiveRequest, context: Any) -> tuple[Any, Any, int]:
        """Return the process group, the reduction and the root."""
        reduction = getattr(dist.ReduceOp, request.options.get("reduction", "sum").upper())
        root = request.members[request.options.get("root", 0)]
        return self.groups.group(request.members), reduction, root

    def launch(
        self, plan: tuple[Any, Any, int], out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None
    ) -> None:
        """Call torch.distributed on the current stream."""
        group, reduction, root = plan
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            if self.op == "broadcast":
                dist.broadcast(inp if out is None else out, root, group)  # type: ignore[arg-type]
                return
            assert out is not None
            assert inp is not None
            if self.op == "all_reduce":
                if out.data_ptr() != inp.data_ptr():
                    out.copy_(inp)
                dist.all_reduce(out, reduction, group)
            elif self.op == "all_gather":
                _all_gather(out.view(-1), inp.view(-1), group)
            elif self.op == "reduce_scatter":
                _reduce_scatter(out.view(-1), inp.view(-1), reduction, group)
            else:
                dist.all_to_all_single(out.view(-1), inp.view(-1), group=group)


class UnfusedTorch(Unfused):
    """One operation as torch.matmul and a collective of torch.distributed, one after the other.

    Args:
        op: the operation.
        groups: where the collective runs.
    """

    measured_only = True

    def __init__(self, op: str, groups: Groups) -> None:
        super().__init__(op)
        self.name = groups.backend
        self.collective_config = Config(algorithm=groups.backend)
        self._groups = groups

    @property
    def info(self) -> Any:
        """The description."""
        return info(self.name, f"torch.matmul and {self.name}, one after the other")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements, and what is between product and collective is contiguous."""
        if problem := self._groups.problem(request):
            return Availability.no(problem)
        if request.options["layout"] != "torch" or request.options.get("gather_dim") == 1:
            return Availability.no("its parts are rows, in torch's order")
        if request.out_stride != dense(request.out_shape):
            return Availability.no("its output is contiguous")
        if self.op == "all_gather_matmul" and request.a_stride != dense((request.m // request.group_size, request.k)):
            return Availability.no("its A is contiguous")
        return super().supports(request)


@dataclass
class AsyncProduct:
    """torch's product of symmetric memory that overlaps communication: its asynchronous tensor parallelism.

    Attributes:
        op: all_gather_matmul or matmul_reduce_scatter.
        groups: where it runs.
    """

    op: str
    groups: Groups

    name: ClassVar = "torch_symm"
    measured_only: ClassVar = True
    always_measured: ClassVar = True
    info: ClassVar = info("torch_symm", "torch's fused operators of symmetric memory")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch has such an operator, for 16-bit floats on NVIDIA GPUs."""
        if request.target.type is not DeviceType.CUDA:
            return Availability.no("torch's symmetric memory is asked for on NVIDIA GPUs only")
        if problem := self.groups.problem(request):
            return Availability.no(problem)
        if request.dtype not in ("float16", "bfloat16") or request.out_dtype != request.dtype:
            return Availability.no("it is offered for float16 and bfloat16")
        if request.options["config"] or request.options["layout"] != "torch" or request.options["bias"] != "none":
            return Availability.no("it takes no config, layout or bias")
        if request.options.get("gather_dim") == 1:
            return Availability.no("it gathers rows")
        rows = request.m // request.group_size if self.op == "all_gather_matmul" else request.m
        if request.a_stride != dense((rows, request.k)):
            return Availability.no("its A is contiguous")
        return Availability.yes()

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds; nothing is chosen by it."""
        return 1e-4 + 2.0 * math.prod(request.shape) / 5e14

    def host_seconds(self, request: FusedRequest) -> float:
        """Estimate what a call costs the CPU: a product and a copy for each member, on two streams."""
        return 5e-5 * request.group_size

    def prepare(self, request: FusedRequest, host: Host) -> tuple[Any, str]:
        """Return the operator and the name of its group, and let torch make the group's symmetric memory."""
        from torch.distributed import _symmetric_memory as symmetric

        group = self.groups.group(request.members)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer versions of torch need it not
            symmetric.enable_symm_mem_for_group(group.group_name)
        return getattr(torch.ops.symm_mem, _SYMMETRIC[self.op]), group.group_name

    def launch(self, plan: tuple[Any, str], out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: None) -> None:
        """Multiply and communicate, and copy the result, which torch allocates, to the output."""
        operator, group = plan
        with torch.no_grad():
            if self.op == "all_gather_matmul":
                _, (found,) = operator(a, [b], gather_dim=0, group_name=group, return_A=False)
            else:
                found = operator(a, b, "sum", scatter_dim=0, group_name=group)
            out.copy_(found)


def products(groups: Groups) -> list[Any]:
    """Return the algorithms for `ctx.ops`."""
    return [*(UnfusedTorch(op, groups) for op in OPS), *(AsyncProduct(op, groups) for op in _SYMMETRIC)]
