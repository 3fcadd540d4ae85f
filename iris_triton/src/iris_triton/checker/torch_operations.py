"""What the host does by torch: operations on tensors of the heap are accesses, and torch.distributed orders ranks.

A dispatch mode sees the operations of the thread that has opened the context.  What numpy, other threads or C code do
with the same memory is not seen.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from iris_core.world import World
from iris_triton.checker.places import Place, place_of, range_of
from iris_triton.checker.replacements import replaced
from iris_triton.checker.watcher import Watcher

_NOT_READ = (  # operations that take a tensor for its shape or its storage only
    "empty_like", "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "randint_like", "new_empty_strided", "set_", "resize_", "is_pinned", "is_same_size", "record_stream",
)  # fmt: skip

_ONLY_WRITTEN = (
    "zero_", "fill_", "copy_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "_foreach_copy_", "_foreach_zero_", "index_put_", "_index_put_impl_", "index_fill_", "index_copy_",
    "scatter_", "put_", "masked_fill_", "masked_scatter_",
)  # fmt: skip

_PICKED = {  # what picks the elements that an operation reads or writes out of a tensor of the same shape
    torch.ops.aten.index: (("indices",), ("index", "index_put_", "_index_put_impl_")),
    torch.ops.aten.index_select: (
        ("dim", "index"), ("index_select", "index_fill_", "index_copy_", "index_add_", "index_reduce_"),
    ),
    torch.ops.aten.gather: (("dim", "index"), ("gather", "scatter_", "scatter_add_", "scatter_reduce_")),
    torch.ops.aten.take: (("index",), ("take", "put_")),
    torch.ops.aten.masked_select: (("mask",), ("masked_select", "masked_fill_", "masked_scatter_")),
}  # fmt: skip
_PICKS = {name: (pick, arguments) for pick, (arguments, names) in _PICKED.items() for name in names}


def _given(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names, without those that are left to their defaults."""
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class HostOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a watcher of every access that torch's operations make to the heap, and what orders ranks."""

    def __init__(self, watcher: Watcher | None, distributed: DistributedOperations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher, self.distributed = watcher, distributed
        self.is_on = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile while this mode is on; what it has compiled is not seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on:
            return func(*args, **kwargs)
        schema = func._schema
        space, _, name = schema.name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            return self.distributed.run(functools.partial(func, *args, **kwargs), name, _given(schema, args, kwargs))
        is_view = bool(schema.returns) and schema.returns[0].alias_info is not None
        is_view = is_view and not schema.returns[0].alias_info.is_write
        read: list[Place] = []
        written: list[Place] = []
        if self.watcher is not None and not is_view and name not in _NOT_READ:
            given = _given(schema, args, kwargs)
            adds = bool(given.get("accumulate")) or "reduce" in given
            for index, argument in enumerate(schema.arguments):
                value = given.get(argument.name)
                if value is None or isinstance(value, (int, float, str)):
                    continue
                writes = argument.alias_info is not None and argument.alias_info.is_write
                only = writes and (argument.kwarg_only or (name in _ONLY_WRITTEN and not adds))
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        places = _places(self.watcher, tensor, name, {} if index else given)
                        read += [] if only else places
                        written += places if writes else []
        run = functools.partial(func, *args, **kwargs)
        awaited = []  # results of torch.distributed that await themselves
        if types and not is_view:
            awaited = [each for each in tree_leaves((args, kwargs)) if isinstance(each, AsyncCollectiveTensor)]
            run = functools.partial(self.distributed.aside, run) if awaited else run
        if self.watcher is not None and (read or written):
            result = self.watcher.host_operation(run, name, read, written)
        else:
            result = run()
        for tensor in awaited:
            self.distributed.end(tensor.elem.data_ptr())
        return result


def _dispatch(self: HostOperations, *call: Any) -> Any:
    """Handle an operation outside of torch's compiler: its wrapper imports that first, a second in every process."""
    is_there = "torch._dynamo" in sys.modules
    return (_WRAPPED if is_there else _PLAIN)(self, *call)


_WRAPPED = HostOperations.__torch_dispatch__
_PLAIN = inspect.unwrap(_WRAPPED)
HostOperations.__torch_dispatch__ = _dispatch  # type: ignore[assignment]


def _places(watcher: Watcher, tensor: torch.Tensor, name: str, given: dict[str, Any]) -> list[Place]:
    """Return the place of a tensor that an operation uses, or of the elements that `given` picks; none off the heap."""
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
    steps = [step * size for step in tensor.stride()]
    picked = _picked(name, tensor.shape, steps, given)
    if picked is not None:
        return [place_of(found[0], np.unique(picked) + found[1], size)] if picked.size else []
    if tensor.is_contiguous():
        return [range_of(*found, tensor.numel() * size)]
    along = (np.arange(extent) * step for extent, step in zip(tensor.shape, steps, strict=True))
    return [place_of(found[0], sum(np.ix_(*along), found[1]), size)]


def _picked(name: str, shape: torch.Size, steps: list[int], given: dict[str, Any]) -> Any:
    """Return the offsets of the elements of a tensor that an operation picks; None where that is all of it.

    The operation, or its twin that reads, picks of each dimension's numbers: that costs as much as what it does.
    """
    if name not in _PICKS or not given or not shape:
        return None
    pick, names = _PICKS[name]
    offsets: Any = 0
    try:
        for dim, step in enumerate(steps):
            numbers = (torch.arange(shape[dim]) * step).view([-1 if at == dim else 1 for at in range(len(shape))])
            offsets = offsets + pick(numbers.expand(shape), *(given[each] for each in names))
    except (IndexError, KeyError, RuntimeError, TypeError):  # the operation says what is wrong with it
        return None
    return offsets.numpy().reshape(-1)


class DistributedOperations:
    """Operations of torch.distributed: what a rank did before its part happens before what those do that wait for it.

    Names of operations are those of c10d, which all ways to call them come to.  What awaits one in C++, such as
    DistributedDataParallel, is not seen.
    """

    def __init__(self, watcher: Watcher | None, observer: Any, world: World) -> None:
        self._watcher, self._world = watcher, world
        self._explorer = None if observer is watcher else observer  # which has clocks of its own
        self._hosts = [] if watcher is None else [watcher.host]
        self._hosts += [observer._host] if self._explorer else []
        self._turns: collections.Counter[Any] = collections.Counter()
        self._pending: dict[Any, Callable[[Any], None]] = {}  # by the handle, or the address of the result

    def aside(self, call: Callable[[], Any]) -> Any:
        """Call what waits for other ranks; where ranks take turns, these go on meanwhile."""
        if self._explorer is None:
            return call()
        turns = self._explorer.turns
        turns.go_away()
        try:
            return call()
        finally:
            turns.ensure()

    def run(self, call: Callable[[], Any], name: str, given: dict[str, Any]) -> Any:
        """Run an operation; what it orders comes when it is awaited, at once where it is not asynchronous."""
        if name == "wait_tensor":
            result = self.aside(call)
            self.end(given["tensor"].data_ptr())
            return result
        group, known = self._group(given), self._world.torch_ranks or ()
        ranks = () if group is None else dist.get_process_group_ranks(group)
        if not ranks or not {*ranks} <= {*known}:
            return call()
        members = tuple(known.index(rank) for rank in ranks)
        waits = bool(given.get("async_op", name != "monitored_barrier_"))
        hear = self._hand_over(name, given, str(group.group_name), members)
        is_exchange = not waits and not {"tag", "root_rank", "src"} & given.keys()
        begun = (
            self._explorer.before_exchange(self._world.subworld(members)) if self._explorer and is_exchange else None
        )
        read, written = self._accesses(name, given, members.index(self._world.rank))

        def end(work: Any) -> None:
            if self._explorer and is_exchange:
                self._explorer.after_exchange(begun)
            hear(work)
            if self._watcher is not None and written:
                self._watcher.host_operation(lambda: None, name, [], written)

        result = self._watcher.host_operation(call, name, read, []) if self._watcher is not None and read else call()
        last = result[-1] if isinstance(result, (tuple, list)) and result else result
        work = dist.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None
        if not waits:
            if work is not None:
                _WAIT(work) if begun else self.aside(lambda: _WAIT(work))
            end(work)
            return result
        for key in tree_leaves(result) if work is None else [work]:
            self._pending[key.data_ptr() if isinstance(key, torch.Tensor) else key] = end
        while len(self._pending) > _MOST_PENDING:
            del self._pending[next(iter(self._pending))]
        return result

    @staticmethod
    def _group(given: dict[str, Any]) -> Any:
        if "process_group" in given:
            return dist.ProcessGroup.unbox(given["process_group"])
        name, c10d = given.get("group_name"), cast("Any", dist.distributed_c10d)
        return None if name is None else c10d._resolve_process_group(name)

    def _hand_over(
        self, name: str, given: dict[str, Any], group: str, members: tuple[int, ...]
    ) -> Callable[[Any], None]:
        """Hand over what this rank has done; returns what takes over that of others, given the handle."""
        me, root, tag = members.index(self._world.rank), given.get("root_rank", given.get("src")), given.get("tag")
        number, heard = 0, members
        if tag is None:
            number = self._number(group)
            if root is not None and name not in _TO_ROOT:
                heard = (members[root],)
            elif root not in (None, me):
                heard = ()
        elif name == "send":
            number, heard = self._number(group, me, given["dst"], tag), ()
        elif root is not None:
            number, heard = self._number(group, root, me, tag), (members[root],)
        if tag is None or name == "send":
            for host in self._hosts:
                host.hand_over(number)

        def hear(work: Any) -> None:
            name, ranks = number, heard
            if not name:  # received from any rank
                source = work._source_rank()
                name, ranks = self._number(group, source, me, tag), (members[source],)
            for host in self._hosts:
                host.take_over(name, ranks)

        return hear

    def _number(self, *key: Any) -> int:
        """Return a name of the next operation of a group, or of the next message of two ranks, on all of them."""
        self._turns[key] += 1
        return 1 + int.from_bytes(hashlib.blake2b(repr((key, self._turns[key])).encode(), digest_size=7).digest())

    def _accesses(self, name: str, given: dict[str, Any], me: int) -> tuple[list[Place], list[Place]]:
        """Return what an operation reads, and what it has written when it is awaited."""
        read: list[Place] = []
        written: list[Place] = []
        for argument, value in given.items():
            if self._watcher is None or isinstance(value, (int, float, str)):
                continue
            is_result, is_root = argument.startswith("out"), me == given.get("root_rank", me)
            is_both = argument == "tensors" and name not in ("send", "broadcast_", "reduce_")
            arrives = argument == "tensors" and (name.startswith("recv") or (name == "broadcast_" and not is_root))
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    places = _places(self._watcher, tensor, name, {})
                    read += [] if is_result or arrives else places
                    written += places if is_result or arrives or is_both or (name == "reduce_" and is_root) else []
        return read, written

    def end(self, key: Any) -> None:
        """End the operation of a handle, or of the address of a result, if one is pending."""
        end = self._pending.pop(key, None)
        if end is not None:
            end(key)

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """Return what stands for methods of asynchronous operations' handles, and for what makes a group."""

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(_WAIT, work, *args, **kwargs)
            result = self.aside(call) if work in self._pending else call()
            self.end(work)
            return result

        def is_completed(work: Any) -> Any:
            result = _IS_COMPLETED(work)
            if result:
                self.end(work)
            return result

        def new_group(*args: Any, **kwargs: Any) -> Any:  # its members wait for each other, by the store
            return self.aside(functools.partial(_NEW_GROUP, *args, **kwargs))

        made = dist.distributed_c10d, _NEW_GROUP.__name__, new_group
        return [(dist.Work, "wait", wait), (dist.Work, "is_completed", is_completed), made]


_TO_ROOT = ("gather_", "reduce_")
_MOST_PENDING = 1024  # what is awaited in C++ would stay
_WAIT, _IS_COMPLETED = dist.Work.wait, dist.Work.is_completed
_NEW_GROUP: Any = dist.distributed_c10d._new_group_with_tag  # all ways to make one


@contextlib.contextmanager
def watched(watcher: Watcher | None, observer: Any, world: World) -> Iterator[None]:
    """Watch torch's operations of this thread within a `with` block, for a watcher if there is one."""
    distributed = DistributedOperations(watcher, observer, world)
    mode = HostOperations(watcher, distributed)
    with replaced(distributed.replacements()):
        mode.__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            mode.is_on = False
            if _get_current_dispatch_mode() is mode:  # else the program has left another one open: it does nothing
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
