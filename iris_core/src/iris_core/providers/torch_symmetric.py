"""`torch_symm`: all_reduce, and asynchronous products, by torch's operators of symmetric memory, on NVIDIA GPUs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from iris_core.dispatch.requests import ALIGNMENT_NBYTES
from iris_core.dispatch.team import Host, Team, lasting, rounded
from iris_core.errors import UnsupportedError
from iris_core.providers.model import everywhere
from iris_core.providers.parts import dense
from iris_core.providers.torch_distributed import UnfusedTorch, group_of, group_problem
from iris_core.types import Availability, CollectiveRequest, DeviceType, FusedRequest
from iris_core.world.failures import on_all_ranks

PRODUCTS = {"all_gather_matmul": "fused_all_gather_matmul", "matmul_reduce_scatter": "fused_matmul_reduce_scatter"}
_ONE_SHOT_NBYTES = 2 << 20
"""Of all inputs together, up to which one_shot is the faster one: in benchmarks/results/ccl-2.json it is up to 1 MiB of
each, in ccl-4.json up to 512 KiB."""

_LEAST_NBYTES, _PIECE_NBYTES = 1 << 20, 64 << 20  # of memory for sums: larger ones go in pieces
_NOT_NVIDIA = "torch's symmetric memory is asked for on NVIDIA GPUs only"


class AsyncProduct(UnfusedTorch):
    """torch's product of symmetric memory that overlaps communication: its asynchronous tensor parallelism."""

    spans_nodes = False

    def __init__(self, op: str, backend: str) -> None:
        super().__init__(op, backend)
        self.name = "torch_symm"
        self.info = everywhere(self.name, "torch's fused operators of symmetric memory")

    def _problem(self, request: FusedRequest) -> str:
        if request.target.type is not DeviceType.CUDA:
            return _NOT_NVIDIA
        if request.dtype not in ("float16", "bfloat16") or request.options["bias"] != "none":
            return "it is offered for float16 and bfloat16, without a bias"
        if self.op == "matmul_reduce_scatter" and request.a_stride != (request.k, 1):
            return "its A is contiguous"
        return super()._problem(request)

    def prepare(self, request: FusedRequest, host: Host) -> tuple[Any, Any]:
        """Return the operator and the name of its group, and let torch make the group's symmetric memory."""
        group = group_of(request.members, self._ranks, self.backend, host.team.world)
        return getattr(torch.ops.symm_mem, PRODUCTS[self.op]), _symmetric(group)[1]

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> None:
        """Multiply and communicate, and copy the result, which torch allocates, to the output."""
        operator, group = plan
        with torch.no_grad():
            if self.op == "all_gather_matmul":
                _, (found,) = operator(a, [b], gather_dim=0, group_name=group, return_A=False)
            else:
                found = operator(a, b, "sum", scatter_dim=0, group_name=group)
            out.copy_(found)


class SymmetricSum:
    """all_reduce by torch's operators of symmetric memory: one_shot, or two_shot where there is much to add up.

    Inputs are copied to memory that all calls of a group share: they follow each other.
    """

    op, name = "all_reduce", "torch_symm"
    info = everywhere(name, "torch's operators of symmetric memory")
    measured_only = composes = True

    def __init__(self, backend: str, ranks: tuple[int, ...] | None = None) -> None:
        self._backend, self._ranks = backend, ranks
        self._memory: dict[str, list[torch.Tensor]] = {}  # of each group, each larger than those before

    def supports(self, request: CollectiveRequest) -> Availability:
        problem = self._problem(request) or group_problem(request, self._backend, self._ranks)
        return Availability(not problem, problem)

    def _problem(self, request: CollectiveRequest) -> str:
        options = request.options
        if request.target.type is not DeviceType.CUDA:
            return _NOT_NVIDIA
        if config := options.get("config"):
            return f"it has no use for {', '.join(config)} of the config"
        if request.dtype not in ("bfloat16", "float32") or options.get("reduction", "sum") != "sum":
            return "it adds up bfloat16 or float32 only"
        if request.group_size not in (2, 4, 8):  # for which two_shot is compiled
            return "it serves groups of 2, 4 or 8 ranks"
        strides = options.get("in_stride"), options.get("out_stride")
        return "" if set(strides) <= {None, dense(request.shape)} else "its tensors are contiguous"

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds, as measured on H200; there is a copy before two_shot."""
        nbytes, size = request.nbytes, request.group_size
        if nbytes * size <= _ONE_SHOT_NBYTES:
            return 6e-6 + nbytes * size / 3.8e11
        return 1.1e-5 + nbytes * (2 * (size - 1) / size / 3e11 + 2 / 3.5e12)

    def prepare(self, request: CollectiveRequest, host: Host) -> tuple[Any, Any, torch.Tensor, bool]:
        """Return the operator, its group's name and memory, and whether it copies the input there itself."""
        team, copies = host.team, request.nbytes * request.group_size <= _ONE_SHOT_NBYTES
        group = group_of(request.members, self._ranks, self._backend, host.whole or team.world, team.world.name)
        memory = self._shared(group, min(rounded(max(request.nbytes, _LEAST_NBYTES)), _PIECE_NBYTES), team)
        name = "one_shot_all_reduce_copy_out" if copies else "two_shot_all_reduce_out"
        operator = getattr(torch.ops.symm_mem, name).default
        return operator, group.group_name, memory.view(getattr(torch, request.dtype)), copies

    def _shared(self, group: Any, nbytes: int, team: Team) -> torch.Tensor:
        """Return symmetric memory of torch, at least this much; collective where it is new, as `Team.region` is."""
        module, name = _symmetric(group)
        known = self._memory.setdefault(name, [])
        if found := [each for each in known if len(each) >= nbytes]:
            return found[0]
        team.ask("torch's symmetric memory")
        how = (nbytes,), (1,), torch.uint8, torch.device(team.device)  # as torch's workspace, with flags of its own
        alike = partial(on_all_ranks, team.world, "could not share memory by torch", ranks=team.members)
        make = partial(lasting, partial(module._SymmetricMemory.empty_strided_p2p, *how))
        memory: torch.Tensor = alike(make, otherwise=UnsupportedError)
        alike(partial(module.rendezvous, memory, name), otherwise=UnsupportedError)
        known.append(memory)
        return memory

    def launch(self, plan: Any, out: Any, inp: Any, stream: Any = None) -> None:
        """Add up, in pieces; a member whose tensors have no whole vectors launches the same kernels, on copies."""
        operator, group, memory, copies = plan
        lanes = ALIGNMENT_NBYTES // memory.element_size()
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            for taken, given in zip(*(each.view(-1).split(len(memory)) for each in (out, inp)), strict=True):
                count = len(given)
                shared = memory[: -(-count // lanes) * lanes]  # what is behind the last element is added up, and lost
                result = taken if _is_like(shared, taken) else torch.empty_like(shared)
                own = given if copies and _is_like(shared, given) else shared
                if own is shared:
                    shared[:count].copy_(given)
                operator(*(shared, own)[: 1 + copies], "sum", group, result)
                if result is not taken:
                    taken.copy_(result[:count])


def _is_like(shared: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor has as many elements, and begins with a vector: torch checks the offset, and not the place."""
    begins = tensor.data_ptr(), tensor.storage_offset() * tensor.element_size()
    return len(tensor) == len(shared) and not any(each % ALIGNMENT_NBYTES for each in begins)


def _symmetric(group: Any) -> tuple[Any, Any]:
    """Return torch's module, and the name of a process group, whose members it lets have symmetric memory."""
    from torch.distributed import _symmetric_memory as module  # not before it is needed: it takes long

    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # newer versions of torch need it not
        module.enable_symm_mem_for_group(group.group_name)
    return module, group.group_name
