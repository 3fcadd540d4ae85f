"""The algorithms for Hopper: by the executor on CPU ranks, on GPUs, and compiled."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from cubins import assembler_says, resources
from jobs_hopper import one_of_each, refused, run
from jobs_sequences import back_to_back, captured, in_groups
from tables import table
from test_choice_ops import REQUEST

from iris_gluon.gemm import GemmConfig, operations
from iris_gluon.gemm.gather_product import _BESIDE_BARRIER, gather_product
from iris_gluon.gemm.push_product import push_product
from iris_gluon.gemm.reduce_product import reduce_product
from iris_triton.collectives.parts.barrier import barrier_alone
from iris_triton.testing.compile_only import assembly, compile_for

BF16, I32, I64 = torch.bfloat16, torch.int32, torch.int64
F8, F32 = torch.float8_e4m3fn, torch.float32
END = (0, 1 << 40)  # timeout, status
SCALES = {"none": (None, None, 0, 0, 0, 0), "rows": (F32, F32, 1, 0, 0, 1), "blocks": (F32, F32, 32, 1, 1, 32)}
"""Arguments of scales and their strides."""


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.multigpu(4))])
def test_operations(pool, num_ranks, device):
    if device == "cpu" and num_ranks > 2:
        pytest.skip("the executor computes every warp: two ranks are enough on a CPU")
    assert pool.run(run, num_ranks, device, 1 if device == "cpu" else 2, timeout_s=300.0) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
def test_refused_calls(pool, num_ranks, device):
    assert pool.run(refused, num_ranks, device) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.multigpu(4))])
def test_back_to_back_with_changing_data(pool, num_ranks, device):
    """All algorithms share memory, words and barriers; some ranks are late."""
    on_cpu = device == "cpu"
    if on_cpu and num_ranks > 2:
        pytest.skip("the executor computes every warp: two ranks are enough on a CPU")
    cases = list(one_of_each(on_cpu))
    job = partial(back_to_back, slow=True, cases=cases, backend="gluon")
    assert pool.run(job, num_ranks, device, 12 if on_cpu else 400, 0, timeout_s=300.0) == [[]] * num_ranks


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replays_with_changing_data(pool, num_ranks):
    how = list(one_of_each(False)), 50, "", 10, "gluon"
    assert pool.run(captured, num_ranks, "cuda", *how, timeout_s=500.0) == [[]] * num_ranks


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks):
    how = [[3, 1], [2, 0, 3], [1, 3, 0, 2]], 0, list(one_of_each(False)), None, "gluon"
    assert pool.run(in_groups, num_ranks, "cuda", *how) == [[]] * num_ranks


KERNELS = {
    "push": (push_product, (BF16, BF16, BF16, BF16, I64, I64, 1, 1, 1000, 8192, 4096, 4096, 8192, 8192, 1, 8, 32, 64,
                            *END), {"DIM": 1, "BIAS": "columns"}),
    "reduce": (reduce_product, (BF16, BF16, I64, BF16, I64, 1, 1, 8192, 8192, 4096, 4096, 8192, 1024, 32, 64, 16, *END),
               {}),
    "gather": (gather_product, (BF16, BF16, BF16, BF16, BF16, I32, 1, 1, 8192, 4096, 8192, 8192, 1, 1024, 32, 64, *END),
               {"BIAS": "columns"}),
}  # fmt: skip


def compiled(name, config, *, turned=False, scales="none", eight_bits=False, **more):
    kernel, arguments, constants = KERNELS[name]
    gathers = name == "gather"
    if eight_bits:
        operands = {1, 2, 4} if gathers else {0, 1} if name == "reduce" else {1, 2}
        arguments = tuple(F8 if place in operands else each for place, each in enumerate(arguments))
        constants = {**constants, "BIAS": "none"} if "BIAS" in constants else constants  # with one, a few are spilled
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "SCALES": scales}
    turns = {"TURNED_B": turned} | ({} if gathers else {"TURNED_A": turned and not eight_bits})
    options = {"SIZE": 8, **blocks, **constants, **turns, **config.options, **more}
    return compile_for(kernel, (*arguments, *SCALES[scales]), options, "sm_90")


_OF_A_QUARTER = 512 * 32
"""Registers of each quarter of a multiprocessor, which takes every fourth warp."""

SMALL = GemmConfig(block_n=128, parts=1, stages=5)
LOW = GemmConfig(block_m=64, block_n=128, parts=1, stages=5, num_warps=4, maxnreg=255)
FORMS = {
    "128x256 rows": (GemmConfig(), False),
    "128x128 columns": (SMALL, True),
    "64x256 columns": (replace(LOW, block_n=256, parts=2, stages=4), True),
    "64x128 rows": (LOW, False),
}


@pytest.mark.parametrize(("form", "name"), [  # each form of the core with one kernel
    pytest.param(form, name, marks=[pytest.mark.exhaustive] * ((i + j) % len(KERNELS) != 2))
    for i, form in enumerate(FORMS) for j, name in enumerate(KERNELS)
])  # fmt: skip
def test_assembly(name, form):
    """A product that gathers leaves room for the barrier beside it."""
    (config, turned), gathers = FORMS[form], name == "gather"
    made = compiled(name, config, turned=turned, **({"maxnreg": _BESIDE_BARRIER[config.maxnreg]} if gathers else {}))
    text = assembly(made)
    assert made.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in text
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", text)
    assert (re.search(r"st\.release\.sys\.global\.b64", text) is None) == gathers
    if gathers:
        barrier = compile_for(barrier_alone, (I64, I64, 1, 1, *END), {"SIZE": 8, "num_warps": 1}, "sm_90")
        (many, spilled), (few, _) = resources(made), resources(barrier)
        assert spilled == 0
        assert made.metadata.num_warps // 4 * many * 32 + few * 32 <= _OF_A_QUARTER
        assert made.metadata.shared + 2 * 1024 <= 228 * 1024  # each program has 1 KiB that it does not see
        assert re.search(r"ld\.acquire\.sys\.global\.b32", text)
        assert "fence.proxy.async" in text
        assert re.search(r"atom\.global\.gpu\.acq_rel\.add\.[su]32", text)  # who has waited


EIGHT = {
    "rows": ("rows", GemmConfig(block_k=128, item=1)),
    "blocks 256": ("blocks", GemmConfig(block_k=128, item=1, num_warps=4)),
    "blocks 128": ("blocks", replace(SMALL, block_k=128, item=1, num_warps=4)),
    "blocks 64 rows": ("blocks", replace(LOW, block_n=256, parts=2, stages=4, block_k=128, item=1)),
}


@pytest.mark.parametrize(("form", "name"), [  # each form and each kernel twice
    pytest.param(form, name, marks=[pytest.mark.exhaustive] * ((i + j) % 3 == 0 or (i == 3 and j == 1)))
    for i, form in enumerate(EIGHT) for j, name in enumerate(KERNELS)
])  # fmt: skip
def test_products_of_8_bit_floats(name, form):
    """Nothing is spilled, beside the barrier, too, and the assembler lets steps overlap."""
    scales, config = EIGHT[form]
    few = {"maxnreg": _BESIDE_BARRIER[config.maxnreg]} if name == "gather" or scales == "rows" else {}
    few |= {"SIZE": 4} if name == "reduce" else {}  # with 8 owners, Triton 3.6 spills two or six registers
    made = compiled(name, config, turned=True, scales=scales, eight_bits=True, **few)
    assert re.search(r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3", assembly(made))
    assert made.metadata.shared <= config.shared_bytes
    assert made.metadata.shared + 2 * 1024 <= 228 * 1024
    assert resources(made)[1] == 0
    assert "serialized" not in assembler_says(assembly(made))


GATHERS, SCATTERS = "all_gather_matmul", "matmul_reduce_scatter"
OPS = (SCATTERS, "matmul_all_gather", GATHERS)


@pytest.fixture(autouse=True)
def copies(monkeypatch):
    monkeypatch.setattr("iris_gluon.gemm.gather_product.copies_obstacle", lambda device: "")


def asked(op, m, n, k, config=None):
    """What a rank of 8 asks for of M rows and its own part of a weight, of K x N."""
    dim, out = {GATHERS: (0, (m, n)), SCATTERS: (None, (m // 8, n))}.get(op, (1, (m, 8 * n)))
    return replace(
        REQUEST, op=op, m=m, n=n, k=k, nbytes=m * (k if op == GATHERS else n) * 2, a_stride=(k, 1), b_stride=(n, 1),
        out_stride=(out[1], 1), out_shape=out, options={**REQUEST.options, "config": config or {}, "gather_dim": dim},
    )  # fmt: skip


def serving(op):
    return [each for each in operations() if each.op == op]


@pytest.mark.parametrize("op", OPS)
def test_launches_that_are_worth_measuring(op):
    """The own choice, then others that it can make, none of them twice, and both orders of owners."""
    for algorithm in serving(op):
        offered = algorithm.tunings(asked(op, 8192, 8192, 3584))
        assert offered[0] == {}
        assert len(offered) >= 4
        requests = [asked(op, 8192, 8192, 3584, config) for config in offered]
        assert all(algorithm.supports(each) for each in requests)
        cores = [algorithm._gemm(each, 132) for each in requests]
        launches = {(core, tuple(sorted(config.items()))) for core, config in zip(cores, offered, strict=True)}
        assert len(launches) == len(offered)
        assert len(set(cores)) >= 2
        if op == SCATTERS:  # in turn by default, or in runs: what was faster where both were measured
            assert {config.get("chunk_size") for config in offered} == {None, 1}
            others = algorithm.tunings(asked(op, 2048, 8192, 3584))
            assert min(config["chunk_size"] for config in others if "chunk_size" in config) > 100_000


@table("config", [{"num_stages": 5}, {"block_size_k": 128}, {"num_stages": 9}, {"block_size_m": 256}])
@table("op", [GATHERS, SCATTERS])
def test_configs_do_not_depend_on_processors(op, config):
    """What `supports` accepts, `prepare` can launch, on devices of any size, whatever the shape."""
    for algorithm in serving(op):
        for m, n in ((8192, 1024), (66 * 128, 384), (2048, 512)):
            request = asked(op, m, *((n, 4096) if op == GATHERS else (4096, n)), config)
            works = bool(algorithm.supports(request)) or "rows must be a multiple" in algorithm.supports(request).reason
            for processors in (1, 116, 132):
                if works:
                    algorithm._gemm(request, processors)
                else:
                    with pytest.raises(ValueError, match="shared memory"):
                        algorithm._gemm(request, processors)
