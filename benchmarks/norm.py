"""all_reduce + residual + RMSNorm: `ctx.ops.all_reduce_rms_norm` against a collective and torch's compiled norm.

    python benchmarks/norm.py [--ranks N] [--quick] [--axis rows=1,16,128]

One process per GPU; bf16; rows of 8192 elements.  "iris" is what ctx.ops chooses, "iris <algorithm>" one that was
named, "iris fp8" and "iris fp8 <algorithm>" the same with an output of 8-bit floats and a scale for each row.
"ccl+norm" is ctx.ccl.all_reduce and the rest compiled by torch.compile into one kernel, "nccl+norm" NCCL's all_reduce
and that kernel; "ccl" is the all_reduce alone, which is what the call adds to.  They are measured in CUDA graphs; the
choice and its peers also "eager", with the launches by the host.  What the ranks add up to is 0, so that the residual
is the same after any number of calls; it, and every element of the output, is compared in the timed configuration.

Targets: in a graph, 1.3 times as fast as "ccl+norm", which is the "ratio", and twice as fast as "nccl+norm".

On CPU ranks (--device cpu) the same code runs with tiny shapes and without the compiler, so that it is tested; the
times say nothing then.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ccl_peers import OFF

from iris_core import bench
from iris_core.ccl import Config

if TYPE_CHECKING:
    from iris_core import Iris
    from iris_core.bench import RunOptions, State

DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN, CPU_HIDDEN, EPS = 8192, 64, 1e-6
FASTER_THAN_CCL, FASTER_THAN_NCCL = 1.3, 2.0
SPOILED = 448.0


def rows(options: RunOptions) -> list[int]:
    """Tokens."""
    if options.device == "cpu":
        return [1, 5]
    return [16] if options.quick else [1, 16, 128, 1024]


def norm(out: torch.Tensor, residual: torch.Tensor, total: torch.Tensor, weight: torch.Tensor) -> None:
    """What is behind the all_reduce."""
    residual.add_(total)
    wide = residual.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float())


class Problem:
    """This rank's tensors, and the result."""

    def __init__(self, ctx: Iris, rows: int, hidden: int) -> None:
        drawn = torch.Generator().manual_seed(rows)
        values = torch.randint(-3, 4, (rows, hidden), generator=drawn)
        self.before = torch.randint(-3, 4, (rows, hidden), generator=drawn).to(ctx.device, DTYPE)
        part = values * (2 * ctx.cur_rank - (ctx.num_ranks - 1))  # of all ranks, the sum is 0
        self.weight = (torch.rand(hidden, generator=drawn) + 0.5).to(ctx.device, DTYPE)
        self.x, self.total = part.to(ctx.device, DTYPE), part.to(ctx.device, DTYPE)
        self.residual, self.out = self.before.clone(), torch.empty_like(self.x)
        self.out8 = torch.empty(rows, hidden, dtype=FP8, device=ctx.device)
        self.scales = torch.empty(rows, device=ctx.device)
        self.want = torch.nn.functional.rms_norm(self.before.float(), (hidden,), self.weight.float(), EPS)

    def _is_near(self, out: torch.Tensor, part: float) -> bool:
        most = self.want.abs().amax(1, keepdim=True) * part
        return torch.equal(self.residual, self.before) and bool(((out - self.want).abs() <= most).all())

    def is_right(self) -> bool:
        """Whether every element is what it must be, but for rounding."""
        return self._is_near(self.out.float(), 2.0**-8)

    def is_right8(self) -> bool:
        """The same of 8-bit floats."""
        return self._is_near(self.out8.float() * self.scales[:, None], 2.0**-4)

    def spoil(self) -> None:
        """Make the outputs wrong, and the residual what it was."""
        self.out.fill_(SPOILED)
        self.scales.fill_(SPOILED)
        self.residual.copy_(self.before)


@bench.register
@bench.axis("rows", rows)
def all_reduce_rms_norm(state: State, ctx: Iris) -> None:
    """What stands between two layers under tensor parallelism."""
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")
    state.resources.enter_context(ctx.scope())
    problem = Problem(ctx, state["rows"], HIDDEN if state.on_gpu else CPU_HIDDEN)
    state.set_bytes(problem.x.nbytes)
    run, behind = ctx.ops.all_reduce_rms_norm, torch.compile(norm, dynamic=False) if state.on_gpu else norm
    tensors = problem.out, problem.residual, problem.x, problem.weight, EPS
    found = ctx.ops.explain("all_reduce_rms_norm", *tensors).candidates

    def call8(config: Config | None = None) -> Any:
        return run(problem.out8, *tensors[1:], scales=problem.scales, config=config)

    def with_ccl() -> None:
        ctx.ccl.all_reduce(problem.total, problem.x)
        behind(problem.out, problem.residual, problem.total, problem.weight)

    def with_nccl() -> None:
        dist.all_reduce(problem.total)
        behind(problem.out, problem.residual, problem.total, problem.weight)

    for timer in ("graph", "events") if state.on_gpu else (None,):
        suffix = " eager" if timer == "events" else ""
        if timer:
            state.set_timer(timer)
        checks = {"check": problem.is_right, "prepare": problem.spoil}
        checks8 = checks | {"check": problem.is_right8}
        state.provider(f"iris{suffix}", lambda: run(*tensors), **checks, baseline=f"ccl+norm{suffix}")
        if timer != "events":
            for name in (each.name for each in found if each.ok):
                config = Config(algorithm=name)
                state.provider(f"iris {name}", lambda config=config: run(*tensors, config=config), **checks)
                state.provider(f"iris fp8 {name}", partial(call8, config), **checks8)
            state.provider("iris fp8", call8, **checks8)
        state.provider(f"ccl+norm{suffix}", with_ccl, **checks)
        state.provider(f"ccl{suffix}", lambda: ctx.ccl.all_reduce(problem.total, problem.x), check=None)
        if not state.on_gpu:
            continue
        state.provider(f"nccl+norm{suffix}", with_nccl, **checks, peer=not suffix)
        if timer == "graph":
            state.target("iris", "ratio", at_least=FASTER_THAN_CCL)
            state.target("iris", "ratio_to_best_peer", at_least=FASTER_THAN_NCCL)


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    backend="triton",
    heap_size="1GiB",
    environ=OFF,
    on_cpu={"heap_size": "24MiB"},
    results="results/norm-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
