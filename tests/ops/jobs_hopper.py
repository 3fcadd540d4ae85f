"""Rank jobs: the algorithms for Hopper, on GPUs, and on CPU ranks where the executor computes TMA and wgmma."""

import torch
from jobs_ops import Tensors, call, verify
from ops_cases import Case

from iris_core import Iris
from iris_core.errors import UnsupportedError
from iris_core.ops import FusedConfig

TINY = {"block_size_m": 64, "block_size_n": 64, "num_warps": 4, "num_stages": 3}
"""Tiles that the executor computes in a moment; on GPUs the choice is the library's."""


def cases(on_cpu):
    """Every algorithm in every form."""
    few, several = ({**TINY, "num_sms": n} for n in (2, 3)) if on_cpu else ({}, {"num_sms": 40})
    m, n, k = (128, 72, 80) if on_cpu else (512, 776, 520)
    turned = (72, 72, 40) if on_cpu else (392, 776, 520)  # columns of A are multiples of 16 bytes, too
    for number, (bias, config) in enumerate((("", several), ("columns", few), ("rows", several))):
        dtype = ("bfloat16", "float16")[number % 2]
        how = {"place": ("heap", "transposed", "ordinary")[number], "bias": bias, "config": config}
        how["out_place"] = ("ordinary", "heap", "gaps")[number]
        how["config"] = {**config, "chunk_size": (3, 1, 100)[number]}  # of 2 or 4 tiles of an owner
        yield Case("matmul_reduce_scatter", "hopper_push", (m, n, k), dtype, **how)
    for number, (dim, bias) in enumerate(((0, ""), (1, "columns"), (1, "rows"))):
        how = {"place": ("heap", "heap", "transposed")[number], "bias": bias, "dim": dim}
        how["out_place"] = ("heap", "heap", "ordinary")[number]
        how["config"] = {**several, "block_size_n": 128} if bias and not on_cpu else several
        yield Case("matmul_all_gather", "hopper_push", turned, "bfloat16", **how)
    name = "hopper_copy_engine_push"
    for place, out_place, bias in (
        ("heap", "ordinary", ""),
        ("transposed", "gaps", "columns"),
        ("ordinary", "heap", "rows"),
    ):
        operands = {"place": place, "out_place": out_place, "bias": bias}
        yield Case("all_gather_matmul", name, (m, n, k), "bfloat16", dim=0, config=several, **operands)


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


def run(device, turns):
    """Call every case `turns` times with new data; returns what was wrong."""
    wrong = []
    with Iris("64MiB", device=device, backend="gluon") as ctx:
        for case in cases(device == "cpu"):
            with ctx.scope():
                tensors = Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks)
                for turn in range(turns):
                    tensors.fill(turn)
                    call(ctx, case, tensors)
                    wrong += verify(case, tensors, turn, f" (turn {turn})" if turn else "")
        ctx.barrier()
    return wrong


def refused(device):
    """Why each of them refuses what TMA, wgmma or the division of rows does not allow."""
    said = {}
    with Iris("4MiB", device=device, backend="gluon") as ctx:
        size = ctx.num_ranks

        def make(*shape, dtype=torch.bfloat16):
            return torch.zeros(*shape, dtype=dtype, device=ctx.device)

        def ask(name, op, algorithm, *tensors, **options):
            config = FusedConfig(algorithm=algorithm, **(TINY | options.pop("more", {})))
            try:
                getattr(ctx.ops, op)(*tensors, config=config, **options)
                said[name] = "nothing"
            except UnsupportedError as error:
                said[name] = str(error)

        scatter, gather = "matmul_reduce_scatter", "matmul_all_gather"
        ask("float32", gather, "hopper_push", *(make(rows, 64, dtype=torch.float32) for rows in (64 * size, 64, 64)))
        out = make(64 * size, 64)
        ask("every other", gather, "hopper_push", out, make(64, 64), make(64, 128)[:, ::2])
        ask("expanded", gather, "hopper_push", out, make(64, 64), make(1, 64).expand(64, 64))
        ask("odd", gather, "hopper_push", make(64 * size, 60), make(64, 64), make(64, 60))
        ask("rows", scatter, "hopper_push", make(24, 64), make(24 * size, 64), make(64, 64))
        ask("tiles", scatter, "hopper_push", make(64, 64), make(64, 64), make(64, 64), layout="tiles")
        ask("block", gather, "hopper_push", out, make(64, 64), make(64, 64), more={"block_size_n": 32})
        gather = "all_gather_matmul", "hopper_copy_engine_push"
        ask("columns", *gather, make(64, 64), make(64, 64), make(64 * size, 64))
        ask("fetching", *gather, out, make(64, 64), make(64, 64), gather_dim=0, more={"num_fetch_sms": 1})
        ctx.barrier()
    return said
