"""GEMM in Gluon: the core for Hopper against cuBLAS, and GEMM + all-scatter against a product and NCCL's all-gather.

    python benchmarks/gluon_gemm.py [--ranks N] [--quick] [--only REGEX]

bfloat16.  Every element is compared with a product in float32.

    gemm            the core and torch.matmul (cuBLAS), in turn, on every rank at the same time
    all_scatter     examples/24_gluon_gemm_all_scatter.py: each rank computes a slab of columns of C and stores every
                    tile to all ranks; a barrier between the devices before and behind it.  "torch" is torch.matmul and
                    all_gather_into_tensor, which leaves the slabs one below the other; "torch whole" then copies them
                    to the rows of C, where the fused kernel has them at once
    configurations  the GEMM over configurations of its launch (only with --only configurations)

On CPU ranks (--device cpu) all_scatter runs with tiny sizes, so that it is tested; the times say nothing then.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import importlib.util
import pathlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl  # noqa: TC002 - kernels look it up

from iris_core import bench
from iris_gluon import gemm as core

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import RunOptions, State

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "24_gluon_gemm_all_scatter.py"
SQUARE = (8192, 8192, 8192)
OTHERS = [(8192, 3584, 8192), (8192, 1792, 4096), (4096, 4096, 4096), (2000, 3000, 1000)]
TARGET = 0.85
ROUNDING, ADDITIONS = 2.0**-8, 2.0**-13
"""Relative errors of a number in bfloat16, and of sums in float32."""

CONFIGURATIONS = {
    "128x256": core.GemmConfig(),
    "128x256 group 4": core.GemmConfig(group=4),
    "128x256 group 16": core.GemmConfig(group=16),
    "128x256 group 64": core.GemmConfig(group=64),
    "128x256 3 stages": core.GemmConfig(stages=3),
    "128x256 3 stages, whole": core.GemmConfig(stages=3, parts=1),
    "128x128": core.GemmConfig(block_n=128, parts=1, stages=5),
    "128x128 group 16": core.GemmConfig(block_n=128, parts=1, stages=5, group=16),
    "128x128 6 stages": core.GemmConfig(block_n=128, parts=1, stages=6),
    "256x128": core.GemmConfig(block_m=256, block_n=128, parts=2, stages=4),
}


def on_cpu(options: RunOptions) -> bool:
    """Whether the ranks compute on the CPU; `main` has chosen."""
    return options.device == "cpu"


def shapes(options: RunOptions) -> list[tuple[int, int, int]]:
    """M, N and K of the whole product."""
    if on_cpu(options):
        return [(128, 96 * options.num_ranks, 72)]
    return [SQUARE] if options.quick else [SQUARE, *OTHERS]


def slabs(options: RunOptions) -> list[tuple[int, int, int]]:
    """M, N of all ranks together, and K."""
    if on_cpu(options):
        return [(128, 96 * options.num_ranks, 72)]
    return [SQUARE] if options.quick else [SQUARE, (8192, 28672, 8192), (4096, 4096, 4096)]


def random_matrix(rows: int, columns: int, seed: int, ctx: Iris) -> torch.Tensor:
    """Normally distributed numbers, the same on every rank for the same seed."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=ctx.device).to(torch.bfloat16)


def is_product(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Callable[[], bool]:
    """Return a check that every element of C is that of A @ B, rounded to bfloat16 once."""

    def check() -> bool:
        wanted = a.float() @ b.float()  # made each time: it would take more memory than the operands
        allowed = ROUNDING * wanted.abs() + ADDITIONS * (a.abs().float() @ b.abs().float())
        return bool(((c.float() - wanted).abs() <= allowed).all())  # NaN is not smaller

    return check


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "k_tiles"])  # a 1 would be a constant, which no order can hold
def product(
    a, b, c, tiles_m, tiles_n, k_tiles,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    TURNED_A: gl.constexpr = False, TURNED_B: gl.constexpr = False
):  # fmt: skip
    """C = A @ B, of descriptors; see `iris_gluon.gemm.multiply_tiles`."""
    order, sink = core.RowGroups(tiles_m, tiles_n, GROUP), core.StoreTile(c)
    core.multiply_tiles(
        a, b, order, sink, tiles_m * tiles_n, k_tiles, STAGES, PARTS, NUM_WARPS, TURNED_A=TURNED_A, TURNED_B=TURNED_B
    )


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    config: core.GemmConfig | None = None,
    programs: int | None = None,
) -> None:
    """C = A @ B with the core, by default with a config chosen by shape, and a program for each multiprocessor."""
    (m, k), n = a.shape, b.shape[1]
    if programs is None:
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    config, fused = config or core.choose_config(m, n, programs, k=k), example()
    tiles = -(-m // config.block_m), -(-n // config.block_n), -(-k // config.block_k)
    product[(min(config.tiles(m, n), programs),)](
        *fused.operands(config, a, b), fused.describe(c, [config.block_m, config.block_n // config.parts]), *tiles,
        **config.options, TURNED_A=fused.by_columns(a), TURNED_B=fused.by_columns(b),
    )  # fmt: skip


def declare_gemm(state: State, ctx: Iris, variants: dict[str, core.GemmConfig | None]) -> None:
    """Declare cuBLAS and the core with some configurations."""
    m, n, k = state["shape"]
    a, b = random_matrix(m, k, 1, ctx), random_matrix(k, n, 2, ctx)
    c = torch.empty(m, n, dtype=torch.bfloat16, device=ctx.device)
    reason = example().unsupported(a, b, c)
    if reason:
        state.skip(reason)
    common: dict[str, Any] = {"check": is_product(c, a, b), "prepare": lambda: c.fill_(float("nan"))}
    state.set_flops(2 * m * n * k)
    state.provider("cublas", lambda: torch.matmul(a, b, out=c), peer=True, **common)

    for name, config in variants.items():
        state.provider(name, partial(multiply, a, b, c, config), baseline="cublas", **common)


@bench.register
@bench.axis("shape", shapes)
@bench.axis("timer", lambda options: ["cpu"] if on_cpu(options) else ["graph", "events"])
def gemm(state: State, ctx: Iris) -> None:
    """The core against cuBLAS."""
    if state.on_gpu:
        state.set_timer(state["timer"])
    declare_gemm(state, ctx, {"gluon": None})
    if tuple(state["shape"]) == SQUARE:
        state.target("gluon", "ratio", at_least=TARGET)


@bench.register(by_default=False)
@bench.axis("shape", shapes)
def configurations(state: State, ctx: Iris) -> None:
    """The core over configurations of its launch, in CUDA graphs."""
    if state.on_gpu:
        state.set_timer("graph")
    declare_gemm(state, ctx, dict(CONFIGURATIONS))


def example() -> Any:
    """The module of the example; its name is not one that can be imported."""
    name = "gluon_gemm_all_scatter"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@bench.register
@bench.axis("shape", slabs)
def all_scatter(state: State, ctx: Iris) -> None:
    """GEMM + all-scatter against torch.matmul and all-gather, in CUDA graphs."""
    if ctx.num_ranks < 2:
        state.skip("needs two ranks or more")
    if state.on_gpu:
        state.set_timer("graph")
    world = ctx.num_ranks
    m, whole, k = state["shape"]
    n = whole // world
    a, b = random_matrix(m, k, 1, ctx), random_matrix(k, n, 2 + ctx.cur_rank, ctx)
    everyones = torch.cat([random_matrix(k, n, 2 + rank, ctx) for rank in range(world)], dim=1)
    c = ctx.empty(m, whole, dtype=torch.bfloat16)
    slab = torch.empty(m, n, dtype=torch.bfloat16, device=ctx.device)
    stacked = torch.empty(world, m, n, dtype=torch.bfloat16, device=ctx.device)
    beside = stacked.transpose(0, 1)

    def torch_pair() -> None:
        torch.matmul(a, b, out=slab)
        torch.distributed.all_gather_into_tensor(stacked.view(world * m, n), slab)

    def torch_whole() -> None:
        torch_pair()
        c.view(m, world, n).copy_(beside)

    def fused() -> None:
        ctx.device_barrier()  # nobody writes to C while another rank still uses it
        example().gemm_all_scatter(ctx, a, b, c)
        ctx.device_barrier()

    def stacked_is_right() -> bool:
        c.view(m, world, n).copy_(beside)
        return whole_is_right()

    whole_is_right = is_product(c, a, everyones)
    nan = float("nan")
    state.set_flops(2 * m * n * k)
    state.set_bytes(m * n * 2 * (world - 1))
    state.provider("torch", torch_pair, check=stacked_is_right, prepare=lambda: stacked.fill_(nan), peer=True)
    state.provider("torch whole", torch_whole, check=whole_is_right, prepare=lambda: c.fill_(nan), baseline="torch")
    state.provider("gluon fused", fused, check=whole_is_right, prepare=lambda: c.fill_(nan), baseline="torch")


SUITE = bench.Suite(
    about=__doc__,
    source=__file__,
    device="cuda",
    backend="gluon",
    results="results/gluon_gemm-{ranks}.json",
)


if __name__ == "__main__":
    sys.exit(SUITE.main())
