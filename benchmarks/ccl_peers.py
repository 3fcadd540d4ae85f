"""Collectives of other libraries, for benchmarks/ccl.py: NCCL, also with windows, and torch's symmetric memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROFILED_CALLS = 3

OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Variables without which these libraries may use NVLink multicast, which shared hosts may not have."""


class Unavailable(Exception):
    """A peer cannot be measured here; says why."""


def nccl_call(op: str, out: torch.Tensor, inp: torch.Tensor, group: Any = None) -> Callable[[], object]:
    """Return a call of NCCL among a process group, by default all ranks.

    An all_reduce is in place on `out`, into which `inp` was copied.
    """
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(out, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(out, inp, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, inp, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, inp, group=group),
    }
    return calls[op]


@contextlib.contextmanager
def window_tensors(out: torch.Tensor, inp: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return tensors like these in memory that NCCL has registered as symmetric windows, within the block.

    NCCL forgets the windows at its end, while the memory is still there.

    Raises:
        Unavailable: this torch or NCCL cannot.
    """
    backend = dist.group.WORLD._get_backend(torch.device(inp.device))  # type: ignore[union-attr]
    if not hasattr(backend, "register_mem_pool") or not hasattr(backend, "mem_allocator"):
        raise Unavailable("this torch cannot register windows")
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        own_out, own_inp = torch.empty_like(out), torch.empty_like(inp)
    try:
        backend.register_mem_pool(pool, symm=True)
    except (TypeError, RuntimeError) as error:
        raise Unavailable(f"NCCL does not register symmetric windows: {error}") from error
    try:
        yield own_out, own_inp
    finally:
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Return the names of the kernels that a call launches.  Collective, as the call is."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED_CALLS):
            call()
        torch.cuda.synchronize()
    return sorted({event.name for event in profile.events() if "nccl" in event.name.lower()})


def is_symmetric_kernel(name: str) -> bool:
    """Whether NCCL names a kernel so that works on symmetric windows."""
    return "symk" in name.lower() or "symm" in name.lower()


def torch_symmetric(
    kind: str, inp: torch.Tensor, out: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a call of torch's all_reduce on symmetric memory, out of place, and what fills its input again.

    Two-shot leaves sums in its input, too.

    Args:
        kind: "one_shot" or "two_shot".
        inp: where the values are.
        out: gets the result.

    Raises:
        Unavailable: this torch has no such operator.
    """
    import torch.distributed._symmetric_memory as symmetric

    operators = torch.ops.symm_mem
    name = f"{kind}_all_reduce_out"
    if not hasattr(operators, name):
        raise Unavailable(f"this torch has no symm_mem.{name}")
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    buffer = symmetric.empty(inp.numel(), dtype=inp.dtype, device=inp.device)
    symmetric.rendezvous(buffer, group)
    buffer.copy_(inp.view(-1))
    call = getattr(operators, name)
    return lambda: call(buffer, "sum", group, out.view(-1)), lambda: buffer.copy_(inp.view(-1))
