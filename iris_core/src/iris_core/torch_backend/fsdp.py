"""FSDP2 with buffers on the symmetric heap: what it gathers and scatters is neither staged nor copied.

FSDP2 asks an object for the buffers and for the collective (`set_custom_all_gather`, `set_custom_reduce_scatter`); on a
process group of backend "iris", `set_allocate_memory_from_process_group_for_comm(True)` takes the same buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from iris_core.api import Iris
from iris_core.dispatch.config import Config
from iris_core.errors import ArgumentError
from iris_core.providers.torch_distributed import NCCL_SMS
from iris_core.torch_backend.buffers import Buffers
from iris_core.torch_backend.operations import as_parts
from iris_core.torch_backend.options import reduction


class _Communication:
    _same_place = False

    def __init__(self, ctx: Iris, buffers: Buffers | None = None) -> None:
        self.context, self._buffers = ctx, buffers or Buffers(ctx)
        sms = None if ctx.device == "cpu" else NCCL_SMS  # products beside it need most multiprocessors
        self._config = Config(comm_sms=sms, same_place=self._same_place)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer of a size on the context's heap, uninitialised.  Collective."""
        return self._buffers.take(size, dtype)

    def _check(self, group: dist.ProcessGroup) -> None:
        if group.size() != self.context.num_ranks:
            raise ArgumentError(f"FSDP2 shards over {group.size()} ranks, and the context has {self.context.num_ranks}")


class AllGather(_Communication):
    """FSDP2's all-gather: `module.set_custom_all_gather(AllGather(ctx))`.  See `use_heap`."""

    _same_place = True  # see `Buffers`

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather all ranks' inputs, (n,), into the output, (world size * n,), in the order of the current stream."""
        self._check(group)
        whole = as_parts(output_tensor, input_tensor, group.size())
        self.context.ccl.all_gather(whole, input_tensor, config=self._config)


class ReduceScatter(_Communication):
    """FSDP2's reduce-scatter: `module.set_custom_reduce_scatter(ReduceScatter(ctx))`.  See `use_heap`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        """Reduce all ranks' inputs, (world size * n,), to this rank's part, (n,), in the current stream's order."""
        self._check(group)
        kind, factor = reduction(op)
        if factor is not None:
            input_tensor.mul_(factor)  # FSDP2 does not read it again
        parts = as_parts(input_tensor, output_tensor, group.size())
        self.context.ccl.reduce_scatter(output_tensor, parts, kind, config=self._config)


def use_heap(net: torch.nn.Module, ctx: Iris) -> None:
    """Let all FSDP2 modules in `net` communicate by `ctx.ccl`, with buffers on its heap.

    Local.  The group that the modules are sharded over may have any backend; its ranks are those of the context.  The
    heap holds, for each rank, two gathered layers, two layers' gradients before they are scattered, and the shards of
    all gradients until they are dropped (`zero_grad`).

    Args:
        net: modules to which `fully_shard` was applied.
        ctx: an open context, whose device is the parameters'.

    Raises:
        ArgumentError: there is no FSDP2 module in it.

    Example:
        >>> import torch.distributed as dist
        >>> from iris_core.torch_backend import fsdp
        >>> for block in net:                                                                        # doctest: +SKIP
        ...     fully_shard(block)
        >>> fsdp.use_heap(net, Iris("2GiB", group=dist.group.WORLD))                                 # doctest: +SKIP
    """
    modules = [each for each in net.modules() if isinstance(each, FSDPModule)]
    if not modules:
        raise ArgumentError("use_heap: fully_shard was applied to no module here")
    buffers = Buffers(ctx)
    for each in modules:
        each.set_custom_all_gather(AllGather(ctx, buffers))  # type: ignore[arg-type]
        each.set_custom_reduce_scatter(ReduceScatter(ctx, buffers))  # type: ignore[arg-type]
