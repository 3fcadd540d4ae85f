"""What a repeated fused operation costs the CPU: time of the calling thread from `ctx.ops.X` to its return.

    python benchmarks/ops_launch.py [--ranks N]                        # on GPUs
    python benchmarks/ops_launch.py --device cpu --ranks 2             # Python's part, on any machine

"iris" is a call that was made before with tensors of the same kind, of small matrices, so that no queue fills up.
"iris, to the launcher" ends where the launcher in C would be called; copies of shards (all_gather_matmul) are
part of it.  "iris NAME" is a named algorithm that asks for more than one launch, or is Hopper's (on GPUs only): copies
by the copy engine, words behind them, meetings, sums.  "torch" is torch.mm and the collective of torch.distributed.

Claim: 25 us for a call on a GPU's host, 10 up to the launcher.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from ccl_launch import repeated, without_launch

from iris_core import bench
from iris_core.ops import FusedConfig
from iris_core.tuning.samples import SPOILED, FusedSample

if TYPE_CHECKING:
    from iris_core import Iris
    from iris_core.bench import RunOptions, State

TARGET_US, PYTHON_TARGET_US = 25, 10
ALGORITHMS = {
    "matmul_all_reduce": "two_shot",
    "all_gather_matmul": "fetch",
    "matmul_all_gather": "push",
    "matmul_reduce_scatter": "push",
}
SHAPE = (128, 256, 128)
"""M, N, K of the layer."""

NAMED = (
    "copy_engine",
    "copy_engine_push",
    "hopper_copy_engine_push",
    "hopper_push",
)
"""Algorithms that are measured by name, where they serve the operation."""

ROWS_EACH = 128
"""Rows of a member for these: a tile of Hopper's."""


def operations(options: RunOptions) -> list[str]:
    """The operations."""
    return list(ALGORITHMS)


@bench.register
@bench.axis("op", operations)
def launch(state: State, ctx: Iris) -> None:
    """A repeated operation on small matrices."""
    op = state["op"]
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")
    dim = {"all_gather_matmul": 0, "matmul_all_gather": 1}.get(op)
    rank, size = ctx.cur_rank, ctx.num_ranks
    sample, other = (
        FusedSample.of_layer(op, dim, torch.bfloat16, rank, size, (SHAPE[0] * times, *SHAPE[1:])) for times in (1, 2)
    )
    config, run = FusedConfig(algorithm=ALGORITHMS[op]), getattr(ctx.ops, op)
    state.resources.enter_context(ctx.scope())
    tensors, others = sample.tensors(ctx), other.tensors(ctx)
    want = sample.wanted(ctx.device)
    python_only = without_launch(ctx, ctx.ops._bound, lambda: run(*others, config=config, **other.options))
    state.set_timer("reported")
    state.provider("iris, to the launcher", repeated(python_only, on_gpu=False), check=None)
    state.target("iris, to the launcher", "time_us", at_most=PYTHON_TARGET_US)
    if not state.on_gpu:
        return

    def call() -> None:
        run(*tensors, config=config, **sample.options)

    call()
    state.provider(
        "iris",
        repeated(call, on_gpu=True),
        check=lambda: torch.equal(tensors[0], want),
        prepare=lambda: tensors[0].fill_(SPOILED),
    )
    state.target("iris", "time_us", at_most=TARGET_US)
    bound = ctx.ops.bind(op, *tensors, config=config, **sample.options)
    bound()
    state.provider(
        "iris bound",
        repeated(bound, on_gpu=True),
        check=lambda: torch.equal(tensors[0], want),
        prepare=lambda: tensors[0].fill_(SPOILED),
    )
    tiles = FusedSample.of_layer(op, dim, torch.bfloat16, rank, size, (ROWS_EACH * size, *SHAPE[1:]))
    named, right = tiles.tensors(ctx), tiles.wanted(ctx.device)
    candidates = ctx.ops.explain(op, *named, **tiles.options).candidates
    for name in (each.name for each in candidates if each.ok and each.name in NAMED):

        def call_named(config: FusedConfig = FusedConfig(algorithm=name)) -> None:
            run(*named, config=config, **tiles.options)

        call_named()
        state.provider(
            f"iris {name}",
            repeated(call_named, on_gpu=True),
            check=lambda: torch.equal(named[0], right),
            prepare=lambda: named[0].fill_(SPOILED),
        )
        state.target(f"iris {name}", "time_us", at_most=TARGET_US)
    if op == "matmul_all_reduce" and torch.distributed.is_initialized():
        out, a, b = (each.clone() for each in tensors)

        def pair() -> None:
            torch.mm(a, b, out=out)
            torch.distributed.all_reduce(out)

        state.provider("torch", repeated(pair, on_gpu=True), check=None)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    backend="gluon",
    heap_size="64MiB",
    on_cpu={"heap_size": "16MiB"},
    results="results/ops_launch-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
