"""What a repeated collective costs the CPU: time of the calling thread from the call to its return.

    python benchmarks/ccl_launch.py [--ranks N]                        # on GPUs
    python benchmarks/ccl_launch.py --device cpu --ranks 1             # Python's part, on any machine

"iris" is a call that was made before with tensors of the same kind, "iris bound" one that `ctx.ccl.bind` returned.  "to
the launcher" ends where the launcher in C would be called, so it is Python's part of that; on a machine
without GPUs it is all there is, and the order of streams is that of a GPU with a stream that never changes.  "triton"
is Triton's own launch of an empty kernel with two tensors, "torch two_shot" torch's operator on symmetric memory.

Claim: 12 us for a call on a GPU's host, of which about 4 are the driver's; 5 up to the launcher.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import unittest.mock
from typing import TYPE_CHECKING, Any

import torch
import triton
from ccl_peers import torch_symmetric

from iris_core import bench
from iris_core.ccl import Config
from iris_core.device.launch_order import DeviceOrder
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import RunOptions, State

CALLS = 200
"""Calls timed together: few enough for the queue of the device."""

TARGET_US, PYTHON_TARGET_US = 12, 5
GATHER = "all_gather"


@triton.jit
def nothing(out, inp):  # type: ignore[no-untyped-def]  # kernels have no types of Python
    """Do nothing."""


def repeated(call: Callable[[], object], *, on_gpu: bool) -> Callable[[], float]:
    """Return what times some calls, and says the seconds of one."""

    def seconds() -> float:
        repetitions = range(CALLS)
        start = time.thread_time()
        for _ in repetitions:
            call()
        took = (time.thread_time() - start) / CALLS
        if on_gpu:
            torch.cuda.synchronize()
        return took

    return seconds


def without_launch(ctx: Iris, launches: Any, call: Callable[[], object]) -> Callable[[], object]:
    """Return a call that does all but launch kernels; it must be the first one of its kind.

    `launches` is where `ctx.ccl` or `ctx.ops` keeps what it has prepared.
    """
    known, kernels, launch = set(launches), list[Any](), BoundKernel._first

    def noted(kernel: BoundKernel, *arguments: Any) -> None:
        kernels.append(kernel)
        launch(kernel, *arguments)

    with unittest.mock.patch.object(BoundKernel, "_first", noted):
        call()
    (new,) = set(launches) - known
    if ctx.device == "cpu":  # what a GPU's first call would have left
        order: Any = object.__new__(DeviceOrder)
        order._index, order._last_raw, order._raw_stream = 0, 0, lambda index: 0
        order._lock, order._work, order._engine = threading.RLock(), None, None
        bound = launches[new]
        bound._run = functools.partial(order.run, bound._launch, bound.plan)
    for kernel in kernels:
        kernel.again = lambda stream, *tensors: None
    return call


def calls(options: RunOptions) -> list[str]:
    """Algorithms of all_reduce that every such machine has, and all_gather as it is chosen."""
    return [*(("one_shot", "two_shot") if options.device == "cpu" else ("ll_one_shot", "sentinel_two_shot")), GATHER]


@bench.register
@bench.axis("call", calls)
def launch(state: State, ctx: Iris) -> None:
    """A repeated call with 4 KiB on each rank."""
    gathers = state["call"] == GATHER
    op, config = (GATHER, None) if gathers else ("all_reduce", Config(algorithm=state["call"]))
    shape = (ctx.num_ranks, 2048) if gathers else (2048,)
    out, inp = ctx.zeros(shape, dtype=torch.bfloat16), ctx.ones(2048, dtype=torch.bfloat16)
    half_out, half_inp = ctx.zeros(*shape[:-1], 1024, dtype=torch.bfloat16), inp[:1024]
    run = getattr(ctx.ccl, op)

    def call() -> None:
        run(out, inp, config=config)

    def is_right() -> bool:
        return bool((out == (1 if gathers else ctx.num_ranks)).all())

    def spoil() -> None:
        out.fill_(-1)

    python_only = without_launch(ctx, ctx.ccl._bound, lambda: run(half_out, half_inp, config=config))
    state.set_timer("reported")
    state.provider("iris, to the launcher", repeated(python_only, on_gpu=False), check=None)
    state.target("iris, to the launcher", "time_us", at_most=PYTHON_TARGET_US)
    bound_only = ctx.ccl.bind(op, half_out, half_inp, config=config)
    bound_only._bound = list(ctx.ccl._bound.values())[-1]  # which does not launch
    state.provider("iris bound, to the launcher", repeated(bound_only, on_gpu=False), check=None)
    if not state.on_gpu:
        return
    call()
    state.provider("iris", repeated(call, on_gpu=True), check=is_right, prepare=spoil)
    state.target("iris", "time_us", at_most=TARGET_US)
    bound = ctx.ccl.bind(op, out, inp, config=config)
    bound()
    state.provider("iris bound", repeated(bound, on_gpu=True), check=is_right, prepare=spoil)
    state.provider("iris device_barrier", repeated(ctx.device_barrier, on_gpu=True), check=None)
    state.provider("triton", repeated(lambda: nothing[(1,)](out, inp), on_gpu=True), check=None)
    if torch.distributed.is_initialized():
        other = inp.clone()
        two_shot, _ = torch_symmetric("two_shot", inp, other)
        state.provider("torch two_shot", repeated(two_shot, on_gpu=True), check=None)
        state.provider("nccl", repeated(lambda: torch.distributed.all_reduce(other), on_gpu=True), check=None)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    heap_size="64MiB",
    on_cpu={"heap_size": "16MiB"},
    results="results/ccl_launch-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
