"""The operations of one process group of torch.distributed, over `ctx.ccl`.

One context for each process group and device type is opened by the group's first collective, which all members call.
Messages between two ranks, tensors of other devices and what `ctx.ccl` does not reduce go to a group inside: NCCL's on
GPUs, gloo's on CPUs.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from iris_core.api import Iris
from iris_core.ccl.api import Collectives
from iris_core.device.launch_order import SideStream, on_stream
from iris_core.dispatch.requests import check_reducible, check_strided
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.heap.mempool import share_mem_pool
from iris_core.settings import load_settings
from iris_core.torch_backend import carried
from iris_core.torch_backend.buffers import Buffers
from iris_core.torch_backend.options import Options, reduction
from iris_core.torch_backend.work import DoneWork, SeveralWorks, StreamWork, ThreadWork, begin_event, end_event, watched
from iris_core.types import ReduceOp

_is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_ALIASES = {
    "all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base", "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "start_coalescing": "_start_coalescing", "end_coalescing": "_end_coalescing",
    "reset_sequence": "_set_sequence_number_for_group", "sequence": "_get_sequence_number_for_group",
}  # fmt: skip
"""torch's newer name of a method, or ours, and the older one."""


class GroupOperations:
    """torch's methods of a process group, by their C++ names; see the module's docstring.

    A call without `asyncOp` runs on the current stream.  Others run on a stream of the group; on the CPU in its thread.

    Args:
        store: the store of the group inside.
        rank, size: this process in the group.
        timeout: bound of every wait for another member; with torch's default, Iris's own waits are bounded by
            IRIS_BARRIER_TIMEOUT and IRIS_DEVICE_TIMEOUT.
        find: returns the process group, once torch has registered it.
        options: see `Options`.
    """

    def __init__(
        self, store: c10d.Store, rank: int, size: int, timeout: timedelta, find: Callable[[], dist.ProcessGroup],
        options: Options | None,
    ) -> None:  # fmt: skip
        self._store, self._rank, self._size, self._timeout, self._find = store, rank, size, timeout, find
        self._bound = None if timeout == c10d._DEFAULT_PG_TIMEOUT else timeout.total_seconds()
        self._options = options or Options()
        self._deterministic = load_settings(deterministic=self._options.deterministic).deterministic
        self._devices = self._options.devices or ("cuda" if torch.cuda.is_available() else "cpu",)
        self._contexts: dict[str, Iris] = {}
        # gloo connects all members at once, and only two of them may come to the first message; torch names the groups
        # of a program that begins anew as before, whose addresses lead nowhere
        turn = (store.add("iris begun", 1) - 1) // size
        inner = dist.ProcessGroupGloo(c10d.PrefixStore(f"iris gloo {turn}", store), rank, size, timeout)
        if store.add(f"iris connected {turn}", 1) == size:
            store.set(f"iris all connected {turn}", "")
        store.wait([f"iris all connected {turn}"], timeout)  # one that ends now makes gloo's others fail to connect
        self._inner: dict[str, Any] = {"cpu": inner}
        self._sides: dict[torch.device, SideStream] = {}
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._last: concurrent.futures.Future[Any] | None = None
        self._pending: list[dist.Work] | None = None  # what was begun since `start_coalescing`
        self._is_grouped = False  # NCCL's group inside launches them together
        self._buffers: dict[str, Buffers] = {}
        self._calls, self._served = 0, set[Any]()  # devices, layouts, dtypes and reductions
        self._known: dict[torch.device, tuple[Collectives, dist.Work]] = {}
        self._carried: carried.Carried | None = None
        self._methods: dict[tuple[str, str, str], Callable[..., Any]] = {}  # of the groups inside
        self.passed: Any = lambda work, *_: work  # where torch asks works in C++, it knows only those of its own

    # -- who serves ---------------------------------------------------------------------------------------------------
    def context(self, device: torch.device | str | None = None) -> Iris:
        """Return the context for tensors of a device.

        Collective, the first time: every member of the group calls it.
        """
        device = torch.device(self._devices[0] if device is None else device)
        if device.type not in self._devices:
            raise ArgumentError(f"backend iris serves {', '.join(self._devices)} here, not {device.type}")
        ctx = self._contexts.get(device.type)
        if ctx is None:
            group, given = self._find(), self._options
            if device.type == "cuda" and device.index is None:
                device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
            ctx = self._contexts[device.type] = Iris(
                given.heap_size, allocator=given.allocator, backend=given.backend, device=device, group=group,
                barrier_timeout=self._bound, device_timeout=self._bound, deterministic=self._deterministic,
            )  # fmt: skip
            if device.type == "cuda" and not self._deterministic:
                self._carried = carried.Carried(ctx, partial(self._inside, "cuda"), device)
        return ctx

    def context_in_order(self, device: torch.device) -> Iris:
        """Return the context for a call of its own, after what the group's thread runs; GPUs order streams."""
        if self._last is not None:
            concurrent.futures.wait([self._last])
        return self.context(device)

    def inner(self, device_type: str, way: str = "") -> Any:
        """Return the group inside for tensors of a device type: NCCL's for "cuda", else gloo's; see `_message`."""
        if device_type != "cuda":
            return self._inner["cpu"]
        if device_type + way not in self._inner:  # connects at its first call, and only whom it needs
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = c10d.PrefixStore("iris nccl" + way, self._store)
            self._inner[device_type + way] = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        return self._inner[device_type + way]

    def _serves(self, tensor: torch.Tensor, op: Any = None) -> bool:
        """Whether Iris runs a call; the same on all members, which call with the same dtype and reduction."""
        key = tensor.device, tensor.layout, tensor.dtype, op
        if key in self._served:
            return True
        is_here = tensor.device.type in self._devices and tensor.layout is torch.strided
        serves = is_here and (op is None or reduces(op, tensor.dtype))
        if serves:
            self._served.add(key)
        elif op is not None and self._deterministic and (tensor.is_floating_point() or tensor.is_complex()):
            raise UnsupportedError(
                f"{op.name} of {tensor.dtype} on {tensor.device.type} goes to gloo or NCCL, which do not promise its "
                "bits, and this group wants that (Options.deterministic, IRIS_DETERMINISTIC or "
                "torch.use_deterministic_algorithms)"
            )
        return serves

    def _inside(self, device_type: str, name: str, way: str = "") -> Callable[..., Any]:
        """Return a method of the group inside, by torch's newer name."""
        key = device_type, name, way
        if key not in self._methods:
            inner = self.inner(device_type, way)
            self._methods[key] = getattr(inner, name, None) or getattr(inner, _ALIASES.get(name, name))
        return self._methods[key]

    def _pass_on(self, name: str, tensor: torch.Tensor, *arguments: Any, way: str = "", peer: str = "") -> dist.Work:
        call = self._inside(tensor.device.type, name, way)
        if self._pending is not None and tensor.is_cuda and not self._is_grouped:
            self.inner("cuda", way)._group_start()
            self._is_grouped = True
        with watched(self._contexts, name + peer):
            work = call(*(each for each in arguments if each is not None))
        return self._begun(self.passed(work, self._contexts, name + peer))

    def _carry(self, name: str, whole: Any, part: Any, opts: Any) -> dist.Work | None:
        """Let NCCL carry a call; None if Iris serves it."""
        if (found := self._carried) is None or self._pending is not None:
            return None
        if (work := found.call(name, whole, part, opts)) is not None:
            self._calls += 1
        return work

    def _pass_on_each(self, name: str, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        works = [self._pass_on(name, each[0], *each, opts) for each in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else SeveralWorks(works)

    def _begun(self, work: dist.Work) -> dist.Work:
        self._calls += 1
        if self._pending is not None:
            self._pending.append(work)
        return work

    def explain(self) -> str:
        """Return which contexts and groups inside this process group has opened, and what goes where."""
        lines = [f"collectives of {', '.join(self._devices)} tensors: Iris"]
        lines += [f"  {kind}: {ctx.plugin_names}" for kind, ctx in self._contexts.items()]
        lines.append("send, recv, reductions of bool, complex, fp8, uint16, uint32, uint64, other devices: gloo, NCCL")
        if "cuda" in self._devices and not self._deterministic:
            lines.append(carried.SUMMARY)
        return "\n".join([*lines, *(f"  {kind}: {inner.name()}" for kind, inner in self._inner.items())])

    # -- how it runs --------------------------------------------------------------------------------------------------
    def _launch(
        self, name: str, opts: Any, device: torch.device, tensors: Sequence[Any], result: list[Any],
        call: Callable[[Collectives], Any],
    ) -> dist.Work:  # fmt: skip
        """Run `call` as the options say; `tensors` are all that it reads and writes."""
        known = self._known.get(device)
        if known is None:
            known = self._known[device] = self.context(device).ccl._anywhere, DoneWork([], device)
        ccl, done = known
        is_async, is_recorded = getattr(opts, "asyncOp", True), False
        for each in tensors:  # `any` and a generator take three times as long
            is_recorded |= each.requires_grad
        is_free = self._last is None or device.type == "cuda" or self._last.done()
        if is_free and not (is_async or is_recorded or _is_profiled()):
            call(ccl)
            if device.type == "cpu":
                self._raise_new()
            return self._begun(done)  # torch asks for nothing but its end
        record, is_inference = begin_event(name, tensors, result), torch.is_inference_mode_enabled()

        def run() -> None:
            try:  # perhaps in a thread, and when torch has marked the output to have a gradient
                with torch.inference_mode() if is_inference else torch.no_grad():
                    call(ccl)
                    if device.type == "cpu":
                        self._raise_new()
            finally:
                end_event(record)

        return self._begun(self._run(name, run, is_async, device, tensors, result))

    def _raise_new(self) -> None:
        """Raise what kernels have reported: on the CPU they have ended, and torch's programs expect the error here."""
        reports = self._contexts["cpu"]._reports
        if reports.alarm[0] != reports.heard:
            reports.raise_new()

    def _run(
        self, name: str, run: Callable[[], None], is_async: bool, device: torch.device, tensors: Sequence[Any],
        result: list[Any],
    ) -> dist.Work:  # fmt: skip
        if device.type == "cuda":
            if not is_async:
                run()
                return DoneWork(result, device)
            side = self._sides.get(device) or self._sides.setdefault(device, SideStream(device.index))
            side.follow()
            try:
                on_stream(side.stream, run)
            finally:  # also where a part of it was launched
                begun = StreamWork(result, device, side, tensors)
            return begun
        if not is_async and (self._last is None or self._last.done()):
            run()
            return DoneWork(result, device)
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, f"iris group of rank {self._rank}")
        self._last = self._thread.submit(run)
        work = ThreadWork(result, device, self._last, name)
        if not is_async:
            work.wait()
        return work

    def _fits(self, ccl: Collectives, op: str, parts: Sequence[torch.Tensor], own: Any, *, alike: bool = False) -> bool:
        """Return whether all parts of a list have the shape of this member's own tensor, as they must if `alike`.

        Refuse the call on all members, as `ctx.ccl` does, unless there is one for each, and this one's has that shape.
        """
        is_alike = {each.shape for each in (own, *parts)} == {own.shape}
        if len(parts) != self._size or not (is_alike or (parts[self._rank].shape == own.shape and not alike)):
            needed = f"one for each of {self._size} members, {'all' if alike else 'this one'} of {tuple(own.shape)}"
            text = f"{op}: the list has tensors of the shapes {[tuple(each.shape) for each in parts]}, and not {needed}"
            text += "; of DTensors pass tensor.to_local()" * any(hasattr(each, "to_local") for each in (own, *parts))
            ccl._binder.refuse(op, ArgumentError(text), None)
        return is_alike

    # -- reductions ---------------------------------------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        return self._all_reduce("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._all_reduce("allreduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: Any, opts: Any) -> dist.Work:
        first, *others = tensors = _listed(tensors)
        if not others and (work := self._carry("allreduce", first, first, opts)):
            return work
        op, factor = reduction(opts)
        for each in tensors:
            if not self._serves(each, op):
                return self._pass_on(name, first, tensors, opts)

        def call(ccl: Collectives) -> None:
            for each in tensors:
                if factor is not None:
                    each.mul_(factor)
                ccl.all_reduce(each, each, op)

        return self._launch("all_reduce", opts, first.device, tensors, tensors, call)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        (tensor,) = _listed(tensors)
        op, factor = reduction(opts)
        if not self._serves(tensor, op):
            return self._pass_on("reduce", tensor, [tensor], opts)
        root = _option(opts, "rootRank", 0)

        def call(ccl: Collectives) -> None:
            given = tensor if factor is None else tensor * factor
            ccl.reduce(tensor if root == self._rank else None, given, root, op)

        return self._launch("reduce", opts, tensor.device, [tensor], [tensor], call)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (output,) = _listed(outputs)
        parts = inputs[0] if isinstance(inputs[0], list | tuple) else inputs
        op, factor = reduction(opts)
        if not self._serves(output, op):
            return self._pass_on("reduce_scatter", output, [output], [parts], opts)

        def call(ccl: Collectives) -> None:
            given = parts if factor is None else [each * factor for each in parts]
            if self._fits(ccl, "reduce_scatter", given, output):
                ccl.reduce_scatter(output, torch.stack(given), op)
            else:
                for root, part in enumerate(given):
                    ccl.reduce(output if root == self._rank else None, part, root, op)

        return self._launch("reduce_scatter", opts, output.device, [output, *parts], [output], call)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        work = self._carry("reduce_scatter_single", input, output, opts)
        return work or self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        op, factor = reduction(opts)
        if not all(self._serves(each, op) for each in outputs):
            return self._pass_on_each("reduce_scatter_single", outputs, inputs, opts)

        def call(ccl: Collectives) -> None:
            for output, input in zip(outputs, inputs, strict=True):
                scaled = input if factor is None else input * factor
                ccl.reduce_scatter(output, as_parts(scaled, output, self._size), op)

        return self._launch("reduce_scatter", opts, outputs[0].device, [*outputs, *inputs], list(outputs), call)

    # -- what moves only ----------------------------------------------------------------------------------------------
    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        (tensor,) = _listed(tensors)
        if not self._serves(tensor):
            return self._pass_on("broadcast", tensor, [tensor], opts)
        root = _option(opts, "rootRank", 0)
        return self._launch("broadcast", opts, tensor.device, [tensor], [tensor], lambda c: c.broadcast(tensor, root))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        inputs = _listed(inputs)
        parts = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
        if not self._serves(inputs[0]):
            return self._pass_on("allgather", inputs[0], [list(each) for each in parts], inputs, opts)
        return self._all_gather_lists(parts, inputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        if not self._serves(inputs[0]):
            return self._pass_on("allgather_coalesced", inputs[0], outputs, inputs, opts)
        fitting = [each for each in outputs if len(each) == len(inputs)]
        return self._all_gather_lists([[each[i] for each in fitting] for i in range(len(inputs))], inputs, opts)

    def _all_gather_lists(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:
        flat = list(itertools.chain(*outputs))

        def call(ccl: Collectives) -> None:
            for parts, input in zip(outputs, inputs, strict=True):
                if self._fits(ccl, "all_gather", parts, input):
                    whole = input.new_empty((self._size, *input.shape))
                    ccl.all_gather(whole, input.contiguous())
                    _copy(parts, whole)
                else:
                    parts[self._rank].copy_(input)
                    for root, part in enumerate(parts):
                        ccl.broadcast(part, root)

        return self._launch("all_gather", opts, inputs[0].device, [*flat, *inputs], flat, call)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        work = self._carry("all_gather_single", output, input, opts)
        return work or self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        if not self._serves(inputs[0]):
            return self._pass_on_each("all_gather_single", outputs, inputs, opts)

        def call(ccl: Collectives) -> None:
            for output, input in zip(outputs, inputs, strict=True):
                ccl.all_gather(as_parts(output, input, self._size), input)

        return self._launch("all_gather", opts, inputs[0].device, [*outputs, *inputs], list(outputs), call)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (input,) = _listed(inputs)
        if not self._serves(input):
            return self._pass_on("gather", input, outputs, [input], opts)
        is_root = (root := _option(opts, "rootRank", 0)) == self._rank
        parts = [*itertools.chain(*outputs)] if is_root else []

        def call(ccl: Collectives) -> None:
            if is_root:
                self._fits(ccl, "gather", parts, input, alike=True)
            whole = input.new_empty((self._size, *input.shape)) if is_root else None
            ccl.gather(whole, input.contiguous(), root)
            if whole is not None:
                _copy(parts, whole)

        return self._launch("gather", opts, input.device, [*parts, input], list(parts), call)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (output,) = _listed(outputs)
        if not self._serves(output):
            return self._pass_on("scatter", output, [output], inputs, opts)
        is_root = (root := _option(opts, "rootRank", 0)) == self._rank
        parts = [*itertools.chain(*inputs)] if is_root else []

        def call(ccl: Collectives) -> None:
            if is_root:
                self._fits(ccl, "scatter", parts, output, alike=True)
            ccl.scatter(output, torch.stack(parts) if is_root else None, root)

        return self._launch("scatter", opts, output.device, [*parts, output], [output], call)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Any = None, input_splits: Any = None,
        opts: Any = None,
    ) -> dist.Work:  # fmt: skip
        splits = list(output_splits or ()), list(input_splits or ())
        if not self._serves(input):
            return self._pass_on("all_to_all_single", input, output, input, *splits, opts)

        def call(ccl: Collectives) -> None:
            ccl.all_to_all(output, input.contiguous(), output_split_sizes=splits[0], input_split_sizes=splits[1])

        return self._launch("all_to_all", opts, input.device, [output, input], [output], call)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        outputs, inputs, first = list(outputs), list(inputs), inputs[0]
        if not self._serves(first):
            return self._pass_on("alltoall", first, outputs, inputs, opts)

        def call(ccl: Collectives) -> None:
            # parts may be uneven on some rank, which the others do not know: all of them pass sizes
            given, taken = [each.numel() for each in inputs], [each.numel() for each in outputs]
            received, sent = first.new_empty(sum(taken)), torch.cat([each.reshape(-1) for each in inputs])
            ccl.all_to_all(received, sent, output_split_sizes=taken, input_split_sizes=given)
            _copy(outputs, [part.view(each.shape) for part, each in zip(received.split(taken), outputs, strict=True)])

        return self._launch("all_to_all", opts, first.device, [*outputs, *inputs], outputs, call)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for the other members, and for what this rank's device does."""
        device = torch.device(self._devices[0])
        ctx = self.context(device)
        if device.type == "cuda":
            ctx.barrier()
            return DoneWork([], device)
        return self._launch("barrier", opts, device, [], [], lambda _: ctx.barrier())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for the other members on the host; rank 0 names who does not come.  torch asks gloo's groups alone."""
        timeout = _option(timeout, "timeout", timeout)  # from torch 2.14 on, among options
        with watched(self._contexts, "monitored_barrier"):
            self.inner("cpu").monitored_barrier(self._timeout if timeout is None else timeout, wait_all_ranks)

    # -- two ranks ----------------------------------------------------------------------------------------------------
    def send(self, tensors: Any, dst: int, tag: int = 0) -> dist.Work:
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> dist.Work:
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._message("recv_anysource", tensors, tag)

    def _message(self, name: str, tensors: Any, *arguments: Any) -> dist.Work:
        """Pass a message on.

        NCCL's group runs the messages between two ranks one after the other, and two ranks may both send first: those
        to lower ranks have a group of their own, unless all are launched together.
        """
        (tensor,) = tensors = _listed(tensors)
        check_strided(name, "tensor", tensor)
        peer = arguments[0]
        is_down = (peer < self._rank) == (name == "send") and self._pending is None
        whom = f" {'to' if name == 'send' else 'from'} rank {peer}" * (name != "recv_anysource")
        return self._pass_on(name, tensor, tensors, *arguments, way=" to lower ranks" * is_down, peer=whom)

    def start_coalescing(self, device: torch.device | None = None) -> None:
        """Collect what follows; NCCL's group inside puts messages between GPUs into one launch."""
        self._pending, self._is_grouped = [], False

    def end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        """End what `start_coalescing` began, and return the work of all that was begun since."""
        pending, self._pending = self._pending or [], None
        if self._is_grouped:
            self.inner("cuda")._group_end()
        return SeveralWorks(pending)

    # -- memory, splits -----------------------------------------------------------------------------------------------
    def supports_tensor_alloc(self, device: torch.device | int) -> bool:
        """Return whether `allocate_tensor` serves a device; a number is that of a GPU."""
        return ("cuda" if isinstance(device, int) else device.type) in self._devices

    def allocate_tensor(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor of (size,), uninitialised, on the heap of the group's context; see `Buffers`.

        Collective: all members allocate and drop tensors of the same sizes in the same order.
        """
        ctx = self.context(device)
        buffers = self._buffers.get(device.type)
        if buffers is None:
            buffers = self._buffers[device.type] = Buffers(ctx)
        return buffers.take((size,), dtype)

    def allocator(self) -> Any:
        """Return what torch can make a `torch.cuda.MemPool` of: its tensors lie on the heap; see `Iris.mem_pool`.

        Collective, the first time.

        Raises:
            UnsupportedError: Iris serves no GPUs here.
        """
        if "cuda" not in self._devices:
            raise UnsupportedError("mem_allocator: torch has memory pools for GPUs only; use allocate_tensor(...)")
        return share_mem_pool(self.context("cuda").mem_pool())

    def reset_sequence(self) -> None:
        self._calls = 0

    def sequence(self) -> int:
        """Return how many operations were begun."""
        return self._calls

    # -- the end ------------------------------------------------------------------------------------------------------
    def shutdown(self) -> None:
        """Close the contexts, which waits for the other members, and the groups inside; errors are logged."""
        if self._thread is not None:
            self._thread.shutdown()
        self._end("shutdown")

    def abort(self) -> None:
        """Give back what the group has opened, without waiting for other members."""
        self._end("abort")

    def _end(self, how: str) -> None:
        if self._carried is not None:
            self._carried.close()
            self._carried = None
        for ctx in self._contexts.values():
            ctx._close(synchronize=how == "shutdown", failing=True)
        for inner in self._inner.values():
            getattr(inner, how)()
        for opened in (self._contexts, self._known, self._buffers, self._inner, self._methods):
            opened.clear()


METHODS = tuple(name for name, each in vars(GroupOperations).items() if callable(each) and not name.startswith("_"))
"""What torch calls, by its newer names; `OLDER` has the older ones."""
OLDER = {older: newer for newer, older in _ALIASES.items()}


def reduces(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Return whether Iris reduces elements of a type as torch.distributed does: bool, for one, it adds otherwise."""
    try:
        check_reducible("", op, dtype)
    except (ArgumentError, UnsupportedError):
        return False
    return dtype is not torch.bool


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _option(opts: Any, name: str, default: Any) -> Any:
    """Return an option; torch passes a number itself where it is the only one."""
    return opts if isinstance(opts, int) else getattr(opts, name, default)


def as_parts(whole: torch.Tensor, part: torch.Tensor, size: int) -> torch.Tensor:
    """View a tensor of all members' elements as (size, ...) of a part; torch looks at the number of elements only."""
    if whole.shape[1:] == part.shape[1:] and part.dim():
        return whole
    try:
        return whole.view(size, *part.shape)
    except RuntimeError:
        return whole  # which `ctx.ccl` refuses, on all members


def _copy(parts: Iterable[torch.Tensor], whole: Iterable[torch.Tensor]) -> None:
    for part, found in zip(parts, whole, strict=True):
        part.copy_(found)
