"""Fused operations: ctx.ops against cuBLAS followed by NCCL, and torch's asynchronous tensor parallelism.

    python benchmarks/fused.py [--ranks N] [--quick] [--only matmul_reduce_scatter] [--limit 1800]

One process per GPU; bf16, or 8-bit floats with scales; a weight of N x K divided among the ranks, M rows.
all_gather_matmul (gather_dim 0) gathers A (M / W, K) and multiplies with (K, N / W); matmul_all_gather (gather_dim 0)
multiplies (M / W, K) with (K, N); the others multiply (M, N / W) with (N / W, K).

"gemm" is torch.matmul alone, "cublas+nccl" it and NCCL one after the other, "cublas+iris" it and our collective,
"async-tp" torch's operator; "iris" what ctx.ops chooses, "iris <algorithm>" one that was named.  Each is measured in
CUDA graphs and, but for those named, "eager", with the launches by the host.  Data is that of `iris tune --ops`, whose
sums are exact in bf16, and every element of the output is compared in the timed configuration.

Targets: in a graph, so many times as fast as "cublas+nccl" (`TARGETS`), and never slower than "cublas+iris", which is
the "ratio" of "iris"; of "iris eager" the ratio is that to "cublas+nccl eager".

Scales "rows" and "blocks" (--axis scales=none,rows,blocks): products of float8_e4m3fn with scales, B by columns, to
bf16.  "gemm" is torch._scaled_mm then, with fast accumulation, "cublas+nccl" it and NCCL, which gathers A's scales,
too; where torch takes no such scales, both are left out.

Places: A and the output are "ordinary" tensors, or lie on the "heap"; weights and scales are ordinary.

Group "half": the two halves of the ranks side by side, from four ranks on, each with a weight of its own.

"iris" chooses by its tables: measure them first (`iris tune --ops`).

On CPU ranks (--device cpu) the same code runs with tiny shapes, so that it is tested; the times say nothing then.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from ccl import HEAP, ORDINARY
from ccl_groups import HALF, WORLD, groups, part_of
from ccl_peers import OFF

from iris_core import bench
from iris_core.ops import FusedConfig
from iris_core.tuning.samples import SPOILED, FusedSample

if TYPE_CHECKING:
    from ccl_groups import Part

    from iris_core import Iris
    from iris_core.bench import RunOptions, State

DTYPE, FP8 = torch.bfloat16, torch.float8_e4m3fn
NONE, ROWS, BLOCKS = "none", "rows", "blocks"
BLOCK = 128
WEIGHTS = ("14336x4096", "28672x8192")
ROWS_OF_SCALED = (512, 2048, 8192)  # on GPUs, of products with scales
ROWS_ELSEWHERE = (16, 512, 8192)  # likewise, of tensors on the heap and of halves of the ranks

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
SCALED_OPS, SCALED_TARGET = ("all_gather_matmul", "matmul_reduce_scatter"), 1.4
"""Of products with scales, at `EAGER_ROWS` rows, on any number of GPUs."""


def weights(options: RunOptions) -> list[str]:
    """N x K of the whole weight."""
    if options.device == "cpu":
        return ["256x128"]
    return [WEIGHTS[0]] if options.quick else list(WEIGHTS)


def rows(options: RunOptions) -> list[int]:
    """M."""
    if options.device == "cpu":
        return [128]
    return [16, 2048] if options.quick else [1, 16, 64, 128, 512, 1024, 2048, 8192]


def scales(options: RunOptions) -> list[str]:
    """What has scales."""
    return [NONE, ROWS] if options.quick and options.device != "cpu" else [NONE, ROWS, BLOCKS]


@dataclass(frozen=True, slots=True)
class Scaled(FusedSample):
    """A sample whose operands have scales: powers of two, so that sums are exact; a(), b() are operands times these."""

    scales: str = ROWS

    def scales_of(self, which: int, rank: int, device: str) -> torch.Tensor:
        """Scales of a rank's A (0) or B (1)."""
        rows, columns = (self.a_shape, (self.shape[2], self.shape[1]))[which]
        down, right = (torch.arange(-(-n // BLOCK), device=device) for n in (rows, columns))
        i = torch.arange(rows, device=device) + (rank * rows if self.op == "all_gather_matmul" else 0)
        if self.scales == BLOCKS:
            steps = i[:, None] + right if which == 0 else down[:, None] // 2 + right
            return 1.0 + steps % 2
        return 2.0 ** (i[:, None] % 3 - 1 if which == 0 else torch.arange(columns, device=device)[None, :] % 2)

    def a(self, rank: int, device: str) -> torch.Tensor:
        values, scales = FusedSample.a(self, rank, device), self.scales_of(0, rank, device)
        wide = scales if self.scales == ROWS else scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
        return values.to(DTYPE) * wide.to(DTYPE)

    def b(self, rank: int, device: str) -> torch.Tensor:
        values, scales = FusedSample.b(self, rank, device), self.scales_of(1, rank, device)
        if self.scales == BLOCKS:
            scales = scales.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
            scales = scales.repeat_interleave(BLOCK, 0)[: values.shape[0]]
        return values.to(DTYPE) * scales.to(DTYPE)


class Problem:
    """This rank's tensors of an operation, and the result.

    Args:
        ctx: the context.
        op: the operation.
        part: the ranks that it is divided among.
        m, n, k, kind: see the module; `kind` says what has scales.
    """

    def __init__(self, ctx: Iris, op: str, part: Part, m: int, n: int, k: int, kind: str = NONE) -> None:
        self._group = part.process_group if ctx.device != "cpu" else None
        dim, dtype = 0 if "all_gather" in op else None, DTYPE if kind == NONE else FP8
        sample = FusedSample.of_layer(op, dim, dtype, part.rank, part.size, (m, n, k))
        self.op, self.options, self.kind = op, sample.options, kind
        self.out, self.a, self.b = sample.tensors(ctx)
        if op == "all_gather_matmul":
            whole = [sample.a(rank, ctx.device) for rank in range(part.size)]
            self.gathered = torch.cat([each.view(torch.uint8) for each in whole]).view(dtype)
            self.moved = self.gathered, self.a
        if kind != NONE:
            self.b = self.b.t().contiguous().t()
            sample = Scaled(*(getattr(sample, name) for name in FusedSample.__slots__), kind)
            of_a, of_b = (sample.scales_of(which, part.rank, ctx.device) for which in range(2))
            self.options |= {"a_scales": of_a, "b_scales": of_b.t().contiguous().t()}
            if op == "all_gather_matmul":
                self.gathered_scales = of_a.new_empty(part.size * len(of_a), of_a.shape[1])
                self.moved = self.gathered.view(torch.uint8), self.a.view(torch.uint8)  # which every NCCL knows
        self.want = sample.wanted(ctx.device)
        if op != "all_gather_matmul":
            self.product = torch.empty(*sample.shape[:2], dtype=DTYPE, device=ctx.device)
        self.flops = 2.0 * math.prod(sample.shape)

    def leave_heap(self) -> None:
        """Give the operation ordinary tensors."""
        self.out, self.a = torch.empty_like(self.out), self.a.clone()
        if self.op == "all_gather_matmul":
            self.moved = self.moved[0], self.a.view(self.moved[1].dtype)

    def is_right(self) -> bool:
        """Whether every element of the output is what it must be."""
        return torch.equal(self.out, self.want)

    def spoil(self) -> None:
        """Make the output wrong."""
        self.out.fill_(SPOILED)

    def _multiply(self, a: torch.Tensor, out: torch.Tensor) -> None:
        if self.kind == NONE:
            torch.mm(a, self.b, out=out)
            return
        left, right = self.options["a_scales"], self.options["b_scales"]
        if self.op == "all_gather_matmul":
            left = self.gathered_scales
        if self.kind == BLOCKS:
            if a.shape[1] % (4 * BLOCK):
                raise ValueError(f"cuBLAS reads scales of blocks of B for multiples of {4 * BLOCK} rows")
            left = left.t().contiguous().t()  # as torch wants them
        torch._scaled_mm(a, self.b, left, right, out_dtype=out.dtype, use_fast_accum=self.kind == ROWS, out=out)

    def gemm(self) -> None:
        """The product alone."""
        if self.op == "all_gather_matmul":
            self._multiply(self.gathered, self.out)
        else:
            self._multiply(self.a, self.product)

    def pair(self) -> None:
        """The product and a collective of torch.distributed, one after the other."""
        if self.op == "all_gather_matmul":
            dist.all_gather_into_tensor(*self.moved, self._group)
            if self.kind != NONE:
                dist.all_gather_into_tensor(self.gathered_scales, self.options["a_scales"], self._group)
            self.gemm()
        elif self.op == "matmul_reduce_scatter":
            self.gemm()
            dist.reduce_scatter_tensor(self.out, self.product, group=self._group)
        elif self.op == "matmul_all_gather":
            self.gemm()
            dist.all_gather_into_tensor(self.out, self.product, self._group)
        else:
            self._multiply(self.a, self.out)
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
    if n % part.size or (op != "matmul_all_reduce" and state["m"] % part.size):
        state.skip(f"{part.size} ranks cannot divide it")
    state.resources.enter_context(ctx.scope())
    kind = state["scales"]
    if kind != NONE and state.on_gpu and state["m"] not in ROWS_OF_SCALED:
        state.skip(f"products with scales are measured with {ROWS_OF_SCALED} rows")
    is_first = (state["place"], state["group"]) == (ORDINARY, WORLD)
    if state.on_gpu and not is_first and (kind != NONE or state["m"] not in ROWS_ELSEWHERE):
        state.skip(f"tensors on the heap, and halves of the ranks, have {ROWS_ELSEWHERE} rows, and no scales")
    problem = Problem(ctx, op, part, state["m"], n, k, kind)
    if state["place"] == ORDINARY:
        problem.leave_heap()
    state.set_flops(problem.flops)
    options, run = problem.options | {"group": part.members}, getattr(ctx.ops, op)
    tensors = problem.out, problem.a, problem.b
    names = [found.name for found in ctx.ops.explain(op, *tensors, **options).candidates if found.ok]
    refused = ""
    try:
        problem.gemm()
    except (RuntimeError, ValueError) as error:
        if kind == NONE:
            raise
        refused = str(error).partition("\n")[0]
    for timer in ("graph", "events") if state.on_gpu else (None,):
        suffix = " eager" if timer == "events" else ""
        if timer:
            state.set_timer(timer)
        checks = {"check": problem.is_right, "prepare": problem.spoil}
        beside = f"cublas+nccl{suffix}" if suffix else "cublas+iris"
        baseline = {"baseline": beside} if state.on_gpu and not (suffix and refused) else {}
        state.provider(f"iris{suffix}", lambda: run(*tensors, **options), **checks, **baseline)
        for name in names:
            config = FusedConfig(algorithm=name)
            label = "cublas+iris" if name == "unfused" else f"iris {name}"
            if suffix and name != "unfused":
                continue
            state.provider(
                f"{label}{suffix}",
                lambda config=config: run(*tensors, config=config, **options),
                **checks,
            )
        if refused:
            state.skip_provider(f"gemm{suffix}", refused)
            state.skip_provider(f"cublas+nccl{suffix}", refused)
        else:
            state.provider(f"gemm{suffix}", problem.gemm, check=None)  # as a part of the pair it is checked
        if not state.on_gpu or refused:
            continue
        state.provider(f"cublas+nccl{suffix}", problem.pair, **checks, peer=not suffix)
        try:
            if state["group"] == HALF or kind != NONE:
                raise AttributeError("it is measured on all ranks only, and without scales")
            peer = AsyncTp(problem)
            state.provider(f"async-tp{suffix}", peer, check=peer.is_right, prepare=peer.spoil)
        except (AttributeError, RuntimeError, ImportError) as error:
            state.skip_provider(f"async-tp{suffix}", str(error).partition("\n")[0])
        bound = TARGETS.get((op, state["m"], state["weight"]), 1.0) if part.size == 8 else 1.0
        if kind != NONE:
            is_goal = op in SCALED_OPS and state["m"] == EAGER_ROWS
            bound = SCALED_TARGET if is_goal else 1.0
        if timer == "graph":
            state.target("iris", "ratio_to_best_peer", at_least=bound)
            state.target("iris", "ratio", at_least=NEVER_SLOWER)
        elif state["m"] == EAGER_ROWS:
            state.target("iris eager", "ratio", at_least=EAGER_PART * bound)


@bench.register
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
@bench.axis("scales", scales)
def all_gather_matmul(state: State, ctx: Iris) -> None:
    """The rows of all ranks times the own columns of a weight."""
    declare(state, ctx, "all_gather_matmul")


@bench.register
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
@bench.axis("scales", scales)
def matmul_reduce_scatter(state: State, ctx: Iris) -> None:
    """Rows of the sum of all ranks' products."""
    declare(state, ctx, "matmul_reduce_scatter")


@bench.register
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
@bench.axis("scales", scales)
def matmul_all_reduce(state: State, ctx: Iris) -> None:
    """The sum of all ranks' products."""
    declare(state, ctx, "matmul_all_reduce")


@bench.register
@bench.axis("place", [ORDINARY, HEAP])
@bench.axis("weight", weights)
@bench.axis("m", rows)
@bench.axis("group", groups)
@bench.axis("scales", scales)
def matmul_all_gather(state: State, ctx: Iris) -> None:
    """The own rows times a weight that all have, the products of all ranks below each other."""
    declare(state, ctx, "matmul_all_gather")


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    min_ranks=2,
    backend="gluon",
    heap_size="6GiB",
    environ=OFF,
    on_cpu={"heap_size": "24MiB"},
    results="results/fused-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
