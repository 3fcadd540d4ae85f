"""The GEMM core: what it compiles to, how it is configured and refused, and, on a Hopper GPU, what it computes."""

import dataclasses
import functools
import importlib.util
import itertools
import pathlib
import re

import pytest
import torch
from cubins import assembler_says
from tables import raises, table

from iris_core import Iris
from iris_gluon import IrisDeviceCtx, gemm
from iris_triton.testing.compile_only import assembly, compile_for

ROOT = pathlib.Path(__file__).parents[2]
TINY = gemm.GemmConfig(block_m=64, block_n=64, parts=2, stages=3, num_warps=4, group=2)


@functools.cache
def loaded(path):
    """A module of the repository that is no part of a package; the example's name is not one that can be imported."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem.lstrip("0123456789_"), ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


all_scatter = functools.partial(loaded, "examples/24_gluon_gemm_all_scatter.py")
benchmark = functools.partial(loaded, "benchmarks/gluon_gemm.py")  # of the plain product


def matrix(rows, columns, seed, inner, dtype=torch.bfloat16, device="cpu"):
    """-1, 0 and 1; sums of `inner` products are exact in 16 bits, in any order."""
    generator = torch.Generator(device).manual_seed(seed)
    density = min(1.0, (64 / inner) ** 0.5)
    values = torch.rand(rows, columns, generator=generator, device=device)
    return ((values < density / 2).float() - (values > 1 - density / 2).float()).to(dtype)


def wrong_elements(c, a, b):
    """How many elements of C are not exactly those of A @ B."""
    wanted = a.double() @ b.double()
    assert wanted.any()
    assert wanted.abs().max() <= 256
    return int((c.double() != wanted).sum())  # NaN is not equal


def scatter_by_core(m, n, k, dtype, parts, programs, stored):
    """How many elements of C are wrong after GEMM + all-scatter for Hopper."""
    config, turned = dataclasses.replace(TINY, parts=parts), STORED[stored]
    with Iris("4MiB", device="cpu", backend="gluon") as ctx:
        a, slabs = matrix(m, k, 1, k, dtype), [matrix(k, n, 2 + rank, k, dtype) for rank in range(ctx.num_ranks)]
        given = zip((a, slabs[ctx.cur_rank]), turned, strict=True)
        given = (each.t().contiguous().t() if turn else each for each, turn in given)
        c = ctx.full((m, n * ctx.num_ranks), float("nan"), dtype=dtype)
        ctx.barrier()
        all_scatter().on_hopper[(programs,)](
            IrisDeviceCtx, ctx.get_device_context(), *all_scatter().operands(config, *given), c, m, n, k, c.stride(0),
            WORLD=ctx.num_ranks, TURNED_A=turned[0], TURNED_B=turned[1], **config.options,
        )  # fmt: skip
        ctx.barrier()
        return wrong_elements(c, a, torch.cat(slabs, dim=1))


BF16 = torch.bfloat16
SMALL = gemm.GemmConfig(block_n=128, parts=1, stages=5)
product = benchmark().product
CONFIGS = {
    "large": gemm.GemmConfig(),
    "small": SMALL,
    "tall": gemm.GemmConfig(block_m=256, block_n=128),
    "four warps": gemm.GemmConfig(block_m=64, block_n=128, num_warps=4, parts=1, maxnreg=255),
}
STORED = {"rows": (False, False), "B by columns": (False, True), "A by columns": (True, False), "both": (True, True)}


@pytest.mark.parametrize(("config", "turned"), [
    pytest.param(CONFIGS[name], STORED[stored], id=f"{name}-{stored}", marks=[pytest.mark.exhaustive] if i % 5 else [])
    for i, (name, stored) in enumerate(itertools.product(CONFIGS, STORED))
])  # fmt: skip
def test_core_for_hopper(config, turned):
    matrix, example = torch.empty(512, 512, dtype=BF16), all_scatter()
    c = example.describe(matrix, [config.block_m, config.block_n // config.parts])
    operands = example.operands(config, *(matrix.t() if each else matrix for each in turned))
    options = {**config.options, "TURNED_A": turned[0], "TURNED_B": turned[1]}
    compiled = compile_for(product, [*operands, c, 17, 18, 19], options)
    ptx = assembly(compiled)
    per_group = config.block_m // (16 * config.num_warps)  # of 64 rows and 16 columns of A
    assert len(re.findall(r"wgmma\.mma_async", ptx)) == config.block_k // 16 * per_group
    majors = set(re.findall(r"wgmma\.mma_async.*, ([01]), ([01]);", ptx))
    assert majors == {(str(int(turned[0])), str(int(not turned[1])))}, "operands are read as they lie, not copied"
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\.mbarrier", ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.bulk_group", ptx)
    assert "cp.async.bulk.wait_group 0;" in ptx, "stores are awaited, not only the reading of shared memory"
    assert "setmaxnreg" in ptx
    assert compiled.metadata.shared <= config.shared_bytes, "the estimate must not be too low"
    assert config.shared_bytes - compiled.metadata.shared < 1024
    assert set(re.findall(r"(\d+) bytes spill (?:stores|loads)", assembler_says(ptx))) == {"0"}


def test_a_matrix_of_one_tile():
    """Sizes of 1 are no constants."""
    example = all_scatter()
    c = example.describe(torch.empty(128, 128, dtype=BF16), [128, 128])
    a, b = torch.empty(128, 64, dtype=BF16), torch.empty(64, 128, dtype=BF16)
    assert assembly(compile_for(product, [*example.operands(SMALL, a, b), c, 1, 1, 1], SMALL.options))
    for turned, left, right in ((False, a, b), (True, b.t(), a.t())):
        arguments = [IrisDeviceCtx, torch.int64, *example.operands(SMALL, left, right), BF16, 1, 1, 1, 8]
        options = {"WORLD": 2, "TURNED_A": turned, "TURNED_B": turned, **SMALL.options}
        assert assembly(compile_for(example.on_hopper, arguments, options))
    arguments = [IrisDeviceCtx, torch.int64, BF16, BF16, BF16, 1, 1, 1, 1, 1, 1, 1, 8, 1]
    assert assembly(compile_for(example.portable, arguments, {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16}))


@table("change, key", [
    ({"parts": 3}, "parts"), ({"block_n": 96}, "parts"), ({"block_k": 32}, "parts"), ({"num_warps": 16}, "warps"),
    ({"block_m": 64}, "warps"), ({"stages": 1}, "stages"), ({"group": 0}, "stages"), ({"stages": 5}, "shared"),
    ({"parts": 1}, "shared"),
])  # fmt: skip
def test_configurations_that_are_refused(change, key):
    with raises(ValueError, f"gemm.{key}"):
        gemm.GemmConfig(**change)


@table("given, chosen", [
    ({"block_n": 128}, (128, 128, 64, 5, 8)), ({"block_m": 64}, (64, 256, 64, 4, 4)),
    ({"block_k": 128}, (128, 256, 128, 2, 8)), ({"stages": 5}, (128, 128, 64, 5, 8)),
    ({"block_m": 256}, (256, 128, 64, 3, 8)),
])  # fmt: skip
def test_choice_of_what_is_not_given(given, chosen):
    config = gemm.choose_config(8192, 8192, 132, k=8192, given=given)
    assert (config.block_m, config.block_n, config.block_k, config.stages, config.num_warps) == chosen


@pytest.mark.parametrize(("num_ranks", "shape", "dtype", "parts", "programs", "stored"), [
    (2, (64, 64, 64), BF16, 1, 3, "rows"), (1, (200, 104, 136), torch.float16, 1, 1, "rows"),
    (3, (200, 104, 136), BF16, 2, 3, "rows"), (1, (8, 8, 200), torch.float16, 2, 1, "rows"),
    *((size, shape, BF16, 1, 2, stored) for size, shape in ((2, (64, 128, 64)), (1, (200, 104, 136)))
      for stored in list(STORED)[1:]),
])  # fmt: skip
def test_core_on_cpu_ranks(pool, num_ranks, shape, dtype, parts, programs, stored):
    wrong = pool.run(scatter_by_core, num_ranks, *shape, dtype, parts, programs, stored)
    assert wrong == [0] * num_ranks


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the core is for sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, *CONFIGS.values()], ids=["chosen", *CONFIGS])
def test_product(hopper, config):
    shapes = [(128, 256, 64), (1000, 520, 328), (2048, 4096, 1024), (8, 8, 8), (5000, 8, 4104)]
    every = [(dtype, STORED["rows"], shape) for dtype in (BF16, torch.float16) for shape in shapes]
    every += [(BF16, turned, shape) for turned in list(STORED.values())[1:] for shape in shapes[1:3]]
    for dtype, turned, (m, n, k) in every:
        a, b = (matrix(*size, m + n + k, k, dtype, "cuda") for size in ((m, k), (k, n)))
        a, b = (each.t().contiguous().t() if turn else each for each, turn in zip((a, b), turned, strict=True))
        surroundings = torch.full((m + 2, n + 16), 7.0, dtype=dtype, device="cuda")
        c = surroundings[1:-1, 8:-8]
        c.fill_(float("nan"))
        benchmark().multiply(a, b, c, config)
        assert wrong_elements(c, a, b) == 0
        c.fill_(7.0)
        assert (surroundings == 7.0).all(), "nothing is written around C"
