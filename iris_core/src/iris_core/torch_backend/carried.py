"""Calls that NCCL carries, for they run beside products: it takes few multiprocessors, and little of the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from iris_core.api import Iris
from iris_core.device.launch_order import DeviceOrder, SideStream, on_stream
from iris_core.errors import HeapClosedError, PeerLostError
from iris_core.logs import logger
from iris_core.providers.torch_distributed import guarded
from iris_core.torch_backend.options import reduction
from iris_core.torch_backend.work import DoneWork

SUMMARY = "floats off the heap and graphs: sums, gathers and scatters, if asynchronous, or of 64 MiB but for sums: NCCL"
_ENGINE = "NCCL of the process group"
_LARGE_NBYTES = 64 << 20  # FSDP2 gathers and scatters layers beside products, on a stream of its own
_LOOK_S = 0.5
_FLOATS = torch.bfloat16, torch.float16, torch.float32


class Carried:
    """The calls of a process group that its NCCL group inside carries, in the order of those of `ctx.ccl`.

    These are, of floats, outside of graphs, asynchronous calls and large gathers and scatters.  Iris serves the first
    call of each kind, and has prepared what graphs capture then.  It serves all if NCCL cannot, or if a tensor of that
    call is on the heap or strided on a member.

    When a peer's process ends, NCCL's calls are aborted, and the next one raises PeerLostError.

    Args:
        ctx: the context for GPUs.
        method: returns a method of the group inside, by its name.
        device: the GPU.
    """

    def __init__(self, ctx: Iris, method: Callable[[str], Callable[..., Any]], device: torch.device) -> None:
        binder, self._check_peers, self._method = ctx._binder, ctx.heap.check_peers, method
        everyone = binder.members_of(None)
        order, self._compare = binder.order(everyone), partial(binder.members.gather, everyone)
        assert isinstance(order, DeviceOrder)
        self._order, self._side = order, SideStream(device.index)
        self._done = DoneWork([], device)
        self._device, self._heap, self._size = device, binder.here.heap, binder.here.world_size
        self._known: dict[tuple[Any, ...], Any] = {}  # NCCL's method, None if Iris serves them
        self._is_usable: bool | None = None  # or not known yet
        self._lost: PeerLostError | None = None
        self._closed = threading.Event()

    def _connect(self, facts: dict[str, str]) -> bool:
        """Connect NCCL, and watch the peers; return whether all members can, which they cannot on one GPU."""
        gpus = self._compare(facts, str(torch.cuda.get_device_properties(self._device).uuid))
        problem = "" if len(set(gpus)) == len(gpus) else "ranks share a GPU"
        if not problem:
            try:
                self._method("eager_connect_single_device")(self._device)  # all are here, and alive
            except (AttributeError, RuntimeError) as error:
                problem = str(error)
        problems = self._compare(facts, problem)
        if any(problems):
            logger.info("NCCL carries no calls of backend iris: %s", next(filter(None, problems)))
            return False
        threading.Thread(target=self._watch, name="iris watch of NCCL", daemon=True).start()
        return True

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._check_peers()
            except PeerLostError as error:
                self._lost = error
                self._method("abort")()
                return
            except HeapClosedError:
                return

    def close(self) -> None:
        """End the thread that watches the peers."""
        self._closed.set()

    def call(self, name: str, whole: torch.Tensor, part: torch.Tensor, opts: Any) -> dist.Work | None:
        """Run a call by NCCL's method `name`; None if Iris serves it.

        Collective.  RankMismatchError on all ranks if others run another call, or by Iris, when it is new.
        """
        is_async = getattr(opts, "asyncOp", False)
        if not is_async and (whole is part or whole.nbytes < _LARGE_NBYTES):  # most calls: nothing runs beside them
            return None
        if self._is_usable is False or opts is None or torch.cuda.is_current_stream_capturing():
            return None
        kind = None if name == "all_gather_single" else reduction(opts)[0]
        key = name, kind, whole.shape, part.shape, whole.dtype, whole.device, whole.layout
        if (method := self._known.get(key)) is not None:
            return self._carry(method, name, whole, part, is_async, opts)
        if key[-2:] == (self._device, torch.strided) and whole.dtype in _FLOATS and key not in self._known:
            self._decide(key, whole, part)
        return None

    def _decide(self, key: tuple[Any, ...], whole: torch.Tensor, part: torch.Tensor) -> None:
        """Agree on who serves calls of a kind after its first one.  Collective."""
        if whole is not part and whole.numel() != self._size * part.numel():
            return  # which Iris refuses
        facts = dict(zip(("operation", "reduction", "whole", "part", "dtype"), map(str, key), strict=False))
        facts["algorithm"] = _ENGINE
        if self._is_usable is None:
            self._is_usable = self._connect(facts)
        if self._is_usable:  # members' tensors may lie differently: all go by the first call
            (low, high), each = self._heap, (whole, part)
            is_usual = all(x.is_contiguous() and not low <= x.data_ptr() < high for x in each)
            is_carried = all(self._compare(facts, is_usual))
            self._known[key] = self._method(key[0]) if is_carried else None

    def _carry(
        self, method: Any, name: str, whole: torch.Tensor, part: torch.Tensor, is_async: bool, opts: Any
    ) -> dist.Work:
        if self._lost is not None:
            raise self._lost
        dense = whole.contiguous()
        own = dense if part is whole else part.contiguous()
        out, copy, inp = (part, own, dense) if name == "reduce_scatter_single" else (whole, dense, own)
        given = ([dense], opts) if part is whole else (copy, inp, opts)
        run: Any = self._order.run
        try:
            if not is_async or self._order.continues(_ENGINE):
                work = run(method, *given, engine=_ENGINE)
            else:  # the current stream must not wait for calls of ours
                self._side.follow()
                work = on_stream(self._side.stream, partial(run, method, *given, engine=_ENGINE))
            if is_async and copy is out:
                return work  # type: ignore[no-any-return]
            if work is not None:  # else the current stream has it in order
                work.wait()
            if copy is not out:
                out.copy_(copy)
            return self._done
        except RuntimeError:
            with guarded(name, range(self._size), self._check_peers):
                raise
