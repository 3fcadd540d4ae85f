"""`Iris(deterministic=True)`: every algorithm that promises its bits gives those of plain torch; others are refused."""

import itertools
import math
import random
import time

import jobs_ops
import pytest
import torch
from devices import unprobed
from emulation import emulation
from jobs_ccl import bits, on_heap
from jobs_common import unlike
from ops_cases import Case as Product
from rank_counts import rank_counts
from tables import says

from iris_core import Iris
from iris_core.ccl import Config, ReduceOp
from iris_core.errors import UnsupportedError
from iris_core.ops import FusedConfig
from iris_core.testing.conformance.collective_jobs import Case, promised

ALGORITHMS = {
    ("all_reduce", "two_shot"), ("all_reduce", "one_shot"), ("reduce", "pull"), ("reduce_scatter", "pull"),
    *(("all_reduce", f"{each}_one_shot") for each in ("ll", "ll128", "sentinel")),
    *(("all_reduce", f"{each}_two_shot") for each in ("ll128", "sentinel")),
    *((op, f"{each}_mailbox") for op in ("reduce", "reduce_scatter") for each in ("ll", "ll128", "sentinel")),
}  # fmt: skip
"""All that promise their bits; reduce_scatter in the layout of tiles has another result."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COUNT = 203


def inputs_of(dtype, size):
    """Every rank's numbers: of each place, a large one, small ones, and one that takes the large one away again.

    Small ones are rounded or not: that depends on the order, and on the type of the sum.  Ranks take turns with them.
    """
    generator = torch.Generator().manual_seed(5)
    shape, digits = (size, size * COUNT), {torch.float64: 52, torch.float32: 23}.get(dtype, 24)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0 ** (12 - digits)
    rows[0] = (torch.rand(shape[1], generator=generator, dtype=torch.float64) + 1) * 2.0**10
    rows[1] = -rows[0] + torch.randn(shape[1], generator=generator, dtype=torch.float64)
    turns = (torch.arange(size)[:, None] + torch.arange(shape[1])) % size
    return [row.view(size, COUNT) for row in rows.gather(0, turns).to(dtype)]


def wrong_bits(device):
    """Every algorithm that promises its bits gives them; each dtype is in another one of the places."""
    places = ("heap", "ordinary", "in place")
    tried, own, reductions = set(), random.Random(), ("sum", "avg", "product", "max")
    with emulation(), Iris("24MiB", device=device, deterministic=True) as ctx:
        size, rank = ctx.num_ranks, ctx.cur_rank
        ctx.ccl.explain("all_reduce", ctx.zeros(1), ctx.zeros(1))
        by_op = ctx.ccl._binder._choosers[False]._by_op
        for each in [each for op in ("all_reduce", "reduce_scatter", "reduce") for each in by_op[op].values()]:
            op, name = each.op, each.name
            if getattr(each, "deterministic", False) is not True or "tiles" in each.layouts:
                continue
            tried.add((op, name))
            if "ll128" in name and unprobed(device, ("ll128",)):
                continue
            for number, dtype in enumerate(DTYPES):
                place, lap = places[number % len(places)], number // len(places)
                if device == "cpu" and size == 3 and (number + len(tried)) % 2:
                    continue  # two of the types for each algorithm
                inputs, make = inputs_of(dtype, size), torch.empty if place == "ordinary" else ctx.empty
                x = make(size, COUNT, dtype=dtype, device=ctx.device)
                rows, in_place = 1 if op == "reduce_scatter" else size, place == "in place" and op == "all_reduce"
                out = x if in_place else make(rows, COUNT, dtype=dtype, device=ctx.device)
                # what is no plain sum takes turns on the CPU
                for turn in range(3 if device != "cpu" else 1 + (lap + len(tried)) % 2):
                    reduction = reductions[turn and (turn + lap) % 4]
                    x.copy_(inputs[rank])
                    case = Case(op, dtype=str(dtype).removeprefix("torch."), reduction=reduction, root=size - 1)
                    time.sleep(0.01 * own.random() * (own.random() < 0.2))
                    root = {"dst": size - 1} if op == "reduce" else {}
                    how = {"op": ReduceOp[reduction.upper()], "config": Config(algorithm=name)}
                    try:
                        getattr(ctx.ccl, op)(None if root and rank != size - 1 else out, x, **root, **how)
                    except UnsupportedError as error:
                        if says("ccl.words") not in str(error):
                            raise
                        continue
                    if op != "reduce" or rank == size - 1:
                        right = promised(case, inputs)[rank]
                        assert torch.equal(bits(out.cpu()), bits(right)), f"{name}: {case}, {place}, call {turn}"
        ctx.barrier()
    assert tried == ALGORITHMS


@on_heap("24MiB")
def with_nans(ctx):
    """Reductions of a tensor with a NaN on each rank have a NaN in each of these places."""
    size = ctx.num_ranks
    algorithms = ("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("reduce_scatter", "pull")
    reductions = ("MIN", torch.float32), ("MAX", torch.bfloat16), ("SUM", torch.float16)
    for (op, algorithm), (reduction, dtype) in itertools.product(algorithms, reductions):
        x = ctx.full((size, size + 1), 1 + ctx.cur_rank, dtype=dtype)
        x[:, ctx.cur_rank] = math.nan
        y = x if op == "all_reduce" else ctx.zeros(1, size + 1, dtype=dtype)
        getattr(ctx.ccl, op)(y, x, ReduceOp[reduction], config=Config(algorithm=algorithm))
        value = {"MIN": 1, "MAX": size, "SUM": size * (size + 1) / 2}[reduction]
        expected = torch.tensor([math.nan] * size + [value]).expand(y.shape)
        torch.testing.assert_close(y.cpu().float(), expected, rtol=0, atol=0, equal_nan=True)


def refusals(device):
    """Algorithms that promise nothing are refused; others serve calls without a name."""
    with emulation(), Iris("24MiB", device=device, deterministic=True) as ctx:
        size, torchs = ctx.num_ranks, "gloo" if device == "cpu" else "nccl"
        x, y = ctx.ones(64), ctx.zeros(64)
        a, b, product, whole = ctx.ones(16 * size, 16), ctx.ones(16, 16), ctx.zeros(16, 16), ctx.zeros(16 * size, 16)
        refused, ops = "UnsupportedError: ccl.no promise", ctx.ops
        wrong = unlike(
            (refused, lambda: ctx.ccl.all_reduce(y, x, config=Config(algorithm="sentinel_split"))),
            (refused, lambda: ctx.ccl.all_reduce(y, x, config=Config(algorithm=torchs))),
            (refused, lambda: ops.matmul_all_reduce(whole, a, b, config=FusedConfig(algorithm="unfused"))),
            (refused, lambda: ops.matmul_reduce_scatter(product, a, b, config=FusedConfig(algorithm="copy_engine"))),
        )
        ctx.ccl.all_reduce(y, x)
        if device == "cpu":  # NCCL's ranks cannot share a GPU
            ctx.ccl.all_gather(ctx.zeros(size, 64), x, config=Config(algorithm=torchs))  # rounds nothing
        assert y.unique().tolist() == [size]
        assert says("ccl.no promise") in str(ctx.ccl.explain("all_reduce", y, x))
        ctx.barrier()
    assert wrong == []


@on_heap("24MiB", deterministic=True)
def of_products(ctx):
    """Reduced products have the same bits wherever tensors lie, which are returned; sums are those of plain torch."""
    found, size, rank = [], ctx.num_ranks, ctx.cur_rank
    for dtype, op in itertools.product((torch.float32, torch.bfloat16), ("matmul_all_reduce", "matmul_reduce_scatter")):
        m, results = 32 * size, set()
        rows = m if op == "matmul_all_reduce" else 32
        for place in ("heap", "ordinary", "skewed", "transposed"):
            how = {"place": place, "out_place": place, "bias": "columns"}
            case = Product(op, "", (rows, 40, 72), str(dtype).removeprefix("torch."), **how)
            tensors = jobs_ops.Tensors(ctx, case, rank, size)
            tensors.fill(1)
            time.sleep(0.01 * random.random())
            jobs_ops.call(ctx, case, tensors)
            results.add(bytes(bits(tensors.out.cpu()).tolist()))
            chosen = ctx.ops.explain(op, tensors.out, *tensors.operands).algorithm
            assert chosen == {m: "two_shot"}.get(rows, "push")
        assert len(results) == 1, (op, dtype)
        found += results if rows == m else []
        # products that are exact: the sums alone round
        inputs = [each.flatten()[: m // 2, None] for each in inputs_of(dtype, size)]
        x, out = ctx.zeros(m, 1, dtype=dtype), ctx.zeros(rows, 16, dtype=dtype)
        x[: m // 2].copy_(inputs[rank])
        getattr(ctx.ops, op)(out, x, ctx.ones(1, 16, dtype=dtype))
        right = torch.zeros(m, 1)
        for each in inputs:
            right[: m // 2] += each.float()
        right = right.to(dtype).expand(m, 16)
        part = right if rows == m else right.chunk(size)[rank]
        assert torch.equal(bits(out.cpu()), bits(part)), (op, dtype)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("job", "num_ranks"), [
    (wrong_bits, 3), *(pytest.param(wrong_bits, n, marks=pytest.mark.exhaustive(device="cpu")) for n in (2, 4)),
    (with_nans, 3), (refusals, 2),
])  # fmt: skip
def test_bits_are_those_of_plain_torch_or_refused(pool, job, num_ranks, device):
    assert pool.run(job, num_ranks, device) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2, 4]))
def test_products_have_the_same_bits_wherever_tensors_lie(pool, num_ranks, device):
    first, *others = pool.run(of_products, num_ranks, device)
    assert others == [first] * (num_ranks - 1)
