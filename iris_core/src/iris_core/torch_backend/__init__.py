"""The backend "iris" of torch.distributed.

From torch 2.14 on, `init_process_group("iris")` finds it by itself; with 2.11 to 2.13, import this module first.
docs/pytorch.md shows DDP, FSDP2, tensor parallelism and `torch.compile` on it.

Example:
    >>> import torch.distributed as dist
    >>> import iris_core.torch_backend
    >>> dist.init_process_group("iris")                                                              # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from iris_core.api import Iris
from iris_core.errors import GroupError
from iris_core.torch_backend.adapters import NAME, create
from iris_core.torch_backend.options import Options

if TYPE_CHECKING:
    import torch


__all__ = ["Options", "context_of", "explain", "register"]


def register() -> None:
    """Register the backend "iris" with torch.distributed; importing this module does it."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def _operations(group: dist.ProcessGroup | None) -> object:
    found: Any = dist.group.WORLD if group is None else group
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError("this rank is not a member of the process group")
    operations = getattr(found, "operations", None)
    if operations is None and isinstance(found, dist.ProcessGroup):
        for device in found._device_types:
            backend: object = found._get_backend(device)
            operations = operations or getattr(getattr(backend, "wrapped_pg", backend), "operations", None)
    if operations is None:
        raise ValueError(f"{found} is no process group of backend {NAME!r}")
    return operations


def context_of(group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> Iris:
    """Return the `Iris` context of a process group: its heap, `ccl`, `ops`, and what kernels need.

    Collective, the first time: every member of the group calls it, or a collective of torch.distributed.

    Args:
        group: a process group of backend "iris"; all ranks by default.
        device: where its tensors are; by default GPUs where there are any.

    Raises:
        ValueError: the group has another backend.
        GroupError: this rank is not a member of the group.
    """
    return _operations(group).context(device)  # type: ignore[attr-defined, no-any-return]


def explain(group: dist.ProcessGroup | None = None) -> str:
    """Return what of a process group runs on Iris, and what goes to gloo or NCCL."""
    return _operations(group).explain()  # type: ignore[attr-defined, no-any-return]


register()
