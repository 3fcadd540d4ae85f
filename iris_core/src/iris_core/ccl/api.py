"""`ctx.ccl`: the collectives of one context.

A repeated call is one dict lookup and a launch; `Binder` prepares the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from iris_core.device.targets import on_device
from iris_core.dispatch.calls import Calls, current_device
from iris_core.dispatch.config import Config
from iris_core.dispatch.requests import ALIGNMENT_NBYTES, OPS, TORCH, CollectiveCall, facts_of_splits, reach
from iris_core.dispatch.team import Team
from iris_core.dispatch.traced import is_traced, trace
from iris_core.heap.streams import uncompiled
from iris_core.protocols import Work
from iris_core.types import Group, ReduceOp

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


class Collectives(Calls):
    """The collectives of one context: `ctx.ccl`.

    Collective: every member of the group calls an operation with the same arguments, in the same order, and no other
    rank does.  These must be equal: dtypes, numbers of elements, strides, reduction, root, config, and whether a tensor
    lies on the heap; its place there may differ.

    Tensors may have any shape and any strides and may lie on the heap or not; those on the heap that are contiguous
    are worked on where they are, others go through a workspace.  An operation works in place where torch's does.

    Stream: an operation runs on the current stream, and the host waits for nothing.  With `async_op=True` it runs on a
    stream of the group, after the work of the current stream so far, and returns a handle: `wait()` lets the then
    current stream wait, `is_completed()` asks.  On the CPU an operation is finished when the call returns, and an
    asynchronous one runs in a thread; an error that its `wait()` has not raised is a DeviceError of the next
    `ctx.barrier()` or `close()` on all members, or of the next call of the group on each member.

    Threads: any thread may call, whatever its current device is; calls of one group come one after the other, in the
    same order on all members.  The first call of a kind may take memory of the heap: make it in the thread that
    allocates, or while that thread neither allocates nor frees.

    Graphs: an operation can be captured once it was called with tensors of the same kind, and replayed at any time.

    Arguments that they share:
        group: a process group of torch.distributed with any ranks of this world, in any order, a DeviceMesh of one
            dimension, or a list of such ranks; None for all.
        op: a ReduceOp, also of torch.distributed; SUM by default.  16-bit floats are reduced in float32; sums of
            integers, and of their averages, wrap around.
        src, dst: a rank of this context's world, also where a group is given.
        async_op: return a handle instead of running on the current stream.
        config: how to run; see `iris_core.ccl.Config`.

    All raise:
        ArgumentError: (a ValueError) shapes, dtypes or options do not fit.
        DeviceError: a tensor is on another device.
        UnsupportedError: no algorithm can serve the call (the message lists all with their reasons), or a graph is
            being captured and it is the first call of its kind.
        RankMismatchError: the members call differently (noticed at the first call of a kind, before anything is
            launched; later differences of some algorithms are a DeviceError of the next call of each member, see
            docs/collectives.md).
        IrisError: a member could not prepare the call; the same on all of them, and none has launched anything.
        DeviceTimeoutError, DeviceError: a kernel of an earlier call has given up waiting, or another member's was
            called differently; on each member, at its next call, which launches nothing.
        IrisError: this rank is not a member of the group.
        HeapClosedError: the context is closed.
        CollectiveTimeoutError, PeerLostError: a member did not take part in the exchange of a first call.
    """

    _launches, _operations = ("bound", "bound_anywhere"), OPS

    # -- operations ---------------------------------------------------------------------------------------------------
    def all_reduce(
        self, output: Tensor, input: Tensor, op: ReduceOp | Any = None, group: Group = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:  # fmt: skip
        """Reduce the inputs of all members into the output of each; all get the same bits.

        Args:
            output: of the input's shape; may be the input.
            input: this rank's contribution.
        """
        return self._run("all_reduce", output, input, group, async_op, config, op)

    def all_gather(
        self, output: Tensor, input: Tensor, group: Group = None, async_op: bool = False, config: Config | None = None
    ) -> Work | None:
        """Put the inputs of all members, in the group's order, into the output of each.

        Args:
            output: (size * M, ...) or (size, M, ...).
            input: (M, ...); may be this rank's part of the output.
        """
        return self._run("all_gather", output, input, group, async_op, config)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: ReduceOp | Any = None, group: Group = None, async_op: bool = False,
        config: Config | None = None, *, layout: str = TORCH,
    ) -> Work | None:  # fmt: skip
        """Reduce the inputs of all members; each member gets its part of the result.

        Args:
            output: (M, ...); may be this rank's part of the input.
            input: (size * M, ...) or (size, M, ...).
            layout: "torch", or "tiles" as in AMD's Iris: both are (M, N), and each member gets some tiles of
                the result at their own places; the rest of its output stays as it is.
        """
        return self._run("reduce_scatter", output, input, group, async_op, config, op, layout)

    def all_to_all(
        self, output: Tensor, input: Tensor, group: Group = None, async_op: bool = False, config: Config | None = None,
        *, output_split_sizes: Sequence[int] | Tensor | None = None,
        input_split_sizes: Sequence[int] | Tensor | None = None, layout: str = TORCH,
    ) -> Work | None:  # fmt: skip
        """Give each member its part of the input; the output has the parts from all members, in the group's order.

        Args:
            output: memory of its own.
            input: with layout "torch", equal parts along the first dimension.
            output_split_sizes: rows that come from each member, where parts are not equal; None or an empty list for
                equal parts.
            input_split_sizes: rows for each member, as many as that one takes from this rank.
            layout: "torch", or "columns" as in AMD's Iris: both are (M, N * size), and the parts are chunks
                of columns.

        Where no host knows the sizes, both are contiguous int64 tensors of `size` numbers on the device, as in torch's
        `all_to_all_vdev`: input_split_sizes is read, output_split_sizes is written, and no host waits.  Then the rows
        that they name lie behind each other in both tensors, from row 0; other rows are not read, and stay as they are.
        What exceeds a tensor is not moved, and is the DeviceError of the next call.  All ranks are on one node.
        """
        both: Any = (input_split_sizes, output_split_sizes)
        if any(isinstance(each, torch.Tensor) for each in both):
            return self._run("all_to_all", output, input, group, async_op, config, None, layout, both)
        splits: Any = None
        if output_split_sizes is not None or input_split_sizes is not None:
            sizes = output_split_sizes, input_split_sizes
            splits = tuple(None if each is None or len(each) == 0 else tuple(each) for each in sizes)
            splits = None if splits == (None, None) else splits  # torch says that also by empty lists
        return self._run("all_to_all", output, input, group, async_op, config, splits, layout)

    def broadcast(
        self, tensor: Tensor, src: int = 0, group: Group = None, async_op: bool = False, config: Config | None = None
    ) -> Work | None:
        """Give the tensor of one member to all.

        Args:
            tensor: the input on rank `src`, the output on the others.
        """
        own = src == self._binder.rank
        return self._run("broadcast", tensor, tensor if own else None, group, async_op, config, src)

    def reduce(
        self, output: Tensor | None, input: Tensor, dst: int = 0, op: ReduceOp | Any = None, group: Group = None,
        async_op: bool = False, config: Config | None = None,
    ) -> Work | None:  # fmt: skip
        """Reduce the inputs of all members into the output of one.

        Args:
            output: on rank `dst`, of the input's shape; may be the input.  Ignored on other ranks.
            input: this rank's contribution.
        """
        out = output if dst == self._binder.rank else None
        return self._run("reduce", out, input, group, async_op, config, op, dst)

    def gather(
        self, output: Tensor | None, input: Tensor, dst: int = 0, group: Group = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:  # fmt: skip
        """Put the inputs of all members, in the group's order, into the output of one.

        Args:
            output: on rank `dst`, (size * M, ...) or (size, M, ...).  Ignored on other ranks.
            input: (M, ...); on rank `dst` it may be its part of the output.
        """
        out = output if dst == self._binder.rank else None
        return self._run("gather", out, input, group, async_op, config, dst)

    def scatter(
        self, output: Tensor, input: Tensor | None, src: int = 0, group: Group = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:  # fmt: skip
        """Give each member its part of the input of one.

        Args:
            output: (M, ...); on rank `src` it may be its part of the input.
            input: on rank `src`, (size * M, ...) or (size, M, ...).  Ignored on other ranks.
        """
        inp = input if src == self._binder.rank else None
        return self._run("scatter", output, inp, group, async_op, config, src)

    def send(
        self, tensor: Tensor, dst: int, group: Group = None, async_op: bool = False, config: Config | None = None
    ) -> Work | None:
        """Send a tensor to another rank.

        Collective: this rank and `dst`, which calls `recv`.  Messages from one rank to another arrive in order, in all
        groups.
        A message that does not fit into the receiver's inbox waits there to be received: where two ranks send each
        other large messages, one of them receives first, or the calls are asynchronous.  To another node, every message
        waits for its receiver.

        Args:
            tensor: the tensor to send.
        """
        return self._run("send", None, tensor, group, async_op, config, dst)

    def recv(
        self, tensor: Tensor, src: int, group: Group = None, async_op: bool = False, config: Config | None = None
    ) -> Work | None:
        """Receive a tensor from another rank; see `send`.

        Args:
            tensor: of the same dtype and number of elements as the one sent.  Else it stays unchanged, the message is
                lost, and the next call of both ranks raises DeviceError; between nodes, on CPUs, this one.
        """
        return self._run("recv", tensor, None, group, async_op, config, src)

    @uncompiled
    def barrier(self, group: Group = None, async_op: bool = False) -> Work | None:
        """Let this rank's stream wait for those of the other members; see `Iris.device_barrier`."""
        self._binder.open()
        with on_device(self._binder.target):
            return self._binder.barrier(group, async_op)

    def reset(self, group: Group = None) -> None:
        """Reset a group's collectives and barriers after a wait has timed out.

        Collective: every member calls it, after the DeviceTimeoutError: a rank whose wait timed out is out of step
        with the others.  Reports of the members' kernels that no call has raised yet are dropped.  It waits for the
        device and for the other members' hosts.  Captured graphs can be replayed afterwards.

        Args:
            group: see `Collectives`; messages between two ranks belong to the whole world.

        Raises:
            IrisError: this rank is not a member of the group.
            HeapClosedError: the context is closed.
            CollectiveTimeoutError, PeerLostError: a member did not arrive.
        """
        self._binder.reset(group)

    def team(self, members: Sequence[int]) -> Team:
        """Return the team of some ranks of this world, in this order, as algorithms get it.

        Collective, the first time: every member calls it, and no other rank.
        """
        return self._binder.team(tuple(members))

    @staticmethod
    def _describe(
        op: str, out: Any, inp: Any, group: Group, async_op: bool, config: Any, first: Any = None, second: Any = None,
        splits: tuple[Any, ...] = (),
    ) -> tuple[CollectiveCall, bool]:  # fmt: skip
        return CollectiveCall(op, (out, inp, *splits), group, config, first, second), async_op

    # -- the fast path ------------------------------------------------------------------------------------------------
    def _run(
        self, op: str, out: Tensor | None, inp: Tensor | None, group: Group, async_op: bool,
        config: Config | None, first: Any = None, second: Any = None, splits: tuple[Any, ...] = (),
    ) -> Work | None:  # fmt: skip
        tensors = (out, inp, *splits) if splits else (out, inp)
        how = op, group, config, first, second
        if is_compiling() and is_traced(tensors):
            return trace(self, op, tensors, how[1:], bool(async_op))  # type: ignore[no-any-return]
        gpu = self._binder.gpu
        if gpu is not None and current_device() != gpu:  # a thread of its own begins on device 0
            with torch.cuda.device(gpu):
                return Collectives._run(self, op, out, inp, group, async_op, config, first, second, splits)
        front = None if splits else self._bound.front
        bound: Any = front(tensors, how) if front is not None else False
        if not bound:
            is_new, bound = bound is None, self._find(op, tensors, group, config, first, second)
            if is_new and front is not None:
                front.keep(tensors, how, bound)
        if async_op:
            return bound.run_async(*tensors)  # type: ignore[no-any-return]
        bound.run(*tensors)
        return None

    def _find(
        self, op: str, tensors: tuple[Any, ...], group: Group, config: Config | None, first: Any, second: Any
    ) -> Any:
        """Return the bound launch of a call, by a key that Python makes; bind it if there is none."""
        out, inp, *splits = tensors
        key: Any = None
        bound: Any = None
        main: Any = out if inp is None else inp
        # Repeated calls are refused, too, with lazily conjugated or negated tensors, or gradients to be recorded.
        try:
            if splits:
                first = facts_of_splits(*splits)
            # Flat, and only of parts that are quick to make and to compare: this is most of a launch's time.
            places = at = main.data_ptr() or main.untyped_storage().data_ptr()  # of an empty tensor
            dense, dtype, recorded = main.is_contiguous() or main.stride(), main.dtype, main.requires_grad
            has_parts = dtype in _COMPLEX
            lazy = main.is_neg() or (has_parts and main.is_conj())
            relation: Any = None
            out_facts: Any = None
            if out is main:
                relation = "alone" if inp is None else 0
            elif out is not None:
                out_at = out.data_ptr() or out.untyped_storage().data_ptr()
                places |= out_at
                lazy = lazy or out.is_neg() or (has_parts and out.is_conj())  # other dtypes are refused
                recorded = recorded or out.requires_grad
                out_dense = out.is_contiguous() or out.stride()
                out_facts = out.shape, out_dense, out.dtype, out.get_device(), self._low <= out_at < self._high
                distance = at - out_at  # matters where they overlap; else only that they do not
                lower, lower_dense = (out, out_dense) if distance >= 0 else (main, dense)
                if abs(distance) < (lower.nbytes if lower_dense is True else reach(lower)):
                    relation = distance
            key = (
                op, places % ALIGNMENT_NBYTES == 0, main.shape, dense, dtype, main.get_device(),
                self._low <= at < self._high, out_facts, relation, lazy, recorded and torch.is_grad_enabled(),
                group, config, first, second,
            )  # fmt: skip
            bound = self._bound.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensor with memory, or no key: the binder says what
            if isinstance(group, list):
                return self._find(op, tensors, tuple(group), config, first, second)
            key = None
        given = group, config, first, second
        return bound or self._prepare(CollectiveCall(op, tensors, *given), key, lambda: self._bound)
