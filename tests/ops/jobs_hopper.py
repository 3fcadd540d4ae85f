"""Rank jobs: the algorithms for Hopper, on GPUs, and on CPU ranks where the executor computes TMA and wgmma."""

import itertools
from functools import partial

import torch
from jobs_ccl import run_cases
from jobs_common import unlike
from ops_cases import Case

from iris_core import Iris
from iris_core.ops import FusedConfig

F8 = torch.float8_e4m3fn
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


def one_of_each(on_cpu, shapes=None):
    """A call of every algorithm, for sequences of calls: tiny ones on CPU ranks, unless shapes are given.

    On GPUs they divide the rows into tiles of 64 and of 128.
    """
    config = {**TINY, "num_sms": 2} if on_cpu else {}
    for number, shape in enumerate(shapes or ([(64, 64, 32)] if on_cpu else [(192, 264, 96), (256, 520, 520)])):
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
        out, a, wide = make(64 * size, 64), make(64, 64), make(64, 128)
        floats = [make(rows, 64, dtype=torch.float32) for rows in (64 * size, 64, 64)]
        tma, narrow = "UnsupportedError: .*TMA needs dense rows", make(1, 64).expand(64, 64)
        of_blocks = {"a_scales": floats[1][:, :1], "b_scales": floats[1][:1, :1]}
        of_blocks |= {"config": of("hopper_push", block_size_k=64)}
        wrong = unlike(
            ("UnsupportedError: .*float32 to float32", lambda: gather(*floats)),
            ("UnsupportedError: .*B by columns", lambda: gather(out, a.to(F8), a.to(F8))),
            ("UnsupportedError: .*block_size_k 128", lambda: gather(out, a.to(F8), a.to(F8).t(), **of_blocks)),
            (tma, lambda: gather(out, a, wide[:, ::2])), (tma, lambda: gather(out, a, narrow)),
            (tma, lambda: gather(make(64 * size, 60), a, make(64, 60))),
            ("UnsupportedError: .*24 rows", lambda: scatter(make(24, 64), make(24 * size, 64), a)),
            ("UnsupportedError: .*layout='torch' alone", lambda: scatter(a.clone(), a, a, layout="tiles")),
            ("UnsupportedError: .*block_n", lambda: gather(out, a, a, config=of("hopper_push", block_size_n=32))),
            ("UnsupportedError: .*gather_dim=0", lambda: ops.all_gather_matmul(a.clone(), a, out, config=fetch)),
            ("UnsupportedError: .*num_fetch_sms", lambda: ops.all_gather_matmul(
                out, a, a, gather_dim=0, config=of("hopper_copy_engine_push", num_fetch_sms=1))),
        )  # fmt: skip
        ctx.barrier()
    return wrong
