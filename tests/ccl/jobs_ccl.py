"""Rank jobs of tests/ccl; they run on CPU ranks and on GPUs."""

import contextlib
import functools
import importlib
import itertools
import math
import random
import time

import delays
import torch
import torch.distributed as dist
from ccl_cases import OPS, REDUCING, ROOTED, data, expected, input_shape, output_shape, row_splits
from emulation import emulation
from jobs_common import environment

from iris_core import Iris
from iris_core.ccl import Config, ReduceOp

POISON = 0xA5
"""In every byte beside the elements of tensors."""


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


class Tensors:
    """Input and output of a rank where a case wants them; made in the same order on every rank."""

    def __init__(self, ctx, case, rank, size):
        self.case, self.rank, self.size, self._ctx = case, rank, size, ctx
        shapes = [(input_shape(case, r, size), output_shape(case, r, size)) for r in range(size)]
        self._most = max(map(math.prod, itertools.chain(*shapes)))  # of any rank: allocations must be alike
        self._made = []  # bytes, and which of them are no element's
        in_shape, out_shape = shapes[rank]
        if case.in_place and case.op in ("all_gather", "gather"):
            self.out = self._make("input only", out_shape)
            self.inp = self.out.view(size, *case.shape)[rank]
        else:
            self.inp = self._make("output only", in_shape)
            if case.in_place and case.op in ("reduce_scatter", "scatter"):
                self.out = self.inp.view(size, *case.shape)[rank]
            else:
                self.out = self.inp if case.in_place else self._make("input only", out_shape)

    def _make(self, other_only, shape):
        """A tensor that lies on the heap, unless the case's place is off it, or that of the other one only."""
        dtype = getattr(torch, self.case.dtype)
        step = 2 if "strided" in self.case.place or self.case.place == "gaps" else 1
        lead = 3 + 5 * self.rank if self.case.place == "skewed" else 0
        nbytes = (step * self._most + 3 + 5 * self.size) * dtype.itemsize
        make = torch.empty if self.case.place in ("ordinary", "strided ordinary", other_only) else self._ctx.empty
        raw = make(nbytes, dtype=torch.uint8, device=self._ctx.device).fill_(POISON)
        count = math.prod(shape)

        def inside(raw):
            raw = raw.view(dtype)[lead:]
            if self.case.place == "transposed" and len(shape) == 2:
                return raw[:count].view(shape[1], shape[0]).t()
            every = slice(shape[-1]) if self.case.place == "gaps" else slice(None, None, step)
            return raw[: step * count].view(*shape[:-1], step * shape[-1])[..., every] if shape else raw[0]

        inside(beside := torch.ones_like(raw)).zero_()
        self._made.append((raw, beside.bool()))
        return inside(raw)

    def are_surroundings_whole(self):
        """Whether the bytes behind the tensors and between their elements are as they were made."""
        return all(bool((raw == POISON)[beside].all()) for raw, beside in self._made)

    @property
    def operands(self):
        return (self.inp,)

    def fill(self, turn):
        """New data in the input, something else in the output; returns the inputs of all ranks."""
        inputs = [data(self.case, r, self.size, turn) for r in range(self.size)]
        if not self.case.in_place:
            self.out.copy_(torch.ones((), dtype=torch.float32).to(self.out.dtype).expand(self.out.shape))
        if self.case.op == "broadcast" and self.rank == self.case.root:
            self.out.copy_(inputs[self.rank])
        self.inp.copy_(inputs[self.rank])
        return inputs


def call(ctx, case, tensors, group=None, members=None, async_op=False):
    """Call the operation; `members` are the world's ranks in the group's order."""
    members = members or list(range(ctx.num_ranks))
    kwargs = {"group": group, "async_op": async_op, "config": Config(**case.config) if case.config else None}
    out, inp, op, root = tensors.out, tensors.inp, ReduceOp[case.reduction.upper()], members[case.root]
    if ctx.cur_rank != root:
        out, inp = None if case.op in ("reduce", "gather") else out, None if case.op == "scatter" else inp
    given = (out,) if case.op == "broadcast" else (out, inp)
    given += (root,) * (case.op in ROOTED) + (op,) * (case.op in REDUCING)
    if case.op == "all_to_all":
        kwargs["layout"] = case.layout
    if case.splits:
        matrix = row_splits(case, tensors.size)
        kwargs["input_split_sizes"] = matrix[tensors.rank]
        kwargs["output_split_sizes"] = [row[tensors.rank] for row in matrix]
        if case.splits == "on device":
            if not hasattr(tensors, "given"):  # a graph knows where they are
                tensors.given = torch.tensor(kwargs["input_split_sizes"], device=inp.device)
                tensors.taken = torch.zeros_like(tensors.given)
            kwargs |= {"input_split_sizes": tensors.given, "output_split_sizes": tensors.taken}
    return getattr(ctx.ccl, case.op)(*given, **kwargs)


def verify(case, tensors, inputs, what=""):
    """What is wrong with the output (and the input); an empty list if nothing is."""
    rank, size, wrong = tensors.rank, tensors.size, []
    if case.op not in ("reduce", "gather") or rank == case.root:
        want, got = expected(case, rank, inputs), tensors.out.cpu()
        if not torch.equal(bits(got), bits(want)):
            wrong.append(f"got {got.flatten()[:8]}, not {want.flatten()[:8]}")
    if case.splits == "on device" and tensors.taken.tolist() != [row[rank] for row in row_splits(case, size)]:
        wrong.append(f"received the sizes {tensors.taken.tolist()}")
    if not case.in_place and not torch.equal(bits(tensors.inp.cpu()), bits(inputs[rank])):
        wrong.append("has another input than before")
    if not tensors.are_surroundings_whole():
        wrong.append("has other memory than before beside its tensors")
    return [f"{case}{what}: rank {rank} of {size} {text}" for text in wrong]


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
