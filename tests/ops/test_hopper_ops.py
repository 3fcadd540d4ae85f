"""The algorithms for Hopper: on CPU ranks where the executor computes TMA and wgmma, on GPUs, and compiled."""

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from cubins import assembler_says, resources
from jobs_ccl import run_cases
from jobs_common import unlike
from jobs_sequences import back_to_back, captured, in_groups
from ops_cases import Case
from tables import raises, says, table
from test_choice_ops import REQUEST

from iris_core import Iris
from iris_core.ops import FusedConfig
from iris_gluon.gemm import GemmConfig, operations
from iris_gluon.gemm.gather_product import _BESIDE_BARRIER, gather_product
from iris_gluon.gemm.push_product import push_product
from iris_gluon.gemm.reduce_product import reduce_product
from iris_triton import _compat
from iris_triton.collectives.parts.barrier import barrier_alone
from iris_triton.testing.compile_only import assembly, compile_for

TINY = {"block_size_m": 64, "block_size_n": 64, "num_warps": 4, "num_stages": 3}
"""Tiles that the executor computes in a moment; on GPUs the choice is the library's."""

ALGORITHMS = (
    ("matmul_reduce_scatter", "hopper_push", None),
    ("matmul_all_gather", "hopper_push", 1),
    ("all_gather_matmul", "hopper_copy_engine_push", 0),
)
"""Operations, their algorithms, and a gather_dim."""


def cases(on_cpu):
    """Every algorithm in every form; on the CPU two of three, in turn."""
    few, several = ({**TINY, "num_sms": n} for n in (2, 3)) if on_cpu else ({}, {"num_sms": 40})
    shape = (128, 72, 80) if on_cpu else (512, 776, 520)
    turned = (72, 72, 40) if on_cpu else (392, 776, 520)  # columns of A are multiples of 16 bytes, too
    forms = ("heap", "ordinary", ""), ("transposed", "heap", "columns"), ("ordinary", "gaps", "rows")
    pairs = itertools.product(enumerate(ALGORITHMS), enumerate(forms))
    for (number, (op, algorithm, dim)), (i, (place, out_place, bias)) in pairs:
        if on_cpu and i == number:
            continue
        config = {**several, "chunk_size": (3, 1, 100)[i]} if number == 0 else several  # of 2 or 4 tiles of an owner
        config = {**config, "block_size_n": 128} if number == 1 and bias and not on_cpu else config
        how = {"place": place, "out_place": out_place, "bias": bias, "dim": 0 if (number, i) == (1, 0) else dim}
        dtype = ("bfloat16", "float16")[i % 2 if number == 0 else 0]
        yield Case(op, algorithm, turned if number == 1 else shape, dtype, config=config, **how)
    scaled = ("rows", "columns"), ("blocks", ""), ("", "rows")
    pairs = itertools.product(enumerate(ALGORITHMS), enumerate(scaled))
    for (number, (op, algorithm, dim)), (i, (scales, bias)) in pairs:
        if on_cpu and i == 2 - number:
            continue
        dtypes = (("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "float16"))[(number + i) % 2]
        how = {"place": "inner", "out_place": "ordinary", "bias": bias, "dim": dim, "scales": scales}
        shape, chosen = ((128, 136, 208), few) if on_cpu else ((512, 776, 528), several if i == 1 else {})
        if on_cpu and scales == "blocks":  # two partitions, and two halves of a tile
            shape, chosen = (256, 136, 208), {"block_size_n": 256, "num_stages": 2, "num_sms": 2}
        yield Case(op, algorithm, shape, *dtypes, **how, config=chosen)


def one_of_each(on_cpu):
    """A call of every algorithm, for sequences of calls: on GPUs with tiles of 64 rows and of 128."""
    config = {**TINY, "num_sms": 2} if on_cpu else {}
    for number, shape in enumerate([(64, 64, 32)] if on_cpu else [(192, 264, 96), (256, 520, 520)]):
        dtype = ("bfloat16", "float16")[number % 2]
        place = ("heap", "ordinary")[number % 2]
        how = {"bias": "columns", "config": config, "place": place, "out_place": place}
        yield Case("matmul_reduce_scatter", "hopper_push", shape, dtype, **how)
        yield Case("matmul_all_gather", "hopper_push", shape, dtype, dim=1, **how)
        yield Case("all_gather_matmul", "hopper_copy_engine_push", shape, dtype, dim=0, **how)
        dtypes, wide = ("float8_e4m3fn", "bfloat16"), (*shape[:2], (shape[2] + 31) // 16 * 16)
        how = {"scales": ("rows", "blocks")[number % 2], "config": config, "place": "inner"}
        yield Case("all_gather_matmul", "hopper_copy_engine_push", wide, *dtypes, dim=0, **how)


def run(device, turns):
    """Call every case `turns` times with new data; returns what was wrong."""
    return run_cases(device, list(cases(device == "cpu")), turns, backend="gluon", heap="64MiB")


def refused(device):
    """What is wrong with why each of them refuses what TMA, wgmma or the division of rows does not allow."""
    with Iris("4MiB", device=device, backend="gluon") as ctx:
        size, ops = ctx.num_ranks, ctx.ops

        def make(*shape, dtype=torch.bfloat16):
            return torch.zeros(*shape, dtype=dtype, device=ctx.device)

        def of(algorithm, **more):
            return FusedConfig(algorithm=algorithm, **(TINY | more))

        push, fetch = of("hopper_push"), of("hopper_copy_engine_push")
        gather, scatter = (partial(op, config=push) for op in (ops.matmul_all_gather, ops.matmul_reduce_scatter))
        out, a = make(64 * size, 64), make(64, 64)
        floats = [make(rows, 64, dtype=torch.float32) for rows in (64 * size, 64, 64)]
        tma, narrow = "UnsupportedError: gemm.dense", make(1, 64).expand(64, 64)
        of_blocks = {"a_scales": floats[1][:, :1], "b_scales": floats[1][:1, :1]}
        of_blocks |= {"config": of("hopper_push", block_size_k=64)}
        wrong = unlike(
            ("UnsupportedError: gemm.dtypes", lambda: gather(*floats)),
            ("UnsupportedError: gemm.columns", lambda: gather(out, a.to(F8), a.to(F8))),
            ("UnsupportedError: .*block_size_k", lambda: gather(out, a.to(F8), a.to(F8).t(), **of_blocks)),
            (tma, lambda: gather(out, a, make(64, 128)[:, ::2])), (tma, lambda: gather(out, a, narrow)),
            (tma, lambda: gather(make(64 * size, 60), a, make(64, 60))),
            ("UnsupportedError: gemm.rows", lambda: scatter(make(24, 64), make(24 * size, 64), a)),
            ("UnsupportedError: .*layout=", lambda: scatter(a.clone(), a, a, layout="tiles")),
            ("UnsupportedError: .*block_n", lambda: gather(out, a, a, config=of("hopper_push", block_size_n=32))),
            ("UnsupportedError: .*gather_dim=0", lambda: ops.all_gather_matmul(a.clone(), a, out, config=fetch)),
            ("UnsupportedError: .*num_fetch_sms", lambda: ops.all_gather_matmul(
                out, a, a, gather_dim=0, config=of("hopper_copy_engine_push", num_fetch_sms=1))),
        )  # fmt: skip
        ctx.barrier()
    return wrong


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


def test_refused_calls(pool, device):
    assert pool.run(refused, 2, device) == [[]] * 2


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


def compiled(name, config, turned, scales, **more):
    kernel, arguments, constants = KERNELS[name]
    if scales:  # of 8-bit floats
        operands = {"gather": {1, 2, 4}, "reduce": {0, 1}, "push": {1, 2}}[name]
        arguments = tuple(F8 if place in operands else each for place, each in enumerate(arguments))
        constants = {**constants, "BIAS": "none"} if "BIAS" in constants else constants  # with one, a few are spilled
    blocks = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    turns = {"TURNED_B": turned} | ({} if name == "gather" else {"TURNED_A": turned and not scales})
    options = {"SIZE": 8, "SCALES": scales or "none", **blocks, **constants, **turns, **config.options, **more}
    return compile_for(kernel, (*arguments, *SCALES[scales or "none"]), options, "sm_90")


_OF_A_QUARTER = 512 * 32
"""Registers of each quarter of a multiprocessor, which takes every fourth warp."""

SMALL = GemmConfig(block_n=128, parts=1, stages=5)
LOW = GemmConfig(block_m=64, block_n=128, parts=1, stages=5, num_warps=4, maxnreg=255)
FORMS = {
    "128x256 rows": (GemmConfig(), False, ""),
    "128x128 columns": (SMALL, True, ""),
    "64x256 columns": (replace(LOW, block_n=256, parts=2, stages=4), True, ""),
    "64x128 rows": (LOW, False, ""),
    "8 bits, scales of rows": (GemmConfig(block_k=128, item=1), True, "rows"),
    "8 bits, blocks 256": (GemmConfig(block_k=128, item=1, num_warps=4), True, "blocks"),
    "8 bits, blocks 128": (replace(SMALL, block_k=128, item=1, num_warps=4), True, "blocks"),
    "8 bits, blocks 64 rows": (replace(LOW, block_n=256, parts=2, stages=4, block_k=128, item=1), True, "blocks"),
}
"""The core's forms, whether operands lie by columns, and scales."""


@pytest.mark.parametrize(("form", "name"), [  # each form with one kernel, of 8-bit floats with two
    pytest.param(form, name, marks=[pytest.mark.exhaustive] * ((i + j) % 3 in ((0, 1) if i < 4 else (0,))))
    for i, form in enumerate(FORMS) for j, name in enumerate(KERNELS)
])  # fmt: skip
def test_assembly(name, form):
    """A product that gathers leaves room for the barrier beside it; the assembler lets steps overlap."""
    (config, turned, scales), gathers = FORMS[form], name == "gather"
    few = {"maxnreg": _BESIDE_BARRIER[config.maxnreg]} if gathers or scales == "rows" else {}
    few |= {"SIZE": 4} if scales and name == "reduce" else {}  # with 8 owners, Triton 3.6 spills two or six registers
    made = compiled(name, config, turned, scales, **few)
    text, (many, spilled) = assembly(made), resources(made)
    assert made.metadata.shared <= (config.shared_bytes if scales else 227 * 1024)
    assert re.search(r"wgmma\.mma_async" + r"\S*k32\.f32\.e4m3\.e4m3" * bool(scales), text)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", text)
    assert (re.search(r"st\.release\.sys\.global\.b64", text) is None) == gathers
    if gathers or scales:
        assert spilled <= (24 if _compat.version() >= (3, 9) else 0)  # Triton 3.9 spills up to six registers
        assert made.metadata.shared + 2 * 1024 <= 228 * 1024  # each program has 1 KiB that it does not see
        assert "serialized" not in assembler_says(text)
    if gathers:
        few, _ = resources(compile_for(barrier_alone, (I64, I64, 1, 1, *END), {"SIZE": 8, "num_warps": 1}, "sm_90"))
        assert made.metadata.num_warps // 4 * many * 32 + few * 32 <= _OF_A_QUARTER
        assert re.search(r"ld\.acquire\.sys\.global\.b32", text)
        assert "fence.proxy.async" in text
        assert re.search(r"atom\.global\.gpu\.acq_rel\.add\.[su]32", text)  # who has waited


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


@table("config", [{"num_stages": 5}, {"block_size_k": 128}, {"num_stages": 9}, {"block_size_m": 256}])
@table("op", [GATHERS, SCATTERS])
def test_configs_do_not_depend_on_processors(op, config):
    """What `supports` accepts, `prepare` can launch, on devices of any size, whatever the shape."""
    for algorithm in serving(op):
        for m, n in ((8192, 1024), (66 * 128, 384), (2048, 512)):
            request = asked(op, m, *((n, 4096) if op == GATHERS else (4096, n)), config)
            answer = algorithm.supports(request)
            works = bool(answer) or says("must be", name="rows") in answer.reason
            for processors in (1, 116, 132):
                if works:
                    algorithm._gemm(request, processors)
                else:
                    with raises(ValueError, "gemm.shared"):
                        algorithm._gemm(request, processors)
