"""Collectives of an inference engine's group of ranks, in the shape of vLLM's device communicators.

vLLM makes one communicator for each group of a model and gives it the group's process groups; a platform plugin names
the class (`get_device_communicator_cls`).  Methods and arguments are as in vLLM's `DeviceCommunicatorBase`, and
`should_custom_ar`, `custom_all_reduce` and `capture` as SGLang's and vLLM's own all-reduce has them.  docs/pytorch.md
shows both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from iris_core.api import Iris
from iris_core.errors import ArgumentError
from iris_core.torch_backend.operations import reduces
from iris_core.types import ReduceOp


class Communicator:
    """The collectives of one group of ranks.

    Collective: all members make it, call its methods in the same order, and destroy it.  Results are new tensors on
    the current stream.  What `should_use` refuses runs on `device_group`.  In a graph, any call can be captured that
    was made with tensors of the same shape before.

    Args:
        cpu_group: the members; its ranks open the heap.
        device: where tensors are; the CPU by default.
        device_group: the process group for what Iris does not serve; `cpu_group` by default.
        unique_name: the group's name, of which nothing depends here.
        heap_size: of each rank's heap, as of `Iris`.
        max_nbytes: size of the largest tensor that Iris serves; None for any size.
        **more: further arguments of vLLM's base class, where this class is combined with it.

    Example:
        >>> import torch.distributed as dist
        >>> from iris_core.torch_backend.communicator import Communicator
        >>> comm = Communicator(dist.group.WORLD, device="cuda:0")                                   # doctest: +SKIP
        >>> y = comm.all_reduce(x) if comm.should_use(x) else x                                      # doctest: +SKIP
    """

    disabled = False  # as SGLang and vLLM ask their own all-reduce

    def __init__(
        self, cpu_group: dist.ProcessGroup, device: torch.device | str | None = None,
        device_group: dist.ProcessGroup | None = None, unique_name: str = "", *, heap_size: int | str | None = None,
        max_nbytes: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        base: Any = super().__init__
        if type(self).__mro__[-2] is not Communicator:
            base(cpu_group, device, device_group, unique_name, **more)
        elif more:
            raise TypeError(f"Communicator has no arguments {', '.join(more)}")
        self.cpu_group, self.device_group = cpu_group, device_group or cpu_group
        self.device, self.unique_name = torch.device(device or "cpu"), unique_name
        self.ranks = dist.get_process_group_ranks(cpu_group)
        self.world_size, self.rank_in_group = len(self.ranks), dist.get_rank(cpu_group)
        self.max_nbytes = max_nbytes
        self.context = Iris(heap_size, device=self.device, group=cpu_group)

    def should_use(self, tensor: torch.Tensor) -> bool:
        """Return whether Iris serves a tensor; the same on all members for the same dtype, size and device."""
        is_small = self.max_nbytes is None or tensor.nbytes <= self.max_nbytes
        return is_small and tensor.device == self.device and reduces(ReduceOp.SUM, tensor.dtype)

    should_custom_ar = should_use

    def empty(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the symmetric heap, where collectives need no copy.  Collective."""
        return self.context.empty(*size, dtype=dtype)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Surround the capture of graphs; nothing has to be registered, and a call of a new kind raises."""
        yield

    # -- collectives --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the sum of all members' tensors, of any shape."""
        output = torch.empty_like(input_, memory_format=torch.contiguous_format)
        if self.should_use(input_):
            self.context.ccl._anywhere.all_reduce(output, input_)
        else:
            dist.all_reduce(output.copy_(input_), group=self.device_group)
        return output

    custom_all_reduce = all_reduce

    @torch.no_grad()
    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return all members' tensors, which have the same shape, concatenated along `dim`; of scalars, a vector."""
        moved = input_.reshape(input_.shape or (1,)).movedim(dim, 0).contiguous()
        output = moved.new_empty(self.world_size * moved.shape[0], *moved.shape[1:])
        if self.should_use(input_):
            self.context.ccl._anywhere.all_gather(output, moved)
        else:
            dist.all_gather_into_tensor(output, moved, group=self.device_group)
        return output.movedim(0, dim).contiguous()

    @torch.no_grad()
    def all_gatherv(self, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        """Return all members' tensors, of `sizes` along the first dimension; or do so for each tensor of a list."""
        if dim != 0:
            raise ArgumentError(f"all_gatherv: parts are along dim 0, not {dim}")
        if isinstance(input_, list | tuple):
            return [self.all_gatherv(each, 0, sizes) for each in input_]
        if sizes is None or len(set(sizes)) == 1:
            return self.all_gather(input_, 0)
        self._check("all_gatherv", sizes, input_.shape[0], sizes[self.rank_in_group])
        output = input_.new_empty(sum(sizes), *input_.shape[1:])
        for root, part in enumerate(torch.split(output, list(sizes))):
            if root == self.rank_in_group:
                part.copy_(input_)
            self.broadcast(part, root)
        return output

    @torch.no_grad()
    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this member's part, along `dim`, of the sum of all members' tensors."""
        moved = input_.reshape(input_.shape or (1,)).movedim(dim, 0).contiguous()
        if moved.shape[0] % self.world_size:
            raise ArgumentError(f"reduce_scatter: {moved.shape[0]} is no multiple of {self.world_size} members")
        output = moved.new_empty(moved.shape[0] // self.world_size, *moved.shape[1:])
        if self.should_use(input_):
            self.context.ccl._anywhere.reduce_scatter(output, moved)
        else:
            dist.reduce_scatter_tensor(output, moved, group=self.device_group)
        return output.movedim(0, dim).contiguous()

    @torch.no_grad()
    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Return this member's part, of `sizes` along `dim`, of the sum of all members' tensors."""
        if sizes is None or len(set(sizes)) == 1:
            return self.reduce_scatter(input_, dim)
        self._check("reduce_scatterv", sizes, input_.shape[dim], sum(sizes))
        whole = self.all_reduce(input_.movedim(dim, 0).contiguous())
        return torch.split(whole, list(sizes))[self.rank_in_group].movedim(0, dim).contiguous()

    @torch.no_grad()
    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Replace the tensor by that of a member, by its rank in the group, and return it."""
        if self.should_use(input_):
            self.context.ccl._anywhere.broadcast(input_, src)
        else:
            dist.broadcast(input_, self.ranks[src], group=self.device_group)
        return input_

    @torch.no_grad()
    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Return all members' tensors along `dim` on one member, by its rank in the group; None on others."""
        is_root = self.rank_in_group == dst
        parts = [torch.empty_like(input_) for _ in self.ranks] if is_root else None
        dist.gather(input_, parts, self.ranks[dst], group=self.device_group)
        return None if parts is None else torch.cat([each.reshape(each.shape or (1,)) for each in parts], dim)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a tensor to a member, by its rank in the group; to the next one by default."""
        dst = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        dist.send(tensor, self.ranks[dst], self.device_group)

    def recv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Return a tensor from a member, by its rank in the group; from the one before by default."""
        src = (self.rank_in_group - 1) % self.world_size if src is None else src
        tensor = torch.empty(*size, dtype=dtype, device=self.device)
        dist.recv(tensor, self.ranks[src], self.device_group)
        return tensor

    def destroy(self) -> None:
        """Close the heap, and end what the engine's own class has made.  Collective."""
        self.context.close()
        getattr(super(), "destroy", lambda: None)()

    close = destroy

    def _check(self, op: str, sizes: Sequence[int], found: int, wanted: int) -> None:
        if len(sizes) != self.world_size or found != wanted:
            raise ArgumentError(f"{op}: sizes={list(sizes)} do not fit {found} rows of {self.world_size} members")
