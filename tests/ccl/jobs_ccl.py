"""Rank jobs of tests/ccl; they run on CPU ranks and on GPUs."""

import contextlib
import functools
import importlib
import random
import time

import delays
import torch
import torch.distributed as dist
from ccl_cases import OPS, REDUCING, ROOTED
from emulation import emulation
from jobs_common import environment

from iris_core import Iris
from iris_core.ccl import Config, ReduceOp
from iris_core.testing.conformance import collective_jobs


def on_heap(nbytes, *, deterministic=None, packets=False, **variables):
    """Let a job of a context take a device; all leave the context together; with `packets`, CPU ranks emulate them."""

    def decorate(job):
        @functools.wraps(job)
        def run(device, *args, **kwargs):
            surroundings = (emulation if packets else environment)(**variables)
            with surroundings, Iris(nbytes, device=device, deterministic=deterministic) as ctx:
                found = job(ctx, *args, **kwargs)
                ctx.barrier()
            return found

        return run

    return decorate


def total(ctx, count=6, **how):
    """The sum of 1, 2, ... over all ranks, off the heap."""
    out = torch.zeros(count, device=ctx.device)
    ctx.ccl.all_reduce(out, torch.full((count,), ctx.cur_rank + 1.0, device=ctx.device), **how)
    return out.unique().tolist()


class Tensors(collective_jobs.Tensors):
    """Input and output of a rank where a case wants them; a broadcast of `ctx.ccl` has one tensor."""

    def __init__(self, ctx, case, rank, size):
        super().__init__(ctx, case, rank, size)
        self.inp = self.out if case.op == "broadcast" else self.inp
        self.operands = () if self.inp is self.out else (self.inp,)


def call(ctx, case, tensors, group=None, members=None, async_op=False):
    """Call the operation; `members` are the world's ranks in the group's order."""
    members = members or list(range(ctx.num_ranks))
    kwargs = {"group": group, "async_op": async_op, "config": Config(**case.config) if case.config else None}
    given = (tensors.out,) if case.op == "broadcast" else tensors.passed
    given += (members[case.root],) * (case.op in ROOTED)
    given += (ReduceOp[case.reduction.upper()],) * (case.op in REDUCING)
    if case.op == "all_to_all":
        kwargs["layout"] = case.layout
    if case.splits:
        sizes = case.rows(tensors.rank, tensors.size)
        if case.splits == "on device":
            if not hasattr(tensors, "given"):  # a graph knows where they are
                tensors.given = torch.tensor(sizes[0], device=tensors.inp.device)
                tensors.taken = torch.zeros_like(tensors.given)
            sizes = tensors.given, tensors.taken
        kwargs |= {"input_split_sizes": sizes[0], "output_split_sizes": sizes[1]}
    return getattr(ctx.ccl, case.op)(*given, **kwargs)


def verify(case, tensors, inputs, what=""):
    """What is wrong with the output (and the input); an empty list if nothing is."""
    rank, size, wrong = tensors.rank, tensors.size, tensors.wrong(inputs)
    if case.splits == "on device" and tensors.taken.tolist() != case.rows(rank, size)[1]:
        wrong["sizes"] = f"received the sizes {tensors.taken.tolist()}"
    return [f"{case}{what}: rank {rank} of {size}: {text}" for text in wrong.values()]


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def jobs_of(case):
    """The module whose `Tensors`, `call` and `verify` are for a case: this one, or that of products."""
    return importlib.import_module(case.jobs)


def late_inside(file, share, job, *args):
    """What a job of CPU ranks returns where programs are late at random in the middle of kernels, too."""
    with delays.late_after_signals(file, dist.get_rank(), dist.get_world_size(), share):
        return job(*args)


def run_cases(
    device, cases, turns=1, members=None, workspace="", packets=False, backend="auto", heap="24MiB", handles=False,
    around=None, look=None
):  # fmt: skip
    """Call every case with new data in each turn, on these ranks in this order or on all; returns what was wrong.

    What is added up by tiles or rows is the same on all, bit by bit.

    Args:
        workspace: its bound: what is larger goes in pieces.
        handles: whether every other call is asynchronous, and ranks are late at random.
        around: a function (rank) of a context manager in which the calls are made.
        look: a function (context) whose result is returned as well.
    """
    wrong, sums, limits = [], [], {"IRIS_CCL_WORKSPACE": workspace} if workspace else {}
    with (
        (emulation if packets else environment)(**limits),
        Iris(heap, device=device, backend=backend) as ctx,
        around(ctx.cur_rank) if around else contextlib.nullcontext(),
    ):
        everyone, chance = list(members or range(ctx.num_ranks)), random.Random(ctx.cur_rank)
        is_member = ctx.cur_rank in everyone
        for number, case in enumerate(cases):
            jobs = jobs_of(case)
            with ctx.scope():  # a symmetric call: on all ranks
                tensors = jobs.Tensors(ctx, case, everyone.index(ctx.cur_rank) if is_member else 0, len(everyone))
                for turn in range(turns * is_member):
                    given, is_async = tensors.fill(turn), handles and (turn + number) % 2 == 1
                    time.sleep(handles and chance.choice([0, 0, 0.005]))
                    work = jobs.call(ctx, case, tensors, members, everyone, async_op=is_async)
                    if is_async:
                        work.wait()
                    elif work is not None and case.op in OPS:
                        wrong.append(f"{case}: a synchronous call returned something")
                    wrong += jobs.verify(case, tensors, given, f" (turn {turn})")
                    if case.op in ("matmul_all_reduce", "all_reduce_rms_norm"):
                        sums.append((case, bits(tensors.out)))
        if sums:  # only now: an exchange behind each call would let no rank be a call ahead
            mine = torch.cat([each for _, each in sums])
            of_all = mine.new_empty(len(everyone), *mine.shape)
            ctx.ccl.all_gather(of_all, mine, members)
            parts = of_all.split([len(each) for _, each in sums], dim=1)
            wrong += [f"{c}: other bits" for (c, own), part in zip(sums, parts, strict=True) if not (part == own).all()]
        found = look and look(ctx)
        ctx.barrier()
    return (wrong, found) if look else wrong
