"""The host API: one `Iris` per rank opens the world (`iris_core.open_context`), owns the heap and closes everything."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from iris_core import open_context, world
from iris_core.ccl.api import Collectives
from iris_core.device import targets
from iris_core.device.one_sided import OneSided
from iris_core.dispatch.bind import CLOSED, Binder
from iris_core.errors import DeviceError, HeapClosedError, IrisError, PeerLostError, RankMismatchError
from iris_core.heap.blocks import Scope
from iris_core.heap.streams import uncompiled
from iris_core.heap.symmetry import NOT_FINISHED
from iris_core.heap.tensors import TensorFactories, as_sent
from iris_core.logs import rank_logger
from iris_core.ops.api import Operations
from iris_core.providers import Providers
from iris_core.registry import MAY_BE_WATCHED, notify
from iris_core.tracing.recorder import Tracing
from iris_core.types import Group, HeapStats
from iris_core.world.failures import on_all_ranks

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class Iris(TensorFactories, OneSided):
    """One rank's view of the symmetric heap and of the world.

    Collective: every rank of the world constructs it with the same arguments.  The ranks are those of torch.distributed
    where the program has initialised it, on one host or several, those that `iris_core.run` has started, or torchrun;
    any other process is a world of one.  When the context is closed, its methods raise HeapClosedError.

    Args:
        heap_size: bytes of each rank's heap, as a number or "64MiB", "1GiB"; IRIS_HEAP_SIZE or 1 GiB by default.
        allocator: allocator by name, `name@distribution`, or "auto" (then IRIS_ALLOCATOR, then the best usable one).
        backend: device backend by name, `name@distribution`, or "auto" (then IRIS_BACKEND, then the best usable one).
        device: "cpu", "cuda", "cuda:1"; by default a GPU where one is usable, else the CPU.
        group: the process group whose ranks share the heap; all ranks by default.
        options: settings of plugins by plugin name, `{"host": {"huge_pages": True}}`; they beat the environment.  Those
            of an allocator or backend that was not chosen are checked, too, and a warning says that they are not used.
        barrier_timeout: bound in seconds of barriers and exchanges of the host; IRIS_BARRIER_TIMEOUT or 300 by default.
        device_timeout: bound in seconds of waits inside kernels; IRIS_DEVICE_TIMEOUT or none by default.
        deterministic: whether reductions of `ctx.ccl` and `ctx.ops` promise the same bits for the same inputs, shapes
            and members: in every call, whatever is measured, wherever tensors lie, and on all ranks of an all_reduce.
            Those that cannot are refused.  By default IRIS_DETERMINISTIC, then what
            torch.use_deterministic_algorithms says now; see docs/collectives.md.
        check: what kernels on CPU ranks are checked for; IRIS_CHECK or nothing by default; see docs/checking.md.

    Raises:
        SettingsError: a size, name or option is wrong.
        PluginError: the requested allocator or backend is not installed, broken, or cannot be used here.
        CapabilityError: allocator and backend do not fit together.
        RankMismatchError: the ranks were opened with different versions, plugins or sizes.
        CollectiveTimeoutError: a rank did not arrive in time.
        HeapError: the heap cannot be made.

    Example:
        >>> from iris_core import Iris
        >>> with Iris(heap_size="16MiB", device="cpu") as ctx:
        ...     x = ctx.zeros(4, 4)
        ...     ctx.barrier()
        ...     ctx.is_symmetric(x)
        True
    """

    # what `ccl`, `ops` and `tracing` are made of; contexts with another face have their own
    _collectives: ClassVar[type[Collectives]] = Collectives
    _operations: ClassVar[type[Operations]] = Operations
    _tracer: ClassVar[type[Tracing]] = Tracing

    def __init__(
        self,
        heap_size: int | str | None = None,
        *,
        allocator: str = "auto",
        backend: str = "auto",
        device: str | torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        barrier_timeout: float | None = None,
        device_timeout: float | None = None,
        deterministic: bool | None = None,
        check: str | Sequence[str] | None = None,
    ) -> None:
        self._closed = CLOSED  # why it cannot be used, until everything is open
        self._mem_pool: torch.cuda.MemPool | None = None
        device = None if device is None else str(device)
        asked: dict[str, Any] = {"heap_size": heap_size, "allocator": allocator, "backend": backend, "device": device}
        asked |= {"barrier_timeout": barrier_timeout, "device_timeout": device_timeout}
        asked |= {"deterministic": deterministic, "check": check}
        notice = partial(_notify_allocated, weakref.ref(self))
        with world.arrive(group) as arrival, contextlib.ExitStack() as undo:
            opened = open_context.open_heap(asked, dict(options or {}), arrival, on_allocated=notice, undo=undo)
            self.settings = opened.maker.settings
            self._world, self._plan, self._reports = opened.world, opened.plan, opened.reports
            self._device_barriers, self._context = opened.device_barriers, opened.context_tensor
            self._log = rank_logger(self._world.rank, self._world.world_size)
            self.target = opened.plan.target
            self.device = self.target.torch_device
            self.backend, self.heap = opened.backend, opened.heap
            self._binder = Binder(self, opened, Providers(opened))
            undo.callback(self._binder.close)
            opened.reports.describers.append(self._binder.explain_report)
            self._world.barrier()
            self._closing = undo.pop_all()
        self._closed = ""
        self._pid = os.getpid()
        # A context that is dropped without close() still gives everything back, without waiting for the others.
        self._finalizer = weakref.finalize(self, _close_here, self._closing, self._pid)
        _open.add(self)
        _ = self.ccl, self.ops  # now: torch.compile could not trace how they are made
        notify("iris_opened", context=self)

    # -- who and where ------------------------------------------------------------------------------------------------
    @property
    def cur_rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the heap."""
        return self._world.world_size

    @property
    def heap_size(self) -> int:
        """Size of each rank's heap in bytes."""
        return self.heap.usable_nbytes

    @property
    def gpu_id(self) -> int:
        """Index of this rank's device; 0 on the CPU."""
        return self.target.index

    @property
    def heap_bases(self) -> torch.Tensor:
        """Same as `get_heap_bases()`."""
        return self.get_heap_bases()

    def get_rank(self) -> int:
        """Return the same as `cur_rank`."""
        return self.cur_rank

    def get_num_ranks(self) -> int:
        """Return the same as `num_ranks`."""
        return self.num_ranks

    def get_device(self) -> str:
        """Return the same as `device`, torch's name of this rank's device: "cpu" or "cuda:N"."""
        return self.device

    def get_device_id(self) -> int:
        """Return the same as `gpu_id`."""
        return self.gpu_id

    def get_cu_count(self) -> int:
        """Return the number of the device's compute units (SMs, CUs); on the CPU, of cores this process may use."""
        return targets.num_compute_units(self.target)

    def get_heap_bases(self) -> torch.Tensor:
        """Return every rank's heap base as this process sees it: int64[num_ranks] on the device.

        Those of ranks on other nodes are an address where every access fails.
        """
        return self.get_device_context()[2 : 2 + self.num_ranks]

    def get_device_context(self) -> torch.Tensor:
        """Return the context tensor that kernels decode, int64 on the device; graphs may capture it."""
        self._check_open()
        self._reports.watch()
        return self._context

    @property
    def plugin_names(self) -> dict[str, str]:
        """Names of the plugins in use, by kind."""
        return {"allocator": self._plan.allocator.name, "backend": self._plan.backend.name}

    def explain(self) -> str:
        """Return why this allocator, backend and device were chosen, and why others were not."""
        return self._plan.explain()

    @cached_property
    def tracing(self) -> Tracing:
        """Device tracing; see `iris_core.tracing.recorder.Tracing` and docs/tracing.md."""
        return self._tracer(self, self._world)

    @cached_property
    def ccl(self) -> Collectives:
        """The collectives on this heap; see `iris_core.ccl.api.Collectives` and docs/collectives.md."""
        return self._collectives(self._binder)

    @cached_property
    def ops(self) -> Operations:
        """Products fused with communication; see `iris_core.ops.api.Operations` and docs/ops.md."""
        return self._operations(self._binder)

    # -- synchronisation ----------------------------------------------------------------------------------------------
    @uncompiled
    def barrier(self, stream: Any = None, group: Group = None) -> None:
        """Finish this rank's device work, then wait for the other ranks.

        Collective: every rank of the world, or of `group`, calls it.

        A barrier of the whole world also compares the ranks' allocation histories and frees what every rank has freed
        or dropped; a barrier of a group does not.  With a stream, blocks that other streams use stay as they are.

        Args:
            stream: the torch stream to wait for; None for the whole device.  On the CPU a kernel is
                finished when its launch returns, and device work are the calls with `async_op=True`.
            group: a process group of torch.distributed, or ranks; None for the whole world.

        Raises:
            SymmetryError: the ranks' allocation histories differ.
            DeviceTimeoutError: a wait inside a kernel reached IRIS_DEVICE_TIMEOUT, here or on another rank that it
                concerns; raised after all ranks have arrived, once on each.
            DeviceError: likewise, the members of a group called a collective differently; or on the CPU, an
                asynchronous call failed that no caller has waited for.
            CollectiveTimeoutError, PeerLostError: a rank did not arrive in time, or its process ended.
        """
        self._check_open()
        if stream is not None and not hasattr(stream, "synchronize"):
            raise TypeError(f"barrier: stream must be a torch stream or None, not {type(stream).__name__}")
        try:
            if group is None:
                self.heap.barrier_agreement(stream)
            else:
                members = self._world.members_of(group)
                step = partial(self.heap.streams.synchronize, stream)
                on_all_ranks(self._world.subworld(members), NOT_FINISHED, step, DeviceError, members)
        except DeviceError as stopped:
            reported = None if self.device == "cpu" else self._reports.error(at_end=True)  # before the GPU stopped
            if reported is None:
                raise
            raise reported from reported.__cause__ or stopped
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new()

    @uncompiled
    def device_barrier(self, group: Group = None, *, stream: Any = None, sem: str = "release") -> None:
        """Let this rank's device wait for the other ranks' devices; the host goes on at once.

        Collective: every rank of the world, or of `group`, calls it, and no other.  Barriers of the same ranks pair in
        the order of the calls, whatever streams they are on; those that a graph captures pair with the same graph's on
        the other members, so all capture their graphs in the same order (see docs/synchronisation.md).
        Stream: work launched on the stream afterwards begins when every member's stream has reached the barrier.  It
        can be captured in a graph, and replayed any number of times, once it has been called with the same group and
        `sem`.  The first call of a group is an exchange between the hosts of its members.  On the CPU the host waits.

        Args:
            group: a process group of torch.distributed with any ranks of this node, or ranks; None for all.
            stream: a torch stream; None for the current one.
            sem: "release": earlier stores of this rank on the stream are visible to all members afterwards;
                "relaxed": the members wait for each other without that guarantee, which is faster.

        Raises:
            CapabilityError: the backend has no such barrier.
            UnsupportedError: a graph is being captured, and this group and `sem` are new, or no flags are left for it;
                or a member is on another node.
            IrisError: this rank is not a member of `group`, or a member does not share this heap.
            CollectiveTimeoutError, PeerLostError: a member did not take part in the first exchange.
            DeviceTimeoutError, DeviceError: as `barrier` raises them, of earlier kernels; nothing was launched.

        Example:
            >>> with Iris(heap_size="1MiB", device="cpu") as ctx:
            ...     ctx.device_barrier()
        """
        self._check_open()
        if stream is not None and not hasattr(stream, "synchronize"):
            raise TypeError(f"device_barrier: stream must be a torch stream or None, not {type(stream).__name__}")
        self._reports.watch()
        with targets.on_device(self.target):
            if self._reports.alarm[0] != self._reports.heard:
                self._reports.raise_new()
            self._device_barriers.launch(group, sem, stream)

    def broadcast(self, value: Any, src: int = 0, *, source_rank: int | None = None) -> Any:
        """Return rank `src`'s value on every rank.

        Collective: every rank calls it; `value` counts on rank `src` only.

        Args:
            value: tensors, arrays and lists of numbers come back as numpy arrays; else as it is, if it can be pickled,
                and between nodes if it is made of numbers, text, containers and arrays.
            src: the rank whose value is sent.
            source_rank: older name of `src`.

        Raises:
            ValueError: no such rank.
            CollectiveTimeoutError, PeerLostError: a rank did not arrive in time, or its process ended.
        """
        self._check_open()
        root = src if source_rank is None else source_rank
        return self._world.broadcast_object(as_sent(value) if self.cur_rank == root else None, root)

    # -- heap ---------------------------------------------------------------------------------------------------------
    def allocate_symmetric(self, *size: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an uninitialised tensor on the heap and its address on every rank.

        Collective: every rank calls it in the same order.

        Args:
            *size: the shape, as numbers or one sequence.
            dtype: element type; torch's default dtype by default.

        Returns:
            (tensor, peer_bases): peer_bases is int64[num_ranks] on the device; entry r is the address of this tensor on
            rank r, and the entry of this rank equals `tensor.data_ptr()`.

        Raises:
            HeapExhaustedError: no free block is large enough.
        """
        return self.heap.allocate_symmetric(*size, dtype=dtype)

    def as_symmetric(self, external: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the heap with the content of `external`.

        Collective: every rank calls it with a tensor of the same shape, strides and dtype.  The ranks compare their
        tensors before anything is imported, so an error of one rank is raised on all.  Where the allocator can share
        memory (capability "import-tensor"), the result shares `external`'s; elsewhere it is a copy.  A tensor that is
        on the heap already, at the same offset on every rank, is returned as it is.

        Args:
            external: a strided tensor on this rank's device, with any allocator.

        Raises:
            SymmetryError: the ranks' tensors differ, or some of them lie on the heap and others do not.
            DeviceError: some rank's tensor is on another device than that rank's heap.
            LayoutError: some rank's tensor is not torch.strided.
            UnsupportedError: the allocator shares memory, and some rank's tensor is in memory that it cannot share; the
                message says what can be done.  Or it is a lazy view (`conj()`): resolve it first.
            HeapExhaustedError: no free block is large enough.

        Example:
            >>> with Iris(heap_size="1MiB", device="cpu") as ctx:
            ...     weights = ctx.as_symmetric(torch.ones(4, 4))
            ...     ctx.is_symmetric(weights)
            True
        """
        return self.heap.as_symmetric(external)

    def as_remote(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return another rank's copy of a tensor, for operators and copies of torch that this rank starts.

        Local.  The result is like the tensor, on this rank's device; its memory is the other rank's.  Accesses
        to it are not ordered: use a barrier, or a signal, before and after.  It must not be used any more when the
        other rank has freed the tensor, or a context is closed.

        Args:
            tensor: a tensor of this heap, or any view of one.
            rank: whose copy.

        Raises:
            ArgumentError: (a ValueError) the rank is out of range.
            NotOnHeapError: (a ValueError) the tensor does not lie wholly on the symmetric heap.
            UnsupportedError: it lies in memory of Iris itself, which peers may not have mapped, or is a lazy view; or
                the rank is on another node.

        Example:
            >>> with Iris(heap_size="1MiB", device="cpu") as ctx:
            ...     x = ctx.arange(4)
            ...     ctx.as_remote(x[1:], rank=0).tolist()
            [1, 2, 3]
        """
        self._check_tensor(tensor, "as_remote")
        return self.heap.as_remote(tensor, rank)

    def mem_pool(self) -> torch.cuda.MemPool:
        """Return a torch memory pool on the symmetric heap; the same one at every call.

        Inside `torch.cuda.use_mem_pool(ctx.mem_pool())` the results of all torch operators of this thread lie on the
        heap.  They are symmetric if every rank does the same there: the same operations with the same sizes, in the
        same order, as any may wait for the other ranks; and tensors are freed at the same places (none is in a
        reference cycle), as torch reuses their memory at once.  Allocate memory that torch keeps, like the workspace of
        matrix products, before and outside.  Different requests for segments raise SymmetryError at the next barrier.
        How torch divides a segment is not compared; `ctx.heap.offset_of(tensor)` returns a tensor's place.

        Segments that torch no longer uses go back to the heap with `torch.cuda.empty_cache()` on every rank, and with
        the pool.  When there is no memory for a segment, the operator raises torch.OutOfMemoryError and the reason is
        logged; inside `ctx.use_mem_pool()` the reason itself is raised.  Allocate in one thread only: a segment is made
        in Python while torch's allocator is locked, and a thread that waits for that with Python's lock never ends.

        Raises:
            UnsupportedError: this rank computes on the CPU.
        """
        self._check_open()
        if self._mem_pool is None:
            from iris_core.heap.mempool import make_mem_pool

            self._mem_pool = make_mem_pool(self.heap, self.target)
        return self._mem_pool

    def use_mem_pool(self) -> contextlib.AbstractContextManager[None]:
        """Put the results of torch operators on the heap, as `torch.cuda.use_mem_pool(ctx.mem_pool())` does.

        Collective in effect: what `mem_pool` asks of the ranks holds inside the block.  An error that keeps torch
        from getting memory there is raised on every rank, with torch's OutOfMemoryError as its cause.

        Raises:
            UnsupportedError: this rank computes on the CPU.
            HeapExhaustedError: the heap or a rank's device is out of memory; the message says which, and what is free.
            SymmetryError: the ranks have asked for different segments.
            PeerAccessError: some rank could not map a peer's new memory.

        Example:
            with ctx.use_mem_pool():
                y = torch.nn.functional.relu(x @ w)    # y is on the heap
        """
        from iris_core.heap import mempool

        return mempool.use_mem_pool(self.mem_pool(), self.target)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Return whether the whole extent of a tensor lies on this rank's heap."""
        self._check_tensor(tensor, "is_symmetric")
        return self.heap.is_symmetric(tensor)

    def free(self, tensor: torch.Tensor) -> None:
        """Give a tensor's block back, which is reused after the next barrier; see `SymmetricHeap.free`.

        Collective: every rank frees the same tensor at the same place in its sequence of calls; no rank waits.
        """
        self._check_tensor(tensor, "free")
        self.heap.free(tensor)

    def scope(self) -> Scope:
        """Free every tensor that is allocated in the block when it ends; `keep(t)` of the scope lets one escape.

        Collective: every rank enters and leaves it at the same place in its sequence of calls.

        Example:
            >>> with Iris(heap_size="1MiB", device="cpu") as ctx:
            ...     with ctx.scope() as scope:
            ...         a, b = ctx.zeros(8), ctx.zeros(8)
            ...         b = scope.keep(b)
            ...     ctx.heap.stats().num_blocks
            1
        """
        return self.heap.scope()

    def stats(self) -> HeapStats:
        """Return the heap's figures; see `HeapStats`."""
        return self.heap.stats()

    # -- logging ------------------------------------------------------------------------------------------------------
    def debug(self, message: str) -> None:
        """Log at level DEBUG with this rank in the record."""
        self._log.debug(message)

    def info(self, message: str) -> None:
        """Log at level INFO with this rank in the record."""
        self._log.info(message)

    def warning(self, message: str) -> None:
        """Log at level WARNING with this rank in the record."""
        self._log.warning(message)

    def error(self, message: str) -> None:
        """Log at level ERROR with this rank in the record."""
        self._log.error(message)

    # -- end ----------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Wait for the other ranks, then give everything back.  Idempotent.

        Collective: every rank calls it.  If a rank does not arrive, the others close all the same and log it.
        Tensors that still live keep their memory and can be read; kernels must not use them any more.

        Raises:
            DeviceTimeoutError, DeviceError: those that `barrier()` raises of kernels, collectives and asynchronous
                calls, unless a call has raised them.  The context is closed all the same.  While another exception is
                handled, and at the end of a `with` block that failed, it is logged instead.
        """
        self._close(synchronize=True, failing=sys.exc_info()[0] is not None)

    def _close(self, *, synchronize: bool, failing: bool) -> None:
        if self._closed:
            return
        self._closed = CLOSED
        error: IrisError | None = None
        try:
            notify("iris_closing", context=self)
            if os.getpid() == self._pid and synchronize:
                on_all_ranks(self._world, NOT_FINISHED, self.heap.streams.synchronize, DeviceError)
                self._reports.idle = True
        except DeviceError as e:
            error = e
        except (PeerLostError, RankMismatchError, TimeoutError) as e:
            self.warning(f"closing without the other ranks: {e}")
            self._world.give_up(e)
        finally:
            with contextlib.ExitStack() as end:
                end.callback(_close_here, self._closing, self._pid)  # also if an interrupt comes on the way
                if os.getpid() == self._pid:
                    error = self._reports.error(at_end=True) or error
                self._mem_pool = None  # its segments are the heap's
                try:
                    self._finalizer()
                except IrisError as e:  # the device may be lost, by what is reported already
                    error = error or e
        if error is not None:
            if not failing:
                raise error
            self.error(str(error))

    def __enter__(self) -> Iris:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # after an error this rank may be anywhere in its sequence of calls: do not wait for the others
        if error is not None and not self._closed and os.getpid() == self._pid:
            self._world.give_up(error)
        self._close(synchronize=kind is None, failing=kind is not None)

    def _check_open(self) -> None:
        if self._closed:
            raise HeapClosedError(self._closed)

    def _check_tensor(self, tensor: Any, what: str) -> None:
        self._check_open()
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what} takes a torch tensor, not {type(tensor).__name__}")

    def __repr__(self) -> str:
        if self._closed:
            return "<Iris, closed>"
        return (
            f"<Iris rank {self.cur_rank} of {self.num_ranks} on {self.device}, backend {self._plan.backend.name!r}, "
            f"allocator {self._plan.allocator.name!r}, heap of {self.heap_size} bytes>"
        )


_open: weakref.WeakSet[Iris] = weakref.WeakSet()


def _after_fork() -> None:
    """Close all contexts in a forked process: they are the parent's."""
    for context in list(_open):
        if not context._closed:
            why = (
                f"this process ({os.getpid()}) was forked off process {context._pid}, which has opened this and alone "
                "can use it; start processes with the method spawn, or before the context"
            )
            context._closed = why
            for each in (context._world.refuse, context.heap.refuse, context._binder.forget):
                each(why)


os.register_at_fork(after_in_child=_after_fork)


def _notify_allocated(context: weakref.ref[Iris], offset_bytes: int, nbytes: int) -> None:
    """Notify observers of an allocation, by a function that does not keep the context alive."""
    if "iris_allocated" in MAY_BE_WATCHED and (found := context()) is not None:
        notify("iris_allocated", context=found, offset_bytes=offset_bytes, nbytes=nbytes)


def _close_here(closing: contextlib.ExitStack, pid: int) -> None:
    """Undo the opening, except in a forked process: groups and descriptors are its parent's."""
    if os.getpid() == pid:
        closing.close()
