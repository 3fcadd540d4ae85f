"""Rank jobs of test_variants; they run on CPU ranks and on GPUs."""

import inspect
import math
import random
import time

import torch
import torch.distributed as dist
from jobs_ccl import Tensors, bits, call, verify

from iris_core import Iris
from iris_core.ccl import Config, ReduceOp


def inexact(device, algorithms, dtypes):
    """Sums of numbers that have to be rounded: this rank's bits, and how far they are from the true sums, per call."""
    results = {}
    with Iris("24MiB", device=device) as ctx:
        for algorithm in algorithms:
            for dtype in dtypes:
                inputs = [
                    torch.randn(701, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
                    for rank in range(ctx.num_ranks)
                ]
                x = ctx.empty(701, dtype=dtype)
                x.copy_(inputs[ctx.cur_rank])
                config = Config(algorithm=algorithm, comm_sms=2, block_size_m=2)
                ctx.ccl.all_reduce(x, x, ReduceOp.AVG, config=config)
                true = torch.stack(inputs).to(torch.float64).mean(0)
                wide = torch.float64 if dtype is torch.float64 else torch.float32
                # error of the rounding at the end, and of a sum in the wider type in any order
                bound = true.abs() * torch.finfo(dtype).eps / 2 + 4 * ctx.num_ranks * torch.finfo(wide).eps
                error = (x.cpu().to(torch.float64) - true).abs()
                results[algorithm, str(dtype)] = bytes(bits(x.cpu()).tolist()), bool((error <= bound).all())
        ctx.barrier()
    return results


def with_nans(device, calls):
    """Reductions of a tensor with a NaN on each rank; what came that should not have."""
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        size = ctx.num_ranks
        for op, algorithm, reduction, dtype in calls:
            x = ctx.full((size, size + 1), 1 + ctx.cur_rank, dtype=dtype)
            x[:, ctx.cur_rank] = math.nan
            y = x if op == "all_reduce" else ctx.zeros(1, size + 1, dtype=dtype)
            getattr(ctx.ccl, op)(y, x, ReduceOp[reduction], config=Config(algorithm=algorithm))
            value = {"MIN": 1, "MAX": size, "SUM": size * (size + 1) / 2}[reduction]
            expected = torch.tensor([math.nan] * size + [value]).expand(y.shape)
            if not torch.equal(y.cpu().float().nan_to_num(-1), expected.nan_to_num(-1)):
                wrong.append(f"{op} {algorithm} {reduction} {dtype}: {y.tolist()}")
        ctx.barrier()
    return wrong


def mixed(device, cases, calls, seed):
    """Calls of all kinds in any order, and ranks that are out of step; returns what was wrong.

    No host waits for another one: results are looked at in the end.
    """
    order, own = random.Random(seed), random.Random()
    wrong, done = [], []
    with Iris("24MiB", device=device) as ctx:
        kinds = [Tensors(ctx, case, ctx.cur_rank, ctx.num_ranks) for case in cases]
        for tensors in kinds:  # prepares
            tensors.fill(0)
            call(ctx, tensors.case, tensors)
        ctx.barrier()
        for turn in range(calls):
            tensors = kinds[order.randrange(len(kinds))]
            inputs = tensors.fill(turn)
            call(ctx, tensors.case, tensors)
            done.append((tensors, inputs, tensors.out.clone(), tensors.inp.clone(), turn))
            if own.random() < 0.2:
                time.sleep(0.005 * own.random())
        for tensors, inputs, out, inp, turn in done:
            tensors.out.copy_(out)
            tensors.inp.copy_(inp)
            wrong += verify(tensors.case, tensors, inputs, f", call {turn}")
        ctx.barrier()
    return wrong


def in_a_group(device, members, cases):
    """Calls of some ranks, named in the group's order; the others do nothing."""
    ordered = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    group = dist.new_group(list(members), **ordered)
    members = list(members) if ordered else sorted(members)  # older versions of torch sort them
    wrong = []
    with Iris("24MiB", device=device) as ctx:
        for case in cases:
            own = members.index(ctx.cur_rank) if ctx.cur_rank in members else 0
            tensors = Tensors(ctx, case, own, len(members))  # a symmetric call: on all ranks
            if ctx.cur_rank in members:
                inputs = tensors.fill(0)
                call(ctx, case, tensors, group, members)
                wrong += verify(case, tensors, inputs, f" in group {members}")
        ctx.barrier()
    return wrong
