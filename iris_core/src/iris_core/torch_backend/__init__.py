"""The backend "iris" of torch.distributed.

From torch 2.14 on, `init_process_group("iris")` finds it by itself; with 2.11 to 2.13, import this module first.
docs/pytorch.md shows DDP, FSDP2, tensor parallelism and `torch.compile` on it.

Example:
    >>> import torch.distributed as dist
    >>> import iris_core.torch_backend
    >>> dist.init_process_group("iris")                                                              # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from iris_core.api import Iris
from iris_core.torch_backend import library  # noqa: F401 - defines torch.ops.iris
from iris_core.torch_backend.adapters import NAME, create, operations_of
from iris_core.torch_backend.options import Options

if TYPE_CHECKING:
    import torch


__all__ = ["Options", "context_of", "explain", "register"]


def register() -> None:
    """Register the backend "iris" with torch.distributed; importing this module does it."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def context_of(group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> Iris:
    """Return the `Iris` context of a process group: its heap, `ccl`, `ops`, and what kernels need.

    Collective, the first time: every member of the group calls it, or a collective of torch.distributed.

    Args:
        group: a process group of backend "iris"; all ranks by default.
        device: where its tensors are; by default GPUs where there are any.

    Raises:
        ArgumentError: the group has another backend, or none was initialised.
        GroupError: this rank is not a member of the group.
    """
    return operations_of(group).context(device)


def explain(group: dist.ProcessGroup | None = None) -> str:
    """Return what of a process group runs on Iris, and what goes to gloo or NCCL."""
    return operations_of(group).explain()


register()
