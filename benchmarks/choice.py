"""The library's choice against everything that it could have chosen, and its peers, at sizes drawn at random.

    python benchmarks/choice.py [--ranks N] [--axis draw=0,1,2] [--axis seed=7] [--only products]

One process per GPU; bf16.  `products` draws M, N and K log-uniformly from 16 to 16,384 (multiples of 16, so that the
ranks can divide them), `collectives` bytes from 1 KiB to 512 MiB; operations go in turn, tensors lie on the heap or
not by the draw.  The first call of a kind measures (IRIS_TUNE=first).

"iris" is the choice; "iris <algorithm>" one that was named; peers are those of benchmarks/fused.py and
benchmarks/ccl.py.  Each is measured in CUDA graphs; `measured_ms` is what the first call spent on measuring,
beside compiling.  The target: never more than 5 % behind the best of all of them.
"""

from __future__ import annotations

import math
import random
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch
from ccl import DTYPE, HEAP, ORDINARY, declare_peers, measured
from ccl import OPS as COLLECTIVES
from ccl_groups import WORLD, part_of
from fused import OFF, AsyncTp, Problem

from iris_core import bench
from iris_core.ccl import Config
from iris_core.ops import FusedConfig
from iris_core.tuning.samples import SPOILED, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from iris_core import Iris
    from iris_core.bench import RunOptions, State
    from iris_core.dispatch.choice import Explanation

PRODUCTS = ("matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_gather")
BEHIND = 0.95
"""The part of the best one's speed that the choice reaches at least."""
UNIT = 16


def draws(options: RunOptions) -> list[int]:
    """Numbers of the draws."""
    return list(range(4 if options.device == "cpu" or options.quick else 40))


def log_uniform(random_: random.Random, low: int, high: int, unit: int) -> int:
    """Draw a multiple of a unit."""
    drawn = math.exp(random_.uniform(math.log(low), math.log(high)))
    return max(low, round(drawn / unit) * unit)


def declare(
    state: State,
    on: tuple[Callable[..., object], tuple[torch.Tensor, ...], Mapping[str, Any]],
    names: list[str],
    config: type[Config | FusedConfig],
    checks: Mapping[str, Any],
) -> None:
    """Declare the choice and the algorithms by name."""
    run, tensors, options = on
    first, run_once = run.__self__._binder._first, partial(run, *tensors, **options)
    run_once()
    state.add_counter("measured_ms", first.seconds * 1e3)
    first.seconds = 0.0  # of a kind whose point is near
    state.provider("iris", run_once, **checks)
    for name in names:
        state.provider(
            f"iris {name}",
            lambda name=name: run(*tensors, config=config(algorithm=name), **options),
            **checks,
            peer=state.on_gpu,
        )
    if state.on_gpu:
        state.target("iris", "ratio_to_best_peer", at_least=BEHIND)


def usable(found: Explanation) -> list[str]:
    """Names of the algorithms that can serve a call."""
    return [each.name for each in found.candidates if each.ok]


@bench.register
@bench.axis("seed", [2026])
@bench.axis("draw", draws)
def products(state: State, ctx: Iris) -> None:
    """A fused operation of a random shape."""
    draw = random.Random(f"products {state['seed']} {state['draw']}")
    largest = 16384 if state.on_gpu else 64
    op = PRODUCTS[state["draw"] % len(PRODUCTS)]
    m, n, k = (log_uniform(draw, UNIT, largest, UNIT) for _ in "mnk")
    state.add_counter("on_heap", float(place := draw.random() < 0.5))
    for name, size in zip("mnk", (m, n, k), strict=True):
        state.add_counter(name, size)
    state.resources.enter_context(ctx.scope())
    problem = Problem(ctx, op, part_of(ctx, WORLD), m, n, k)
    if not place:
        problem.leave_heap()
    state.set_flops(problem.flops)
    tensors = problem.out, problem.a, problem.b
    names = usable(ctx.ops.explain(op, *tensors, **problem.options))
    checks = {"check": problem.is_right, "prepare": problem.spoil}
    if state.on_gpu:
        state.set_timer("graph")
    declare(state, (getattr(ctx.ops, op), tensors, problem.options), names, FusedConfig, checks)
    if not state.on_gpu:
        return
    state.provider("cublas+nccl", problem.pair, **checks, peer=True)
    try:
        peer = AsyncTp(problem)
        state.provider("async-tp", peer, check=peer.is_right, prepare=peer.spoil, peer=True)
    except (AttributeError, RuntimeError, ImportError) as error:
        state.skip_provider("async-tp", str(error).partition("\n")[0])


@bench.register
@bench.axis("seed", [2026])
@bench.axis("draw", draws)
def collectives(state: State, ctx: Iris) -> None:
    """A collective of a random size."""
    draw = random.Random(f"collectives {state['seed']} {state['draw']}")
    op = COLLECTIVES[state["draw"] % len(COLLECTIVES)]
    nbytes = log_uniform(draw, 1 << 10, 512 << 20 if state.on_gpu else 8 << 10, 1)
    place = HEAP if draw.random() < 0.5 else ORDINARY
    state.add_counter("on_heap", float(place == HEAP))
    sample = Sample.of_bytes(op, DTYPE, ctx.cur_rank, ctx.num_ranks, nbytes)
    state.resources.enter_context(ctx.scope())
    out, inp = sample.tensors(ctx)
    assert out is not None
    assert inp is not None
    if place == ORDINARY:
        out, inp = torch.empty_like(out), inp.clone()
    state.set_bytes(sample.nbytes)
    names = [name for name in usable(ctx.ccl.explain(op, out, inp)) if measured(name, nbytes)]
    checks = {"check": partial(sample.is_right, out), "prepare": partial(out.fill_, SPOILED)}
    if state.on_gpu:
        state.set_timer("graph")
    declare(state, (getattr(ctx.ccl, op), (out, inp), {}), names, Config, checks)
    if state.on_gpu:
        declare_peers(state, sample, out, inp, "", None)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    backend="gluon",
    heap_size="6GiB",
    environ=OFF | {"IRIS_TUNE": "first"},
    on_cpu={"heap_size": "24MiB"},
    results="results/choice-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
