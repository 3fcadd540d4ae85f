"""Accesses by the host: operations of torch on tensors of the heap are accesses, and torch's barrier orders the ranks.

A dispatch mode sees the operations of the thread that has opened the context.  What numpy, other threads or C code do
with the same memory is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from iris_triton.checker.places import Place, place_of, range_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iris_core.world import World
    from iris_triton.checker.watcher import Watcher

_NOT_READ = (  # operations that take a tensor for its shape or its storage only
    "empty_like", "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "randint_like", "new_empty_strided", "set_", "resize_", "is_pinned", "is_same_size", "record_stream",
)  # fmt: skip

_ONLY_WRITTEN = (
    "zero_", "fill_", "copy_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_",
)  # fmt: skip


class HostOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a watcher of every access that torch's operations make to the heap."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher: Watcher | None = watcher

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile while this mode is on; what it has compiled is not seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name.split("::")[-1]
        is_view = bool(schema.returns) and schema.returns[0].alias_info is not None
        is_view = is_view and not schema.returns[0].alias_info.is_write
        read: list[Place] = []
        written: list[Place] = []
        if self.watcher is not None and not is_view and name not in _NOT_READ:
            for index, argument in enumerate(schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if value is None or isinstance(value, (int, float, str)):
                    continue
                writes = argument.alias_info is not None and argument.alias_info.is_write
                only = writes and (name in _ONLY_WRITTEN or argument.name == "out")
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        places = _places(self.watcher, tensor, name)
                        read += [] if only else places
                        written += places if writes else []
        if self.watcher is None or not (read or written):
            return func(*args, **kwargs)
        return self.watcher.host_operation(functools.partial(func, *args, **kwargs), name, read, written)


def _dispatch(self: HostOperations, *call: Any) -> Any:
    """Handle an operation outside of torch's compiler: its wrapper imports that first, a second in every process."""
    is_there = "torch._dynamo" in sys.modules
    return (_WRAPPED if is_there else _PLAIN)(self, *call)


_WRAPPED = HostOperations.__torch_dispatch__
_PLAIN = inspect.unwrap(_WRAPPED)
HostOperations.__torch_dispatch__ = _dispatch  # type: ignore[assignment]


def _places(watcher: Watcher, tensor: torch.Tensor, name: str) -> list[Place]:
    """Return the place of a tensor that an operation uses; none if it is not on the heap."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return []
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return []
    if not watcher.heaps.low <= start < watcher.heaps.high:
        return []
    watcher.check_alive(tensor, name)
    size = tensor.element_size()
    found = watcher.heaps.rank_of(start)
    if found is None:
        return []
    if tensor.is_contiguous():
        return [range_of(*found, tensor.numel() * size)]
    along = (np.arange(extent) * (stride * size) for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [place_of(found[0], sum(np.ix_(*along), found[1]), size)]


@contextlib.contextmanager
def watched(watcher: Watcher | None, exchanges: Any, world: World) -> Iterator[None]:
    """Watch torch's operations of this thread within a `with` block, if there is a watcher, and torch's barrier."""
    mode = None if watcher is None else HostOperations(watcher)
    barrier = dist.barrier

    @functools.wraps(barrier)
    def watched_barrier(group: Any = None, *args: Any, **kwargs: Any) -> Any:
        begun = exchanges.before_exchange(world) if group is None and world.torch_ranks is not None else None
        result = barrier(group, *args, **kwargs)
        exchanges.after_exchange(begun)
        return result

    dist.barrier = watched_barrier
    if mode is not None:
        mode.__enter__()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if mode is not None:
            mode.watcher = None
            if _get_current_dispatch_mode() is mode:  # else the program has left another one open, and it does nothing
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if dist.barrier is watched_barrier:
            dist.barrier = barrier
