"""What `ctx.ccl` and `ctx.ops` share: explaining calls, and binding calls that are repeated with the same tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from iris_core.device.targets import on_device
from iris_core.dispatch.bind import Binder, Call, Launches
from iris_core.dispatch.choice import Explanation
from iris_core.dispatch.requests import OPS
from iris_core.dispatch.traced import Anywhere
from iris_core.errors import ArgumentError
from iris_core.protocols import Work

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
"""The calling thread's GPU, by torch's index."""


class Calls:
    """The calls of one context, and where the rank's heap begins and ends."""

    _launches: ClassVar[tuple[str, str]]  # what a binder calls those of this face, and those of `anywhere`
    _operations: ClassVar[tuple[str, ...]]
    _describe: Callable[..., tuple[Call, bool]]  # returns what `_described` does, of the arguments of `_run`

    def __init__(self, binder: Binder, *, anywhere: bool = False) -> None:
        self._binder, self._is_anywhere = binder, anywhere
        self._bound: Launches = getattr(binder, self._launches[anywhere])
        self._prepare: Callable[..., Any] = Anywhere(binder).bind if anywhere else binder.bind
        self._low, self._high = binder.here.heap

    @cached_property
    def _anywhere(self) -> Self:
        """The same operations, for members whose tensors lie differently; see `Anywhere`.  All use it, or none."""
        return type(self)(self._binder, anywhere=True)

    def explain(self, op: str, /, *tensors: torch.Tensor | None, **options: Any) -> Explanation:
        """Return which algorithm serves a call, why, what the others would cost, and why others cannot.

        Local: nothing is communicated or launched.

        Args:
            op: the operation, "all_reduce" and so on.
            *tensors: as the operation takes them.
            **options: likewise.

        Example:
            >>> import torch
            >>> from iris_core import Iris
            >>> with Iris("1MiB", device="cpu") as ctx:
            ...     x = torch.ones(4)
            ...     print(ctx.ccl.explain("all_reduce", x, x).algorithm)
            local
        """
        return self._binder.explain(self._described("explain", op, tensors, options)[0])

    def bind(self, op: str, /, *tensors: torch.Tensor | None, **options: Any) -> BoundCall:
        """Prepare a call that is repeated with the same tensors; what it returns launches it without looking at them.

        Like persistent collectives of MPI 4.0 (chapter 6.13).  The tensors are kept; their values may change, their
        memory, shapes and strides may not.

        Collective: every member binds the call, like a first call of its kind, and calls what it gets in the same order
        as other calls of the group.  Where a first call measures (IRIS_TUNE), the output's values are lost.

        Args:
            op: the operation, "all_reduce" and so on.
            *tensors: as the operation takes them.
            **options: likewise, but no `async_op` (see `BoundCall.start`) and no `workspace`.

        Raises:
            ArgumentError: there is no such operation, or it is given one of those two.
            All that the operation raises.

        Example:
            >>> import torch
            >>> from iris_core import Iris
            >>> with Iris("1MiB", device="cpu") as ctx:
            ...     x, y = torch.ones(2), torch.empty(2)
            ...     add = ctx.ccl.bind("all_reduce", y, x)
            ...     add()
            ...     y.tolist()
            [1.0, 1.0]
        """
        call, other = self._described("bind", op, tensors, options)
        if other:
            raise ArgumentError("bind: neither async_op nor workspace: start() of a bound call returns a handle")
        return BoundCall(self._binder, self._prepare, call)

    def _described(self, what: str, op: str, tensors: Any, options: Any) -> tuple[Call, bool]:
        """Return the call that an operation passes on, and whether it is given `async_op` or `workspace`."""
        if op not in self._operations:
            raise ArgumentError(f"{what} takes {', '.join(self._operations)}, not {op!r}")
        asked: Any = copy.copy(self)
        asked._run = self._describe
        return getattr(type(self), op)(asked, *tensors, **options)  # type: ignore[no-any-return]


class BoundCall:
    """A call of `ctx.ccl` or `ctx.ops` with its tensors: it launches as that call does; see `bind` there.

    Stream, threads, graphs: as with the call itself.

    Raises:
        HeapClosedError: the context is closed.
        DeviceTimeoutError, DeviceError: as the call.
    """

    def __init__(self, binder: Binder, prepare: Callable[..., Any], call: Call) -> None:
        self._binder, self._tensors = binder, call.tensors
        self._is_fused = call.op not in OPS
        with on_device(binder.target):
            self._bound = prepare(call, None, None)

    def __call__(self) -> None:
        """Launch on the current stream."""
        self._launch(self._bound.run)

    def start(self) -> Work:
        """Launch beside the current stream, like a call with `async_op`, and return its handle."""
        work: Work = self._launch(self._bound.run_async)
        return work

    def _launch(self, run: Callable[..., Any]) -> Any:
        binder = self._binder
        if (gpu := binder.gpu) is None or binder.context() is None:
            binder.open()
            return run(*self._tensors)
        if current_device() != gpu:  # a thread of its own begins on device 0
            with torch.cuda.device(gpu):
                return self._launch(run)
        if self._is_fused and torch.cuda.is_current_stream_capturing():
            binder.held[id(self._bound)] = self._bound  # the graph knows it
        return run(*self._tensors)
