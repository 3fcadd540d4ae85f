"""How torch reaches `GroupOperations`: a Python `Backend` from torch 2.14 on, before that a Python `ProcessGroup`.

Where torch calls a backend in Python, it loses what the work says of itself (`is_completed`, the source of a message).
Therefore a group that is Iris's alone is a `DirectGroup` there, whose operations Python programs call themselves.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._dynamo import eval_frame

from iris_core.errors import ArgumentError, GroupError, UnsupportedError
from iris_core.torch_backend.operations import METHODS, OLDER, GroupOperations
from iris_core.torch_backend.options import IS_BACKEND, Options, uncopied
from iris_core.torch_backend.work import DoneWork, PassedWork
from iris_core.world.group import process_group_of

NAME = "iris"
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_ENDS = ("shutdown", "abort")  # which torch's own group passes on to its backend


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.operations, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _operations(about: Any, find: Callable[[], Any], options: Options | None) -> GroupOperations:
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options of backend iris: iris_core.torch_backend.Options, not {type(options).__name__}")
    return GroupOperations(about.store, about.group_rank, about.group_size, about.timeout, find, options)


class _Methods:
    """The methods of `GroupOperations`, by all their names, and what else it can: torch's own properties hang."""

    operations: GroupOperations
    supports_shrinking = supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = False

    @property
    def supports_splitting(self) -> bool:
        """Whether `split_group` splits it; a new group of NCCL finds no communicator here that it could split."""
        return sys._getframe(1).f_code.co_name != "_get_split_source"

    def name(self) -> str:
        return NAME

    getBackendName = name

    @property
    def options(self) -> Any:
        return self.operations._options

    @property
    def mem_allocator(self) -> Any:
        """What `torch.cuda.MemPool` takes; see `GroupOperations.allocator`."""
        return self.operations.allocator()


for _name, _newer in {**dict(zip(METHODS, METHODS, strict=True)), **OLDER}.items():
    setattr(_Methods, _name, _method(_newer))
_LEFT = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)  # else compiled programs have these compiled
for _class in (_Methods, GroupOperations, PassedWork, DoneWork, *DoneWork.__subclasses__()):
    for _code in filter(None, (getattr(each, "__code__", None) for each in vars(_class).values())):
        eval_frame.set_code_exec_strategy(_code, _LEFT)


_open: set[IrisBackend] = set()  # torch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL lets what is Python's of it go


class IrisBackend(_Methods, c10d.Backend):
    """The backend "iris" of torch from 2.14 on; what it does not serve goes to gloo or NCCL inside."""

    supports_coalescing = True

    def __init__(self, about: Any, options: Options | None, find: Callable[[], Any] | None = None) -> None:
        super().__init__(about.group_rank, about.group_size)
        name = about.group_id
        self.operations = _operations(about, find or (lambda: c10d._resolve_process_group(name)), options)
        _open.add(self)

    def shutdown(self) -> None:
        self.operations.shutdown()
        _open.discard(self)

    def abort(self) -> None:
        self.operations.abort()
        _open.discard(self)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: the process group knows its device; contexts are opened by the first collective all the same."""

    def split(self, store: c10d.Store, ranks: Sequence[int], opts: Any) -> IrisBackend:
        """Return the backend of a group of some of the members, in their order, for torch's `split_group`.

        Raises:
            ArgumentError: a rank is none of this group or there twice.
            UnsupportedError: this rank is none of them.
        """
        backend: IrisBackend | None = _split(self, store, ranks, opts._timeout, opts.group_name, uncopied(opts))
        if backend is None:
            raise UnsupportedError(
                f"split_group: rank {self.rank()} is in none of split_ranks, where torch {torch.__version__} crashes: "
                "put the others into groups of their own there, or call new_group"
            )
        return backend


class DirectGroup(dist.ProcessGroup):
    """A process group that is Iris's alone; programs in Python call its operations without torch in between.

    From torch 2.14 on it has an `IrisBackend` for all devices.  torch's hooks see calls that go through torch; so the
    first hook ends the direct ones.
    """

    def __init__(self, about: Any, options: Options | None) -> None:
        super().__init__(*[about.store] * IS_BACKEND, about.group_rank, about.group_size)  # type: ignore[call-arg]
        backend, self.operations = self._backend(about, options)
        self._set_default_backend(_CUSTOM)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), _CUSTOM, backend)
        self._num_splits = 0
        self._direct = [name for name in (*METHODS, *OLDER) if name in vars(dist.ProcessGroup) and name not in _ENDS]
        for name in self._direct:
            setattr(self, name, getattr(self.operations, OLDER.get(name, name)))
        self.operations.passed = lambda work, *about: work and PassedWork(work, *about)

    def _backend(self, about: Any, options: Options | None) -> tuple[Any, GroupOperations]:
        if about.process_group is not None:  # which this one replaces
            self.bound_device_id = about.process_group.bound_device_id
        backend = IrisBackend(about, options, weakref.ref(self))
        return backend, backend.operations

    def getBackendName(self) -> str:
        return NAME

    def split_group(  # type: ignore[override]
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Options | None = None,
        group_name: str | None = None, group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> DirectGroup | None:  # fmt: skip
        """Return a group of some of the members, in ascending order before torch 2.14; None on the others.

        Collective: all members of this group call it, in the same order, each with the ranks of its new group.

        Args:
            ranks: of the members, in this group.
            timeout, opts: as of the group; this group's by default.
            group_name: in this process, by which torch finds the group; made of the ranks by default.
            group_desc: of the new group.
            device_types: which of the devices that Iris serves it serves there; all by default.

        Raises:
            ArgumentError: a rank is none of this group or there twice, or no device is left.
        """
        opts = self.operations._options if opts is None else opts
        if device_types is not None:
            types = {each.type for each in device_types}
            opts = replace(opts, devices=tuple(each for each in self.operations._devices if each in types))
            if not opts.devices:
                raise ArgumentError(f"split_group: Iris serves none of {sorted(types)}: make that group by new_group")
        self._num_splits += 1
        name = f"split {self._num_splits} {sorted(ranks)}"  # on all members; torch's counts this process's groups
        timeout = self.operations._timeout if timeout is None else timeout
        store, ranks = c10d.PrefixStore(f"{name}/", self.get_group_store()), ranks if IS_BACKEND else sorted(ranks)
        name = group_name or f"{self.group_name}/{name}"
        group: DirectGroup | None = _split(self, store, ranks, timeout, name, opts)
        if group:
            group._set_group_name(name)  # type: ignore[arg-type]
            group._set_group_desc(group_desc or "undefined")
            known, parents = dist.distributed_c10d._world, dist.get_process_group_ranks(self)
            known.pg_map[group], known.pg_backend_config[group] = (NAME, store), NAME
            known.pg_names[group] = name  # type: ignore[assignment]
            known.pg_to_tag[group], known.pg_group_ranks[group] = "", {parents[each]: i for i, each in enumerate(ranks)}
            if group_name is None:  # else torch registers it
                c10d._register_process_group(name, group)  # type: ignore[arg-type]
        return group


def _hooked(name: str) -> Callable[..., Any]:
    def register(self: DirectGroup, hook_id: int, hook: Callable[..., Any]) -> None:
        while self._direct:
            delattr(self, self._direct.pop())
        self.operations.passed = lambda work, *_: work
        getattr(super(DirectGroup, self), name)(hook_id, hook)

    return register


for _name in ("register_pre_hook", "register_post_hook"):
    setattr(DirectGroup, _name, _hooked(_name))


class IrisProcessGroup(_Methods, DirectGroup):
    """The process group of torch 2.11 to 2.13, which takes the place of a mixed group.

    It routes by device: what `Options.devices` names goes to Iris, the rest to gloo or NCCL.  Where torch asks for the
    backend of a device, it is itself.
    """

    def _backend(self, about: Any, options: Options | None) -> tuple[Any, GroupOperations]:
        operations = _operations(about, weakref.ref(self), options)  # no cycle, which would keep threads of gloo
        return operations.inner("cpu"), operations

    def get_group_store(self) -> c10d.Store:
        return self.operations._store

    def _get_backend(self, device: torch.device) -> IrisProcessGroup:  # type: ignore[override]
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Bind the group to a device, for its contexts; they are opened by the first collective all the same."""
        self.bound_device_id = device


_awaited: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_await = c10d.Reducer._set_forward_pass_work_handle


def _keep(reducer: Any, work: Any, *about: Any) -> None:
    """Keep a work that DDP's `join` waits for: without its part in Python, C++ waits without end."""
    _awaited[reducer] = work
    _await(reducer, work, *about)


c10d.Reducer._set_forward_pass_work_handle = _keep  # type: ignore[assignment]


def _is_alone(replaced: dist.ProcessGroup | None) -> bool:
    """Whether a group that torch makes is Iris's alone, as far as its first device says, and torch examines no call."""
    is_examined = c10d.get_debug_level() == c10d.DebugLevel.DETAIL or os.environ.get("TORCH_DIST_NAN_CHECK") == "1"
    return bool(replaced and replaced.name() == "custom" and not (replaced._device_types or is_examined))


def _split(parent: Any, store: c10d.Store, ranks: Sequence[int], timeout: timedelta, name: str, options: Any) -> Any:
    """Make the process group, or the backend, of some ranks; None on the others."""
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(parent.size())):
        raise ArgumentError(f"split_group: ranks={ranks} are not different ranks of a group of {parent.size()}")
    if parent.rank() not in ranks:
        return None
    about = c10d._DistributedBackendOptions()
    about.group_id, about.store, about.timeout = name, store, timeout
    about.group_rank, about.group_size = ranks.index(parent.rank()), len(ranks)
    return type(parent)(about, options)


def create(about: Any, options: Options | None = None) -> Any:
    """Make the process group, or the backend, that torch asks for."""
    kind = IrisProcessGroup if not IS_BACKEND else DirectGroup if _is_alone(about.process_group) else IrisBackend
    return kind(about, options)


def operations_of(group: dist.ProcessGroup | None) -> GroupOperations:
    """Return the operations of a process group of backend "iris", that of all ranks by default; see `context_of`."""
    found: Any = dist.group.WORLD if group is None else process_group_of(group)
    if found is None:
        raise ArgumentError(f'torch.distributed has no groups yet: call init_process_group("{NAME}") first')
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError("this rank is not a member of the process group")
    operations: GroupOperations | None = getattr(found, "operations", None)
    if operations is None:
        for device in found._device_types:
            backend: object = found._get_backend(device)
            operations = operations or getattr(getattr(backend, "wrapped_pg", backend), "operations", None)
    if operations is None:
        about = f"group {found.group_name!r} of backend {dist.get_backend(found)!r}"
        raise ArgumentError(f"{about} is no process group of backend {NAME!r}")
    return operations
