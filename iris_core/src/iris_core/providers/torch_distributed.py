"""Algorithms of torch.distributed: NCCL (gloo on CPUs), alone and after torch.matmul, and asynchronous products.

They serve where the program has initialised torch.distributed, and are chosen where they were measured as the fastest,
or by name.  What they reduce is rounded as NCCL does it.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from iris_core.dispatch.config import Config
from iris_core.dispatch.products import OPS
from iris_core.providers.baseline import Unfused, dense
from iris_core.providers.model import everywhere
from iris_core.types import Availability, DeviceType

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.team import Host
    from iris_core.types import CollectiveRequest, FusedRequest, PluginInfo

_BYTES_PER_S, _CALL_S = {"nccl": 2e11, "gloo": 1e9}, {"nccl": 2e-5, "gloo": 1e-3}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_DTYPES = (*_FLOATS, "int8", "uint8", "int32", "int64")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_SYMMETRIC = {"all_gather_matmul": "fused_all_gather_matmul", "matmul_reduce_scatter": "fused_matmul_reduce_scatter"}

# torch 2.13 has new names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups: dict[tuple[str, tuple[int, ...]], tuple[Any, Any]] = {}
"""Process groups by backend and ranks, apart from the program's own: torch keeps them as long as the process lives."""


def _group_problem(request: CollectiveRequest | FusedRequest, backend: str) -> str:
    """Say why there can be no process group for a request; empty if there can."""
    members = request.members
    if len(members) < 2:
        return "a group of one rank has no peer"
    if not (dist.is_available() and dist.is_initialized()):
        return "torch.distributed is not initialised (torch.distributed.init_process_group)"
    if list(members) != sorted(members):
        return "torch.distributed orders the members by rank"
    if dist.get_rank() != members[request.rank] or dist.get_world_size() <= members[-1]:
        return "torch.distributed numbers the ranks otherwise"
    is_there = dist.is_gloo_available if backend == "gloo" else dist.is_nccl_available
    return "" if is_there() else f"this torch has no {backend}"


def _group_of(members: tuple[int, ...], backend: str) -> Any:
    """Return the process group of some ranks.  Collective, the first time: every member calls it."""
    world, known = _groups.get((backend, members), (None, None))
    if world is not dist.group.WORLD:  # the program may have ended torch.distributed, and begun again
        c10d, own = dist.distributed_c10d, dist.distributed_c10d._hash_ranks_to_str
        numbered = "_".join([backend, *map(str, members)])
        # counted in the members' store: a process may be newer than others, and the store older than the world
        number = c10d._get_default_store().add(f"iris/{numbered}/made by {dist.get_rank()}", 1)
        name = f"iris_{number}_{numbered}"
        c10d._hash_ranks_to_str = lambda ranks: name  # torch's depends on how many groups a rank has made
        try:
            known = dist.new_group(list(members), backend=backend, use_local_synchronization=True)
        finally:
            c10d._hash_ranks_to_str = own
        _groups[backend, members] = dist.group.WORLD, known
    return known


@dataclass
class TorchCollective:
    """A collective of torch.distributed; its name is the backend of its process groups, "nccl" or "gloo"."""

    op: str
    name: str

    measured_only: ClassVar = True
    always_measured: ClassVar = True

    @property
    def info(self) -> PluginInfo:
        return everywhere(self.name, f"torch.distributed with {self.name}")

    def supports(self, request: CollectiveRequest) -> Availability:
        problem = _group_problem(request, self.name) or self._problem(request)
        return Availability(not problem, problem)

    def _problem(self, request: CollectiveRequest) -> str:
        options, reduction = request.options, request.options.get("reduction", "sum")
        averages = reduction == "avg" and self.name == "nccl" and request.dtype in _FLOATS
        shapes = ((request.shape, options.get("in_stride")), (options.get("out_shape"), options.get("out_stride")))
        if options.get("config"):
            return f"it has no use for {', '.join(options['config'])} of the config"
        if options.get("layout", "torch") != "torch" or options.get("uneven"):
            return "it divides tensors in equal parts, along the first dimension"
        if request.dtype not in _DTYPES:
            return f"it is offered for {', '.join(_DTYPES)}"
        if not averages and reduction not in ("sum", "product", "min", "max"):
            return f"it does not reduce by {reduction}"
        if any(stride is not None and shape is not None and stride != dense(shape) for shape, stride in shapes):
            return "its tensors are contiguous"
        return ""

    def cost(self, request: CollectiveRequest) -> float:
        return _CALL_S[self.name] + request.nbytes * (request.group_size - 1) / _BYTES_PER_S[self.name]

    def host_seconds(self, request: CollectiveRequest) -> float:
        return _CALL_S["nccl"]

    def prepare(self, request: CollectiveRequest, context: Any) -> tuple[Any, Any, int]:
        """Return the process group, the reduction and the root."""
        reduction = getattr(dist.ReduceOp, request.options.get("reduction", "sum").upper())
        root = request.members[request.options.get("root", 0)]
        return _group_of(request.members, self.name), reduction, root

    def launch(self, plan: tuple[Any, Any, int], out: Any, inp: Any, stream: Any = None) -> None:
        group, reduction, root = plan
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            if self.op == "broadcast":
                dist.broadcast(inp if out is None else out, root, group)
            elif self.op == "all_reduce":
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
    """One operation as torch.matmul and a collective of torch.distributed, one after the other."""

    measured_only = True

    def __init__(self, op: str, backend: str) -> None:
        super().__init__(op)
        self.name = self.backend = backend
        self.collective_config = Config(algorithm=backend)
        self.info = everywhere(backend, f"torch.matmul and {backend}, one after the other")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements, and what is between product and collective is contiguous."""
        problem = self._problem(request) or _group_problem(request, self.backend)
        return Availability.no(problem) if problem else super().supports(request)

    def _problem(self, request: FusedRequest) -> str:
        if request.options["layout"] != "torch" or request.options.get("gather_dim") == 1:
            return "its parts are rows, in torch's order"
        if request.out_stride != dense(request.out_shape):
            return "its output is contiguous"
        gathers = self.op == "all_gather_matmul"
        contiguous = dense((request.m // request.group_size, request.k))
        return "its A is contiguous" if gathers and request.a_stride != contiguous else ""


class AsyncProduct(UnfusedTorch):
    """torch's product of symmetric memory that overlaps communication: its asynchronous tensor parallelism."""

    def __init__(self, op: str, backend: str) -> None:
        super().__init__(op, backend)
        self.name = "torch_symm"
        self.info = everywhere(self.name, "torch's fused operators of symmetric memory")

    def _problem(self, request: FusedRequest) -> str:
        if request.target.type is not DeviceType.CUDA:
            return "torch's symmetric memory is asked for on NVIDIA GPUs only"
        if request.dtype not in ("float16", "bfloat16") or request.options["bias"] != "none":
            return "it is offered for float16 and bfloat16, without a bias"
        if self.op == "matmul_reduce_scatter" and request.a_stride != (request.k, 1):
            return "its A is contiguous"
        return super()._problem(request)

    def host_seconds(self, request: FusedRequest) -> float:
        """Estimate what a call costs the CPU: a product and a copy for each member, on two streams."""
        return 5e-5 * request.group_size

    def prepare(self, request: FusedRequest, host: Host) -> tuple[Any, str]:
        """Return the operator and the name of its group, and let torch make the group's symmetric memory."""
        from torch.distributed import _symmetric_memory as symmetric

        group = _group_of(request.members, self.backend)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer versions of torch need it not
            symmetric.enable_symm_mem_for_group(group.group_name)
        return getattr(torch.ops.symm_mem, _SYMMETRIC[self.op]), group.group_name

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply and communicate, and copy the result, which torch allocates, to the output."""
        operator, group = plan
        with torch.no_grad():
            if self.op == "all_gather_matmul":
                _, (found,) = operator(a, [b], gather_dim=0, group_name=group, return_A=False)
            else:
                found = operator(a, b, "sum", scatter_dim=0, group_name=group)
            out.copy_(found)


def products(backend: str) -> list[Any]:
    """Return the algorithms for `ctx.ops`."""
    return [*(UnfusedTorch(op, backend) for op in OPS), *(AsyncProduct(op, backend) for op in _SYMMETRIC)]
