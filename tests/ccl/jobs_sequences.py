"""Rank jobs of tests/ccl: many calls one after the other, in groups, beside each other, and in graphs."""

import inspect
import random
import time

import torch
import torch.distributed as dist
from ccl_cases import OPS, Case, expected
from jobs_ccl import Tensors, bits, call, on_heap, run_cases, said_by, verify
from jobs_common import environment

from iris_core import Iris
from iris_core.ccl import Config
from iris_core.hooks import hookimpl
from iris_core.registry import default_registry
from iris_core.types import PluginKind

SHAPES = ((1,), (7,), (129,), (33, 5), (4099,))
DTYPES = ("float32", "bfloat16", "int32", "int8")


def random_case(generator, size):
    """A call, the same on every rank that has the same generator."""
    place, op = generator.choice(("heap", "ordinary", "skewed")), generator.choice(OPS)
    dtype, shape, root = generator.choice(DTYPES), generator.choice(SHAPES), generator.randrange(size)
    config = {"algorithm": generator.choice(("one_shot", "two_shot"))}
    return Case(
        op, dtype, shape=shape, place=place, root=root,
        config=config if op == "all_reduce" and generator.random() < 0.5 else {},
    )  # fmt: skip


def rest(ctx, seconds):
    """Keep this rank's device busy."""
    if ctx.device == "cpu":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * 1e9))


def in_groups(device, sets, rounds):
    """Every group makes calls of its own; a rank that is in none of them makes none."""

    def play(ctx, generator, turn, rank, members, group):
        case = random_case(generator, len(members))
        tensors = Tensors(ctx, case, rank or 0, len(members))
        if rank is None:
            return []
        inputs = tensors.fill(turn)
        call(ctx, case, tensors, group, members)
        return verify(case, tensors, inputs, f" in group {members}")

    return of_groups(device, sets, lambda members: rounds, play)


def of_groups(device, sets, rounds, play, backend="auto"):
    """What `play` finds wrong with calls of each group, in turns; its rank is None where this one is no member."""
    unsorted = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    made, wrong = [dist.new_group(members, **unsorted) for members in sets], []
    sets = [members if unsorted else sorted(members) for members in sets]  # older versions of torch sort them
    with Iris("24MiB", device=device, backend=backend) as ctx:
        for number, (members, group) in enumerate(zip(sets, made, strict=True)):
            generator = random.Random(number)
            rank = members.index(ctx.cur_rank) if ctx.cur_rank in members else None
            for turn in range(rounds(members)):
                wrong += play(ctx, generator, turn, rank, members, group)
        ctx.barrier()
    return wrong


def back_to_back(device, calls, kinds, slow_ranks):
    """Calls of different sizes and operations, nothing waited for in between; all results are looked at afterwards."""
    generator, wrong, plays = random.Random(5), [], []
    with Iris("64MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        for turn in range(kinds):
            case = random_case(generator, size)
            tensors = Tensors(ctx, case, rank, size)
            inputs = tensors.fill(turn)
            source = tensors.inp.clone()
            bad = torch.zeros((), dtype=torch.int64, device=ctx.device)
            has_output = case.op not in ("reduce", "gather") or rank == case.root
            want = expected(case, rank, inputs).to(ctx.device) if has_output else None
            plays.append((case, tensors, source, want, bad))
        ctx.barrier()
        for _ in range(calls):
            case, tensors, source, want, bad = plays[generator.randrange(kinds)]
            if slow_ranks and generator.random() < 0.1 and generator.randrange(size) == rank:
                rest(ctx, 0.003)
            if case.op == "broadcast" and rank == case.root:
                tensors.out.copy_(source)
            elif want is not None:
                tensors.out.copy_(want.flip(0))
            call(ctx, case, tensors)
            tensors.inp.neg_() if case.dtype != "int8" else tensors.inp.add_(1)  # peers must be done with it
            if want is not None:
                bad += (bits(tensors.out) != bits(want)).sum()
            tensors.inp.copy_(source)
        ctx.barrier()
        for case, _, _, _, bad in plays:
            if int(bad.item()):
                wrong.append(f"{case}: {int(bad.item())} bytes were wrong on rank {rank}")
    return wrong


def in_pieces(device, cases, workspace):
    """Tensors off the heap that are larger than the workspace."""
    return run_cases(device, cases, 2, None, workspace)


@on_heap("24MiB")
def asynchronous(ctx):
    """Handles: started together, waited for in another order; and a synchronous call behind asynchronous ones."""
    said, rank = [], ctx.cur_rank
    tensors, outputs = ([ctx.full((1000 + i,), float(n * (rank + i))) for i in range(4)] for n in (1, 0))
    works = [ctx.ccl.all_reduce(out, inp, async_op=True) for out, inp in zip(outputs, tensors, strict=True)]
    last = ctx.zeros(ctx.num_ranks)
    ctx.ccl.all_gather(last, tensors[0][:1])  # same team: behind the four
    for work in reversed(works):
        work.wait()
    said.append([float(out.float().mean().item()) for out in outputs])
    works[0].wait(timeout_s=10)
    said.append(all(work.is_completed() for work in works))
    said.append(last.tolist())
    gone, out = (torch.full((5000,), float(n), device=ctx.device) for n in (rank, 0))
    work = ctx.ccl.all_reduce(out, gone, async_op=True)
    del gone
    torch.full((5000,), 77.0, device=ctx.device)  # must not get the memory of what is still read
    work.wait()
    said.append(out.unique().tolist())
    barrier = ctx.ccl.barrier(async_op=True)
    barrier.wait()
    ctx.ccl.barrier()
    ctx.barrier()
    return [*said, barrier.is_completed()]


def captured(device, cases, replays, workspace=""):
    """Calls in a graph, replayed with new data; and a first call inside a capture; with a workspace of this bound."""
    wrong = []
    with environment(**({"IRIS_CCL_WORKSPACE": workspace} if workspace else {})), Iris("64MiB", device=device) as ctx:
        rank, size = ctx.cur_rank, ctx.num_ranks
        x = ctx.zeros(77)

        def first_call():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                ctx.ccl.all_reduce(x, x)

        said = said_by(first_call)
        ctx.barrier()
        everything = [Tensors(ctx, case, rank, size) for case in cases]
        for case, tensors in zip(cases, everything, strict=True):
            tensors.fill(0)
            call(ctx, case, tensors)
        ctx.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for case, tensors in zip(cases, everything, strict=True):
                work = call(ctx, case, tensors, async_op=case.place == "ordinary")
                if work is not None:
                    work.wait()
        for turn in range(replays):
            inputs = [tensors.fill(turn) for tensors in everything]
            if turn % 7 == rank:
                torch.cuda._sleep(int(1e6))
            graph.replay()
            if turn % 3 == 0:  # eager calls of the same team between replays
                call(ctx, cases[0], everything[0])
            for case, tensors, given in zip(cases, everything, inputs, strict=True):
                wrong += verify(case, tensors, given, f" in replay {turn}")
        ctx.barrier()
    return [said] if said.startswith("UnsupportedError") else [], wrong


class Observer:
    """Writes down what it hears."""

    def __init__(self):
        self.heard = []

    @hookimpl
    def iris_collective(self, op, algorithm, nbytes):
        self.heard.append((op, algorithm, nbytes))


@on_heap("8MiB")
def observed(ctx):
    """What an observer hears, and which algorithms serve these calls."""
    observer, x = Observer(), ctx.zeros(10)
    ctx.ccl.all_reduce(x, x)
    record = default_registry().register(PluginKind.OBSERVER, observer, name="listener")
    try:
        ctx.ccl.all_reduce(x, x)
        ctx.ccl.broadcast(x, async_op=True).wait()
    finally:
        default_registry().unregister(record)
    ctx.ccl.all_reduce(x, x)
    return observer.heard, [ctx.ccl.explain(*each).algorithm for each in (("all_reduce", x, x), ("broadcast", x))]


@on_heap("24MiB")
def messages(ctx, rounds):
    """Messages round a ring and across, of all kinds, small and larger than an inbox."""
    wrong, rank, size = [], ctx.cur_rank, ctx.num_ranks
    right, left = (rank + 1) % size, (rank - 1) % size
    kinds = [(dtype, n) for dtype in ("bfloat16", "int8", "complex128", "bool") for n in (1, 77, 30_001)]
    for turn, (name, n) in enumerate(kinds * rounds):
        dtype = getattr(torch, name)
        drawn = [torch.Generator().manual_seed(1000 * turn + sender) for sender in range(size)]
        sent = [torch.randint(0, 2 if name == "bool" else 100, (n, 3), generator=each).to(dtype) for each in drawn]
        out = (ctx.empty if turn % 2 else torch.empty)(n, 6, dtype=dtype, device=ctx.device)[:, ::2]
        inp = sent[rank].to(ctx.device)
        for work in (ctx.ccl.send(inp, right, async_op=True), ctx.ccl.recv(out, left, async_op=True)):
            work.wait()
        if not torch.equal(bits(out.cpu()), bits(sent[left])):
            wrong.append(f"{name} {n}: rank {rank} got something else than rank {left} sent")
    # in order, and before anybody receives
    small, got = ([ctx.full((5,), float(n * (10 * rank + i))) for i in range(2)] for n in (1, 0))
    for tensor in small:
        ctx.ccl.send(tensor, right)
    for tensor in got:
        ctx.ccl.recv(tensor, left)
    if [t.unique().tolist() for t in got] != [[10.0 * left + i] for i in range(2)]:
        wrong.append(f"rank {rank}: messages came in another order: {got}")
    if "this rank" not in said_by(ctx.ccl.send, small[0], rank):
        wrong.append("a message to oneself was not refused")
    return wrong


@on_heap("24MiB")
def in_tiles(ctx):
    """reduce_scatter in the layout of the reference system."""
    wrong, rank, size = [], ctx.cur_rank, ctx.num_ranks
    for place, distribution, swizzle in (("heap", 1, 4), ("heap", 0, 2), ("ordinary", 1, 2), ("ordinary", 0, 1)):
        make = ctx.empty if place == "heap" else torch.empty
        numbers = torch.arange(100 * 130).remainder(251).view(100, 130).to(torch.int32)
        x, y = (make(100, 130, dtype=torch.int32, device=ctx.device) for _ in range(2))
        x.copy_(numbers * (rank + 1))
        y.fill_(-1)
        config = Config(all_reduce_distribution=distribution, block_size_m=16, block_size_n=32, swizzle_size=swizzle)
        ctx.ccl.reduce_scatter(y, x, layout="tiles", config=config)
        want = torch.full((100, 130), -1, dtype=torch.int32)
        for row, column in own_tiles(rank, size, 7, 5, swizzle, distribution):
            part = slice(16 * row, 16 * row + 16), slice(32 * column, 32 * column + 32)
            want[part] = numbers[part] * (size * (size + 1) // 2)
        if not torch.equal(y.cpu(), want):
            wrong.append(f"rank {rank}, {place}, distribution {distribution}, swizzle {swizzle}")
    return wrong


def own_tiles(rank, size, rows, columns, swizzle, distribution):
    """(row, column) of the tiles of a rank, numbered as the reference system does."""
    each = -(-rows * columns // size)
    for number in range(rows * columns):
        if rank == (number // each if distribution else number % size):
            first = number // (swizzle * columns) * swizzle
            height = min(rows - first, swizzle)
            within = number % (swizzle * columns)
            yield first + within % height, within // height


@on_heap("8MiB")
def explained(ctx):
    """What `explain` says, and that it is what happens."""
    x = ctx.zeros(10)
    explanation = ctx.ccl.explain("all_reduce", x, x, op="max")
    refused = ctx.ccl.explain("all_reduce", x, x, config=Config(num_xcds=4))
    return str(explanation), explanation.algorithm, [c.name for c in explanation.candidates], str(refused)
