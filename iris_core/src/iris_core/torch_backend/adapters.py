"""How torch reaches `GroupOperations`: a Python `Backend` from torch 2.14 on, before that a Python `ProcessGroup`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from iris_core.torch_backend.operations import METHODS, OLDER, GroupOperations, Options

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "iris"
IS_BACKEND = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 14)
"""Whether this torch takes a backend for each device type that is written in Python."""


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.operations, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _operations(about: Any, find: Callable[[], Any], options: Options | None) -> GroupOperations:
    return GroupOperations(about.store, about.group_rank, about.group_size, about.timeout, find, options)


class IrisProcessGroup(dist.ProcessGroup):
    """A process group of the backend "iris": torch 2.11 to 2.13 take it in the place of a mixed group.

    It routes by device: what `Options.devices` names goes to Iris, the rest to gloo or NCCL.
    """

    def __init__(self, about: Any, options: Options | None) -> None:
        super().__init__(about.group_rank, about.group_size)  # type: ignore[call-arg]
        self._name, self._description = about.group_id, ""
        self.operations = _operations(about, lambda: self, options)
        self._store: c10d.Store = about.store

    def get_group_store(self) -> c10d.Store:
        return self._store

    @property
    def group_name(self) -> Any:
        return self._name

    def _set_group_name(self, name: Any) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in self.operations._devices]

    def _start_coalescing(self, device: torch.device) -> None:
        self.operations.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self.operations.end_coalescing()


class IrisBackend(c10d.Backend):
    """The backend "iris" of torch from 2.14 on; what it does not serve goes to gloo or NCCL inside."""

    supports_coalescing = True

    def __init__(self, about: Any, options: Options | None) -> None:
        super().__init__(about.group_rank, about.group_size)
        name = about.group_id
        self.operations = _operations(about, lambda: c10d._resolve_process_group(name), options)


for _class in (IrisProcessGroup, IrisBackend):
    for _name, _newer in {**dict(zip(METHODS, METHODS, strict=True)), **OLDER}.items():
        setattr(_class, _name, _method(_newer))
    for _name in ("getBackendName", "name"):
        setattr(_class, _name, lambda self: NAME)


def create(about: Any, options: Options | None = None) -> Any:
    """Make the process group, or the backend, that torch asks for."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options of backend iris is an iris_core.torch_backend.Options, not {type(options).__name__}"
        )
    return (IrisBackend if IS_BACKEND else IrisProcessGroup)(about, options)
