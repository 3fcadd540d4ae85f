"""Fused operations: ctx.ops against cuBLAS followed by NCCL, and torch's asynchronous tensor parallelism.

    python benchmarks/fused.py [--ranks N] [--quick] [--only matmul_reduce_scatter] [--limit 1800]

One process per GPU; bf16; a weight of N x K divided among the ranks, M rows.  all_gather_matmul (gather_dim 0) gathers
A (M / W, K) and multiplies with (K, N / W); matmul_all_gather (gather_dim 0) multiplies (M / W, K) with (K, N); the
others multiply (M, N / W) with (N / W, K).

"gemm" is torch.matmul alone, "cublas+nccl" it and NCCL one after the other, "cublas+iris" it and our collective,
"async-tp" torch's operator; "iris" what ctx.ops chooses, "iris <algorithm>" one that was named.  Each is measured in
CUDA graphs and, "eager", with the launches by the host.  Data is that of `iris tune --ops`, whose sums are
exact in bf16, and every element of the output is compared in the timed configuration.

Targets: in a graph, so many times as fast as "cublas+nccl" (`TARGETS`), and never slower than "cublas+iris", which is
the "ratio" of "iris"; of "iris eager" the ratio is that to "cublas+nccl eager".

Group "half": the two halves of the ranks side by side, from four ranks on, each with a weight of its own.

"iris" chooses by its tables: measure them first (`iris tune --ops`).

On CPU ranks (--device cpu) the same code runs with tiny shapes, so that it is tested; the times say nothing then.
"""

from __future__ import annotations

import math
import pathlib
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from ccl_groups import HALF, groups, part_of
from ccl_peers import OFF

from iris_core import bench
from iris_core.ops import FusedConfig
from iris_core.tuning.matmuls import SPOILED, FusedSample

if TYPE_CHECKING:
    from ccl_groups import Part

    from iris_core import Iris
    from iris_core.bench import RunOptions, State

RESULTS = pathlib.Path(__file__).parent / "results"
DTYPE = torch.bfloat16
WEIGHTS = ("11008x4096", "14336x4096", "28672x8192")

# How much faster than cuBLAS + NCCL the choice should be in a graph, on 8 x H200; elsewhere, never slower.
# With launches by the host, at M = 8192, nine tenths of that; and never slower than cuBLAS and our own collective.
EAGER_PART, EAGER_ROWS = 0.9, 8192
NEVER_SLOWER = 0.98  # a repeated run differs by two percent
TARGETS = {
    ("all_gather_matmul", 8192, "28672x8192"): 1.5,
    ("all_gather_matmul", 8192, "14336x4096"): 1.5,
    ("all_gather_matmul", 2048, "28672x8192"): 1.35,
    ("all_gather_matmul", 2048, "14336x4096"): 1.15,
    ("matmul_reduce_scatter", 8192, "28672x8192"): 1.45,
    ("matmul_reduce_scatter", 8192, "14336x4096"): 1.45,
    ("matmul_reduce_scatter", 2048, "28672x8192"): 1.35,
    ("matmul_reduce_scatter", 2048, "14336x4096"): 1.4,
    ("matmul_all_reduce", 8192, "28672x8192"): 1.35,
    ("matmul_all_reduce", 8192, "14336x4096"): 1.35,
}


def weights(options: RunOptions) -> list[str]:
    """N x K of the whole weight."""
    if options.device == "cpu":
        return ["256x128"]
    return [WEIGHTS[1]] if options.quick else list(WEIGHTS)


def rows(options: RunOptions) -> list[int]:
    """M."""
    if options.device == "cpu":
        return [128]
    return [2048] if options.quick else [512, 2048, 8192]


class Problem:
    """This rank's tensors of an operation, and the result.

    Args:
        ctx: the context.
        op: the operation.
        part: the ranks that it is divided among.
        m, n, k: see the module.
    """

    def __init__(self, ctx: Iris, op: str, part: Part, m: int, n: int, k: int) -> None:
        self._group = part.process_group if ctx.device != "cpu" else None
        dim = 0 if "all_gather" in op else None
        sample = FusedSample.of_layer(op, dim, DTYPE, part.rank, part.size, (m, n, k))
        self.op, self.options = op, sample.options
        self.out, self.a, self.b = sample.tensors(ctx)
        self.want = sample.wanted(ctx.device)
        if op == "all_gather_matmul":
            self.gathered = torch.cat([sample.a(rank, ctx.device) for rank in range(part.size)])
        else:
            self.product = torch.empty(*sample.shape[:2], dtype=DTYPE, device=ctx.device)
        self.flops = 2.0 * math.prod(sample.shape)

    def is_right(self) -> bool:
        """Whether every element of the output is what it must be."""
        return torch.equal(self.out, self.want)

    def spoil(self) -> None:
        """Make the output wrong."""
        self.out.fill_(SPOILED)

    def gemm(self) -> None:
        """The product alone."""
        if self.op == "all_gather_matmul":
            torch.mm(self.gathered, self.b, out=self.out)
        else:
            torch.mm(self.a, self.b, out=self.product)

    def pair(self) -> None:
        """The product and a collective of torch.distributed, one after the other."""
        if self.op == "all_gather_matmul":
            dist.all_gather_into_tensor(self.gathered, self.a, self._group)
            self.gemm()
        elif self.op == "matmul_reduce_scatter":
            self.gemm()
            dist.reduce_scatter_tensor(self.out, self.product, group=self._group)
        elif self.op == "matmul_all_gather":
            self.gemm()
            dist.all_gather_into_tensor(self.out, self.product, self._group)
        else:
            torch.mm(self.a, self.b, out=self.out)
            dist.all_reduce(self.out, group=self._group)


class AsyncTp:
    """torch's operator, which makes its output itself.  Each provider has its own: a graph's output stays where it is.

    Args:
        problem: the operands.

    Raises:
        AttributeError, RuntimeError: torch has no such operator, or it does not work here.
    """

    def __init__(self, problem: Problem) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._problem = problem
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._returned: torch.Tensor | None = None
        symmetric.enable_symm_mem_for_group(self._group)
        names = {"all_gather_matmul": "fused_all_gather_matmul", "matmul_reduce_scatter": "fused_matmul_reduce_scatter"}
        if problem.op not in names:
            raise AttributeError("torch has no such operator")
        self._operator = getattr(torch.ops.symm_mem, names[problem.op])
        self()

    def __call__(self) -> None:
        a, b = self._problem.a, self._problem.b
        if self._problem.op == "all_gather_matmul":
            _, (self._returned,) = self._operator(a, [b], gather_dim=0, group_name=self._group)
        else:
            self._returned = self._operator(a, b, "sum", scatter_dim=0, group_name=self._group)

    def is_right(self) -> bool:
        """Whether every element is what it must be."""
        return self._returned is not None and torch.equal(self._returned, self._problem.want)

    def spoil(self) -> None:
        """Make the output wrong."""
        if self._returned is not None:
            self._returned.fill_(SPOILED)


def declare(state: State, ctx: Iris, op: str) -> None:
    """Declare the providers of an operation with one shape."""
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")
    n, k = map(int, state["weight"].split("x"))
    part = part_of(ctx, state["group"])
    if n % part.size or state["m"] % part.size:
        state.skip(f"{part.size} ranks cannot divide it")
    state.enter(ctx.scope())
    problem = Problem(ctx, op, part, state["m"], n, k)
    state.set_flops(problem.flops)
    options, run = problem.options | {"group": part.members}, getattr(ctx.ops, op)
    tensors = problem.out, problem.a, problem.b
    names = [found.name for found in ctx.ops.explain(op, *tensors, **options).candidates if found.ok]
    for timer in ("graph", "events") if state.on_gpu else (None,):
        suffix = " eager" if timer == "events" else ""
        if timer:
            state.set_timer(timer)
        checks = {"check": problem.is_right, "prepare": problem.spoil}
        beside = f"cublas+nccl{suffix}" if suffix else "cublas+iris"
        baseline = {"baseline": beside} if state.on_gpu else {}
        state.provider(f"iris{suffix}", lambda: run(*tensors, **options), **checks, **baseline)
        for name in names:
            config = FusedConfig(algorithm=name)
            label = "cublas+iris" if name == "unfused" else f"iris {name}"
            state.provider(
                f"{label}{suffix}",
                lambda config=config: run(*tensors, config=config, **options),
                **checks,
            )
        state.provider(f"gemm{suffix}", problem.gemm, check=None)  # as a part of the pair it is checked
        if not state.on_gpu:
            continue
        state.provider(f"cublas+nccl{suffix}", problem.pair, **checks, peer=not suffix)
        try:
            if state["group"] == HALF:
                raise AttributeError("it is measured on all ranks only")
            peer = AsyncTp(problem)
            state.provider(f"async-tp{suffix}", peer, check=peer.is_right, prepare=peer.spoil)
        except (AttributeError, RuntimeError, ImportError) as error:
            state.skip_provider(f"async-tp{suffix}", str(error).partition("\n")[0])
        bound = TARGETS.get((op, state["m"], state["weight"]), 1.0) if part.size == 8 else 1.0
        if timer == "graph":
            state.target("iris", "ratio_to_best_peer", at_least=bound)
            state.target("iris", "ratio", at_least=NEVER_SLOWER)
        elif state["m"] == EAGER_ROWS:
            state.target("iris eager", "ratio", at_least=EAGER_PART * bound)


@bench.register
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
def all_gather_matmul(state: State, ctx: Iris) -> None:
    """The rows of all ranks times the own columns of a weight."""
    declare(state, ctx, "all_gather_matmul")


@bench.register
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
def matmul_reduce_scatter(state: State, ctx: Iris) -> None:
    """Rows of the sum of all ranks' products."""
    declare(state, ctx, "matmul_reduce_scatter")


@bench.register
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
def matmul_all_reduce(state: State, ctx: Iris) -> None:
    """The sum of all ranks' products."""
    declare(state, ctx, "matmul_all_reduce")


@bench.register
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
def matmul_all_gather(state: State, ctx: Iris) -> None:
    """The own rows times a weight that all have, the products of all ranks below each other."""
    declare(state, ctx, "matmul_all_gather")


SUITE = bench.suite(
    "fused",
    __doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    backend="gluon",
    heap_size="6GiB",
    environ=OFF,
    on_cpu={"heap_size": "24MiB"},
    results=str(RESULTS / "fused-{ranks}.json"),
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
